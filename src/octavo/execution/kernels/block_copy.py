"""Copies of whole blocks inside the pool, all of a plan's in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.execution.kernels.ahead import Kernel

# 16 KB a program: 128 of them move a block of 2 MB.
_BLOCK = 4096


@Kernel
@triton.jit
def _copy_blocks(pool, sources, destinations, words, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < words
    source = tl.load(sources + i).to(tl.int64) * words
    destination = tl.load(destinations + i).to(tl.int64) * words
    tl.store(pool + destination + n, tl.load(pool + source + n, mask=mask), mask=mask)


def copy_blocks(kv: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """``kv[destinations] = kv[sources]`` for a contiguous pool ``kv [blocks, ...]`` and int32 ids
    ``[n]``. Destinations differ from each other and are no sources."""
    # As wide as the block's bytes allow: elements of any dtype are copied by their bits.
    block_bytes = kv[0].nbytes
    dtype = next(
        kind for kind in (torch.int32, torch.int16, torch.int8) if block_bytes % kind.itemsize == 0
    )
    pool = kv.view(len(kv), -1).view(dtype)
    words = pool.shape[1]
    if len(sources):
        _copy_blocks[(len(sources), triton.cdiv(words, _BLOCK))](
            pool, sources, destinations, words, BLOCK=_BLOCK, num_warps=8
        )
