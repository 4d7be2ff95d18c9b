"""Attention of rows that run several tokens, over the block table: causal, a chunk and its prefix.

A program serves ``tile`` tokens of one row × all query heads of one KV head, or a part of their
keys: a few tokens behind a long prefix are few tiles, which would leave most of the GPU idle. Which
those are comes from device memory (`PrefillTiles`), so that one captured launch fits every mix of
rows. The program that finishes last adds the parts of its tile in their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.execution.kernels.ahead import Kernel
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
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
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
        # Rounded once, with a mask or without: the compiler fuses a product with a difference
        # only where no mask stands between them, and a key is masked for some tiles, whole for
        # others.
        weight = tl.exp2(tl.fma(scores, scale_log2, -(base * scale_log2)[:, None]))
        shrink = tl.exp2((largest - base) * scale_log2)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
        largest = new_largest
    return acc, total, largest


@Kernel
@triton.jit
def _prefill(
    queries,
    keys,
    tiles,
    num_tiles,
    tables,
    out,
    part_out,
    part_lse,
    counters,
    kv_scales,
    scale_log2,
    group,
    num_kv_heads,
    window,
    stride_table,
    stride_block,
    stride_token,
    value_offset,
    stride_field,
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
    token = tl.load(tiles + tile)
    count = tl.load(tiles + stride_field + tile)
    row = tl.load(tiles + 2 * stride_field + tile)
    position = tl.load(tiles + 3 * stride_field + tile)
    begin_key = tl.load(tiles + 4 * stride_field + tile)
    end_key = tl.load(tiles + 5 * stride_field + tile)
    slot = tl.load(tiles + 6 * stride_field + tile)
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
    last_key = end_key - 1
    if HAS_SCALES:
        scale_log2 *= tl.load(kv_scales + kv_head)
    # Keys that every query of the tile sees need no mask.
    first = begin_key
    full = tl.minimum(tl.maximum((position + 1) // BLOCK_N * BLOCK_N, first), end_key)
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
        end_key,
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
    value_scale = 1.0
    if HAS_SCALES:
        value_scale = tl.load(kv_scales + num_kv_heads + kv_head)
    if slot < 0:
        acc = acc * (value_scale / total)[:, None]
        tl.store(out + q_place, acc.to(out.dtype.element_ty), mask=q_mask)
        return
    # A query may see no key of this part: nothing, with no weight.
    divisor = tl.where(total == 0.0, 1.0, total)
    acc = acc / divisor[:, None]
    own = (slot.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_M + m
    tl.store(part_out + own[:, None] * DIM + d[None, :], acc)
    lse = largest * scale_log2 + tl.log2(divisor)
    tl.store(part_lse + own, tl.where(total == 0.0, float("-inf"), lse))
    place = tl.load(tiles + 7 * stride_field + tile)
    num_parts = tl.load(tiles + 8 * stride_field + tile)
    counter = counters + (slot - place) * num_kv_heads + kv_head
    # Every thread's part is written before the one that counts says so.
    tl.debug_barrier()
    done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if done == num_parts - 1:
        tl.debug_barrier()
        largest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        acc = tl.zeros([BLOCK_M, DIM], dtype=tl.float32)
        for other in range(num_parts):
            own = ((slot - place + other).to(tl.int64) * num_kv_heads + kv_head) * BLOCK_M + m
            lse = tl.load(part_lse + own, cache_modifier=".cg")
            o = tl.load(part_out + own[:, None] * DIM + d[None, :], cache_modifier=".cg")
            new_largest = tl.maximum(largest, lse)
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            shrink = tl.exp2(largest - base)
            weight = tl.exp2(lse - base)
            acc = acc * shrink[:, None] + o * weight[:, None]
            total = total * shrink + weight
            largest = new_largest
        acc = acc * (value_scale / total)[:, None]
        tl.store(out + q_place, acc.to(out.dtype.element_ty), mask=q_mask)
        tl.store(counter, 0)


@dataclass(frozen=True, slots=True, eq=False)
class PrefillTiles:
    """``table`` int32 ``[FIELDS, max_tiles]`` of `octavo.execution.prefill_tiles`, the first
    ``num_tiles`` (``[1]``) used."""

    table: torch.Tensor
    num_tiles: torch.Tensor


class PrefillWorkspace:
    """What the programs of a tile hand to the last of them. Counters are zero between launches."""

    def __init__(
        self, max_parts: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        """``max_parts`` bounds the parts of any launch, whole tiles not counted."""
        programs = max(max_parts, 1) * num_kv_heads
        rows = programs * MOST_ROWS
        dim = triton.next_power_of_2(head_dim)
        self.out = torch.empty(rows * dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(rows, dtype=torch.float32, device=device)
        self.counters = torch.zeros(programs, dtype=torch.int32, device=device)


MOST_ROWS = 128
"""So many query heads of a KV head fit a tile."""


def tile_rows(group: int, dtype: torch.dtype) -> int:
    """Rows of a tile, its tokens × the ``group`` of query heads of a KV head. Float32 is not for
    tensor cores: the sums of 128 rows do not fit a thread's registers, and take 10 s to compile."""
    assert group <= MOST_ROWS
    rows = MOST_ROWS if dtype.itemsize < 4 else 32
    return max(rows, triton.next_power_of_2(group))


