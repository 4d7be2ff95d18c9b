"""Which program of decode attention reads which keys of which row, found on the device.

Rows of a batch differ in length: one program a row would leave the GPU to the longest. Rows are cut
so that no part is much longer than what an even share of all keys would be, and not at all where
there are enough rows of like lengths; the longest come first, since what is left at the end is then
short. The list is made once a step and read by every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from octavo.execution.kernels.ahead import Kernel
from octavo.execution.kernels.gpu import OVERLAP, PDL, begin

HELD = 512
"""Programs that a GPU has under way at once, nearly: four on each multiprocessor of an H200."""

# Of a part: its token, row, first key, end, place among the row's parts, and their number.
WIDTH = 8


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """How programs of decode attention read: the keys of ``block_n`` tokens at once, of as many
    ``kv_heads``, by ``warps``, in as many ``stages``. Rows of up to ``whole_keys`` are not cut, and
    of others a part has ``min_keys`` at least, but the last of a row: adding parts takes the last
    program some microseconds. ``is_ahead``: places of keys are looked up a tile ahead, which is for
    nothing where a program has one."""

    block_n: int = 64
    warps: int = 4
    stages: int = 3
    min_keys: int = 128
    whole_keys: int = 256
    kv_heads: int = 1
    is_ahead: bool = True


_FEW = DecodeTiling(128, 4, 3, is_ahead=False)
_FEW_WHOLE = DecodeTiling(128, 4, 3, whole_keys=512, is_ahead=False)
_FEW_LONG = DecodeTiling(64, 2, 2, min_keys=256)
_MANY_FP8 = DecodeTiling(64, 4, 3)
_WIDE, _WIDEST = DecodeTiling(64, 4, 2), DecodeTiling(32, 4, 2)
FEW_ROWS = 32
LONG_ROW = 16384


def decode_tiling(
    max_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_length: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> DecodeTiling:
    """What is fastest on an H200 (docs/decisions/0005-gpu-step.md) for up to ``max_tokens`` rows
    of up to ``max_length``: few have a program of few keys each, which waits for memory more than
    for its bytes; more of them, or of very long ones, keep it busy, and smaller tiles leave room
    for others. ``dtype`` is what is computed in: of heads that take more bytes than 128 numbers of
    16 bits shared memory holds smaller tiles only. ``kv_dtype`` is what is stored."""
    num_bytes = head_dim * dtype.itemsize
    if num_bytes > 256:
        return _WIDE if num_bytes <= 512 else _WIDEST
    if max_tokens > FEW_ROWS:
        if kv_dtype.itemsize == 1:
            return _MANY_FP8
        kv_heads, most = 1, 2 if head_dim > 64 else 4
        # As many as have the query heads of a tile, while their programs fill the GPU.
        while (
            kv_heads < most
            and num_kv_heads % (2 * kv_heads) == 0
            and 2 * kv_heads * (num_heads // num_kv_heads) <= 16
            and max_tokens * num_kv_heads // (2 * kv_heads) >= HELD
        ):
            kv_heads *= 2
        return DecodeTiling((64 if head_dim > 64 else 128) // kv_heads, 4, 2, kv_heads=kv_heads)
    if max_length > LONG_ROW:
        return _FEW_LONG
    # Uncut, the longer ones leave few multiprocessors without a program.
    few = _FEW_WHOLE if max_tokens * num_kv_heads >= 128 else _FEW
    # Tiles of few bytes are small enough for others to be there meanwhile.
    is_small = head_dim * kv_dtype.itemsize <= 128
    return replace(few, stages=2, is_ahead=True) if is_small else few


@dataclass(frozen=True, slots=True, eq=False)
class DecodeParts:
    """``table`` int32 ``[parts, 8]``, a row's parts one after the other: token, row, first key, end
    of its keys, place among the row's parts, how many these are. ``count`` int32 ``[1]``: how many
    are used. A row's parts have ``BLOCK_N`` keys times the same number each, but for the last."""

    table: torch.Tensor
    count: torch.Tensor

    @staticmethod
    def bound(max_tokens: int, columns: int, programs: int) -> int:
        """The most parts of ``max_tokens`` rows, each of which ``columns`` programs read."""
        # A part has an even share of all keys, or two thirds of a row's on average, at least.
        return max_tokens + max(programs // columns, 3 * max_tokens // 2) + 1


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
    columns,
    programs,
    min_keys,
    whole_keys,
    window,
    HAS_WINDOW: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HELD: tl.constexpr,
    IS_ORDERED: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    token = tl.arange(0, BLOCK)
    seen = token < tl.minimum(tl.load(num_tokens), max_tokens)
    row = tl.load(token_rows + token, mask=seen, other=0)
    length = tl.load(positions + token, mask=seen, other=-1) + 1
    first = 0 * length
    if HAS_PREFIX:
        first = tl.load(prefix_lengths + token, mask=seen, other=0)
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    keys = length - first
    # An even share of all keys times programs for each. Keys of a pool times KV heads do not fit 32
    # bits.
    num_keys = tl.sum(keys.to(tl.int64), axis=0)
    share = (num_keys * columns + programs - 1) // programs
    # Rows of one key are what a captured step is padded with: the mean is that of the others.
    num_rows = tl.maximum(tl.sum((keys > 1).to(tl.int32), axis=0), 1)
    # Rounded up, as is what follows from it: so there are never more parts than `bound` says.
    mean = (num_keys + num_rows - 1) // num_rows
    # Rows that keep the GPU busy twice over are balanced by who comes first, and those that fill it
    # once where they are of like lengths: adding parts costs more than waiting for the longest.
    is_twice = num_rows * columns >= 2 * HELD
    is_alike = (num_rows * columns >= HELD) & (tl.max(keys, axis=0) <= mean * 5 // 4)
    if is_twice | is_alike:
        whole_keys = tl.maximum(whole_keys, mean * 5 // 4).to(tl.int32)
    span = tl.where(is_twice, mean, tl.minimum(share, (mean * 2 + 2) // 3))
    # In whole tiles.
    span = tl.maximum((span + BLOCK_N - 1) // BLOCK_N * BLOCK_N, min_keys).to(tl.int32)
    num_parts = tl.where(keys <= whole_keys, 1, (keys + span - 1) // span)
    # The row's own span is even: a last part of a few keys would be a program for nothing.
    own = (keys + num_parts - 1) // num_parts
    own = tl.maximum((own + BLOCK_N - 1) // BLOCK_N * BLOCK_N, BLOCK_N)
    num_parts = tl.where(seen, tl.maximum((keys + own - 1) // own, 1), 0)
    if IS_ORDERED:
        # Who comes first, roughly: by how many times the mean a row has, in four classes. Parts of
        # each are counted in 16 bits of their own, so that one scan counts all.
        later = (keys <= mean * 2).to(tl.int64) + (keys <= mean) + (keys <= mean // 2)
        counted = num_parts.to(tl.int64) << (later * 16)
        ends = tl.cumsum(counted, axis=0)
        sums = tl.sum(counted, axis=0)
        of_first, of_second, of_third = sums & 0xFFFF, (sums >> 16) & 0xFFFF, (sums >> 32) & 0xFFFF
        end = (ends >> (later * 16)) & 0xFFFF
        end += tl.where(later > 0, of_first, 0) + tl.where(later > 1, of_second, 0)
        end = (end + tl.where(later > 2, of_third, 0)).to(tl.int32)
        tl.store(count_out, (of_first + of_second + of_third + (sums >> 48)).to(tl.int32))
    else:
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

    ``programs`` is how many programs, over parts and KV heads (or as many of them at once as
    ``tiling`` says), fill the GPU. ``window`` 0 means none. ``prefix_lengths``: how many of a
    token's first keys are somebody else's work.
    """
    device = positions.device
    columns = num_kv_heads // tiling.kv_heads
    size = DecodeParts.bound(max_tokens, columns, programs)
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
        columns,
        programs,
        tiling.min_keys,
        tiling.whole_keys,
        window,
        HAS_WINDOW=window > 0,
        HAS_PREFIX=prefix_lengths is not None,
        BLOCK=block,
        BLOCK_N=tiling.block_n,
        HELD=HELD,
        # Parts of a class are counted in 16 bits, those of the last in 15.
        IS_ORDERED=size < 1 << 15,
        WIDTH=WIDTH,
        PDL=PDL,
        num_warps=4 if block <= 512 else 8,
        **OVERLAP,
    )
    return DecodeParts(table, count)
