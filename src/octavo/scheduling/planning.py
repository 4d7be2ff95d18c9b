"""Makes the next step's plan: room for every decoding row, then chunks, then admissions.

There is no prefill or decode mode: a row runs as many tokens as it lacks, within the budget. Who is
admitted is decided in `waiting`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from octavo.core.plan import (
    NO_FORKS,
    Batch,
    FanOut,
    RowInit,
    StepPlan,
    int_array,
)
from octavo.scheduling.beams import take_row_changes
from octavo.scheduling.groups import Launched
from octavo.scheduling.resizing import PoolResizing
from octavo.scheduling.state import SchedulerState
from octavo.scheduling.waiting import Admitter


class Planner:
    """Plans on a `SchedulerState`, which it changes."""

    def __init__(self, state: SchedulerState, resizing: PoolResizing) -> None:
        self.state = state
        self._admitter = Admitter(state)
        self._resizing = resizing
        self._was_resizing = False

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run before a result arrives. Steps that resize
        the pool and others take turns."""
        if not self._resizing.is_under_way:
            return self._plan_rows()
        if self._was_resizing:
            self._was_resizing = False
            if (plan := self._plan_rows()) is not None:
                return plan
        if (plan := self._resizing.plan()) is not None:
            self._was_resizing = True
            return plan
        return self._plan_rows()

    def _plan_rows(self) -> StepPlan | None:
        num_preemptions = self.state.num_preemptions
        stalled = self._grow_decoding_rows()
        decode = self._current_decode_batch(stalled)
        budget = self.state.config.max_num_batched_tokens - (decode.num_tokens if decode else 0)
        chunks, budget = self._plan_chunks(budget)
        inits: list[RowInit] = []
        row_forks = NO_FORKS
        prepared: list[int] = []
        if self.state.continuing:
            prepared += self.state.continuing
            inits, row_forks = take_row_changes(self.state)
        forks: list[tuple[int, int]] = []
        if not stalled and num_preemptions == self.state.num_preemptions:
            self._admitter.admit(budget, chunks, inits)
        batch = self._join(decode, chunks)
        if batch is not None and batch is self.state.decode_batch:
            batch = self._with_prefix_groups(batch)
        fan_outs = self._fan_out(batch, inits, forks) if batch else ()
        if batch is not None and batch.is_mapped:
            batch = self._with_mapping(batch)
        drained = self.state.manager.drain()
        if batch is None:
            if not drained.commands and not prepared and not len(drained.table_deltas):
                return None
            batch = Batch.empty()
        self.state.step_id += 1
        plan = StepPlan(
            step_id=self.state.step_id,
            batch=batch,
            row_inits=tuple(inits),
            table_deltas=drained.table_deltas,
            commands=drained.commands,
            fan_outs=fan_outs,
            row_forks=row_forks,
        )
        if stalled:
            # Some rows of beams that sit out may have got their blocks, copied in this plan.
            prepared += [row for row in stalled if self.state.rows.is_beam[row]]
        self._note_launch(plan, len(chunks), tuple(forks), tuple(prepared))
        return plan

    def _grow_decoding_rows(self) -> set[int]:
        """Give each decoding row room for its next token, preempting the latest arrivals.

        Returns:
            Rows that have to sit out this step until launched steps give blocks back.
        """
        rows = self.state.decoding_rows()
        crossing = rows[self.state.rows.num_computed[rows] >= self.state.manager.writable[rows]]
        if not len(crossing):
            return set()
        stalled: set[int] = set()
        for row in crossing[np.argsort(self.state.rows.arrival[crossing])].tolist():
            while self.state.rows.is_decoding[row]:
                if self.state.manager.grow(row, int(self.state.rows.num_computed[row]) + 1):
                    break
                if self._is_release_due():
                    stalled.add(row)
                    break
                self.state.preempt(self.state.latest_group())
        for row in list(stalled):
            # Beams run all together.
            sequence = self.state.sequence_of_row[row]
            if self.state.rows.is_beam[row] and sequence is not None:
                stalled.update(sequence.group.rows)
        return {row for row in stalled if self.state.rows.is_decoding[row]}

    def _is_release_due(self) -> bool:
        """Whether a launched step may give blocks back: a row's that ended or was preempted or
        whose last step is in flight, or those of beams that die."""
        running = (
            len(self.state.decoding_rows()) + len(self.state.prefilling) + len(self.state.awaiting)
        )
        return self.state.rows.num_used > running

    def _current_decode_batch(self, stalled: set[int]) -> Batch | None:
        rows = self.state.decoding_rows()
        if stalled:
            rows = rows[~np.isin(rows, int_array(sorted(stalled)))]
            return Batch.decode(rows) if len(rows) else None
        return self.state.decode_batch if len(rows) else None

    def _with_prefix_groups(self, batch: Batch) -> Batch:
        """The decode batch, with who begins alike: looked up once, since it holds until the batch
        changes. Beams change at every step."""
        if (
            not self.state.config.finds_prefix_groups
            or batch.prefix_groups is not None
            or self.state.rows.num_beams
        ):
            return batch
        num_computed = self.state.rows.num_computed[batch.rows]
        groups = self.state.manager.prefix_groups(batch.rows, num_computed)
        self.state.decode_batch = replace(batch, prefix_groups=groups)
        return self.state.decode_batch

    def _with_mapping(self, batch: Batch) -> Batch:
        """The batch, with whether all its rows may be read through their slots."""
        if self.state.manager.is_mapped(batch.rows):
            return batch
        unmapped = replace(batch, is_mapped=False)
        if batch is self.state.decode_batch:
            self.state.decode_batch = unmapped
        return unmapped

    def _plan_chunks(self, budget: int) -> tuple[list[tuple[int, int]], int]:
        chunks = []
        for row in self.state.prefilling:
            if budget <= 0:
                break
            count = min(
                budget, int(self.state.rows.num_tokens[row] - self.state.rows.num_computed[row])
            )
            chunks.append((row, count))
            self.state.publish(row, int(self.state.rows.num_computed[row]) + count)
            budget -= count
        return chunks, budget

    def _fan_out(
        self, batch: Batch, inits: list[RowInit], forks: list[tuple[int, int]]
    ) -> tuple[FanOut, ...]:
        """Groups whose prompt this step completes: the other samples take their first token from
        the same logits and share the prompt's blocks."""
        if not self.state.awaiting:
            return ()
        fan_outs = []
        for parent in batch.sampled_rows.tolist():
            sequence = self.state.sequence_of_row[parent]
            assert sequence is not None
            group = sequence.group
            if group.is_fanned_out or group.beams is not None:
                continue
            group.is_fanned_out = True
            children = [other for other in group.sequences if other.row != parent]
            for child in children:
                num_tokens = len(child.token_ids)
                self.state.manager.fork(parent, child.row, num_tokens)
                inits.append(child.row_init(num_tokens, self.state.manager.block_ids(child.row)))
                forks.append((parent, child.row))
            self.state.awaiting.difference_update(child.row for child in children)
            if children:
                fan_outs.append(FanOut(parent, tuple(child.row for child in children)))
        return tuple(fan_outs)

    def _join(self, decode: Batch | None, chunks: list[tuple[int, int]]) -> Batch | None:
        """One batch: the decoding rows, then the chunks."""
        if not chunks:
            return decode
        pairs = int_array(chunks)
        rows, counts = pairs[:, 0], pairs[:, 1]
        catches_up = self.state.rows.num_computed[rows] + counts == self.state.rows.num_tokens[rows]
        if decode is None:
            return Batch.of(rows, counts, catches_up)
        return Batch.of(
            np.concatenate([decode.rows, rows]),
            np.concatenate([decode.num_scheduled_tokens, counts]),
            np.concatenate([decode.samples, catches_up]),
        )

    def _note_launch(
        self,
        plan: StepPlan,
        num_chunks: int,
        forks: tuple[tuple[int, int], ...],
        prepared: tuple[int, ...],
    ) -> None:
        columns, batch = self.state.rows, plan.batch
        rows = batch.rows
        columns.num_computed[rows] += batch.num_scheduled_tokens
        sampled = plan.sampled_rows()
        columns.last_step[rows] = plan.step_id
        counts = columns.num_tokens[sampled] + 1
        columns.num_tokens[sampled] = counts
        published, self.state.published = tuple(self.state.published), []
        self.state.launched.append(
            Launched(plan.step_id, batch, sampled, plan.commands, published, forks, prepared)
        )
        if num_chunks:
            caught_up = rows[-num_chunks:][batch.samples[-num_chunks:]]
            if len(caught_up):
                done = set(caught_up.tolist())
                self.state.prefilling = [row for row in self.state.prefilling if row not in done]
                columns.is_decoding[caught_up] = True
                self.state.decode_batch = None
        for _, child in forks:
            columns.last_step[child] = plan.step_id
            columns.is_decoding[child] = True
        if prepared:
            columns.last_step[list(prepared)] = plan.step_id
        if columns.num_beams:
            # The host has to choose their tokens before they go on.
            beams = sampled[columns.is_beam[sampled]]
            if len(beams):
                columns.is_decoding[beams] = False
                self.state.decode_batch = None
        # A length stop is known now: the row needs no further step.
        last = sampled[counts >= columns.max_length[sampled]]
        if len(last):
            columns.is_decoding[last] = False
            self.state.decode_batch = None
