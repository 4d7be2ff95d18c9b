"""``silu(gate) * up`` in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.execution.kernels.ahead import Kernel
from octavo.execution.kernels.gpu import OVERLAP, PDL, SplitSum, begin, load_sum, pointer_and_splits


@Kernel
@triton.jit
def _silu_and_mul(
    gate_up,
    out,
    features,
    stride_split,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < features
    place = row * 2 * features + column
    gate = load_sum(gate_up, place, mask, stride_split, SPLITS)
    up = load_sum(gate_up, place + features, mask, stride_split, SPLITS)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * features + column, y.to(out.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: torch.Tensor | SplitSum, dtype: torch.dtype) -> torch.Tensor:
    """``gate_up [rows, 2 * features]``, gate first. Returns ``[rows, features]`` in ``dtype``."""
    source, splits = pointer_and_splits(gate_up)
    rows, features = source.shape[-2], source.shape[-1] // 2
    out = torch.empty(rows, features, dtype=dtype, device=source.device)
    block = 1024 if rows < 64 else 2048
    _silu_and_mul[(rows, triton.cdiv(features, block))](
        source,
        out,
        features,
        rows * 2 * features,
        SPLITS=splits,
        BLOCK=block,
        PDL=PDL,
        num_warps=4,
        **OVERLAP,
    )
    return out
