"""Attention of many rows to the prefix that they share: its keys and values are read once a tile of
rows, not once a row.

Rows whose block tables begin alike are a group; a tile is up to `tile_tokens` of its rows × all
query heads of a KV head. What a row has of its own is left to `decode_attention`, which adds both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.execution.kernels.ahead import Kernel
from octavo.execution.kernels.decode_attention import SharedPrefixParts
from octavo.execution.kernels.gpu import OVERLAP, PDL, begin
from octavo.execution.kernels.prefill_attention import (
    attend,
    tile_keys,
    tile_rows,
    tile_stages,
)


@Kernel
@triton.jit
def _prefix(
    queries,
    keys,
    tile_tokens,
    tile_rows,
    tile_lengths,
    num_tiles,
    tables,
    out,
    lse,
    kv_scales,
    scale_log2,
    group,
    num_kv_heads,
    stride_table,
    stride_block,
    stride_token,
    value_offset,
    SPLITS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    if tile >= tl.load(num_tiles):
        return
    row = tl.load(tile_rows + tile)
    length = tl.load(tile_lengths + tile)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, DIM)
    g = m % GROUP
    token = tl.load(tile_tokens + tile * (BLOCK_M // GROUP) + m // GROUP)
    seen = (token >= 0) & (g < group)
    head = kv_head * group + g
    num_heads = num_kv_heads * group
    mask = seen[:, None] & (d < HEAD_DIM)[None, :]
    place = token.to(tl.int64) * num_heads + head
    q = tl.load(queries + place[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
    span = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
    first = tl.minimum(split * span, length)
    end = tl.minimum(first + span, length)
    full = first + (end - first) // BLOCK_N * BLOCK_N
    last = tl.zeros([BLOCK_M], dtype=tl.int32) + end - 1
    largest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], dtype=tl.float32)
    pool = keys + kv_head * HEAD_DIM
    if HAS_SCALES:
        scale_log2 *= tl.load(kv_scales + kv_head)
    acc, total, largest = attend(
        q, acc, total, largest, pool, value_offset, tables, row, last, first, full,
        end - 1, 0, scale_log2, stride_table, stride_block, stride_token,
        False, False, BLOCK_SIZE, HEAD_DIM, DIM, BLOCK_N,
    )  # fmt: skip
    acc, total, largest = attend(
        q, acc, total, largest, pool, value_offset, tables, row, last, full, end,
        end - 1, 0, scale_log2, stride_table, stride_block, stride_token,
        True, False, BLOCK_SIZE, HEAD_DIM, DIM, BLOCK_N,
    )  # fmt: skip
    # A part without keys weighs nothing.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if HAS_SCALES:
        acc *= tl.load(kv_scales + num_kv_heads + kv_head)
    part = (token.to(tl.int64) * SPLITS + split) * num_heads + head
    tl.store(out + part[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)
    tl.store(lse + part, largest * scale_log2 + tl.log2(total), mask=seen)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTiles:
    """Int32, on the device. ``tokens [max_tiles, tile_tokens]``: those of a tile, padded by -1;
    ``rows [max_tiles]``: a row whose table begins with the prefix; ``lengths [max_tiles]``: the
    prefix in tokens. The first ``num_tiles`` (``[1]``) are used. ``token_lengths [tokens]``: how
    many of a token's first keys are covered."""

    tokens: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    num_tiles: torch.Tensor
    token_lengths: torch.Tensor


def prefix_attention(
    queries: torch.Tensor,
    kv_layer: torch.Tensor,
    tiles: PrefixTiles,
    tables: torch.Tensor,
    *,
    splits: int,
    block_n: int | None = None,
    kv_scales: torch.Tensor | None = None,
) -> SharedPrefixParts:
    """Attend to the prefixes of ``tiles``; ``queries`` is ``[tokens, num_heads, head_dim]``,
    ``kv_scales`` as in `decode_attention`."""
    tokens, num_heads, head_dim = queries.shape
    _, block_size, _, num_kv_heads, _ = kv_layer.shape
    group = num_heads // num_kv_heads
    dim = triton.next_power_of_2(head_dim)
    out = torch.empty(
        tokens, splits, num_heads, head_dim, dtype=torch.float32, device=queries.device
    )
    lse = torch.empty(tokens, splits, num_heads, dtype=torch.float32, device=queries.device)
    _prefix[(num_kv_heads, len(tiles.rows), splits)](
        queries,
        kv_layer,
        tiles.tokens,
        tiles.rows,
        tiles.lengths,
        tiles.num_tiles,
        tables,
        out,
        lse,
        lse if kv_scales is None else kv_scales,
        head_dim**-0.5 * 1.4426950408889634,
        group,
        num_kv_heads,
        tables.stride(0),
        kv_layer.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        SPLITS=splits,
        HAS_SCALES=kv_scales is not None,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        DIM=dim,
        GROUP=triton.next_power_of_2(group),
        BLOCK_M=tile_rows(group, queries.dtype),
        BLOCK_N=block_n or tile_keys(dim, queries.dtype),
        PDL=PDL,
        num_warps=8,
        num_stages=tile_stages(dim, queries.dtype),
        **OVERLAP,
    )
    return SharedPrefixParts(tiles.token_lengths, out, lse)
