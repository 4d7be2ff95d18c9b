"""Attention over slots by stock kernels only, as vAttention has it (Prabhu et al., ASPLOS 2025):
FlashAttention-2 as PyTorch ships it, and cuDNN for long chunks. Neither knows what a block is.

FlashAttention-2 takes sequences of any length from one long tensor: slot starts are its
``cum_seq_k``, in any order, and ``seqused_k`` says how far to read. Its loads are predicated by
that length, so nothing unmapped is touched. cuDNN loads tiles by a tensor's shape: it gets slices
that are wholly mapped (`dense`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from octavo.execution.attention.paged import PagedAttention, PagedStep
from octavo.execution.kernels.gpu import SplitSum
from octavo.execution.models.norms import QueryKeyNorm


class StockAttention(PagedAttention):
    """Reads rows through their slots with stock kernels; steps whose rows are not all mapped are
    read through their tables by Octavo's own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert self.has_slots, "stock kernels read slots"
        # One layer as FlashAttention-2 wants it: [tokens of all slots, kv_head, head_dim].
        self._flat = [layer[1:].flatten(0, 1) for layer in self.slot_layers]
        self._slot_tokens = self.slot_layers[0].shape[1]
        self._window = self.sliding_window - 1 if self.sliding_window else None
        device = self.slot_layers[0].device
        self._places = torch.arange(self.max_decode + 65, dtype=torch.int32, device=device)

    def wants_spans(self, in_slots: bool) -> bool:
        return in_slots

    def length_class(self, longest: int, num_decode: int) -> int:
        """A power of two: into how many parts keys are split follows from it."""
        return max(1 << (longest - 1).bit_length(), 256)

    def plan(self, step: PagedStep) -> Callable[..., torch.Tensor]:
        if not step.in_slots:
            return super().plan(step)
        if step.tiles is None and not step.dense:
            # Every row runs one token: captured.
            rows, first = step.token_rows, self._places[: len(step.token_rows) + 1]
            ends, max_count, tokens = step.positions + 1, 1, None
        elif step.spans is None:
            return self._planned(step, None)
        else:
            spans = step.spans
            rows, ends, first = spans.rows[:-1], spans.ends[:-1], spans.first
            max_count, tokens = spans.max_count, spans.tokens
        slot_starts = torch.nn.functional.pad(rows * self._slot_tokens, (0, 1))

        def attend(layer: int, queries: torch.Tensor) -> torch.Tensor:
            keys = self._flat[layer]
            found: torch.Tensor = torch.ops.aten._flash_attention_forward(
                queries if tokens is None else queries[tokens],
                keys[:, 0],
                keys[:, 1],
                first,
                slot_starts,
                max_count,
                step.max_length,
                0.0,
                True,
                False,
                window_size_left=self._window,
                window_size_right=None if self._window is None else 0,
                seqused_k=ends,
            )[0]
            if tokens is None:
                return found
            out = torch.empty_like(queries)
            out[tokens] = found
            return out

        return self._planned(step, attend)

    def _planned(
        self, step: PagedStep, attend: Callable[[int, torch.Tensor], torch.Tensor] | None
    ) -> Callable[..., torch.Tensor]:
        def run(
            layer: int,
            qkv: torch.Tensor | SplitSum,
            norm: QueryKeyNorm | None = None,
            next_weight: torch.Tensor | None = None,
        ) -> torch.Tensor:
            queries = self.rotate_and_write(step, layer, qkv, norm)
            out = torch.empty_like(queries) if attend is None else attend(layer, queries)
            self.attend_densely(step, layer, queries, out)
            return out.view(len(out), -1)

        return run
