"""The persistent rows on a device: last token, position, sampling parameters, block table.

All of it is one int32 buffer, so that whatever changed before a step, rows that start as well as
single table entries, is one kernel over places and values.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from octavo.core.plan import IntArray, RowForks, RowInit, TableDeltas
from octavo.execution.device import Device
from octavo.execution.kernels.row_state import scatter
from octavo.execution.kernels.sampling import SamplingState
from octavo.execution.staging import Int64Array, Staging

_ALIGN = 32  # ints; kernels are compiled for aligned addresses


class DeviceRows:
    """Rows 0 to ``max_num_seqs - 1``, and one more that pads batches: it stays at position 0 of
    the null block.

    ``last_token``, ``position`` int32 ``[rows + 1]``; ``tables`` int32 ``[rows + 1, max_blocks]``.
    """

    def __init__(self, device: Device, max_num_seqs: int, max_blocks: int) -> None:
        self.num_rows = max_num_seqs
        self.width = -(-max_blocks // _ALIGN) * _ALIGN
        stride = -(-(max_num_seqs + 1) // _ALIGN) * _ALIGN
        self._starts = {
            name: index * stride
            for index, name in enumerate(
                ("last_token", "position", "temperature", "top_k", "top_p", "min_p", "seed")
            )
        }
        self._tables_start = 8 * stride  # a seed takes two
        num_ints = self._tables_start + (max_num_seqs + 1) * self.width
        self._state = torch.zeros(num_ints, dtype=torch.int32, device=device.torch_device)
        self.last_token = self._field("last_token")
        self.position = self._field("position")
        self.tables = self._state[self._tables_start :].view(max_num_seqs + 1, self.width)
        seeds = self._state[self._starts["seed"] :][: 2 * (max_num_seqs + 1)]
        self.sampling = SamplingState(
            temperature=self._field("temperature").view(torch.float32),
            top_k=self._field("top_k"),
            top_p=self._field("top_p").view(torch.float32),
            min_p=self._field("min_p").view(torch.float32),
            seed=seeds.view(torch.int64),
        )

    def _field(self, name: str) -> torch.Tensor:
        return self._state[self._starts[name] :][: self.num_rows + 1]

    def apply(
        self, inits: tuple[RowInit, ...], forks: RowForks, deltas: TableDeltas, staging: Staging
    ) -> None:
        """Have the changes of a plan made once ``staging`` sends, in this order."""
        writes = [self._init(init) for init in inits]
        if len(forks):
            self._write(writes, staging)
            staging.then(self._fork, forks.rows, forks.parents, forks.token_ids)
            writes = []
        if len(deltas):
            rows = deltas.rows.astype(np.int64)
            places = self._tables_start + rows * self.width + deltas.indices
            writes.append((places, deltas.block_ids))
        self._write(writes, staging)

    def _write(self, writes: list[tuple[Int64Array, IntArray]], staging: Staging) -> None:
        """Places and values, of which no two touch one place."""
        if writes:
            places, values = map(np.concatenate, zip(*writes, strict=True))
            staging.then(partial(scatter, self._state), places, values)

    def _init(self, init: RowInit) -> tuple[Int64Array, IntArray]:
        row, params, starts = init.row, init.params, self._starts
        num_blocks = len(init.block_ids)
        place = np.empty(8 + num_blocks, dtype=np.int64)
        place[:6] = [
            starts[name] + row
            for name in ("last_token", "position", "temperature", "top_k", "top_p", "min_p")
        ]
        place[6] = starts["seed"] + 2 * row
        place[7] = place[6] + 1
        first = self._tables_start + row * self.width
        place[8:] = np.arange(first, first + num_blocks)
        value = np.empty(8 + num_blocks, dtype=np.int32)
        value[0] = init.token_ids[-1] if len(init.token_ids) else 0
        value[1] = init.num_computed_tokens
        value[3] = max(params.top_k, 0)
        floats = np.array([params.temperature, params.top_p, params.min_p], dtype=np.float32)
        value[[2, 4, 5]] = floats.view(np.int32)
        value[6:8] = np.array([init.seed], dtype=np.uint64).view(np.int32)
        value[8:] = init.block_ids
        return place, value

    def _fork(self, rows: torch.Tensor, parents: torch.Tensor, token_ids: torch.Tensor) -> None:
        # Read before written: the right side is gathered into new memory.
        self.tables[rows] = self.tables[parents]
        self.position[rows] = self.position[parents]
        self.last_token[rows] = token_ids
