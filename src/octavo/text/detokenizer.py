"""Token ids to text as they arrive. Never emits half a character; knows no stop strings."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from octavo.text.token_bytes import TokenBytes, strip_spaces
from octavo.text.tokenizer import Tokenizer

# A character has at most four bytes, so a tail of more tokens than that is not waiting for one.
_MAX_HELD_TOKENS = 4


class IncrementalDetokenizer:
    """Turns one sequence's output ids into text, piece by piece.

    The pieces, with :meth:`flush`, concatenate to what ``tokenizer.decode`` makes of the output
    after the prompt: a leading space that decoding strips from the start of a text stays when the
    prompt precedes it, and a character begun by the prompt's last tokens is emitted whole.

    Invalid bytes come out as U+FFFD as soon as the bytes after them show that they are invalid,
    and a U+FFFD that the model meant comes out at once. The cost of a token does not depend on
    how many came before.
    """

    __slots__ = ("_stream",)

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        table = tokenizer.token_bytes(skip_special_tokens)
        self._stream: _ByteStream | _WindowStream
        if table is not None:
            self._stream = _ByteStream(table, prompt_ids)
        else:
            self._stream = _WindowStream(tokenizer, prompt_ids, skip_special_tokens)

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that ``token_ids`` complete."""
        return self._stream.add(token_ids)

    def flush(self) -> str:
        """The rest: an unfinished character at the end of the output, as U+FFFD."""
        return self._stream.flush()


class _ByteStream:
    """Joins bytes; its state is an unfinished character and the spaces still to strip."""

    __slots__ = ("_pending", "_started", "_strip", "_table")

    def __init__(self, table: TokenBytes, prompt_ids: Sequence[int]) -> None:
        self._table = table
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = table[token_id] + tail
            if len(tail) >= 3:  # an unfinished character has at most three bytes
                break
        _, used = utf_8_decode(tail, "replace", False)
        self._pending = tail[used:]
        self._strip = 0 if tail else table.strip_left
        self._started = False

    def add(self, token_ids: Sequence[int]) -> str:
        table = self._table
        data = b"".join([table[token_id] for token_id in token_ids])
        if not data:
            return ""
        self._started = True
        if self._pending:
            data = self._pending + data
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return self._stripped(text) if self._strip else text

    def flush(self) -> str:
        pending, self._pending = self._pending, b""
        return pending.decode("utf-8", "replace") if self._started else ""

    def _stripped(self, text: str) -> str:
        rest = strip_spaces(text, self._strip)
        self._strip = 0 if rest else self._strip - len(text)
        return rest


class _WindowStream:
    """For decoders that look at neighbours (WordPiece, Metaspace): decode a short window twice.

    ``[context | held]``: the text of both, less the text of the context, is new.
    """

    __slots__ = ("_context", "_context_text", "_held", "_skip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._context = list(prompt_ids[-_MAX_HELD_TOKENS:])
        self._context_text = tokenizer.decode(self._context, skip)
        self._held: list[int] = []

    def add(self, token_ids: Sequence[int]) -> str:
        return "".join([self._add(token_id) for token_id in token_ids])

    def flush(self) -> str:
        return self._emit() if self._held else ""

    def _add(self, token_id: int) -> str:
        self._held.append(token_id)
        if len(self._held) <= _MAX_HELD_TOKENS:
            text = self._tokenizer.decode(self._context + self._held, self._skip)
            if len(text) <= len(self._context_text) or text.endswith("\ufffd"):
                return ""
        return self._emit()

    def _emit(self) -> str:
        text = self._tokenizer.decode(self._context + self._held, self._skip)
        piece = text[len(self._context_text) :]
        if piece:
            self._context = self._held
            self._context_text = self._tokenizer.decode(self._context, self._skip)
        self._held = []
        return piece
