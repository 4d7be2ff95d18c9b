"""A linear layer's product on a GPU, by whichever kernel is fastest at its size."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
import triton

from octavo.execution.kernels.activation import silu_and_mul
from octavo.execution.kernels.fp8 import scaled_linear
from octavo.execution.kernels.gpu import SplitSum, Unnormed
from octavo.execution.kernels.skinny_linear import MAX_ROWS, Tiling, skinny_linear
from octavo.execution.kernels.wide_linear import gated_wide_linear, suits

# Multiprocessors of a Hopper or Ampere data-centre chip; two programs fit on each.
_PROCESSORS = 132

FEW_ROWS = 64
"""Products of so many rows are all ours, and take little more than reading the weights."""


def tiling(rows: int, outputs: int, inputs: int) -> Tiling | None:
    """How to cut a product of this size; None: the library's is faster.

    From a search on an H200 over the projections of 1B and 8B models, 1 to 128 rows (see
    docs/decisions).
    """
    if rows > MAX_ROWS:
        return None
    tiles = triton.cdiv(outputs, 64)
    if rows <= 16:
        splits = triton.next_power_of_2(triton.cdiv(2 * _PROCESSORS - 8, tiles))
        splits = _limited(splits, inputs)
        # With three stages three programs fit on a multiprocessor, which spares a second round.
        stages = 3 if 2 * _PROCESSORS < tiles * splits <= 3 * _PROCESSORS else 4
        return Tiling(64, 128, splits, stages, 4)
    if rows <= FEW_ROWS:
        if tiles >= 4 * 96 and rows > 32:
            return Tiling(128, 128, 1, 4, 8)
        # One program on each multiprocessor, with many loads in flight.
        splits = 1
        while 2 * splits * tiles <= _PROCESSORS:
            splits *= 2
        splits = _limited(splits, inputs)
        return Tiling(64, 128, splits, 5 if tiles * splits <= _PROCESSORS else 4, 4)
    # The library adds to the residual too, which spares a norm more than ours is faster.
    return Tiling(128, 64, 1, 5, 8) if tiles >= 4 * 96 else None


# The order in which a row's products are added is the tile's, and there is one tile for all.
_INVARIANT = Tiling(128, 64, 1, 3, 8, block_m=128)


def _tiling_of(x: torch.Tensor, weight: torch.Tensor, is_invariant: bool) -> Tiling | None:
    """As ``tiling``; wider elements, which the search was not for, get tiles of the same bytes.
    Of fp8 only few rows are multiplied in their own dtype: widening the weights takes longer than
    reading them, 6.7 ms a step of an 8B at 32 rows where bfloat16 takes 4.6."""
    chosen = _INVARIANT if is_invariant else tiling(x.shape[0], *weight.shape)
    if chosen is None or (weight.element_size() == 1 and x.shape[0] > 16 and not is_invariant):
        return None
    if x.element_size() > 2:
        return replace(chosen, block_k=chosen.block_k * 2 // x.element_size())
    if weight.element_size() == 1 and not is_invariant:
        return replace(chosen, block_k=2 * chosen.block_k)
    return chosen


def _limited(splits: int, inputs: int) -> int:
    """At most eight parts, of 256 inputs at least."""
    return max(min(splits, 8, inputs // 256), 1)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scales: torch.Tensor | None = None,
    is_invariant: bool = False,
) -> torch.Tensor | SplitSum:
    """``x [rows, in] @ weight [out, in].T + bias``: ``[rows, out]`` in x's dtype, or its parts.

    A weight of float8_e4m3fn has ``scales``, float32 ``[out]``; where rows are many, x is rounded
    to fp8 too. ``is_invariant`` gives each row the same bits whatever rows are beside it.
    """
    chosen = _tiling_of(x, weight, is_invariant)
    if chosen is not None:
        return skinny_linear(x, weight, bias, chosen, scales=scales)
    if scales is not None:
        return scaled_linear(x, weight, scales, bias)
    return F.linear(x, weight, bias)


def gated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scales: torch.Tensor | None = None,
    is_invariant: bool = False,
) -> torch.Tensor:
    """``silu(gate) * up``, ``[rows, out / 2]`` in x's dtype; gates are the first half of the
    product's outputs. ``scales`` as in `linear`."""
    if bias is None and not is_invariant and suits(x, weight):
        return gated_wide_linear(x, weight)
    chosen = _tiling_of(x, weight, is_invariant)
    if chosen is not None and chosen.splits == 1:
        y = skinny_linear(x, weight, bias, chosen, gated=True, scales=scales)
        assert isinstance(y, torch.Tensor)
        return y
    y = linear(x, weight, bias, scales=scales, is_invariant=is_invariant)
    return silu_and_mul(y, x.dtype)


def takes_library(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None, *, is_gated: bool = False
) -> bool:
    """Whether `linear`, or `gated_linear`, leaves these to the library's product of many rows."""
    return (
        scales is None
        and _tiling_of(x, weight, is_invariant=False) is None
        and not (is_gated and suits(x, weight))
    )


def add_linear(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """``residual += x @ weight.T`` in place, by the library, which adds before it rounds."""
    residual.addmm_(x, weight.t())


def unnormed_linear(residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Unnormed:
    """``rms_norm(residual) @ weight.T`` by the library, but for the division, which is its
    reader's."""
    return Unnormed(F.linear(residual, weight), residual, eps)


def whole(x: torch.Tensor | SplitSum, dtype: torch.dtype) -> torch.Tensor:
    """The product itself, for who cannot read parts."""
    return x.sum().to(dtype) if isinstance(x, SplitSum) else x
