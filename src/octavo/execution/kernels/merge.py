"""Attention in pieces: keys brought together for kernels that know no blocks, results merged."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.execution.kernels.ahead import Kernel
from octavo.execution.kernels.rope import kv_offset


@Kernel
@triton.jit
def _gather_keys(
    keys,
    tables,
    row,
    length,
    out,
    kv_scales,
    stride_table,
    stride_block,
    stride_token,
    value_offset,
    width,
    HAS_SCALES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    seen = token < length
    offset = kv_offset(
        tables,
        row,
        tl.minimum(token, length - 1),
        stride_table,
        stride_block,
        stride_token,
        BLOCK_SIZE,
    )
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = seen[:, None] & (column < width)[None, :]
        place = token.to(tl.int64)[:, None] * 2 * width + column[None, :]
        k = tl.load(keys + offset[:, None] + column[None, :], mask=mask)
        v = tl.load(keys + value_offset + offset[:, None] + column[None, :], mask=mask)
        if HAS_SCALES:
            scale = kv_scales + column // HEAD_DIM
            is_column = column < width
            k = k.to(tl.float32) * tl.load(scale, mask=is_column)[None, :]
            v = v.to(tl.float32) * tl.load(scale + width // HEAD_DIM, mask=is_column)[None, :]
        tl.store(out + place, k.to(out.dtype.element_ty), mask=mask)
        tl.store(out + place + width, v.to(out.dtype.element_ty), mask=mask)


def gather_keys(
    kv_layer: torch.Tensor,
    tables: torch.Tensor,
    row: int,
    length: int,
    *,
    dtype: torch.dtype,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The first ``length`` tokens of a row in their order: ``[length, K|V, kv_head, head_dim]`` in
    ``dtype``, multiplied by their head's of ``kv_scales`` (see `rope_and_write`)."""
    _, block_size, _, num_kv_heads, head_dim = kv_layer.shape
    out = torch.empty(length, 2, num_kv_heads, head_dim, dtype=dtype, device=kv_layer.device)
    tokens = 4
    _gather_keys[(triton.cdiv(length, tokens),)](
        kv_layer,
        tables,
        row,
        length,
        out,
        out if kv_scales is None else kv_scales,
        tables.stride(0),
        kv_layer.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        num_kv_heads * head_dim,
        HAS_SCALES=kv_scales is not None,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        TOKENS=tokens,
        BLOCK=1024,
    )
    return out


@Kernel
@triton.jit
def _merge(
    out,
    lse,
    other_out,
    other_lse,
    tokens,
    num_heads,
    stride_other,
    stride_other_head,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    d = tl.arange(0, DIM)
    seen = head < num_heads
    mask = seen[:, None] & (d < HEAD_DIM)[None, :]
    a = tl.load(lse + head * tokens + token, mask=seen, other=0.0)
    b = tl.load(other_lse + head * tokens + token, mask=seen, other=0.0)
    largest = tl.maximum(a, b)
    wa, wb = tl.exp(a - largest), tl.exp(b - largest)
    place = token * num_heads * HEAD_DIM + head[:, None] * HEAD_DIM + d[None, :]
    other = token * stride_other + head[:, None] * stride_other_head + d[None, :]
    x = tl.load(out + place, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(other_out + other, mask=mask, other=0.0).to(tl.float32)
    merged = (x * wa[:, None] + y * wb[:, None]) / (wa + wb)[:, None]
    tl.store(out + place, merged.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + head * tokens + token, largest + tl.log(wa + wb), mask=seen)


def merge_attention(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> None:
    """Attention over two sets of keys as if over their union, into ``out`` and ``lse``.

    Outputs are ``[tokens, num_heads, head_dim]``, ``out`` contiguous; log-sum-exps (natural) are
    float32 ``[num_heads, tokens]``, contiguous.
    """
    tokens, num_heads, head_dim = out.shape
    _merge[(tokens,)](
        out,
        lse,
        other_out,
        other_lse,
        tokens,
        num_heads,
        other_out.stride(0),
        other_out.stride(1),
        HEAD_DIM=head_dim,
        DIM=triton.next_power_of_2(head_dim),
        HEADS=triton.next_power_of_2(num_heads),
    )