def tile_tokens(num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> int:
    """Tokens of a tile."""
    group = num_heads // num_kv_heads
    return tile_rows(group, dtype) // triton.next_power_of_2(group)


def tile_keys(dim: int, dtype: torch.dtype) -> int:
    """Keys of a tile, of heads of ``dim`` numbers that are computed in ``dtype``."""
    if dim * dtype.itemsize > 512:
        return 32
    return 64 if dim > 128 or dtype == torch.float32 else 128


def tile_stages(dim: int, dtype: torch.dtype) -> int:
    """In how many stages tiles are loaded: as many as shared memory holds beside the queries."""
    return 3 if dim * dtype.itemsize <= 512 else 2


def prefill_attention(
    queries: torch.Tensor,
    kv_layer: torch.Tensor,
    tiles: PrefillTiles,
    tables: torch.Tensor | None,
    out: torch.Tensor,
    workspace: PrefillWorkspace,
    *,
    window: int = 0,
    block_n: int | None = None,
    warps: int = 8,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Attend for the tokens of ``tiles``, whose keys are written already.

    ``queries`` and ``out`` are ``[tokens, num_heads, head_dim]``. Without ``tables`` ``kv_layer``
    is a layer of slots, as in `decode_attention`, as are ``kv_scales``. With a ``window`` (0: none)
    no tile may be cut.
    """
    assert tiles.table.stride(1) == 1, "fields are read one after the other"
    _, num_heads, head_dim = queries.shape
    _, block_size, _, num_kv_heads, _ = kv_layer.shape
    group = num_heads // num_kv_heads
    dim = triton.next_power_of_2(head_dim)
    _prefill[(num_kv_heads, tiles.table.shape[1])](
        queries,
        kv_layer,
        tiles.table,
        tiles.num_tiles,
        tiles.table if tables is None else tables,
        out,
        workspace.out,
        workspace.lse,
        workspace.counters,
        out if kv_scales is None else kv_scales,
        head_dim**-0.5 * 1.4426950408889634,
        group,
        num_kv_heads,
        window,
        0 if tables is None else tables.stride(0),
        kv_layer.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        tiles.table.stride(0),
        HAS_WINDOW=window > 0,
        HAS_SCALES=kv_scales is not None,
        BLOCK_SIZE=0 if tables is None else block_size,
        HEAD_DIM=head_dim,
        DIM=dim,
        GROUP=triton.next_power_of_2(group),
        BLOCK_M=tile_rows(group, queries.dtype),
        BLOCK_N=block_n or tile_keys(dim, queries.dtype),
        PDL=PDL,
        num_warps=warps,
        # Keys at contiguous addresses are all loaded ahead, which takes more shared memory.
        num_stages=2 if dim > 128 and tables is None else tile_stages(dim, queries.dtype),
        **OVERLAP,
    )
