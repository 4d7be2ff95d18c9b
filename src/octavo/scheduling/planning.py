"""Makes the next step's plan: room for every decoding row, then chunks, then admissions.

There is no prefill or decode mode: a row runs as many tokens as it lacks, within the budget.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from octavo.core.layout import num_blocks_for
from octavo.core.plan import (
    NO_FORKS,
    Admission,
    Batch,
    FanOut,
    IntArray,
    RowInit,
    StepPlan,
    int_array,
)
from octavo.scheduling.beam_search import closest_before
from octavo.scheduling.beams import take_row_changes
from octavo.scheduling.groups import Group, Launched
from octavo.scheduling.resizing import PoolResizing
from octavo.scheduling.state import SchedulerState


class Planner:
    """Plans on a `SchedulerState`, which it changes."""

    def __init__(self, state: SchedulerState, resizing: PoolResizing) -> None:
        self.state = state
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
            self._admit(budget, chunks, inits)
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
            self._publish(row, int(self.state.rows.num_computed[row]) + count)
            budget -= count
        return chunks, budget

    def _publish(self, row: int, num_tokens: int) -> None:
        """Blocks of known tokens may be hit as soon as they are planned, in this very step: each
        layer writes keys and values before it attends."""
        tokens = self.state.rows.first_token_ids(row, num_tokens)
        for block_id in self.state.manager.publish(row, tokens):
            self.state.published.append((row, block_id))

    def _admit(self, budget: int, chunks: list[tuple[int, int]], inits: list[RowInit]) -> None:
        """Admit waiting groups in order of arrival while rows, budget and blocks last. A static
        batch is formed whole: what is beyond the budget is prefilled in the steps that follow."""
        is_static = self.state.config.is_static
        if is_static and self.state.rows.num_used:
            return
        while self.state.waiting and (budget > 0 or is_static) and not self.state.num_resuming:
            group = self.state.waiting[0]
            if self.state.rows.num_free < len(group.sequences):
                return
            has_slots = self.state.manager.max_mapped_blocks is not None
            if has_slots and not (self._can_map(group) and self._choose_rows(group)):
                return
            if group.swapped is not None:
                if not self._try_swap_in(group, inits):
                    return
                continue
            cached = self._try_blocks(group)
            if cached is None:
                return
            self.state.waiting.popleft()
            group.is_fanned_out |= len(group.sequences) == 1
            if not group.num_preemptions:
                group.num_cached_tokens = cached[0]
            for sequence, num_cached in zip(group.sequences, cached, strict=False):
                self.state.take_row(sequence, num_cached)
                inits.append(
                    sequence.row_init(num_cached, self.state.manager.block_ids(sequence.row))
                )
                self.state.prefilling.append(sequence.row)
                if budget > 0:
                    count = min(budget, len(sequence.token_ids) - num_cached)
                    chunks.append((sequence.row, count))
                    self._publish(sequence.row, num_cached + count)
                    budget -= count
            for sequence in group.sequences[len(cached) :]:
                self.state.take_row(sequence, len(sequence.token_ids))
                self.state.awaiting.add(sequence.row)

    def _can_map(self, group: Group) -> bool:
        """Whether slots have room for all that runs and for this group, each sequence as long as
        it may become: neither growing nor forking has to be refused later."""
        size, manager = self.state.manager.block_size, self.state.manager
        assert manager.max_mapped_blocks is not None
        taken = int((-(-self.state.rows.max_length // size)).sum())
        wanted = len(group.sequences) * num_blocks_for(group.request.max_length, size)
        return taken + wanted <= manager.max_mapped_blocks

    def _choose_rows(self, group: Group) -> bool:
        """Hand out next the rows whose slots have most of the group's blocks mapped already; False
        when it cannot be admitted yet."""
        request = group.request
        is_new = group.swapped is None
        rows = self.state.manager.choose_rows(
            self.state.rows.free_rows,
            len(group.sequences),
            group.sequences[0].token_ids,
            # What is swapped in takes the blocks of its tables, which `swap_in` counts.
            reserve=self._reserve_for(group) if is_new else None,
            salt=request.cache_salt,
            use_cache=is_new and not request.needs_prompt_logits,
        )
        self.state.rows.prefer(rows)
        return bool(rows)

    def _try_blocks(self, group: Group) -> list[int] | None:
        """Blocks for what the group has to compute: a new one's prompt once, or all sequences of
        one that resumes, which share full blocks again: the prompt's, and beams all that they have
        in common with another.

        Returns:
            How many tokens of each of these sequences are cached or shared; None and no change
            when blocks are missing.
        """
        reserve = self._reserve_for(group)
        leader = group.sequences[0]
        manager, rows, request = self.state.manager, self.state.rows, group.request

        def admit(row: int, token_ids: IntArray) -> Admission | None:
            # Where all prompt logits are needed, every position is computed.
            use_cache = not request.needs_prompt_logits
            salt = request.cache_salt
            return manager.admit(
                row,
                token_ids,
                max_length=request.max_length,
                reserve=reserve,
                salt=salt,
                use_cache=use_cache,
            )

        admission = admit(rows.peek(), leader.token_ids)
        if admission is None:
            return None
        cached = [admission.num_cached_tokens]
        if not group.is_fanned_out:
            if manager.reserves_ahead:
                for index in range(1, len(group.sequences)):
                    if admit(rows.peek(index), leader.token_ids) is None:
                        for taken in range(index):
                            manager.free(rows.peek(taken))
                        return None
            return cached
        for index, (closest, shared) in enumerate(self._shared_prefixes(group), start=1):
            child, token_ids = rows.peek(index), group.sequences[index].token_ids
            if manager.sharing:
                manager.fork(rows.peek(closest), child, shared)
                has_room = manager.grow(child, len(token_ids), reserve=reserve)
            else:
                has_room = admit(child, token_ids) is not None
            if not has_room:
                for taken in range(index + 1):
                    manager.free(rows.peek(taken))
                return None
            cached.append(shared)
        return cached

    def _shared_prefixes(self, group: Group) -> list[tuple[int, int]]:
        """For each sequence but the first, an earlier one and how many tokens of whole blocks it
        shares with it when both are computed again."""
        size, sequences = self.state.manager.block_size, group.sequences
        if not self.state.manager.sharing:
            return [(0, 0)] * (len(sequences) - 1)
        num_prompt = len(group.request.prompt_token_ids)
        if group.beams is None:
            return [(0, num_prompt // size * size)] * (len(sequences) - 1)
        closest = closest_before([sequence.token_ids[num_prompt:] for sequence in sequences])
        return [(index, (num_prompt + length) // size * size) for index, length in closest]

    def _try_swap_in(self, group: Group, inits: list[RowInit]) -> bool:
        """Bring a swapped-out group back; its rows run once the transfer is reported."""
        assert group.swapped is not None
        tables = [group.swapped[sequence.index] for sequence in group.sequences]
        rows = [self.state.rows.peek(index) for index in range(len(tables))]
        transfer = self.state.manager.swap_in(tables, rows, reserve=self._reserve_for(group))
        if transfer is None:
            return False
        self.state.waiting.popleft()
        group.swapped = None
        group.is_arriving = True
        self.state.arriving[transfer] = (group, tables)
        for sequence, table in zip(group.sequences, tables, strict=True):
            self.state.take_row(sequence, table.num_computed_tokens)
            self.state.rows.last_step[sequence.row] = self.state.step_id + 1
            self.state.awaiting.add(sequence.row)
            block_ids = self.state.manager.block_ids(sequence.row)
            inits.append(sequence.row_init(table.num_computed_tokens, block_ids))
        return True

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

    def _reserve_for(self, group: Group) -> int:
        """Blocks to leave free at admission, so that it does not preempt itself at once.

        A new group leaves one block in a hundred; a resumed one leaves every running row a block
        to go on with, so that it makes progress before it can be preempted again.
        """
        if self.state.manager.reserves_ahead:
            return 0
        num_running = self.state.rows.num_used
        copies = 0 if self.state.manager.sharing else self._num_blocks_to_copy(group)
        if group.num_preemptions:
            return num_running + copies
        return min(num_running, max(1, self.state.manager.num_usable_blocks // 100)) + copies

    def _num_blocks_to_copy(self, group: Group) -> int:
        """Without sharing: blocks that sequences will take at their fan-out, this group's too."""
        size, rows = self.state.manager.block_size, self.state.rows
        counts = rows.num_tokens[list(self.state.awaiting)].tolist()
        if not group.is_fanned_out:
            counts += [len(group.request.prompt_token_ids)] * (len(group.sequences) - 1)
        return sum(num_blocks_for(count, size) for count in counts)

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
