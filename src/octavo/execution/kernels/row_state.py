"""What changes in the rows' device state around a step: tables before it, tokens after it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.execution.kernels.ahead import Kernel
from octavo.execution.kernels.gpu import OVERLAP, PDL, begin


@Kernel
@triton.jit
def _gather_rows(
    rows,
    last_token,
    position,
    token_ids,
    token_rows,
    positions,
    num_rows,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_rows
    row = tl.load(rows + i, mask=mask, other=0)
    tl.store(token_rows + i, row, mask=mask)
    tl.store(token_ids + i, tl.load(last_token + row, mask=mask, other=0), mask=mask)
    tl.store(positions + i, tl.load(position + row, mask=mask, other=0), mask=mask)


def gather_rows(
    rows: torch.Tensor,
    last_token: torch.Tensor,
    position: torch.Tensor,
    token_ids: torch.Tensor,
    token_rows: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """A decode step's inputs: each of ``rows`` runs the token it sampled last.

    All int32; outputs are ``[len(rows)]``, state is indexed by row.
    """
    count = len(rows)
    _gather_rows[(triton.cdiv(count, 256),)](
        rows,
        last_token,
        position,
        token_ids,
        token_rows,
        positions,
        count,
        BLOCK=256,
        PDL=PDL,
        **OVERLAP,
    )


@Kernel
@triton.jit
def _scatter(target, indices, values, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    tl.store(target + tl.load(indices + i, mask=mask), tl.load(values + i, mask=mask), mask=mask)


def scatter(target: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """``target.view(-1)[indices] = values``, all int32; indices differ from each other."""
    count = len(indices)
    if count:
        _scatter[(triton.cdiv(count, 256),)](target, indices, values, count, BLOCK=256)


@Kernel
@triton.jit
def _fill_tokens(
    token_ids, token_rows, last_token, num_tokens, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + i, mask=i < num_tokens, other=0)
    wanted = (i < num_tokens) & (token < 0)
    row = tl.load(token_rows + i, mask=wanted, other=0)
    tl.store(token_ids + i, tl.load(last_token + row, mask=wanted, other=0), mask=wanted)


def fill_tokens(
    token_ids: torch.Tensor, token_rows: torch.Tensor, last_token: torch.Tensor
) -> None:
    """Replace negative ``token_ids`` by what their rows sampled last, in place; all int32."""
    count = len(token_ids)
    _fill_tokens[(triton.cdiv(count, 256),)](
        token_ids, token_rows, last_token, count, BLOCK=256, PDL=PDL, **OVERLAP
    )
