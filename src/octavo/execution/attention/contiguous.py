"""Attention over slots: each row's keys and values at contiguous addresses, whatever its blocks.

No block table, no gathering: the driver has mapped the row's blocks in order (Prabhu et al., ASPLOS
2025), so PyTorch's own attention reads them in place, as any kernel for contiguous tensors would.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.execution.attention.gather import attend_row, rotate, visible_keys
from octavo.execution.attention.interface import StepAttention, StepRows
from octavo.execution.models.rope import RopeTable
from octavo.execution.virtual_arena import VirtualArena


class ContiguousAttention:
    """Implements `AttentionBackend`. ``sliding_window`` 0 means none."""

    def __init__(
        self, arena: VirtualArena, num_heads: int, rope: RopeTable, sliding_window: int = 0
    ) -> None:
        self.arena = arena
        self.num_heads = num_heads
        self.rope = rope
        self.sliding_window = sliding_window

    def plan(self, step: StepRows) -> StepAttention:
        """Raises `PageError` when a row's slot could not be mapped."""
        self.arena.require(step.rows, step.starts + step.counts)
        slots = self.arena.slots
        num_slots, max_tokens, num_layers = slots.shape[:3]
        num_heads, num_kv_heads, dim = self.num_heads, *slots.shape[-2:]
        positions = torch.from_numpy(step.positions).long()
        cos = self.rope.cos[positions][:, None, :]
        sin = self.rope.sin[positions][:, None, :]
        row_of_token = np.repeat(step.rows, step.counts).astype(np.int64)
        offsets = torch.from_numpy(row_of_token * max_tokens + step.positions)
        tokens = slots.view(num_slots * max_tokens, num_layers, 2, num_kv_heads, dim)
        spans = [
            (row, offset, count, start + count, visible_keys(start, count, self.sliding_window))
            for row, count, offset, start in zip(
                step.rows.tolist(),
                step.counts.tolist(),
                step.offsets.tolist(),
                step.starts.tolist(),
                strict=True,
            )
        ]

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, dim)
            rotated = rotate(heads[:, : num_heads + num_kv_heads], cos, sin)
            query, key = rotated[:, :num_heads].to(slots.dtype), rotated[:, num_heads:]
            tokens[offsets, layer, 0] = key.to(slots.dtype)
            tokens[offsets, layer, 1] = heads[:, num_heads + num_kv_heads :].to(slots.dtype)
            out = torch.empty(len(qkv), num_heads, dim, dtype=qkv.dtype)
            for row, offset, count, end, mask in spans:
                # [K|V, 1, kv_head, token, head_dim] in place, with the token's stride.
                keys, values = slots[row, :end, layer].permute(1, 2, 0, 3).unsqueeze(1)
                out[offset : offset + count] = attend_row(
                    query[offset : offset + count], keys, values, mask
                )
            return out.view(len(qkv), num_heads * dim)

        return attend
