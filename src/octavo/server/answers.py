"""The bodies that the API answers with, as msgspec structs. Knows no requests and no engine."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec


class PromptTokensDetails(msgspec.Struct):
    """``cached_tokens`` were found in the KV cache and not computed."""

    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, num_prompt_tokens: int, num_tokens: int, num_cached_tokens: int = 0) -> Usage:
        total = num_prompt_tokens + num_tokens
        details = PromptTokensDetails(cached_tokens=num_cached_tokens)
        return cls(num_prompt_tokens, num_tokens, total, details)


class CompletionLogprobs(msgspec.Struct):
    """An entry for each token; ``text_offset`` is where it begins in the choice's text, in
    characters. Nothing is known of a prompt's first token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(msgspec.Struct):
    """``rank`` counts from 1, the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


class CompletionChoice(msgspec.Struct):
    """``prompt_logprobs`` (vLLM's) is left out where nobody asked for it: for each token of the
    prompt but the first, the token itself and the likeliest in its place, by id. ``score`` is what
    a beam search ranked the choice by."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[dict[int, PromptToken] | None] | msgspec.UnsetType = msgspec.UNSET
    score: float | msgspec.UnsetType = msgspec.UNSET


class ChatTopToken(msgspec.Struct):
    """``bytes`` is exact where ``token`` is half a character; null where it is not known."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(ChatTopToken):
    top_logprobs: list[ChatTopToken]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatToken]
    refusal: None = None


class ChatMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """``score`` is what a beam search ranked the choice by."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    score: float | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    score: float | msgspec.UnsetType = msgspec.UNSET


Choice = TypeVar("Choice")


class Answer(msgspec.Struct, Generic[Choice]):
    """A whole response or a chunk. ``usage`` is left out where nobody asked for it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class ModelCard(msgspec.Struct):
    """``root`` is the model itself where ``id`` is one of its names."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "octavo"
    parent: None = None


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


class Tokens(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(msgspec.Struct):
    prompt: str


class PrefixCard(msgspec.Struct):
    """Of ``num_tokens`` the first ``num_pinned_tokens``, those of full blocks, are kept."""

    id: str
    num_tokens: int
    num_pinned_tokens: int
    object: str = "prefix"


class PrefixList(msgspec.Struct):
    data: list[PrefixCard]
    object: str = "list"


class PrefixDropped(msgspec.Struct):
    id: str
    object: str = "prefix"
    deleted: bool = True


class PoolCard(msgspec.Struct):
    """The KV cache: ``num_blocks`` for sequences; ``num_bytes`` counts the null block too."""

    num_blocks: int
    block_size: int
    num_tokens: int
    num_bytes: int
    object: str = "kv_cache"


class Sleeping(msgspec.Struct):
    is_sleeping: bool


class Status(msgspec.Struct):
    status: str


class Version(msgspec.Struct):
    version: str


class ErrorDetail(msgspec.Struct):
    """``param`` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    error: ErrorDetail
