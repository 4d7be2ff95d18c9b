"""How log probabilities are spelled: OpenAI's shapes for both endpoints, vLLM's for prompts.

Knows a tokenizer; knows no requests and no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from octavo.engine.logprobs import TokenLogprobs
from octavo.server.answers import (
    ChatLogprobs,
    ChatToken,
    ChatTopToken,
    CompletionLogprobs,
    PromptToken,
)
from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.tokenizer import Tokenizer

# JSON has no infinity; the value is vLLM's.
LOWEST = -9999.0


class Spelling:
    """What a token is by itself, special tokens spelled out. Without a tokenizer its id is told."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._table = None if tokenizer is None else tokenizer.token_bytes(False)

    def text(self, token_id: int) -> str:
        """Parts of a character are U+FFFD."""
        if self._table is not None:
            return self._table[token_id].decode("utf-8", "replace")
        if self._tokenizer is not None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False)
        return f"token_id:{token_id}"

    def bytes(self, token_id: int) -> list[int] | None:
        if self._table is not None:
            return list(self._table[token_id])
        return None if self._tokenizer is None else list(self.text(token_id).encode())


class Offsets:
    """Where a choice's tokens begin in its text, in characters, from ``start`` to at most ``end``.

    A token that ends half a character begins where the character does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int] = (),
        start: int = 0,
        end: int | None = None,
    ) -> None:
        self._stream: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            self._stream = IncrementalDetokenizer(tokenizer, prompt_token_ids)
        self._position = start
        self._end = end

    def add(self, token_id: int) -> int:
        """The place of the next token."""
        found = self._position if self._end is None else min(self._position, self._end)
        if self._stream is not None:
            self._position += len(self._stream.add((token_id,)))
        return found


def chat_logprobs(values: Iterable[TokenLogprobs], spelling: Spelling) -> ChatLogprobs:
    def top(token_id: int, logprob: float) -> ChatTopToken:
        return ChatTopToken(spelling.text(token_id), finite(logprob), spelling.bytes(token_id))

    return ChatLogprobs(
        [
            ChatToken(
                spelling.text(value.token_id),
                finite(value.logprob),
                spelling.bytes(value.token_id),
                [top(*pair) for pair in value.top],
            )
            for value in values
        ]
    )


def completion_logprobs(
    token_ids: Iterable[int],
    values: Iterable[TokenLogprobs | None],
    num_top: int,
    spelling: Spelling,
    offsets: Offsets,
) -> CompletionLogprobs:
    """The token itself is always among its top ones, which may so be one more than ``num_top``; of
    tokens that are spelled alike the likeliest counts. ``values`` has None where nothing is
    known."""
    found = CompletionLogprobs([], [], [], [])
    for token_id, value in zip(token_ids, values, strict=True):
        found.tokens.append(spelling.text(token_id))
        found.text_offset.append(offsets.add(token_id))
        if value is None:
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
            continue
        top: dict[str, float] = {}
        for other_id, logprob in (*value.top[:num_top], (token_id, value.logprob)):
            top.setdefault(spelling.text(other_id), finite(logprob))
        found.token_logprobs.append(finite(value.logprob))
        found.top_logprobs.append(top)
    return found


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """The tokens of both, one after the other."""
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def prompt_logprobs(
    values: Iterable[TokenLogprobs | None], num_top: int, spelling: Spelling
) -> list[dict[int, PromptToken] | None]:
    """The prompt's own token comes first, then the likeliest."""
    return [None if value is None else _prompt_token(value, num_top, spelling) for value in values]


def _prompt_token(value: TokenLogprobs, num_top: int, spelling: Spelling) -> dict[int, PromptToken]:
    own = PromptToken(finite(value.logprob), value.rank, spelling.text(value.token_id))
    found = {value.token_id: own}
    for index, (token_id, logprob) in enumerate(value.top[:num_top]):
        found.setdefault(token_id, PromptToken(finite(logprob), index + 1, spelling.text(token_id)))
    return found


def spelled_score(score: float | None) -> float | msgspec.UnsetType:
    """A beam's, else nothing."""
    return msgspec.UNSET if score is None else finite(score)


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)
