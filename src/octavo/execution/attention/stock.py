"""Attention by stock kernels only, where the keys and values of a row are one piece: in slots, as
vAttention has it (Prabhu et al., ASPLOS 2025), or in runs of blocks, as engines had it before
paging. They are FlashAttention-2 as PyTorch ships it, and cuDNN for long chunks. Neither knows what
a block is.

FlashAttention-2 takes sequences of any length from one long tensor: where rows start is its
``cum_seq_k``, in any order, and ``seqused_k`` says how far to read. Its loads are predicated by
that length, so nothing unmapped is touched. cuDNN loads tiles by a tensor's shape: it gets slices
of the same tensor, in place, that end where what it may read does (`dense`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from octavo.core.plan import IntArray, RowForks, RowInit, TableDeltas
from octavo.execution.attention.dense import attend_together
from octavo.execution.attention.paged import PagedAttention, PagedStep
from octavo.execution.device_arena import DeviceArena
from octavo.execution.kernels.gpu import Product
from octavo.execution.models.norms import QueryKeyNorm


class StockAttention(PagedAttention, ABC):
    """What slots and runs have in common. ``flat_layers`` are ``[token, K|V, kv_head, head_dim]``:
    one layer of all rows, in which a row's tokens follow each other."""

    flat_layers: list[torch.Tensor]

    def __init__(self, arena: DeviceArena, *args: Any, **options: Any) -> None:
        super().__init__(arena, *args, **options)
        self._window = self.sliding_window - 1 if self.sliding_window else None
        self._places = torch.arange(self.max_decode + 65, dtype=torch.int32, device=arena.kv.device)

    @abstractmethod
    def row_starts(self, step: PagedStep, rows: torch.Tensor) -> torch.Tensor:
        """Int32 ``[len(rows)]``: which of ``flat_layers``' tokens a row's first is. Computed on the
        device, so that a captured step finds rows where they are when it is replayed."""

    def length_class(self, longest: int, num_decode: int) -> int:
        """A power of two: into how many parts keys are split follows from it."""
        return max(1 << (longest - 1).bit_length(), 256)

    def plan(self, step: PagedStep) -> Callable[..., torch.Tensor]:
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
        starts = torch.nn.functional.pad(self.row_starts(step, rows), (0, 1))

        def attend(layer: int, queries: torch.Tensor) -> torch.Tensor:
            keys = self.flat_layers[layer]
            found: torch.Tensor = torch.ops.aten._flash_attention_forward(
                queries if tokens is None else queries[tokens],
                keys[:, 0],
                keys[:, 1],
                first,
                starts,
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
            qkv: Product,
            norm: QueryKeyNorm | None = None,
        ) -> torch.Tensor:
            queries = self.rotate_and_write(step, layer, qkv, norm)
            out = torch.empty_like(queries) if attend is None else attend(layer, queries)
            self.attend_densely(step, layer, queries, out)
            return out.view(len(out), -1)

        return run


class StockSlotAttention(StockAttention):
    """Reads rows through their slots; steps whose rows are not all mapped are read through their
    tables by Octavo's own kernels."""

    def __init__(self, arena: DeviceArena, *args: Any, **options: Any) -> None:
        super().__init__(arena, *args, **options)
        assert self.has_slots, "stock kernels read slots"
        self.flat_layers = [layer[1:].flatten(0, 1) for layer in self.slot_layers]
        self._slot_tokens = self.slot_layers[0].shape[1]

    def wants_spans(self, in_slots: bool) -> bool:
        return in_slots

    def row_starts(self, step: PagedStep, rows: torch.Tensor) -> torch.Tensor:
        return rows * self._slot_tokens

    def plan(self, step: PagedStep) -> Callable[..., torch.Tensor]:
        return super().plan(step) if step.in_slots else PagedAttention.plan(self, step)


class StockRunAttention(StockAttention):
    """Reads rows in the pool itself, where every block table is a run of consecutive ids.

    A row's first block is read from its table on the device. cuDNN's calls need it on the host,
    which `follow` tells.
    """

    def __init__(self, arena: DeviceArena, *args: Any, **options: Any) -> None:
        super().__init__(arena, *args, **options)
        self._block_size = arena.layout.block_size
        # A view: the step from a block to the next is that of its tokens.
        self.flat_layers = [layer.view(-1, *layer.shape[2:]) for layer in self.layers]
        self._first_blocks: IntArray = np.zeros(self.max_decode, dtype=np.int32)

    def wants_spans(self, in_slots: bool) -> bool:
        return True

    def row_starts(self, step: PagedStep, rows: torch.Tensor) -> torch.Tensor:
        return step.tables[:, 0].index_select(0, rows) * self._block_size

    def follow(self, inits: tuple[RowInit, ...], forks: RowForks, deltas: TableDeltas) -> None:
        for init in inits:
            self._first_blocks[init.row] = init.block_ids[0]
        if len(forks):
            self._first_blocks[forks.rows] = self._first_blocks[forks.parents]
        if len(deltas):
            is_first = deltas.indices == 0
            self._first_blocks[deltas.rows[is_first]] = deltas.block_ids[is_first]

    def attend_densely(
        self, step: PagedStep, layer: int, queries: torch.Tensor, out: torch.Tensor
    ) -> None:
        for chunk in step.dense:
            first = int(self._first_blocks[chunk.row]) * self._block_size
            kv = self.flat_layers[layer][first : first + chunk.start + chunk.count]
            attend_together(queries, kv, chunk, out)
