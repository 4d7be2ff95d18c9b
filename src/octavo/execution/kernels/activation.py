"""``silu(gate) * up`` in one pass."""

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
    begin,
    inverse_rms,
    load_sum,
    pointer_and_splits,
)

_MANY_ROWS = 512


@Kernel
@triton.jit
def _silu_and_mul(
    gate_up,
    out,
    residual,
    features,
    stride_split,
    hidden,
    eps,
    SPLITS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    inverse = 1.0
    if HIDDEN > 0:
        inverse = inverse_rms(residual, row, hidden, eps, HIDDEN)
    for block in range(BLOCKS):
        column = (tl.program_id(1) * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        mask = column < features
        place = row * 2 * features + column
        gate = load_sum(gate_up, place, mask, stride_split, SPLITS) * inverse
        up = load_sum(gate_up, place + features, mask, stride_split, SPLITS) * inverse
        y = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out + row * features + column, y.to(out.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: Product, dtype: torch.dtype) -> torch.Tensor:
    """``gate_up [rows, 2 * features]``, gate first. Returns ``[rows, features]`` in ``dtype``."""
    residual = gate_up.residual if isinstance(gate_up, Unnormed) else None
    source, splits = pointer_and_splits(gate_up)
    rows, features = source.shape[-2], source.shape[-1] // 2
    out = torch.empty(rows, features, dtype=dtype, device=source.device)
    blocks = 1
    if residual is None:
        block, warps = 1024 if rows < 64 else 2048, 4
    else:
        # A program reads the whole residual of its row: there are few, or one, where rows are many.
        block, warps = min(triton.next_power_of_2(features), 4096), 8
        if rows >= _MANY_ROWS:
            blocks, warps = triton.cdiv(features, block), 16
    _silu_and_mul[(rows, triton.cdiv(features, block * blocks))](
        source,
        out,
        source if residual is None else residual,
        features,
        rows * 2 * features,
        0 if residual is None else residual.shape[1],
        gate_up.eps if isinstance(gate_up, Unnormed) else 0.0,
        SPLITS=splits,
        HIDDEN=0 if residual is None else triton.next_power_of_2(residual.shape[1]),
        BLOCK=block,
        BLOCKS=blocks,
        PDL=PDL,
        num_warps=warps,
        **OVERLAP,
    )
    return out
