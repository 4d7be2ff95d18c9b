"""Which program of decode attention reads which keys of which row, found on the device.

Rows of a batch differ in length: one program a row would leave the GPU to the longest. Rows are cut
so that no part is much longer than what an even share of all keys would be, and not at all where
there are enough rows of like lengths. The list is made once a step and read by every layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.execution.kernels.ahead import Kernel
from octavo.execution.kernels.gpu import OVERLAP, PDL, begin

# Of a part: its token, row, first key, end, place among the row's parts, and their number.
WIDTH = 8


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """How programs of decode attention read: ``block_n`` keys at once, by ``warps``, in as many
    ``stages``. Rows of up to ``whole_keys`` are not cut, and of others a part has ``min_keys`` at
    least, but the last of a row: adding parts takes the last program some microseconds."""

    block_n: int = 64
    warps: int = 4
    stages: int = 3
    min_keys: int = 128
    whole_keys: int = 256


_FEW = DecodeTiling(128, 4, 3)
_FEW_WHOLE = DecodeTiling(128, 4, 3, whole_keys=512)
_FEW_LONG = DecodeTiling(64, 2, 3, min_keys=256)
_MANY = DecodeTiling(64, 4, 3)
_MANY_NARROW = DecodeTiling(64, 4, 2)
_WIDE = DecodeTiling(32, 4, 3)
FEW_ROWS = 32
LONG_ROW = 16384


def decode_tiling(
    max_tokens: int, num_kv_heads: int, head_dim: int, max_length: int, dtype: torch.dtype
) -> DecodeTiling:
    """What is fastest on an H200 (docs/decisions/0005-gpu-step.md) for up to ``max_tokens`` rows
    of up to ``max_length``: few have a program of few keys each, which waits for memory more than
    for its bytes; more of them, or of very long ones, keep it busy, and smaller tiles leave room
    for others. ``dtype`` is what is computed in: of heads that take more bytes than 128 numbers of
    16 bits shared memory holds smaller tiles only."""
    num_bytes = head_dim * dtype.itemsize
    if num_bytes > 256:
        return _MANY if num_bytes <= 512 else _WIDE
    if max_tokens > FEW_ROWS:
        return _MANY if head_dim > 64 else _MANY_NARROW
    if max_length > LONG_ROW:
        return _FEW_LONG
    # Uncut, the longer ones leave few multiprocessors without a program.
    return _FEW_WHOLE if max_tokens * num_kv_heads >= 128 else _FEW


@dataclass(frozen=True, slots=True, eq=False)
class DecodeParts:
    """``table`` int32 ``[parts, 8]``, a row's parts one after the other: token, row, first key, end
    of its keys, place among the row's parts, how many these are. ``count`` int32 ``[1]``: how many
    are used. A row's parts have ``BLOCK_N`` keys times the same number each, but for the last."""

    table: torch.Tensor
    count: torch.Tensor

    @staticmethod
    def bound(max_tokens: int, num_kv_heads: int, programs: int) -> int:
        """The most parts of ``max_tokens`` rows."""
        return max_tokens + programs // num_kv_heads + 1


@Kernel
@triton.jit
def _decode_parts(
    token_rows,
    positions,
    num_tokens,
    prefix_lengths,
    table,
    count_out,
    max_tokens,
    num_kv_heads,
    programs,
    min_keys,
    whole_keys,
    window,
    HAS_WINDOW: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    token = tl.arange(0, BLOCK)
    seen = (token < tl.load(num_tokens)) & (token < max_tokens)
    row = tl.load(token_rows + token, mask=seen, other=0)
    length = tl.load(positions + token, mask=seen, other=-1) + 1
    first = 0 * length
    if HAS_PREFIX:
        first = tl.load(prefix_lengths + token, mask=seen, other=0)
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    keys = length - first
    # An even share of all keys times KV heads, in whole tiles. Keys of a pool times KV heads do
    # not fit 32 bits.
    share = (tl.sum(keys.to(tl.int64), axis=0) * num_kv_heads + programs - 1) // programs
    span = tl.maximum((share + BLOCK_N - 1) // BLOCK_N * BLOCK_N, min_keys).to(tl.int32)
    num_parts = tl.where(keys <= whole_keys, 1, (keys + span - 1) // span)
    # The row's own span is even: a last part of a few keys would be a program for nothing.
    own = (keys + num_parts - 1) // num_parts
    own = tl.maximum((own + BLOCK_N - 1) // BLOCK_N * BLOCK_N, BLOCK_N)
    num_parts = tl.where(seen, tl.maximum((keys + own - 1) // own, 1), 0)
    end = tl.cumsum(num_parts, axis=0)
    tl.store(count_out, tl.sum(num_parts, axis=0))
    for part in range(tl.max(num_parts, axis=0)):
        place = table + (end - num_parts + part) * WIDTH
        mask = part < num_parts
        start = first + part * own
        tl.store(place, token, mask=mask)
        tl.store(place + 1, row, mask=mask)
        tl.store(place + 2, start, mask=mask)
        tl.store(place + 3, tl.minimum(start + own, length), mask=mask)
        tl.store(place + 4, 0 * token + part, mask=mask)
        tl.store(place + 5, num_parts, mask=mask)


def decode_parts(
    token_rows: torch.Tensor,
    positions: torch.Tensor,
    num_tokens: torch.Tensor,
    *,
    max_tokens: int,
    num_kv_heads: int,
    programs: int,
    tiling: DecodeTiling,
    window: int = 0,
    prefix_lengths: torch.Tensor | None = None,
) -> DecodeParts:
    """The parts of the first ``num_tokens`` (int32 ``[1]``, at most ``max_tokens``) tokens, each
    the last of row ``token_rows[i]``, at ``positions[i]``.

    ``programs`` is how many programs, over parts and KV heads, fill the GPU. ``window`` 0 means
    none. ``prefix_lengths``: how many of a token's first keys are somebody else's work.
    """
    device = positions.device
    size = DecodeParts.bound(max_tokens, num_kv_heads, programs)
    table = torch.empty(size, WIDTH, dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    block = triton.next_power_of_2(max_tokens)
    _decode_parts[(1,)](
        token_rows,
        positions,
        num_tokens,
        positions if prefix_lengths is None else prefix_lengths,
        table,
        count,
        max_tokens,
        num_kv_heads,
        programs,
        tiling.min_keys,
        tiling.whole_keys,
        window,
        HAS_WINDOW=window > 0,
        HAS_PREFIX=prefix_lengths is not None,
        BLOCK=block,
        BLOCK_N=tiling.block_n,
        WIDTH=WIDTH,
        PDL=PDL,
        num_warps=4 if block <= 512 else 8,
        **OVERLAP,
    )
    return DecodeParts(table, count)
