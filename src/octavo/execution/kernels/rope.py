"""From a layer's projections to queries and the cache: norms of heads, rotation, KV write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.execution.kernels.ahead import Kernel
from octavo.execution.kernels.gpu import (
    OVERLAP,
    PDL,
    Product,
    Unnormed,
    inverse_rms,
    load_sum,
    pointer_and_splits,
)


@triton.jit
def kv_offset(tables, row, position, stride_table, stride_block, stride_token, BLOCK_SIZE):
    """Where a token's keys and values begin: its block's place in the pool, by the block table, or,
    of ``BLOCK_SIZE`` 0, its place in the row's slot: both translations in one kernel source. The
    first slot is nobody's: Triton asks the driver about a tensor's first address, so that one is
    always mapped."""
    if BLOCK_SIZE == 0:
        return (row + 1).to(tl.int64) * stride_block + position.to(tl.int64) * stride_token
    block = tl.load(tables + row * stride_table + position // BLOCK_SIZE).to(tl.int64)
    return block * stride_block + (position % BLOCK_SIZE) * stride_token


@triton.jit
def to_e4m3(x):
    """Nearest values of e4m3, the largest where ``x`` is beyond it; NaN stays NaN."""
    return tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


_MANY_TOKENS = 512


@Kernel
@triton.jit
def _rope_and_write(
    qkv,
    queries,
    keys,
    token_rows,
    positions,
    tables,
    cosines,
    sines,
    head_norms,
    kv_scales,
    residual,
    eps,
    residual_eps,
    hidden,
    num_heads,
    num_kv_heads,
    stride_split,
    stride_table,
    stride_block,
    stride_token,
    value_offset,
    SPLITS: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, HALF)
    half_dim = HEAD_DIM // 2
    total_heads = num_heads + 2 * num_kv_heads
    mask = (head < total_heads)[:, None] & (column < half_dim)[None, :]
    position = tl.load(positions + token)
    row = tl.load(token_rows + token)
    # Known since the step began, while a product is under way that these do not depend on.
    slot = kv_offset(tables, row, position, stride_table, stride_block, stride_token, BLOCK_SIZE)
    if HAS_ROPE:
        angle = position.to(tl.int64) * half_dim + column
        cos = tl.load(cosines + angle, mask=column < half_dim, other=1.0)[None, :]
        sin = tl.load(sines + angle, mask=column < half_dim, other=0.0)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    place = token * total_heads * HEAD_DIM + head[:, None] * HEAD_DIM + column[None, :]
    low = load_sum(qkv, place, mask, stride_split, SPLITS)
    high = load_sum(qkv, place + half_dim, mask, stride_split, SPLITS)
    if HIDDEN > 0:
        inverse = inverse_rms(residual, token, hidden, residual_eps, HIDDEN)
        low *= inverse
        high *= inverse
    is_value = (head >= num_heads + num_kv_heads)[:, None]
    if HAS_NORM:
        norm_mask = mask & (is_value == 0)
        weights = head_norms + head[:, None] * HEAD_DIM + column[None, :]
        square = tl.sum(low * low + high * high, axis=1)
        inverse = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        low = tl.where(is_value, low, low * inverse * tl.load(weights, mask=norm_mask, other=0.0))
        high = tl.where(
            is_value,
            high,
            high * inverse * tl.load(weights + half_dim, mask=norm_mask, other=0.0),
        )
    if HAS_ROPE:
        cos = tl.where(is_value, 1.0, cos)
        sin = tl.where(is_value, 0.0, sin)
        turned = low * cos - high * sin
        high = high * cos + low * sin
        low = turned
    is_query = (head < num_heads)[:, None] & mask
    q_place = token * num_heads * HEAD_DIM + head[:, None] * HEAD_DIM + column[None, :]
    q_low = low.to(queries.dtype.element_ty)
    q_high = high.to(queries.dtype.element_ty)
    tl.store(queries + q_place, q_low, mask=is_query)
    tl.store(queries + q_place + half_dim, q_high, mask=is_query)
    kv_head = tl.where(
        head >= num_heads + num_kv_heads, head - num_heads - num_kv_heads, head - num_heads
    )
    kv_place = (
        slot + tl.where(is_value, value_offset, 0) + kv_head[:, None] * HEAD_DIM + column[None, :]
    )
    is_kv = (head >= num_heads)[:, None] & mask
    if HAS_SCALES:
        place = tl.where(head >= num_heads + num_kv_heads, num_kv_heads, 0) + kv_head
        is_kept = (head >= num_heads) & (head < total_heads)
        scale = tl.load(kv_scales + place, mask=is_kept, other=1.0)[:, None]
        low = to_e4m3(low / scale)
        high = to_e4m3(high / scale)
    tl.store(keys + kv_place, low.to(keys.dtype.element_ty), mask=is_kv)
    tl.store(keys + kv_place + half_dim, high.to(keys.dtype.element_ty), mask=is_kv)


def rope_and_write(
    qkv: Product,
    kv_layer: torch.Tensor,
    token_rows: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    *,
    head_norms: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    eps: float = 0.0,
    dtype: torch.dtype,
    is_invariant: bool = False,
) -> torch.Tensor:
    """Norm and rotate queries and keys, write keys and values to their blocks.

    ``qkv [tokens, (num_heads + 2 * num_kv_heads) * head_dim]``; ``kv_layer`` is one layer of the
    arena, ``[block, token, K|V, kv_head, head_dim]`` with strides; ``token_rows`` and ``positions``
    are int32 ``[tokens]``, ``tables`` int32 ``[rows, blocks]``. ``cos`` and ``sin`` are float32
    ``[positions, head_dim / 2]``, of zero columns where nothing is rotated. ``head_norms`` is
    float32 ``[num_heads + num_kv_heads, head_dim]``. An arena of float8_e4m3fn has ``kv_scales``,
    float32 ``[K|V, kv_head]``: what is written is divided by its head's, and cut off at 448.
    Where a token stands is read while the kernel before this one still runs: one that does not
    overlap lies between it and what wrote that.
    ``is_invariant``: a token gets the same bits whatever tokens are beside it.

    Returns the queries, ``[tokens, num_heads, head_dim]`` in ``dtype``.
    """
    source, splits = pointer_and_splits(qkv)
    tokens = source.shape[-2]
    _, block_size, _, num_kv_heads, head_dim = kv_layer.shape
    queries = torch.empty(tokens, num_heads, head_dim, dtype=dtype, device=source.device)
    total_heads = num_heads + 2 * num_kv_heads
    residual = qkv.residual if isinstance(qkv, Unnormed) else None
    heads, warps = 4 if tokens < 256 or is_invariant else 16, 4
    if residual is not None:
        # A program reads the whole residual of its token: there are few, or one, where those are
        # many.
        heads = 16
        if tokens >= _MANY_TOKENS:
            heads, warps = min(triton.next_power_of_2(total_heads), 64), 8
    columns = triton.cdiv(total_heads, heads)
    _rope_and_write[(tokens, columns)](
        source,
        queries,
        kv_layer,
        token_rows,
        positions,
        tables,
        cos,
        sin,
        cos if head_norms is None else head_norms,
        cos if kv_scales is None else kv_scales,
        source if residual is None else residual,
        eps,
        qkv.eps if isinstance(qkv, Unnormed) else 0.0,
        0 if residual is None else residual.shape[1],
        num_heads,
        num_kv_heads,
        tokens * total_heads * head_dim,
        tables.stride(0),
        kv_layer.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        SPLITS=splits,
        HAS_ROPE=cos.shape[-1] > 0,
        HAS_NORM=head_norms is not None,
        HAS_SCALES=kv_scales is not None,
        HIDDEN=0 if residual is None else triton.next_power_of_2(residual.shape[1]),
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HALF=triton.next_power_of_2(head_dim // 2),
        HEADS=heads,
        PDL=PDL,
        num_warps=warps,
        **OVERLAP,
    )
    return queries
