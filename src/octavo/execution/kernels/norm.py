"""Residual addition and root mean square norm in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.execution.kernels.ahead import Kernel
from octavo.execution.kernels.gpu import OVERLAP, PDL, SplitSum, load_sum, pointer_and_splits

_FEW_ROWS = 64


@Kernel
@triton.jit
def _add_rms_norm(
    residual,
    delta,
    weight,
    out,
    hidden,
    eps,
    stride_split,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < hidden
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = row * hidden + column
    x = tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    if SPLITS > 0:
        x += load_sum(delta, place, mask, stride_split, SPLITS)
        rounded = x.to(residual.dtype.element_ty)
        tl.store(residual + place, rounded, mask=mask)
        x = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    tl.store(out + place, (x * inverse * scale).to(out.dtype.element_ty), mask=mask)


def add_rms_norm(
    residual: torch.Tensor,
    delta: torch.Tensor | SplitSum | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    *,
    is_invariant: bool = False,
) -> torch.Tensor:
    """``residual += delta`` in place, then its norm; all ``[rows, hidden]``.

    Returns the normed rows in the residual's dtype. ``is_invariant`` gives each row the same bits
    whatever rows are beside it.
    """
    rows, hidden = residual.shape
    out = torch.empty_like(residual) if out is None else out
    source, splits = (residual, 0) if delta is None else pointer_and_splits(delta)
    block = triton.next_power_of_2(hidden)
    # Few rows wait for memory: the more threads, the more of it is asked for at once.
    warps = block // 512 if is_invariant or rows > _FEW_ROWS else block // 128
    _add_rms_norm[(rows,)](
        residual,
        source,
        weight,
        out,
        hidden,
        eps,
        rows * hidden,
        SPLITS=splits,
        BLOCK=block,
        PDL=PDL,
        num_warps=min(max(warps, 1), 32),
        **OVERLAP,
    )
    return out
