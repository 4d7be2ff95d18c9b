"""What a plan asks of the machine: tokens, rows, keys read, blocks moved. Knows no seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from octavo.core.plan import NULL_BLOCK, Batch, CopyBlocks, IntArray, MapBlocks, StepPlan
from octavo.core.plan import SwapIn, SwapOut


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Of one step, or summed over several (``num_steps``), or of one as the mean of equal ones.

    ``num_tokens`` go through the layers, ``num_sampled`` rows through the head, of ``num_rows``
    rows ``num_chunks`` compute more than a token. ``kv_tokens`` are those whose keys and values the
    other rows read, a prefix that rows share once; ``attention_pairs`` the (query, key) pairs of
    the chunks. Blocks are copied, swapped either way, and mapped before the step can begin.
    """

    num_tokens: float = 0
    num_rows: float = 0
    num_sampled: float = 0
    num_chunks: float = 0
    kv_tokens: float = 0
    attention_pairs: float = 0
    copied_blocks: float = 0
    swapped_blocks: float = 0
    mapped_blocks: float = 0


class LoadMeter:
    """Follows the positions of rows through plans, in the order of their launch.

    A decode batch that is the same object as in the step before costs no work a row: what it reads
    has grown by a token for each.
    """

    def __init__(self) -> None:
        self._positions: IntArray = np.zeros(64, dtype=np.int32)
        self._batch: Batch | None = None
        self._load = StepLoad()
        # Steps of ``_batch`` that ``_positions`` do not hold yet.
        self._pending = 0

    def measure(self, plan: StepPlan) -> StepLoad:
        batch = plan.batch
        if plan.row_inits or len(plan.row_forks):
            self._settle()
            self._initialise(plan)
        elif batch is self._batch:
            self._pending += 1
            old = self._load
            self._load = StepLoad(
                old.num_tokens,
                old.num_rows,
                old.num_sampled,
                0,
                old.kv_tokens + old.num_rows,
            )
            return self._with_commands(plan) if plan.commands else self._load
        self._settle()
        self._load = self._count(plan)
        # Only where every row computes one token does a step's load follow from the last one's.
        if not self._load.num_chunks:
            self._batch, self._pending = batch, 1
        else:
            self._positions[batch.rows] += batch.num_scheduled_tokens
        return self._with_commands(plan) if plan.commands else self._load

    def _initialise(self, plan: StepPlan) -> None:
        for init in plan.row_inits:
            if init.row >= len(self._positions):
                grown = np.zeros(max(2 * len(self._positions), init.row + 1), dtype=np.int32)
                grown[: len(self._positions)] = self._positions
                self._positions = grown
            self._positions[init.row] = init.num_computed_tokens
        if len(plan.row_forks):
            self._positions[plan.row_forks.rows] = self._positions[plan.row_forks.parents]

    def _settle(self) -> None:
        if self._batch is not None:
            self._positions[self._batch.rows] += self._pending
            self._batch, self._pending = None, 0

    def _count(self, plan: StepPlan) -> StepLoad:
        batch = plan.batch
        counts = batch.num_scheduled_tokens
        starts = self._positions[batch.rows].astype(np.int64)
        num_rows = len(batch.rows)
        num_sampled = len(batch.sampled_rows)
        for fan_out in plan.fan_outs:
            num_sampled += len(fan_out.destination_rows)
        num_chunks = pairs = 0
        if batch.num_tokens == num_rows:
            kv_tokens = int(starts.sum()) + num_rows
        else:
            is_chunk = counts > 1
            num_chunks = int(is_chunk.sum())
            kv_tokens = int(starts[~is_chunk].sum()) + num_rows - num_chunks
            lengths = counts[is_chunk].astype(np.int64)
            pairs = int((lengths * starts[is_chunk] + lengths * (lengths + 1) // 2).sum())
        for group in batch.prefix_groups or ():
            kv_tokens -= (len(group.places) - 1) * group.num_tokens
        return StepLoad(batch.num_tokens, num_rows, num_sampled, num_chunks, kv_tokens, pairs)

    def _with_commands(self, plan: StepPlan) -> StepLoad:
        copied = swapped = mapped = 0
        for command in plan.commands:
            if isinstance(command, CopyBlocks):
                copied += len(command.sources)
            elif isinstance(command, SwapIn | SwapOut):
                swapped += len(command.block_ids)
            elif isinstance(command, MapBlocks) and not command.is_ahead:
                mapped += int((command.block_ids != NULL_BLOCK).sum())
        return replace(
            self._load, copied_blocks=copied, swapped_blocks=swapped, mapped_blocks=mapped
        )
