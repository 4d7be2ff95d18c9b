"""What every Triton kernel here shares: overlap with its neighbours, and pending sums.

Kernels of a step run one after the other, and each is small: at a few rows, an 8B's step is some
280 kernels of 2 to 40 µs. With programmatic dependent launch a kernel starts while its predecessor
still runs, does what depends on nobody (looking up what has been known since the step began), and
only then waits. Every kernel waits, even a program with nothing to do: a
kernel that ends early would let the one behind it pass its own predecessor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on a CPU: for tests."""

OVERLAP: dict[str, Any] = {} if INTERPRETED else {"launch_pdl": True}
"""Launch options of a kernel that calls `begin`."""

PDL: bool = not INTERPRETED


@dataclass(frozen=True, slots=True, eq=False)
class SplitSum:
    """A product whose inner dimension was split: the sum of ``parts`` over its first axis.

    ``parts`` is float32 ``[splits, rows, features]``. Whoever reads it adds the parts in their
    order, so that the result is the same at every run.
    """

    parts: torch.Tensor

    def sum(self) -> torch.Tensor:
        """Float32 ``[rows, features]``; for references and for consumers without a kernel."""
        return self.parts.sum(dim=0)


@dataclass(frozen=True, slots=True, eq=False)
class Unnormed:
    """The ``product`` of rows that were multiplied as they are, by a weight that holds the norm's:
    whoever reads a row divides it by the root mean square of its ``residual`` (`inverse_rms`).

    ``product`` is ``[rows, features]``, ``residual`` ``[rows, hidden]``, contiguous.
    """

    product: torch.Tensor
    residual: torch.Tensor
    eps: float


Product = torch.Tensor | SplitSum | Unnormed
"""What products leave for the kernel after them."""


def pointer_and_splits(x: Product) -> tuple[torch.Tensor, int]:
    """What a kernel reads: the tensor, and how many parts it has (1: none to add)."""
    if isinstance(x, Unnormed):
        return x.product, 1
    if isinstance(x, SplitSum):
        return x.parts, x.parts.shape[0]
    return x, 1


@triton.jit
def begin(PDL: tl.constexpr):
    """Let the next kernel start, and wait until the one before has written its results."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def inverse_rms(residual, row, hidden, eps, BLOCK: tl.constexpr):
    """One by the root mean square of a row of ``hidden`` values; ``BLOCK``: as many at least."""
    column = tl.arange(0, BLOCK)
    x = tl.load(residual + row * hidden + column, mask=column < hidden, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)


@triton.jit
def load_sum(pointer, offsets, mask, stride_split, SPLITS: tl.constexpr):
    """Float32 values at ``offsets``, added over ``SPLITS`` parts in their order."""
    total = tl.load(pointer + offsets, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, SPLITS):
        total += tl.load(pointer + part * stride_split + offsets, mask=mask, other=0.0).to(
            tl.float32
        )
    return total
