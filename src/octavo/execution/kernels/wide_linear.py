"""``silu(x @ gate.T) * (x @ up.T)`` for tens to hundreds of rows, where reading the weight and
multiplying with it take about equally long.

Tiles of both come through the tensor memory accelerator, which keeps many bytes under way at the
cost of few registers. What it gains on the library's product is mostly the activation, a kernel of
its own there, and that it starts before its predecessor has ended.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.execution.kernels.ahead import Kernel
from octavo.execution.kernels.gpu import INTERPRETED, OVERLAP, PDL, begin

# From a search on an H200: 128 rows, 128 gates and what they gate, at 128 and at 256 rows.
_ROWS, _FEATURES, _INPUTS = 128, 128, 64


@Kernel
@triton.jit
def _gated_wide_linear(
    x,
    weight,
    out,
    num_rows,
    features,
    K,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    INPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    # Tiles of rows that are neighbours share a tile of weights, which one of them brings to L2.
    first_row = tl.program_id(0) * ROWS
    first = tl.program_id(1) * FEATURES
    begin(PDL)
    gate = tl.zeros([ROWS, FEATURES], dtype=tl.float32)
    up = tl.zeros([ROWS, FEATURES], dtype=tl.float32)
    for k in range(0, K, INPUTS):
        inputs = x.load([first_row, k])
        gate = tl.dot(inputs, weight.load([first, k]).T, gate)
        up = tl.dot(inputs, weight.load([features + first, k]).T, up)
    row = first_row + tl.arange(0, ROWS)
    feature = first + tl.arange(0, FEATURES)
    y = gate / (1.0 + tl.exp(-gate)) * up
    place = row.to(tl.int64)[:, None] * features + feature[None, :]
    mask = (row < num_rows)[:, None] & (feature < features)[None, :]
    tl.store(out + place, y.to(out.dtype.element_ty), mask=mask)


def suits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `gated_wide_linear` takes these, and is the fastest that does: rows that fill one
    tile by half or two nearly, 16-bit elements, a tile of weights for most multiprocessors, a chip
    with the accelerator. (At 192 rows half of a second tile is empty: over a whole step the
    library is 7 % faster there.)"""
    tiles = triton.cdiv(weight.shape[0] // 2, _FEATURES)
    rows = x.shape[0]
    return (
        (_ROWS // 2 < rows <= _ROWS or _ROWS * 7 // 4 < rows <= 2 * _ROWS)
        and x.element_size() == weight.element_size() == 2
        and tiles >= 96
        and weight.shape[1] % 8 == 0
        and x.is_contiguous()
        and weight.is_contiguous()
        and _has_accelerator(x.device)
    )


@cache
def _has_accelerator(device: torch.device) -> bool:
    return INTERPRETED or torch.cuda.get_device_capability(device)[0] >= 9


def gated_wide_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x [rows, in]`` and ``weight [2 · features, in]``, gates first, of one 16-bit dtype and
    contiguous, ``in`` a multiple of 8 (rows begin at multiples of 16 bytes). Returns ``[rows,
    features]`` in that dtype; sums are float32."""
    rows, k = x.shape
    features = weight.shape[0] // 2
    out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    _gated_wide_linear[triton.cdiv(rows, _ROWS), triton.cdiv(features, _FEATURES)](
        TensorDescriptor.from_tensor(x, [_ROWS, _INPUTS]),
        TensorDescriptor.from_tensor(weight, [_FEATURES, _INPUTS]),
        out,
        rows,
        features,
        k,
        ROWS=_ROWS,
        FEATURES=_FEATURES,
        INPUTS=_INPUTS,
        PDL=PDL,
        num_warps=8,
        num_stages=4,
        **OVERLAP,
    )
    return out
