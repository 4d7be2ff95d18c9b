"""Rows rounded to fp8 (e4m3), each by a scale of its own, and products of such rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.execution.kernels.ahead import Kernel
from octavo.execution.kernels.gpu import OVERLAP, PDL, begin
from octavo.execution.kernels.rope import to_e4m3


@Kernel
@triton.jit
def _quantize_rows(
    x,
    out,
    scales,
    columns,
    stride_x,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    values = tl.load(x + row * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), axis=0)
    scale = tl.where(largest > 0.0, largest / 448.0, 1.0)
    tl.store(out + row * columns + column, to_e4m3(values / scale), mask=mask)
    tl.store(scales + row, scale)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [rows, in]`` as e4m3 and float32 scales ``[rows, 1]``: a row's largest value becomes the
    largest of e4m3. The values are ``e4m3 * scale``."""
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, device=x.device)
    block = triton.next_power_of_2(columns)
    _quantize_rows[(rows,)](
        x,
        out,
        scales,
        columns,
        x.stride(0),
        BLOCK=block,
        PDL=PDL,
        num_warps=min(max(block // 512, 1), 16),
        **OVERLAP,
    )
    return out, scales


def scaled_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``x [rows, in]``, rounded to e4m3 row by row, times ``weight [out, in]`` of e4m3 with
    ``scales [out]``: ``[rows, out]`` in x's dtype, rounded to bfloat16 first.

    ``in`` and ``out`` are multiples of 16.
    """
    values, row_scales = quantize_rows(x)
    y = torch._scaled_mm(
        values,
        weight.t(),
        scale_a=row_scales,
        scale_b=scales[None, :],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    if bias is not None:
        y += bias
    return y.to(x.dtype)
