"""Block tables as the list that other libraries' kernels read: the rows' blocks, row after row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.execution.kernels.ahead import Kernel

_BLOCK = 1024


@Kernel
@triton.jit
def _list_pages(tables, rows, starts, pages, width, BLOCK: tl.constexpr):
    index = tl.program_id(0)
    start = tl.load(starts + index)
    count = tl.load(starts + index + 1) - start
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    table = tables + tl.load(rows + index).to(tl.int64) * width
    tl.store(pages + start + place, tl.load(table + place, mask=mask, other=0), mask=mask)


def list_pages(
    tables: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, pages: torch.Tensor
) -> None:
    """``pages[starts[i] : starts[i + 1]]`` become the first blocks of row ``rows[i]``.

    All int32 and contiguous: ``tables [rows, width]``, ``rows [n]``, ``starts [n + 1]``.
    """
    width = tables.shape[1]
    grid = (len(rows), triton.cdiv(width, _BLOCK))
    _list_pages[grid](tables, rows, starts, pages, width, BLOCK=_BLOCK)
