"""Attention by gathering each row's keys and values and calling PyTorch's own attention.

Plain PyTorch on any device and dtype: the reference of every kernel, and the backend where numba
is missing. It reads the arena, and knows nothing of how blocks are chosen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from octavo.execution.arena import Arena
from octavo.execution.attention.interface import StepAttention, StepRows
from octavo.execution.models.rope import RopeTable


class GatherAttention:
    """Implements `AttentionBackend`. ``sliding_window`` 0 means none."""

    def __init__(
        self, arena: Arena, num_heads: int, rope: RopeTable, sliding_window: int = 0
    ) -> None:
        self.arena = arena
        self.num_heads = num_heads
        self.rope = rope
        self.sliding_window = sliding_window

    def plan(self, step: StepRows) -> StepAttention:
        layout, kv = self.arena.layout, self.arena.kv
        size, dim = layout.block_size, layout.head_dim
        num_heads, num_kv_heads = self.num_heads, layout.num_kv_heads
        positions = torch.from_numpy(step.positions).long()
        cos = self.rope.cos[positions][:, None, :]
        sin = self.rope.sin[positions][:, None, :]
        kv_offsets = torch.from_numpy(step.kv_offsets(size))
        spans = []
        for row, count, offset, start in zip(
            step.rows.tolist(),
            step.counts.tolist(),
            step.offsets.tolist(),
            step.starts.tolist(),
            strict=True,
        ):
            end = start + count
            blocks = torch.from_numpy(step.tables[row, : -(-end // size)]).long()
            spans.append(
                (offset, count, end, blocks, visible_keys(start, count, self.sliding_window))
            )

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, dim)
            rotated = rotate(heads[:, : num_heads + num_kv_heads], cos, sin)
            query, key = rotated[:, :num_heads].to(kv.dtype), rotated[:, num_heads:].to(kv.dtype)
            pool = kv.view(-1, *kv.shape[2:])
            pool[kv_offsets, layer, 0] = key
            pool[kv_offsets, layer, 1] = heads[:, num_heads + num_kv_heads :].to(kv.dtype)
            out = torch.empty(len(qkv), num_heads, dim, dtype=qkv.dtype)
            for offset, count, end, blocks, mask in spans:
                both = kv[blocks, :, layer].flatten(0, 1)[:end]
                keys, values = both.permute(1, 2, 0, 3).unsqueeze(1)
                out[offset : offset + count] = attend_row(
                    query[offset : offset + count], keys, values, mask
                )
            return out.view(len(qkv), num_heads * dim)

        return attend


def attend_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """One row's attention: ``query [count, num_heads, head_dim]`` over ``keys`` and ``values``
    ``[1, num_kv_heads, length, head_dim]`` of any strides; ``[count, num_heads, head_dim]``."""
    count, num_heads, dim = query.shape
    num_kv_heads = keys.shape[1]
    q = query.transpose(0, 1).unsqueeze(0)
    if count == 1:
        # Folding the query group into the length axis is seven times faster in bfloat16 than
        # enable_gqa.
        q = q.view(1, num_kv_heads, num_heads // num_kv_heads, dim)
        rows = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return rows.view(1, num_heads, dim)
    rows = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
    return rows[0].transpose(0, 1)


def visible_keys(start: int, count: int, sliding_window: int) -> torch.Tensor | None:
    """``bool [count, start + count]``: what each of ``count`` queries sees; None: everything."""
    if count == 1 and not sliding_window:
        return None
    queries = torch.arange(start, start + count)[:, None]
    keys = torch.arange(start + count)[None, :]
    mask = keys <= queries
    if sliding_window:
        mask &= keys > queries - sliding_window
    return mask


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``heads [n, head, dim]`` by angles ``[n, 1, dim / 2]``, in fp32."""
    half = cos.shape[-1]
    low, high = heads[..., :half].float(), heads[..., half : 2 * half].float()
    turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(heads.dtype)
    return torch.cat([turned, heads[..., 2 * half :]], dim=-1)
