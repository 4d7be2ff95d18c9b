"""The door: turns what a client asked into a `Request`, or says why it cannot be served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from octavo.core.layout import num_blocks_for
from octavo.core.plan import KVCapacity
from octavo.core.request import ContextLengthError, Request, RequestError
from octavo.core.sampling_params import MAX_BEAM_TOKENS, MAX_BEAM_WIDTH, SamplingParams
from octavo.memory.reservation import Reservation


@dataclass(frozen=True, slots=True)
class Limits:
    """What one engine can serve. ``num_kv_tokens`` is the whole pool, in tokens; ``sharing`` says
    whether sequences of a request have the prompt's blocks in common, ``max_mapped_blocks`` how
    many blocks slots can show at once, where there are slots, ``reservation`` what each sequence is
    given whole, where it is, ``most_kv_tokens`` how many the pool could be resized to (None: it
    stays as it is)."""

    vocab_size: int
    max_model_len: int
    num_kv_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    block_size: int = 1
    max_num_seqs: int = 2**16
    sharing: bool = True
    max_mapped_blocks: int | None = None
    reservation: Reservation | None = None
    most_kv_tokens: int | None = None

    @classmethod
    def of(
        cls,
        capacity: KVCapacity,
        vocab_size: int,
        max_model_len: int,
        eos: tuple[int, ...],
        max_num_seqs: int = 2**16,
        sharing: bool = True,
        max_mapped_blocks: int | None = None,
        reservation: Reservation | None = None,
    ) -> Limits:
        num_kv_tokens = (capacity.num_blocks - 1) * capacity.block_size
        most = capacity.max_blocks
        most_kv_tokens = None if most is None else (most - 1) * capacity.block_size
        return cls(
            vocab_size,
            max_model_len,
            num_kv_tokens,
            eos,
            capacity.block_size,
            max_num_seqs,
            sharing,
            max_mapped_blocks,
            reservation,
            most_kv_tokens,
        )

    @property
    def max_length(self) -> int:
        """Longest sequence that fits: the last token's keys and values are never needed."""
        if self.reservation is not None:
            return self.longest(1, 1)
        return min(self.max_model_len, self.num_kv_tokens + 1)

    def longest(self, num_prompt_tokens: int, n: int) -> int:
        """Longest of ``n`` sequences of a request that fit together: they share the prompt's full
        blocks. With a reservation each has a run of its own."""
        if self.reservation is not None:
            num_blocks = self.num_kv_tokens // self.block_size
            return self.reservation.longest(num_prompt_tokens, num_blocks // n, self.block_size)
        if n == 1:
            return self.max_length
        # All of its sequences are mapped side by side, shared blocks once in each.
        longest = self.max_length
        if self.max_mapped_blocks is not None:
            longest = min(longest, self.max_mapped_blocks // n * self.block_size)
        num_blocks = self.num_kv_tokens // self.block_size
        shared = min(num_prompt_tokens // self.block_size, num_blocks) if self.sharing else 0
        own = (num_blocks - shared) // n
        return min(longest, (shared + own) * self.block_size + 1)


def resolve_request(
    number: int,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    limits: Limits,
    *,
    random_seed: int,
    n: int = 1,
    cache_salt: str = "",
) -> Request:
    """Check a request against the engine's limits and fill in what it left open.

    ``random_seed`` is used when the client gave none; ``beam_width``, ``n`` where it gave none.

    Raises:
        RequestError: an empty prompt, a token id out of range, or sampling parameters that could
            leave no token to choose.
        ContextLengthError: prompt and output together are longer than the engine can ever hold.
    """
    num_prompt = len(prompt_token_ids)
    if not num_prompt:
        raise RequestError("the prompt is empty; give at least one token")
    # Compared before conversion: a client's integer may not fit 32 bits, nor 64.
    try:
        wide = np.asarray(prompt_token_ids, dtype=np.int64)
        lowest, highest = int(wide.min()), int(wide.max())
    except OverflowError:
        lowest, highest = min(prompt_token_ids), max(prompt_token_ids)
    if lowest < 0 or highest >= limits.vocab_size:
        bad = lowest if lowest < 0 else highest
        raise RequestError(
            f"token id {bad} is out of range: the model's vocabulary has ids 0 to "
            f"{limits.vocab_size - 1}"
        )
    beam_width = (params.beam_width or n) if params.use_beam_search else 0
    if beam_width:
        _check_width(beam_width, n, limits)
    if not 1 <= n <= limits.max_num_seqs:
        raise RequestError(
            f"n is {n}, but it must be from 1 to {limits.max_num_seqs}, the sequences that run at "
            "once (--max-num-seqs)"
        )
    num_sequences = beam_width or n
    room = limits.longest(num_prompt, num_sequences) - num_prompt
    max_tokens = params.max_tokens if params.max_tokens is not None else max(room, 1)
    check_length(num_prompt, max_tokens, n, beam_width, limits)
    stops = params.stop_token_ids
    if not params.ignore_eos:
        # A tokenizer may know ends that the model's vocabulary has no room for.
        eos = (token_id for token_id in limits.eos_token_ids if token_id < limits.vocab_size)
        stops = tuple(dict.fromkeys((*eos, *stops)))
    check_sampling(params, max_tokens, stops, limits.vocab_size)
    check_beams(beam_width, n, stops, limits)
    return Request(
        number=number,
        prompt_token_ids=wide.astype(np.int32),
        params=params,
        max_tokens=max_tokens,
        seed=(params.seed if params.seed is not None else random_seed) & (2**64 - 1),
        stop_token_ids=stops,
        cache_salt=cache_salt.encode(),
        n=n,
        beam_width=beam_width,
    )


def check_length(num_prompt: int, max_tokens: int, n: int, beam_width: int, limits: Limits) -> None:
    """Check that ``n`` samples, or the beams of a search, fit with their prompt and ``max_tokens``
    each.

    Raises:
        ContextLengthError: they never do; the message says what would.
    """
    num_sequences = beam_width or n
    if num_prompt + max_tokens > limits.longest(num_prompt, num_sequences):
        what = "beams" if beam_width else "samples"
        raise ContextLengthError(_too_long(num_prompt, max_tokens, num_sequences, what, limits))


def check_beams(beam_width: int, n: int, stop_token_ids: tuple[int, ...], limits: Limits) -> None:
    """Check a search of ``beam_width`` candidates (0: none) for ``n`` results.

    Raises:
        RequestError: the message names the field.
    """
    if not beam_width:
        return
    _check_width(beam_width, n, limits)
    num_tokens = beam_width + len(stop_token_ids)
    if num_tokens > min(MAX_BEAM_TOKENS, limits.vocab_size):
        raise RequestError(
            f"beam_width {beam_width} and {len(stop_token_ids)} stop tokens are too many: together "
            f"at most {min(MAX_BEAM_TOKENS, limits.vocab_size)} are possible; ask for a smaller "
            "beam_width or for fewer stop_token_ids"
        )


def _check_width(beam_width: int, n: int, limits: Limits) -> None:
    widest = min(MAX_BEAM_WIDTH, limits.max_num_seqs)
    if beam_width > widest:
        raise RequestError(
            f"beam_width is {beam_width}, but it must be from 1 to {widest}, which is "
            f"{MAX_BEAM_WIDTH} or the sequences that run at once (--max-num-seqs)"
        )
    if n > beam_width:
        raise RequestError(
            f"n is {n}, but a beam search of beam_width {beam_width} has at most so many results; "
            "ask for fewer, or for more beams"
        )


def check_sampling(
    params: SamplingParams, max_tokens: int, stop_token_ids: tuple[int, ...], vocab_size: int
) -> None:
    """Check what `SamplingParams` cannot know alone: vocabulary, resolved length, stop tokens.

    A mask that leaves nothing would fail a whole step, with the other requests in it, so it is
    refused here, already where it might once come to that.

    Raises:
        RequestError: the message names the field.
    """
    words, allowed = params.bad_words_token_ids, params.allowed_token_ids
    named = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": tuple(token_id for token_id, _ in params.logit_bias),
        "allowed_token_ids": allowed or (),
        "bad_words_token_ids": tuple(chain.from_iterable(words)),
    }
    for field, token_ids in named.items():
        highest = max(token_ids, default=0)
        if highest >= vocab_size:
            raise RequestError(
                f"{field}: {highest} is out of range: the model's vocabulary has ids 0 to "
                f"{vocab_size - 1}"
            )
    if params.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, but at most {max_tokens} tokens can be generated"
        )
    if params.bad_words:
        raise RequestError("bad_words need a tokenizer; give their tokens in bad_words_token_ids")
    forbidden = {word[-1] for word in words}
    if params.min_tokens:
        forbidden.update(stop_token_ids)
    left = vocab_size - len(forbidden) if allowed is None else len(set(allowed) - forbidden)
    if forbidden and left <= 0:
        raise RequestError(
            "allowed_token_ids, bad_words and min_tokens (which forbids stop tokens) could leave "
            "no token to choose; allow more tokens"
        )


def _too_long(num_prompt: int, max_tokens: int, n: int, what: str, limits: Limits) -> str:
    longest = limits.longest(num_prompt, n)
    if limits.reservation is not None and longest < limits.max_model_len:
        return (
            f"{n} {what} of {num_prompt} prompt and {max_tokens} new tokens cannot be reserved "
            f"in the KV cache of {limits.num_kv_tokens} tokens (--reserve "
            f"{limits.reservation.reserve}); ask for fewer or shorter ones, or raise --kv-memory"
        )
    if longest < limits.max_length:
        room = longest - num_prompt
        fewer = f", or for at most {room} new tokens each" if room > 0 else ""
        return (
            f"{n} {what} of {num_prompt} prompt and {max_tokens} new tokens do not fit in the KV "
            f"cache of {limits.num_kv_tokens} tokens; ask for fewer {what}{fewer}"
        )
    if limits.max_length < limits.max_model_len:
        limit = _pool_limit(limits)
    else:
        limit = f"this model's maximum context length is {limits.max_model_len} tokens"
    if num_prompt >= limits.max_length:
        return f"{limit}, but the prompt alone has {num_prompt}; shorten the prompt"
    return (
        f"{limit}, but the request asks for {num_prompt + max_tokens} "
        f"({num_prompt} in the prompt, {max_tokens} in max_tokens); shorten the prompt or ask "
        f"for at most {limits.max_length - num_prompt} tokens"
    )


def _pool_limit(limits: Limits) -> str:
    """What the pool holds, where that is less than the model could use, and how it could be more:
    one that is resized while it serves need not be started anew."""
    holds = f"the KV cache holds {limits.num_kv_tokens} tokens"
    if limits.most_kv_tokens is None:
        use = f"to use the model's whole context of {limits.max_model_len}"
        return f"{holds} (raise --kv-memory {use})"
    longest = min(limits.max_model_len, limits.most_kv_tokens + 1)
    if longest <= limits.max_length:
        return f"{holds}, which is all that it can have on this machine"
    return (
        f"{holds} at present (grow it with POST /kv/resize or LLM.resize_kv, or start with more "
        f"--kv-memory, to serve up to {longest})"
    )


def blocks_needed(request: Request, block_size: int) -> int:
    """Blocks that the request needs at its longest."""
    return num_blocks_for(request.max_length - 1, block_size)
