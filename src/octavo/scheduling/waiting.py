"""Lets groups that wait join the batch, in order of arrival, while rows, budget and blocks last.

New groups, those that resume and those that come back from the host. What could never be admitted
was refused before (`admission`).
"""

from __future__ import annotations

from octavo.core.layout import num_blocks_for
from octavo.core.plan import Admission, IntArray, RowInit
from octavo.scheduling.beam_search import closest_before
from octavo.scheduling.groups import Group
from octavo.scheduling.state import SchedulerState


class Admitter:
    """Admits on a `SchedulerState`, which it changes."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state

    def admit(self, budget: int, chunks: list[tuple[int, int]], inits: list[RowInit]) -> None:
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
                    self.state.publish(sequence.row, num_cached + count)
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
