"""Attention over contiguous keys and values: PyTorch's own, in place, without gathering.

They are contiguous in virtual memory, since the driver has mapped a row's blocks in order into its
slot (Prabhu et al., ASPLOS 2025), or in the pool itself, where a row's blocks are one run.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.execution.arena import Arena
from octavo.execution.attention.gather import (
    GatherAttention,
    attend_row,
    rotate,
    visible_keys,
)
from octavo.execution.attention.interface import StepAttention, StepRows
from octavo.execution.models.rope import RopeTable
from octavo.execution.virtual_arena import VirtualArena


class ContiguousAttention:
    """Implements `AttentionBackend` over slots. ``sliding_window`` 0 means none."""

    def __init__(
        self, arena: VirtualArena, num_heads: int, rope: RopeTable, sliding_window: int = 0
    ) -> None:
        self.arena = arena
        self.num_heads = num_heads
        self.rope = rope
        self.sliding_window = sliding_window
        self._gathering = GatherAttention(arena, num_heads, rope, sliding_window)

    def plan(self, step: StepRows) -> StepAttention:
        """Where a row's slot cannot be mapped all are read through their tables."""
        if not self.arena.can_show(step.rows, step.starts + step.counts):
            return self._gathering.plan(step)
        slots = self.arena.slots
        firsts = step.rows.astype(np.int64) * slots.shape[1]
        tokens = slots.flatten(0, 1)
        return attend_in_place(tokens, firsts, step, self.num_heads, self.rope, self.sliding_window)


class RunAttention:
    """Implements `AttentionBackend` where every block table is a run of consecutive ids.
    ``sliding_window`` 0 means none."""

    def __init__(
        self, arena: Arena, num_heads: int, rope: RopeTable, sliding_window: int = 0
    ) -> None:
        self.arena = arena
        self.num_heads = num_heads
        self.rope = rope
        self.sliding_window = sliding_window

    def plan(self, step: StepRows) -> StepAttention:
        size = self.arena.layout.block_size
        firsts = step.tables[step.rows, 0].astype(np.int64) * size
        tokens = self.arena.kv.flatten(0, 1)
        return attend_in_place(tokens, firsts, step, self.num_heads, self.rope, self.sliding_window)


def attend_in_place(
    tokens: torch.Tensor,
    firsts: NDArray[np.int64],
    step: StepRows,
    num_heads: int,
    rope: RopeTable,
    sliding_window: int,
) -> StepAttention:
    """``tokens`` is ``[token, layer, K|V, kv_head, head_dim]``; the i-th of the step's rows has its
    position p at ``firsts[i] + p``."""
    num_kv_heads, dim = tokens.shape[-2:]
    positions = torch.from_numpy(step.positions).long()
    cos = rope.cos[positions][:, None, :]
    sin = rope.sin[positions][:, None, :]
    offsets = torch.from_numpy(np.repeat(firsts, step.counts) + step.positions)
    spans = [
        (first, offset, count, start + count, visible_keys(start, count, sliding_window))
        for first, count, offset, start in zip(
            firsts.tolist(),
            step.counts.tolist(),
            step.offsets.tolist(),
            step.starts.tolist(),
            strict=True,
        )
    ]

    def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
        heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, dim)
        rotated = rotate(heads[:, : num_heads + num_kv_heads], cos, sin)
        query, key = rotated[:, :num_heads].to(tokens.dtype), rotated[:, num_heads:]
        tokens[offsets, layer, 0] = key.to(tokens.dtype)
        tokens[offsets, layer, 1] = heads[:, num_heads + num_kv_heads :].to(tokens.dtype)
        out = torch.empty(len(qkv), num_heads, dim, dtype=qkv.dtype)
        for first, offset, count, end, mask in spans:
            # [K|V, 1, kv_head, token, head_dim] in place, with the token's stride.
            keys, values = tokens[first : first + end, layer].permute(1, 2, 0, 3).unsqueeze(1)
            out[offset : offset + count] = attend_row(
                query[offset : offset + count], keys, values, mask
            )
        return out.view(len(qkv), num_heads * dim)

    return attend
