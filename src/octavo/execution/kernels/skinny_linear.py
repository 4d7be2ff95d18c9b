"""``x @ weight.T`` for few rows: the time of reading the weight, which is all there is to do.

A library's product for many rows leaves multiprocessors idle at few: a projection of 4096 × 4096
has 64 tiles of 64 outputs for 132 of them. Here the inner dimension is split as well; partial sums
stay in float32 and are added by whichever kernel reads them next (`SplitSum`), which costs neither
a memset nor atomics and gives the same bits at every run.

A program starts while the kernel before it still runs, and asks for nothing until that has ended:
weights fetched earlier take the memory's time from who is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.execution.kernels.ahead import Kernel
from octavo.execution.kernels.gpu import OVERLAP, PDL, SplitSum, begin

MAX_ROWS = 128
"""Rows up to which a tile of the product holds them all."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut: ``block_n`` outputs × ``block_k`` inputs at once, ``splits`` parts of
    the inner dimension. ``block_m`` rows at once; 0: as many as there are, up to `MAX_ROWS`."""

    block_n: int = 64
    block_k: int = 128
    splits: int = 1
    stages: int = 4
    warps: int = 4
    block_m: int = 0


@Kernel
@triton.jit
def _skinny_linear(
    x,
    weight,
    bias,
    scales,
    out,
    num_rows,
    N,
    K,
    k_per_split,
    stride_x,
    stride_weight,
    stride_split,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    split = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        # Half of the tile's outputs are gates, the other half what they gate.
        half = tl.arange(0, BLOCK_N) // (BLOCK_N // 2)
        within = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N) % (BLOCK_N // 2)
        n = tl.where(within < N // 2, half * (N // 2) + within, N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = split * k_per_split + tl.arange(0, BLOCK_K)
    last_k = tl.minimum((split + 1) * k_per_split, K)
    n_mask = n < N
    weights = weight + n.to(tl.int64)[:, None] * stride_weight + k[None, :]
    inputs = x + m.to(tl.int64)[None, :] * stride_x + k[:, None]
    begin(PDL)
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for first in range(split * k_per_split, last_k, BLOCK_K):
        if EVEN:
            w = tl.load(weights, mask=n_mask[:, None], other=0.0, eviction_policy="evict_first")
            a = tl.load(inputs, mask=(m < num_rows)[None, :], other=0.0)
        else:
            k_mask = first + tl.arange(0, BLOCK_K) < last_k
            w = tl.load(weights, mask=n_mask[:, None] & k_mask[None, :], other=0.0)
            a = tl.load(inputs, mask=(m < num_rows)[None, :] & k_mask[:, None], other=0.0)
        total = tl.dot(w.to(a.dtype), a, total, input_precision="ieee")
        weights += BLOCK_K
        inputs += BLOCK_K
    if HAS_SCALES:
        total *= tl.load(scales + n, mask=n_mask, other=0.0)[:, None]
    if HAS_BIAS and split == 0:
        total += tl.load(bias + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
    if GATED:
        pair = tl.permute(tl.reshape(total, [2, BLOCK_N // 2, BLOCK_M]), (1, 2, 0))
        gate, up = tl.split(pair)
        features = N // 2
        column = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        y = gate / (1.0 + tl.exp(-gate)) * up
        target = out + m.to(tl.int64)[None, :] * features + column[:, None]
        mask = (column < features)[:, None] & (m < num_rows)[None, :]
        tl.store(target, y.to(out.dtype.element_ty), mask=mask)
        return
    target = out + split * stride_split + m.to(tl.int64)[None, :] * N + n[:, None]
    mask = n_mask[:, None] & (m < num_rows)[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiling: Tiling,
    *,
    gated: bool = False,
    scales: torch.Tensor | None = None,
) -> torch.Tensor | SplitSum:
    """``x [rows, in]`` times ``weight [out, in]``, up to ``MAX_ROWS`` rows or any number with a
    ``block_m``.

    Returns ``[rows, out]`` in x's dtype, or a `SplitSum` where the tiling splits the inner
    dimension. ``gated`` (not with splits) returns ``silu(gate) * up``, ``[rows, out / 2]``: gates
    are the first half of the outputs. ``scales``, float32 ``[out]``, are what the channels of a
    weight in float8_e4m3fn are multiplied by; x stays as it is.
    """
    rows, k = x.shape
    n = weight.shape[0]
    splits = tiling.splits
    assert splits == 1 or not gated, "a gate needs whole sums"
    features = n // 2 if gated else n
    dtype = torch.float32 if splits > 1 else x.dtype
    out = torch.empty(splits, rows, features, dtype=dtype, device=x.device)
    k_per_split = triton.cdiv(triton.cdiv(k, splits), tiling.block_k) * tiling.block_k
    block_m = tiling.block_m or max(16, triton.next_power_of_2(rows))
    grid = (triton.cdiv(n, tiling.block_n), splits, triton.cdiv(rows, block_m))
    _skinny_linear[grid](
        x,
        weight,
        weight if bias is None else bias,
        weight if scales is None else scales,
        out,
        rows,
        n,
        k,
        k_per_split,
        x.stride(0),
        weight.stride(0),
        rows * n,
        HAS_BIAS=bias is not None,
        HAS_SCALES=scales is not None,
        GATED=gated,
        EVEN=k == k_per_split * splits,
        BLOCK_M=block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        PDL=PDL,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **OVERLAP,
    )
    return SplitSum(out) if splits > 1 else out[0]
