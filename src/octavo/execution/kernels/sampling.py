"""From logits to tokens on the device, one program or a few a row; nothing is sorted.

Top-k and top-p keep what is at or above a threshold, which bisection finds over the ordered bits of
the logits: exact, at most 32 passes over a row that lies in L2 (16 where logits are bfloat16), for
the rows that ask for it. Noise is counter-based, as in `octavo.execution.sampling.noise`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.execution.kernels.ahead import Kernel
from octavo.execution.kernels.gpu import OVERLAP, PDL, begin

BAD_LOGITS = -1
"""The token of a row whose logits hold NaN or +inf, or nothing but -inf."""

# Programs of a row: few rows need many to keep memory busy.
_CHUNKS, _MANY_CHUNKS, _FEW_ROWS = 8, 32, 16
_BLOCK = 4096
_NO_KEY = -(2**63)


@dataclass(frozen=True, slots=True, eq=False)
class SampledRows:
    """Places of a step's sampled tokens, int32 ``[n]``: the token whose logits they are of (its
    position is ``positions[tokens[i]]``), and the row that gets them. Rows from ``num_rows`` on are
    padding."""

    tokens: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    num_rows: int


class SamplingWorkspace:
    """Between the programs of a row; neutral between launches."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.keys = torch.full((max_rows,), _NO_KEY, dtype=torch.int64, device=device)
        self.counters = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.best = torch.zeros(max_rows, dtype=torch.float32, device=device)


