"""What a token id stands for, in bytes. Knows how tokenizers write bytes; knows no streams.

Both common families spell a text as a concatenation of byte strings, one a token: byte-level BPE
writes each byte as a printable character, SentencePiece writes spaces as U+2581 and bytes outside
its vocabulary as ``<0xNN>``. Decoding is then joining bytes and reading UTF-8, and the state of a
stream is the at most three bytes of an unfinished character.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[int, int]:
    """Code point of GPT-2's printable stand-in → byte (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {
        **{byte: byte for byte in printable},
        **{0x100 + position: byte for position, byte in enumerate(hidden)},
    }


BYTE_OF_CODE_POINT = _byte_level_alphabet()


class TokenBytes(dict[int, bytes]):
    """Token id → bytes, filled as ids are asked for. Ids without a token have no bytes.

    ``strip_left`` is how many leading spaces the decoder takes off the whole text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        byte_level: bool,
        strip_left: int = 0,
        hidden_ids: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self.strip_left = strip_left
        self._backend = backend
        self._byte_level = byte_level
        self._hidden_ids = hidden_ids
        self._added_ids = frozenset(backend.get_added_tokens_decoder())

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        data = b"" if token_id in self._hidden_ids else self._spell(token_id, token)
        self[token_id] = data
        return data

    def _spell(self, token_id: int, token: str) -> bytes:
        if not self._byte_level:
            match = _BYTE_TOKEN.fullmatch(token)
            if match and token_id not in self._added_ids:
                return bytes((int(match[1], 16),))
            return token.replace(_SPACE, " ").encode()
        if token_id in self._added_ids:
            return token.encode()  # matched in the text as it stands, so not spelled in bytes
        try:
            return bytes([BYTE_OF_CODE_POINT[ord(char)] for char in token])
        except KeyError:
            return token.encode()


def token_bytes_of(backend: tokenizers.Tokenizer, hidden_ids: frozenset[int]) -> TokenBytes | None:
    """The byte table of a tokenizer, or None if its decoder does more than join bytes."""
    if backend.decoder is None:
        return None
    try:
        state: Any = json.loads(backend.decoder.__getstate__())
    except (TypeError, ValueError):
        return None
    steps = state["decoders"] if state.get("type") == "Sequence" else [state]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenBytes(backend, byte_level=True, hidden_ids=hidden_ids)
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
        return None
    if steps[0].get("pattern") != {"String": _SPACE} or steps[0].get("content") != " ":
        return None
    strip_left = 0
    if kinds[3:]:
        if steps[3].get("content") != " " or steps[3].get("stop"):
            return None
        strip_left = int(steps[3]["start"])
    return TokenBytes(backend, byte_level=False, strip_left=strip_left, hidden_ids=hidden_ids)


def strip_spaces(text: str, at_most: int) -> str:
    """``text`` without up to ``at_most`` leading spaces."""
    return text[min(at_most, len(text) - len(text.lstrip(" "))) :]
