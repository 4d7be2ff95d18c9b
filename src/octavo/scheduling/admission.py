"""The door: turns what a client asked into a `Request`, or says why it cannot be served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.layout import num_blocks_for
from octavo.core.plan import KVCapacity
from octavo.core.request import ContextLengthError, Request, RequestError
from octavo.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """What one engine can serve. ``num_kv_tokens`` is the whole pool, in tokens."""

    vocab_size: int
    max_model_len: int
    num_kv_tokens: int
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, capacity: KVCapacity, vocab_size: int, max_model_len: int, eos: tuple[int, ...]
    ) -> Limits:
        return cls(vocab_size, max_model_len, (capacity.num_blocks - 1) * capacity.block_size, eos)

    @property
    def max_length(self) -> int:
        """Longest sequence that fits: the last token's keys and values are never needed."""
        return min(self.max_model_len, self.num_kv_tokens + 1)


def resolve_request(
    number: int,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    limits: Limits,
    *,
    random_seed: int,
) -> Request:
    """Check a request against the engine's limits and fill in what it left open.

    ``random_seed`` is used when the client gave none.

    Raises:
        RequestError: an empty prompt or a token id out of range.
        ContextLengthError: prompt and output together are longer than the engine can ever hold.
    """
    num_prompt = len(prompt_token_ids)
    if not num_prompt:
        raise RequestError("the prompt is empty; give at least one token")
    # Compared before conversion: a client's integer may not fit 32 bits.
    lowest, highest = min(prompt_token_ids), max(prompt_token_ids)
    if lowest < 0 or highest >= limits.vocab_size:
        bad = lowest if lowest < 0 else highest
        raise RequestError(
            f"token id {bad} is out of range: the model's vocabulary has ids 0 to "
            f"{limits.vocab_size - 1}"
        )
    room = limits.max_length - num_prompt
    max_tokens = params.max_tokens if params.max_tokens is not None else max(room, 1)
    if max_tokens > room:
        raise ContextLengthError(_too_long(num_prompt, max_tokens, params, limits))
    named = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": tuple(token_id for token_id, _ in params.logit_bias),
    }
    for field, token_ids in named.items():
        for token_id in token_ids:
            if token_id >= limits.vocab_size:
                raise RequestError(
                    f"{field}: {token_id} is out of range: the model's vocabulary has ids 0 to "
                    f"{limits.vocab_size - 1}"
                )
    stops = params.stop_token_ids
    if not params.ignore_eos:
        stops = tuple(dict.fromkeys(limits.eos_token_ids + stops))
    return Request(
        number=number,
        prompt_token_ids=np.asarray(prompt_token_ids, dtype=np.int32),
        params=params,
        max_tokens=max_tokens,
        seed=(params.seed if params.seed is not None else random_seed) & (2**64 - 1),
        stop_token_ids=stops,
    )


def _too_long(num_prompt: int, max_tokens: int, params: SamplingParams, limits: Limits) -> str:
    if limits.max_length < limits.max_model_len:
        limit = (
            f"the KV cache holds {limits.num_kv_tokens} tokens "
            f"(raise --kv-memory to use the model's whole context of {limits.max_model_len})"
        )
    else:
        limit = f"this model's maximum context length is {limits.max_model_len} tokens"
    if num_prompt >= limits.max_length:
        return f"{limit}, but the prompt alone has {num_prompt}; shorten the prompt"
    return (
        f"{limit}, but the request asks for {num_prompt + max_tokens} "
        f"({num_prompt} in the prompt, {max_tokens} in max_tokens); shorten the prompt or ask "
        f"for at most {limits.max_length - num_prompt} tokens"
    )


def blocks_needed(request: Request, block_size: int) -> int:
    """Blocks that the request needs at its longest."""
    return num_blocks_for(request.max_length - 1, block_size)
