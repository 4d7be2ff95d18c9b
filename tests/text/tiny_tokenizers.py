"""Tiny tokenizers of both families, as GGUF metadata."""

from __future__ import annotations

import functools
from typing import Any

from octavo.text.gguf_tokenizer import tokenizer_from_gguf
from octavo.text.token_bytes import BYTE_OF_CODE_POINT
from octavo.text.tokenizer import Tokenizer

CONTROL, USER_DEFINED, BYTE = 3, 4, 6
BYTE_CHARS = {byte: chr(point) for point, byte in BYTE_OF_CODE_POINT.items()}


def byte_level_metadata(pre: str = "smollm", **extra: object) -> dict[str, Any]:
    """256 bytes, a few merges, two control tokens and two user-defined tokens."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġ Ġ", "1 2", "Ã ©", "ð Ł"]
    tokens = ["<|end|>", "<|im_start|>", *(BYTE_CHARS[byte] for byte in range(256))]
    tokens += [merge.replace(" ", "") for merge in merges] + ["<tool>", "né"]
    types = [CONTROL, CONTROL] + [1] * (len(tokens) - 4) + [USER_DEFINED, USER_DEFINED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
    } | {f"tokenizer.{key.replace('__', '.')}": value for key, value in extra.items()}


def sentencepiece_metadata(**extra: object) -> dict[str, Any]:
    """Pieces with scores in training order, bytes, and <unk> <s> </s> in Llama's places."""
    pieces = ["▁h", "el", "lo", "▁hel", "▁hello", "▁w", "▁world", "or", "ld", "wor", "world"]
    pieces += ["▁wor", "▁▁", "▁", *"helowrd,.1é日"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, CONTROL, CONTROL] + [BYTE] * 256 + [1] * len(pieces)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.{key.replace('__', '.')}": value for key, value in extra.items()}


@functools.cache
def tiny_tokenizer(family: str) -> Tokenizer:
    """``byte_level`` or ``sentencepiece``."""
    if family == "byte_level":
        return tokenizer_from_gguf(byte_level_metadata())
    return tokenizer_from_gguf(sentencepiece_metadata())
