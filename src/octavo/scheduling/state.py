"""What the scheduler knows between steps, and how a sequence comes to a row and leaves it again.

What a launched step names (rows, blocks) is released only when the result of the last launched
step that names it has been processed: ``last_step[row] <= processed``. Decides nothing about who
runs next (`planning`, `waiting`) and reads no results (`results`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from octavo.core.plan import Batch, IntArray, int_array
from octavo.core.protocols import KVManager, Swapped
from octavo.core.request import Request
from octavo.scheduling.groups import Group, Launched, Sequence
from octavo.scheduling.preemption import RECOMPUTE, PreemptionPolicy
from octavo.scheduling.rows import RowTable


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of admission. ``max_num_batched_tokens`` is the token budget of a step;
    ``finds_prefix_groups`` looks for rows that begin alike, for executors that gain by it. With
    ``is_static`` a batch is formed of who waits, and nobody joins until all of it has ended.
    ``max_blocks`` bounds the ids of a pool that can be resized (None: it cannot)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_queued_requests: int
    preemption: PreemptionPolicy = RECOMPUTE
    finds_prefix_groups: bool = False
    max_blocks: int | None = None
    is_static: bool = False

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence decodes one token "
                "a step"
            )


class SchedulerState:
    """Queue, rows and what is in flight. Sequences are named by their number, places by row."""

    def __init__(self, config: SchedulerConfig, manager: KVManager) -> None:
        self.config = config
        self.manager = manager
        self.rows = RowTable(config.max_num_seqs, config.max_model_len)
        # Blocks that sequences are to have, as far as was decided (see `resizing`).
        self.target_blocks = manager.num_usable_blocks
        self.num_preemptions = 0
        self.num_swaps = 0
        self.arrivals = 0
        self.step_id = 0
        self.processed = 0
        self.sequences: dict[int, Sequence] = {}
        # Requests that were accepted and will be added when the queue has room.
        self.promised: dict[int, Request] = {}
        self.sequence_of_row: list[Sequence | None] = [None] * config.max_num_seqs
        self.waiting: deque[Group] = deque()
        self.prefilling: list[int] = []
        self.releasing: list[int] = []
        self.num_resuming = 0
        # Rows of samples that wait for their group's prompt to be computed, or for their blocks.
        self.awaiting: set[int] = set()
        self.arriving: dict[int, tuple[Group, list[Swapped]]] = {}
        self.launched: deque[Launched] = deque()
        self.decode_batch: Batch | None = None
        self.published: list[tuple[int, int]] = []
        # Where beams go on that the executor has not been told of: row → parent's row and token;
        # beams that have just got a row.
        self.continuing: dict[int, tuple[int, int]] = {}
        self.joining: list[Sequence] = []

    @property
    def num_lasting_blocks(self) -> int:
        """Blocks that are there and stay."""
        return min(self.target_blocks, self.manager.num_usable_blocks)

    def most_blocks_needed(self) -> int:
        """What the largest request needs that was accepted and has not ended."""
        requests = {id(s.group): s.group.request for s in self.sequences.values()}
        needs = [*requests.values(), *self.promised.values()]
        return max(map(self.manager.num_blocks_needed, needs), default=0)

    def forget_group(self, group: Group) -> None:
        """None of the group's sequences is wanted any more."""
        group.is_ending = True
        for sequence in list(group.sequences):
            self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended or is not wanted any more."""
        group = sequence.group
        del self.sequences[sequence.number]
        group.sequences.remove(sequence)
        if sequence.row >= 0:
            self.retire_row(sequence.row)
            if group.is_resuming and not group.sequences:
                group.is_resuming = False
                self.num_resuming -= 1
            return
        if group.swapped is not None:
            self.manager.drop_swapped([group.swapped.pop(sequence.index)])
        if not group.sequences and group in self.waiting:
            self.waiting.remove(group)

    def decoding_rows(self) -> IntArray:
        if self.decode_batch is None:
            rows = np.flatnonzero(self.rows.is_decoding).astype(np.int32)
            self.decode_batch = Batch.decode(rows)
        return self.decode_batch.rows

    def take_row(self, sequence: Sequence, num_computed: int) -> None:
        group = sequence.group
        sequence.row = self.rows.take(
            sequence.number, group.request, group.arrival, sequence.token_ids, num_computed
        )
        self.sequence_of_row[sequence.row] = sequence

    def publish(self, row: int, num_tokens: int) -> None:
        """Blocks of known tokens may be hit as soon as they are planned, in this very step: each
        layer writes keys and values before it attends."""
        tokens = self.rows.first_token_ids(row, num_tokens)
        for block_id in self.manager.publish(row, tokens):
            self.published.append((row, block_id))

    def arrive(self, transfer: int) -> None:
        """The blocks of a swapped-in group are there: it goes on."""
        group, tables = self.arriving.pop(transfer)
        self.manager.drop_swapped(tables)
        group.is_arriving = False
        for row in group.rows:
            # Only the token that it sampled last is not computed: it decodes, known to the host.
            self.awaiting.discard(row)
            self.rows.is_decoding[row] = True
        self.decode_batch = None

    def latest_group(self) -> Group:
        rows = np.concatenate([self.decoding_rows(), int_array(self.prefilling)])
        sequence = self.sequence_of_row[int(rows[np.argmax(self.rows.arrival[rows])])]
        assert sequence is not None
        return sequence.group

    def preempt(self, group: Group) -> None:
        """Take the rows away from a group, which waits to come back: all of it, or nothing.

        Its blocks come back at once, or with the result of the last launched step that names them
        (the one that swaps them out, maybe); tokens of launched steps are kept.
        """
        if not self.try_swap_out(group):
            group.swapped = None
        group.num_preemptions += 1
        self.num_preemptions += 1
        group.is_resuming = True
        self.num_resuming += 1
        if group.beams is not None:
            group.beams.arrived.clear()
        for sequence in list(group.sequences):
            self.stop_running(sequence.row)
            self.release_when_processed(sequence.row)

    def try_swap_out(self, group: Group) -> bool:
        """Copy a group's blocks to host memory in the plan that is being made, where that is
        wanted and there is room. What is half-way through its prompt is recomputed."""
        rows = group.rows
        if not all(self.rows.is_decoding[row] for row in rows):
            return False
        computed = self.rows.num_computed[rows].tolist()
        blocks = {b for row in rows for b in self.manager.block_ids(row).tolist()}
        if not self.config.preemption.prefers_swap(len(blocks), sum(computed)):
            return False
        tables = self.manager.swap_out(rows, computed)
        if tables is None:
            return False
        group.swapped = {
            sequence.index: table for sequence, table in zip(group.sequences, tables, strict=True)
        }
        self.rows.last_step[rows] = self.step_id + 1
        self.num_swaps += 1
        return True

    def retire_row(self, row: int) -> None:
        """The row's sequence has ended: results that still arrive for it are dropped."""
        sequence = self.sequence_of_row[row]
        assert sequence is not None
        group = sequence.group
        self.rows.is_wanted[row] = False
        if not group.is_resuming:
            self.hand_over(group, row)
        self.stop_running(row)
        if row not in self.releasing:
            self.release_when_processed(row)

    def hand_over(self, group: Group, row: int) -> None:
        """A sequence ends whose row may compute the prompt for the others of its group. Nobody can
        take that over half-way: they start again."""
        if row in self.awaiting:
            group.is_fanned_out |= len(group.sequences) == 1
            return
        shared = len(group.request.prompt_token_ids) // self.manager.block_size
        is_half_way = self.rows.num_computed[row] < shared * self.manager.block_size
        is_needed = not group.is_fanned_out or is_half_way
        if group.sequences and is_needed and not group.is_ending:
            self.preempt(group)
        group.is_fanned_out |= not group.sequences

    def stop_running(self, row: int) -> None:
        if self.rows.is_decoding[row]:
            self.rows.is_decoding[row] = False
            self.decode_batch = None
        elif row in self.prefilling:
            self.prefilling.remove(row)
        self.awaiting.discard(row)
        if self.continuing or self.joining:
            self.continuing.pop(row, None)
            self.joining = [sequence for sequence in self.joining if sequence.row != row]

    def release_when_processed(self, row: int) -> None:
        if self.rows.last_step[row] <= self.processed:
            self.release(row)
        else:
            self.releasing.append(row)

    def release(self, row: int) -> None:
        sequence = self.sequence_of_row[row]
        assert sequence is not None
        group = sequence.group
        if self.rows.is_wanted[row]:
            sequence.token_ids = self.known_token_ids(sequence)
        elif group.swapped is not None:
            self.manager.drop_swapped([group.swapped.pop(sequence.index)])
        sequence.row = -1
        self.sequence_of_row[row] = None
        self.manager.free(row)
        self.rows.give_back(row)
        if group.is_resuming and group.sequences and not group.rows:
            group.is_resuming = False
            self.num_resuming -= 1
            self.wait_again(group)

    def known_token_ids(self, sequence: Sequence) -> IntArray:
        """What a sequence on a row holds, as far as the host knows."""
        group = sequence.group
        if group.beams is None:
            return self.rows.token_ids(sequence.row)
        beams, prompt = group.beams, group.request.prompt_token_ids
        if sequence.index not in beams.places:
            return prompt
        rank = beams.places.index(sequence.index)
        return np.concatenate([prompt, beams.search.token_ids(rank)])

    def wait_again(self, group: Group) -> None:
        """Back into the queue, before every later arrival."""
        index = 0
        for other in self.waiting:
            if other.arrival > group.arrival:
                break
            index += 1
        self.waiting.insert(index, group)

    def release_processed(self) -> None:
        if self.releasing:
            due = [row for row in self.releasing if self.rows.last_step[row] <= self.processed]
            for row in due:
                self.releasing.remove(row)
                self.release(row)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken. For tests and debug runs."""
        self.manager.check()
        owned = {s.row for s in self.sequences.values() if s.row >= 0}
        used = {row for row, s in enumerate(self.sequence_of_row) if s is not None}
        assert used == owned | set(self.releasing), "a row is owned by nobody"
        assert len(used) == self.rows.num_used, "the free rows are wrong"
        groups = {id(s.group): s.group for s in self.sequences.values()}.values()
        assert self.num_resuming == sum(g.is_resuming for g in groups), "resuming is miscounted"
        for group in groups:
            waits = not group.is_fanned_out and not group.is_resuming and group.rows
            expected = len(group.sequences) - 1 if waits else 0
            if group.is_arriving:
                expected = len(group.sequences)
            assert len(self.awaiting.intersection(group.rows)) == expected
            if group.beams is not None:
                places = group.beams.places
                assert len(set(places)) == len(places) == group.beams.search.num_candidates
        assert all(self.rows.is_decoding[row] for row in self.continuing), "a beam goes on alone"
        assert self.awaiting <= owned, "a row awaits a fan-out for nobody"
        arrivals = [group.arrival for group in self.waiting]
        assert arrivals == sorted(arrivals), "the queue is out of order"