@triton.jit
def _ordered(x):
    """Int32 keys in the order of float32 ``x``."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@Kernel
@triton.jit
def _argmax(
    logits,
    sample_tokens,
    sample_rows,
    positions,
    keys,
    counters,
    best,
    out,
    last_token,
    position,
    num_rows,
    vocab,
    stride,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    i = tl.program_id(0)
    chunk = tl.program_id(1)
    per_chunk = tl.cdiv(tl.cdiv(vocab, CHUNKS), BLOCK) * BLOCK
    start = chunk * per_chunk
    end = tl.minimum(start + per_chunk, vocab)
    n = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    place = tl.zeros([BLOCK], dtype=tl.int32)
    base = logits + i.to(tl.int64) * stride
    for first in range(start, end, BLOCK):
        index = first + n
        x = tl.load(base + index, mask=index < end, other=float("-inf")).to(tl.float32)
        x = tl.where(x != x, float("inf"), x)
        is_larger = x > largest
        largest = tl.where(is_larger, x, largest)
        place = tl.where(is_larger, index, place)
    # The largest value first, the lowest index second.
    packed = (_ordered(largest).to(tl.int64) << 32) + (0x7FFFFFFF - place).to(tl.int64)
    tl.atomic_max(keys + i, tl.max(packed, axis=0), sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    done = tl.atomic_add(counters + i, 1, sem="acq_rel", scope="gpu")
    if done == CHUNKS - 1:
        winner = tl.atomic_add(keys + i, 0, sem="acq_rel", scope="gpu")
        key = (winner >> 32).to(tl.int32)
        bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
        value = bits.to(tl.float32, bitcast=True)
        token = 0x7FFFFFFF - (winner & 0xFFFFFFFF).to(tl.int32)
        is_bad = (value == float("inf")) | (value == float("-inf"))
        row = tl.load(sample_rows + i)
        tl.store(best + i, tl.where(is_bad, float("inf"), value))
        tl.store(out + i, tl.where(is_bad, -1, token))
        if row < num_rows:
            tl.store(last_token + row, tl.where(is_bad, 0, token))
            tl.store(position + row, tl.load(positions + tl.load(sample_tokens + i)) + 1)
        tl.store(keys + i, -9223372036854775808)
        tl.store(counters + i, 0)


def argmax_tokens(
    logits: torch.Tensor,
    sampled: SampledRows,
    workspace: SamplingWorkspace,
    out: torch.Tensor,
    last_token: torch.Tensor,
    position: torch.Tensor,
) -> None:
    """The likeliest token of each of ``logits [n, vocab]``, the lowest id of equal ones.

    Writes it to ``out [n]`` and to ``last_token`` of its row, and advances the row's ``position``
    to the new token's; all int32.
    """
    n, vocab = logits.shape
    chunks = _MANY_CHUNKS if n <= _FEW_ROWS else _CHUNKS
    chunks = min(chunks, triton.next_power_of_2(triton.cdiv(vocab, _BLOCK)))
    _argmax[(n, chunks)](
        logits,
        sampled.tokens,
        sampled.rows,
        sampled.positions,
        workspace.keys,
        workspace.counters,
        workspace.best,
        out,
        last_token,
        position,
        sampled.num_rows,
        vocab,
        logits.stride(0),
        CHUNKS=chunks,
        BLOCK=_BLOCK,
        PDL=PDL,
        num_warps=8,
        **OVERLAP,
    )


@triton.jit
def _mixed(bits):
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def _uniform(seed, counter):
    """Float32 in [0, 1)."""
    golden = tl.full([], 0x9E3779B97F4A7C15, dtype=tl.uint64)
    bits = seed.to(tl.uint64, bitcast=True) + golden
    bits = _mixed(_mixed(bits) ^ (counter.to(tl.uint64) * golden))
    # 24 bits: what float32 holds below 1.
    return (bits >> 40).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _count_above(base, vocab, key, BLOCK: tl.constexpr):
    count = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, vocab, BLOCK):
        index = first + tl.arange(0, BLOCK)
        x = tl.load(base + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
        count += ((index < vocab) & (_ordered(x).to(tl.int64) >= key)).to(tl.int32)
    return tl.sum(count, axis=0)


@triton.jit
def _mass_above(base, vocab, key, largest, inverse, floor, BLOCK: tl.constexpr):
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, vocab, BLOCK):
        index = first + tl.arange(0, BLOCK)
        x = tl.load(base + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
        weight = tl.exp((x - largest) * inverse)
        kept = (index < vocab) & (_ordered(x).to(tl.int64) >= key) & (weight >= floor)
        mass += tl.where(kept, weight, 0.0)
    return tl.sum(mass, axis=0)


@Kernel
@triton.jit
def _sample(
    logits,
    sample_tokens,
    sample_rows,
    positions,
    best,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    out,
    last_token,
    num_rows,
    vocab,
    stride,
    GRAIN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    i = tl.program_id(0)
    row = tl.load(sample_rows + i)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    largest = tl.load(best + i)
    is_random = (temperature > 0.0) & (top_k != 1) & (largest != float("inf"))
    if (row >= num_rows) | (is_random == 0):
        return
    base = logits + i.to(tl.int64) * stride
    inverse = 1.0 / tl.maximum(temperature, 1e-5)
    lowest = tl.full([], -2147483648, dtype=tl.int64)
    above = _ordered(largest).to(tl.int64) + 1
    threshold = lowest
    if (top_k > 0) & (top_k < vocab):
        high = above
        while high - threshold > GRAIN:
            middle = (threshold + high) >> 1
            if _count_above(base, vocab, middle, BLOCK) >= top_k:
                threshold = middle
            else:
                high = middle
    top_p = tl.load(top_ps + row)
    if top_p < 1.0:
        goal = top_p * _mass_above(base, vocab, threshold, largest, inverse, 0.0, BLOCK)
        high = above
        while high - threshold > GRAIN:
            middle = (threshold + high) >> 1
            if _mass_above(base, vocab, middle, largest, inverse, 0.0, BLOCK) >= goal:
                threshold = middle
            else:
                high = middle
    floor = tl.load(min_ps + row)
    total = _mass_above(base, vocab, threshold, largest, inverse, floor, BLOCK)
    counter = tl.load(positions + tl.load(sample_tokens + i)).to(tl.int64) + 1
    target = _uniform(tl.load(seeds + row), counter) * total
    before = tl.zeros([], dtype=tl.float32)
    # Rounding may leave the target above the last sum: the last kept token is taken then.
    token = tl.load(out + i)
    found = 0
    for first in range(0, vocab, BLOCK):
        index = first + tl.arange(0, BLOCK)
        x = tl.load(base + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
        weight = tl.exp((x - largest) * inverse)
        kept = (index < vocab) & (_ordered(x).to(tl.int64) >= threshold) & (weight >= floor)
        weight = tl.where(kept, weight, 0.0)
        mass = tl.sum(weight, axis=0)
        if (found == 0) & (mass > 0.0):
            reached = before + tl.cumsum(weight, axis=0)
            hit = kept & (weight > 0.0) & (reached > target)
            candidate = tl.min(tl.where(hit, index, 0x7FFFFFFF), axis=0)
            last = tl.max(tl.where(kept & (weight > 0.0), index, -1), axis=0)
            is_hit = candidate != 0x7FFFFFFF
            token = tl.where(is_hit, candidate, last)
            found = tl.where(is_hit, 1, 0)
        before += mass
    tl.store(out + i, token)
    tl.store(last_token + row, token)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingState:
    """Parameters by row, on the device: float32 ``temperature``, ``top_p`` and ``min_p``, int32
    ``top_k`` (0: off), int64 ``seed``."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor


def sample_tokens(
    logits: torch.Tensor,
    sampled: SampledRows,
    state: SamplingState,
    workspace: SamplingWorkspace,
    out: torch.Tensor,
    last_token: torch.Tensor,
) -> None:
    """Replace what `argmax_tokens` wrote for the rows that sample at random.

    Of the tokens that the temperature weighs, top-k keeps the k likeliest (and their equals), top-p
    the fewest likeliest that make up its share of what is left, min-p those of at least its share
    of the likeliest's probability. The one is taken where the running sum exceeds the noise.
    """
    n, vocab = logits.shape
    _sample[(n,)](
        logits,
        sampled.tokens,
        sampled.rows,
        sampled.positions,
        workspace.best,
        state.temperature,
        state.top_k,
        state.top_p,
        state.min_p,
        state.seed,
        out,
        last_token,
        sampled.num_rows,
        vocab,
        logits.stride(0),
        GRAIN=1
        if logits.dtype == torch.float32
        else 65536
        if logits.dtype == torch.bfloat16
        else 8192,
        BLOCK=4096,
        PDL=PDL,
        num_warps=16,
        **OVERLAP,
    )
