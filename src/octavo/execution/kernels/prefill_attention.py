"""Attention of rows that run several tokens, over the block table: causal, a chunk and its prefix.

A program serves ``tile`` tokens of one row × all query heads of one KV head. Which tokens those are
comes from device memory (`PrefillTiles`), so that one captured launch fits every mix of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.execution.kernels.gpu import OVERLAP, PDL, begin
from octavo.execution.kernels.rope import kv_offset


@triton.jit
def attend(
    q,
    acc,
    total,
    largest,
    pool,
    value_offset,
    tables,
    row,
    query_position,
    first,
    end,
    last_key,
    window,
    scale_log2,
    stride_table,
    stride_block,
    stride_token,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    d = tl.arange(0, DIM)
    n = tl.arange(0, BLOCK_N)
    for start in range(first, end, BLOCK_N):
        key = start + n
        offset = kv_offset(
            tables,
            row,
            tl.minimum(key, last_key),
            stride_table,
            stride_block,
            stride_token,
            BLOCK_SIZE,
        )
        if DIM == HEAD_DIM:
            k = tl.load(pool + offset[:, None] + d[None, :])
            v = tl.load(pool + value_offset + offset[:, None] + d[None, :])
        else:
            d_mask = (d < HEAD_DIM)[None, :]
            k = tl.load(pool + offset[:, None] + d[None, :], mask=d_mask, other=0.0)
            v = tl.load(pool + value_offset + offset[:, None] + d[None, :], mask=d_mask, other=0.0)
        k = k.to(q.dtype)
        v = v.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if MASKED:
            seen = key[None, :] <= query_position[:, None]
            if HAS_WINDOW:
                seen = seen & (key[None, :] > query_position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        base = new_largest
        if MASKED:
            # A row that has seen no key yet: nothing to subtract.
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
        largest = new_largest
    return acc, total, largest


@triton.jit
def _prefill(
    queries,
    keys,
    tile_tokens,
    tile_counts,
    tile_rows,
    tile_positions,
    num_tiles,
    tables,
    out,
    kv_scales,
    scale_log2,
    group,
    num_kv_heads,
    window,
    stride_table,
    stride_block,
    stride_token,
    value_offset,
    HAS_WINDOW: tl.constexpr,
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
    tile = tl.program_id(1)
    kv_head = tl.program_id(0)
    if tile >= tl.load(num_tiles):
        return
    token = tl.load(tile_tokens + tile)
    count = tl.load(tile_counts + tile)
    row = tl.load(tile_rows + tile)
    position = tl.load(tile_positions + tile)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, DIM)
    query = m // GROUP
    g = m % GROUP
    query_seen = (query < count) & (g < group)
    query_position = position + tl.minimum(query, count - 1)
    head = kv_head * group + g
    place = (token + query).to(tl.int64) * num_kv_heads * group + head
    q_mask = query_seen[:, None] & (d < HEAD_DIM)[None, :]
    q_place = place[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(queries + q_place, mask=q_mask, other=0.0)
    largest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], dtype=tl.float32)
    pool = keys + kv_head * HEAD_DIM
    last_key = position + count - 1
    if HAS_SCALES:
        scale_log2 *= tl.load(kv_scales + kv_head)
    # Keys that every query of the tile sees need no mask.
    first = 0
    full = (position + 1) // BLOCK_N * BLOCK_N
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N
        full = first
    acc, total, largest = attend(
        q,
        acc,
        total,
        largest,
        pool,
        value_offset,
        tables,
        row,
        query_position,
        first,
        full,
        last_key,
        window,
        scale_log2,
        stride_table,
        stride_block,
        stride_token,
        False,
        HAS_WINDOW,
        BLOCK_SIZE,
        HEAD_DIM,
        DIM,
        BLOCK_N,
    )
    acc, total, largest = attend(
        q,
        acc,
        total,
        largest,
        pool,
        value_offset,
        tables,
        row,
        query_position,
        full,
        last_key + 1,
        last_key,
        window,
        scale_log2,
        stride_table,
        stride_block,
        stride_token,
        True,
        HAS_WINDOW,
        BLOCK_SIZE,
        HEAD_DIM,
        DIM,
        BLOCK_N,
    )
    acc = acc / total[:, None]
    if HAS_SCALES:
        acc *= tl.load(kv_scales + num_kv_heads + kv_head)
    tl.store(out + q_place, acc.to(out.dtype.element_ty), mask=q_mask)


@dataclass(frozen=True, slots=True, eq=False)
class PrefillTiles:
    """Int32 ``[max_tiles]`` each, the first ``num_tiles`` (``[1]``) used: a tile's first token, its
    tokens (at most `tile_tokens`), its row, and its first token's position."""

    tokens: torch.Tensor
    counts: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    num_tiles: torch.Tensor


BLOCK_M = 128


def tile_tokens(num_heads: int, num_kv_heads: int) -> int:
    """Tokens of a tile: its rows in the tensor cores are tokens × query heads of a KV head."""
    return BLOCK_M // triton.next_power_of_2(num_heads // num_kv_heads)


def prefill_attention(
    queries: torch.Tensor,
    kv_layer: torch.Tensor,
    tiles: PrefillTiles,
    tables: torch.Tensor | None,
    out: torch.Tensor,
    *,
    max_tiles: int | None = None,
    window: int = 0,
    block_n: int | None = None,
    warps: int = 8,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Attend for the tokens of ``tiles``, whose keys are written already.

    ``queries`` and ``out`` are ``[tokens, num_heads, head_dim]``. ``max_tiles`` bounds
    ``tiles.num_tiles``. Without ``tables`` ``kv_layer`` is a layer of slots, as in
    `decode_attention`, as are ``kv_scales``.
    """
    _, num_heads, head_dim = queries.shape
    _, block_size, _, num_kv_heads, _ = kv_layer.shape
    group = num_heads // num_kv_heads
    dim = triton.next_power_of_2(head_dim)
    _prefill[(num_kv_heads, len(tiles.tokens) if max_tiles is None else max_tiles)](
        queries,
        kv_layer,
        tiles.tokens,
        tiles.counts,
        tiles.rows,
        tiles.positions,
        tiles.num_tiles,
        tiles.rows if tables is None else tables,
        out,
        out if kv_scales is None else kv_scales,
        head_dim**-0.5 * 1.4426950408889634,
        group,
        num_kv_heads,
        window,
        0 if tables is None else tables.stride(0),
        kv_layer.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        HAS_WINDOW=window > 0,
        HAS_SCALES=kv_scales is not None,
        BLOCK_SIZE=0 if tables is None else block_size,
        HEAD_DIM=head_dim,
        DIM=dim,
        GROUP=triton.next_power_of_2(group),
        BLOCK_M=BLOCK_M,
        BLOCK_N=block_n or (64 if dim > 128 or queries.dtype == torch.float32 else 128),
        PDL=PDL,
        num_warps=warps,
        # Keys at contiguous addresses are all loaded ahead, which takes more shared memory.
        num_stages=2 if dim > 128 and tables is None else 3,
        **OVERLAP,
    )
