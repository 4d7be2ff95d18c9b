"""Requests, the reasons they end, and the errors that refuse them at the door."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from octavo.core.layout import num_blocks_for
from octavo.core.plan import IntArray, PromptLogprobs, StepLogprobs, TokenScores
from octavo.core.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended: OpenAI's words, and ``error`` for a step that failed."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestError(ValueError):
    """The request cannot be served as it is; the message says what to change."""


class ContextLengthError(RequestError):
    """Longer than the model's context or than the whole KV pool."""


class QueueFullError(RuntimeError):
    """Too many requests wait; trying again later helps."""


class AsleepError(RequestError):
    """The pool's memory was given back; nothing can be served until the engine is woken up."""


class PoolSizeError(ValueError):
    """The pool cannot have this size; the message says which it may have."""


class PoolBusyError(RuntimeError):
    """The pool cannot be resized now, or the machine did not give or take the memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What the engine knows of a client's request.

    ``number`` names it between front end and engine; its ``n`` results are ``number`` to
    ``number + n - 1``: samples, with seeds that count up likewise, or with a ``beam_width`` (0: no
    beam search) the best beams, best first. The numbers up to ``number + num_sequences - 1`` are
    its own. ``max_tokens`` and ``seed`` are resolved (never None). Only requests of the same
    ``cache_salt`` share cached prefixes. ``stop_token_ids`` joins the model's end-of-sequence ids,
    unless ignored, and the client's own. With ``pins_prefix`` the prompt's full blocks stay in the
    cache from its end on (see `RegisteredPrefix`).
    """

    number: int
    prompt_token_ids: IntArray
    params: SamplingParams
    max_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...] = ()
    cache_salt: bytes = b""
    n: int = 1
    beam_width: int = 0
    pins_prefix: bool = False

    @property
    def num_sequences(self) -> int:
        """Sequences that run side by side."""
        return self.beam_width or self.n

    @property
    def max_length(self) -> int:
        """Tokens of the sequence when it ends by length."""
        return len(self.prompt_token_ids) + self.max_tokens

    @property
    def needs_prompt_logits(self) -> bool:
        """Every position of the prompt must be computed, cached or not."""
        return self.params.prompt_logprobs is not None

    def num_blocks(self, block_size: int, *, sharing: bool = True) -> int:
        """Blocks that it needs at most: the prompt's full ones once, the rest for each sequence;
        without ``sharing`` all of them for each. The last token's keys and values are never
        needed."""
        shared = len(self.prompt_token_ids) // block_size if sharing else 0
        own = num_blocks_for(self.max_length - 1, block_size) - shared
        return shared + self.num_sequences * own


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended. ``num_tokens`` were generated, those of this step included; the first
    ``num_cached_tokens`` of the prompt came from the prefix cache."""

    number: int
    reason: FinishReason
    num_tokens: int
    error: str | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class BeamResult:
    """A whole sequence that a beam search found, told at its end, beside its `Finished`.

    ``cumulative_logprob`` is the sum over ``token_ids``; ``score``, by which beams are ranked, is
    that over their number to the power ``length_penalty``. ``logprobs`` has a place for each token
    where the request asked.
    """

    number: int
    token_ids: IntArray
    score: float
    cumulative_logprob: float
    logprobs: TokenScores | None = None


@dataclass(frozen=True, slots=True)
class RegisteredPrefix:
    """How a request that ``pins_prefix`` came out, told with its `Finished`: the first
    ``num_pinned_tokens`` of its ``num_tokens``, those of full blocks, stay in the cache until the
    prefix ``number`` is dropped; or ``error`` says why nothing was pinned."""

    number: int
    num_tokens: int
    num_pinned_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepOutputs:
    """What a step brought: ``token_ids[i]`` is the next token of request ``numbers[i]``; requests
    with beam search get ``beams``, all tokens at once, with their end; ``prefixes`` are of those
    that pin theirs.

    ``logprobs`` and ``prompt_logprobs`` are for the requests that asked. A prompt's come in pieces,
    the last with the first token; of a request with samples, its first sample gets them.
    """

    numbers: NDArray[np.int64]
    token_ids: IntArray
    finished: tuple[Finished, ...] = ()
    logprobs: StepLogprobs | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    beams: tuple[BeamResult, ...] = ()
    prefixes: tuple[RegisteredPrefix, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not len(self.numbers) and not self.finished and not self.prompt_logprobs
