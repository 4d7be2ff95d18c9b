"""First come, first served; iteration-level batching; chunked prefill; preemption by recomputation.

The scheduler makes a `StepPlan` out of queue, rows and blocks, and digests `StepResult`s. There is
no prefill or decode mode: a row runs as many tokens as it lacks, within the budget. It reads no
clock, imports no torch and never asks the executor.

What a launched step names (rows, blocks) is released only when the result of the last launched
step that names it has been processed: ``last_step[row] <= processed``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from octavo.core.plan import (
    Batch,
    BoolArray,
    FanOut,
    IntArray,
    KVUsage,
    RowInit,
    StepPlan,
    StepResult,
    SwapIn,
    SwapOut,
    int_array,
)
from octavo.core.protocols import KVManager, Swapped
from octavo.core.request import (
    ContextLengthError,
    Finished,
    FinishReason,
    QueueFullError,
    Request,
    RequestError,
    StepOutputs,
)
from octavo.scheduling.groups import Group, Launched, Sequence
from octavo.scheduling.preemption import RECOMPUTE, PreemptionPolicy
from octavo.scheduling.rows import RowTable


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of admission. ``max_num_batched_tokens`` is the token budget of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_queued_requests: int
    preemption: PreemptionPolicy = RECOMPUTE

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence decodes one token "
                "a step"
            )


class Scheduler:
    """One queue, one set of rows, one manager.

    Use: `add` and `abort` at any time; `plan` when the executor has room for a step; `update`
    with each result in the order of launch, or `fail` when the step failed.
    """

    def __init__(self, config: SchedulerConfig, manager: KVManager) -> None:
        self.config = config
        self.manager = manager
        self.rows = RowTable(config.max_num_seqs, config.max_model_len)
        self.num_preemptions = 0
        self.num_swaps = 0
        self._arrivals = 0
        self._step_id = 0
        self._processed = 0
        self._sequences: dict[int, Sequence] = {}
        self._sequence_of_row: list[Sequence | None] = [None] * config.max_num_seqs
        self._waiting: deque[Group] = deque()
        self._prefilling: list[int] = []
        self._releasing: list[int] = []
        self._num_resuming = 0
        # Rows of samples that wait for their group's prompt to be computed, or for their blocks.
        self._awaiting: set[int] = set()
        self._arriving: dict[int, tuple[Group, list[Swapped]]] = {}
        self._launched: deque[Launched] = deque()
        self._decode_batch: Batch | None = None
        self._published: list[tuple[int, int]] = []

    # ── what the outside asks ────────────────────────────────────────────────────────────────

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that own a row and are still wanted."""
        return int(self.rows.is_wanted.sum())

    @property
    def has_work(self) -> bool:
        """Whether something runs, waits, or is in flight."""
        return bool(self._sequences or self._launched or self._releasing)

    @property
    def has_room(self) -> bool:
        """Whether the queue takes another request."""
        return len(self._waiting) < self.config.max_queued_requests

    def usage(self) -> KVUsage:
        return self.manager.usage()

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes; sequences that run keep their blocks."""
        self.manager.reset_prefix_cache()

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ContextLengthError: it can never fit in the pool, however long it waits.
            QueueFullError: ``max_queued_requests`` wait already.
        """
        num_blocks = request.num_blocks(self.manager.block_size)
        is_too_long = request.max_length > self.config.max_model_len
        if is_too_long or self.manager.can_never_fit(num_blocks):
            raise ContextLengthError(
                f"the request may grow to {request.max_length} tokens, {num_blocks} blocks, "
                f"more than the model's {self.config.max_model_len} tokens or than the KV cache "
                "can hold"
            )
        if request.n > self.config.max_num_seqs:
            raise RequestError(
                f"n is {request.n}, but only {self.config.max_num_seqs} sequences run at once "
                "(max_num_seqs); ask for fewer samples"
            )
        if not self.has_room:
            raise QueueFullError(
                f"{len(self._waiting)} requests wait already (max_queued_requests); try again later"
            )
        group = Group(request, self._arrivals)
        self._arrivals += 1
        for sequence in group.sequences:
            assert sequence.number not in self._sequences, f"request {sequence.number} exists"
            self._sequences[sequence.number] = sequence
        self._waiting.append(group)

    def knows(self, number: int) -> bool:
        """Whether a sequence of this number waits or runs."""
        return number in self._sequences

    def abort(self, number: int) -> bool:
        """Forget a sequence; its blocks are free at once, or with the last step that names them.

        The other samples of its request go on. False when there is no such sequence (it may have
        just ended).
        """
        sequence = self._sequences.get(number)
        if sequence is None:
            return False
        self._forget(sequence)
        return True

    def _forget(self, sequence: Sequence) -> None:
        """The sequence has ended or is not wanted any more."""
        group = sequence.group
        del self._sequences[sequence.number]
        group.sequences.remove(sequence)
        if sequence.row >= 0:
            self._retire_row(sequence.row)
            if group.is_resuming and not group.sequences:
                group.is_resuming = False
                self._num_resuming -= 1
            return
        if group.swapped is not None:
            self.manager.drop_swapped([group.swapped.pop(sequence.index)])
        if not group.sequences and group in self._waiting:
            self._waiting.remove(group)

    # ── planning ─────────────────────────────────────────────────────────────────────────────

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run before a result arrives."""
        num_preemptions = self.num_preemptions
        stalled = self._grow_decoding_rows()
        decode = self._current_decode_batch(stalled)
        budget = self.config.max_num_batched_tokens - (decode.num_tokens if decode else 0)
        chunks, budget = self._plan_chunks(budget)
        inits: list[RowInit] = []
        forks: list[tuple[int, int]] = []
        if not stalled and num_preemptions == self.num_preemptions:
            self._admit(budget, chunks, inits)
        batch = self._join(decode, chunks)
        fan_outs = self._fan_out(batch, inits, forks) if batch else ()
        drained = self.manager.drain()
        if batch is None:
            if not drained.commands:
                return None
            batch = Batch.empty()
        self._step_id += 1
        plan = StepPlan(
            step_id=self._step_id,
            batch=batch,
            row_inits=tuple(inits),
            table_deltas=drained.table_deltas,
            commands=drained.commands,
            fan_outs=fan_outs,
        )
        self._note_launch(plan, len(chunks), tuple(forks))
        return plan

    def _grow_decoding_rows(self) -> set[int]:
        """Give each decoding row room for its next token, preempting the latest arrivals.

        Returns:
            Rows that have to sit out this step until launched steps give blocks back.
        """
        rows = self._decoding_rows()
        crossing = rows[self.rows.num_computed[rows] >= self.manager.writable[rows]]
        if not len(crossing):
            return set()
        stalled: set[int] = set()
        for row in crossing[np.argsort(self.rows.arrival[crossing])].tolist():
            while self.rows.is_decoding[row]:
                if self.manager.grow(row, int(self.rows.num_computed[row]) + 1):
                    break
                if self._is_release_due():
                    stalled.add(row)
                    break
                self._preempt(self._latest_group())
        return {row for row in stalled if self.rows.is_decoding[row]}

    def _is_release_due(self) -> bool:
        """Whether a launched step will give a row's blocks back: one that ended or was preempted,
        or one whose last step is in flight."""
        running = len(self._decoding_rows()) + len(self._prefilling) + len(self._awaiting)
        return self.rows.num_used > running

    def _decoding_rows(self) -> IntArray:
        if self._decode_batch is None:
            rows = np.flatnonzero(self.rows.is_decoding).astype(np.int32)
            self._decode_batch = Batch.decode(rows)
        return self._decode_batch.rows

    def _current_decode_batch(self, stalled: set[int]) -> Batch | None:
        rows = self._decoding_rows()
        if stalled:
            rows = rows[~np.isin(rows, int_array(sorted(stalled)))]
            return Batch.decode(rows) if len(rows) else None
        return self._decode_batch if len(rows) else None

    def _plan_chunks(self, budget: int) -> tuple[list[tuple[int, int]], int]:
        chunks = []
        for row in self._prefilling:
            if budget <= 0:
                break
            count = min(budget, int(self.rows.num_tokens[row] - self.rows.num_computed[row]))
            chunks.append((row, count))
            self._publish(row, int(self.rows.num_computed[row]) + count)
            budget -= count
        return chunks, budget

    def _publish(self, row: int, num_tokens: int) -> None:
        """Blocks of known tokens may be hit as soon as they are planned, in this very step: each
        layer writes keys and values before it attends."""
        if self._shares_blocks(row):
            tokens = self.rows.first_token_ids(row, num_tokens)
            for block_id in self.manager.publish(row, tokens):
                self._published.append((row, block_id))

    def _shares_blocks(self, row: int) -> bool:
        """Whether others may hit the row's blocks; none can under a salt that is the row's own."""
        sequence = self._sequence_of_row[row]
        assert sequence is not None
        return self.manager.prefix_caching and not sequence.group.request.needs_prompt_logits

    def _admit(self, budget: int, chunks: list[tuple[int, int]], inits: list[RowInit]) -> None:
        """Admit waiting groups in order of arrival while rows, budget and blocks last."""
        while self._waiting and budget > 0 and not self._num_resuming:
            group = self._waiting[0]
            if self.rows.num_free < len(group.sequences):
                return
            if group.swapped is not None:
                if not self._try_swap_in(group, inits):
                    return
                continue
            cached = self._try_blocks(group)
            if cached is None:
                return
            self._waiting.popleft()
            group.is_fanned_out |= len(group.sequences) == 1
            if not group.num_preemptions:
                group.num_cached_tokens = cached[0]
            for sequence, num_cached in zip(group.sequences, cached, strict=False):
                self._take_row(sequence, num_cached)
                inits.append(sequence.row_init(num_cached, self.manager.block_ids(sequence.row)))
                self._prefilling.append(sequence.row)
                if budget > 0:
                    count = min(budget, len(sequence.token_ids) - num_cached)
                    chunks.append((sequence.row, count))
                    self._publish(sequence.row, num_cached + count)
                    budget -= count
            for sequence in group.sequences[len(cached) :]:
                self._take_row(sequence, len(sequence.token_ids))
                self._awaiting.add(sequence.row)

    def _try_blocks(self, group: Group) -> list[int] | None:
        """Blocks for what the group has to compute: a new one's prompt once, or all sequences of
        one that resumes, which share the full blocks of the prompt again.

        Returns:
            How many tokens of each of these sequences are cached or shared; None and no change
            when blocks are missing.
        """
        reserve = self._reserve_for(group)
        leader = group.sequences[0]
        row = self.rows.peek()
        salt = group.cache_salt
        admission = self.manager.admit(row, leader.token_ids, reserve=reserve, salt=salt)
        if admission is None:
            return None
        cached = [admission.num_cached_tokens]
        if not group.is_fanned_out:
            return cached
        size = self.manager.block_size
        shared = len(group.request.prompt_token_ids) // size * size
        for index, sequence in enumerate(group.sequences[1:], start=1):
            child = self.rows.peek(index)
            self.manager.fork(row, child, shared)
            if not self.manager.grow(child, len(sequence.token_ids), reserve=reserve):
                for taken in range(index + 1):
                    self.manager.free(self.rows.peek(taken))
                return None
            cached.append(shared)
        return cached

    def _try_swap_in(self, group: Group, inits: list[RowInit]) -> bool:
        """Bring a swapped-out group back; its rows run once the transfer is reported."""
        assert group.swapped is not None
        tables = [group.swapped[sequence.index] for sequence in group.sequences]
        rows = [self.rows.peek(index) for index in range(len(tables))]
        transfer = self.manager.swap_in(tables, rows, reserve=self._reserve_for(group))
        if transfer is None:
            return False
        self._waiting.popleft()
        group.swapped = None
        group.is_arriving = True
        self._arriving[transfer] = (group, tables)
        for sequence, table in zip(group.sequences, tables, strict=True):
            self._take_row(sequence, table.num_computed_tokens)
            self.rows.last_step[sequence.row] = self._step_id + 1
            self._awaiting.add(sequence.row)
            block_ids = self.manager.block_ids(sequence.row)
            inits.append(sequence.row_init(table.num_computed_tokens, block_ids))
        return True

    def _arrive(self, transfer: int) -> None:
        """The blocks of a swapped-in group are there: it goes on."""
        group, tables = self._arriving.pop(transfer)
        self.manager.drop_swapped(tables)
        group.is_arriving = False
        for row in group.rows:
            # Only the token that it sampled last is not computed: it decodes, known to the host.
            self._awaiting.discard(row)
            self.rows.is_decoding[row] = True
        self._decode_batch = None

    def _take_row(self, sequence: Sequence, num_computed: int) -> None:
        group = sequence.group
        sequence.row = self.rows.take(
            sequence.number, group.request, group.arrival, sequence.token_ids, num_computed
        )
        self._sequence_of_row[sequence.row] = sequence

    def _fan_out(
        self, batch: Batch, inits: list[RowInit], forks: list[tuple[int, int]]
    ) -> tuple[FanOut, ...]:
        """Groups whose prompt this step completes: the other samples take their first token from
        the same logits and share the prompt's blocks."""
        if not self._awaiting:
            return ()
        fan_outs = []
        for parent in batch.sampled_rows.tolist():
            sequence = self._sequence_of_row[parent]
            assert sequence is not None
            group = sequence.group
            if group.is_fanned_out:
                continue
            group.is_fanned_out = True
            children = [other for other in group.sequences if other.row != parent]
            for child in children:
                num_tokens = len(child.token_ids)
                self.manager.fork(parent, child.row, num_tokens)
                inits.append(child.row_init(num_tokens, self.manager.block_ids(child.row)))
                forks.append((parent, child.row))
            self._awaiting.difference_update(child.row for child in children)
            if children:
                fan_outs.append(FanOut(parent, tuple(child.row for child in children)))
        return tuple(fan_outs)

    def _reserve_for(self, group: Group) -> int:
        """Blocks to leave free at admission, so that it does not preempt itself at once.

        A new group leaves one block in a hundred; a resumed one leaves every running row a block
        to go on with, so that it makes progress before it can be preempted again.
        """
        num_running = self.rows.num_used
        if group.num_preemptions:
            return num_running
        return min(num_running, max(1, self.manager.num_usable_blocks // 100))

    def _join(self, decode: Batch | None, chunks: list[tuple[int, int]]) -> Batch | None:
        """One batch: the decoding rows, then the chunks."""
        if not chunks:
            return decode
        pairs = int_array(chunks)
        rows, counts = pairs[:, 0], pairs[:, 1]
        catches_up = self.rows.num_computed[rows] + counts == self.rows.num_tokens[rows]
        if decode is None:
            return Batch.of(rows, counts, catches_up)
        return Batch.of(
            np.concatenate([decode.rows, rows]),
            np.concatenate([decode.num_scheduled_tokens, counts]),
            np.concatenate([decode.samples, catches_up]),
        )

    def _note_launch(
        self, plan: StepPlan, num_chunks: int, forks: tuple[tuple[int, int], ...]
    ) -> None:
        columns, batch = self.rows, plan.batch
        rows = batch.rows
        columns.num_computed[rows] += batch.num_scheduled_tokens
        sampled = plan.sampled_rows()
        columns.last_step[rows] = plan.step_id
        counts = columns.num_tokens[sampled] + 1
        columns.num_tokens[sampled] = counts
        published, self._published = tuple(self._published), []
        self._launched.append(
            Launched(plan.step_id, batch, sampled, plan.commands, published, forks)
        )
        if num_chunks:
            caught_up = rows[-num_chunks:][batch.samples[-num_chunks:]]
            if len(caught_up):
                done = set(caught_up.tolist())
                self._prefilling = [row for row in self._prefilling if row not in done]
                columns.is_decoding[caught_up] = True
                self._decode_batch = None
        for _, child in forks:
            columns.last_step[child] = plan.step_id
            columns.is_decoding[child] = True
        # A length stop is known now: the row needs no further step.
        last = sampled[counts >= columns.max_length[sampled]]
        if len(last):
            columns.is_decoding[last] = False
            self._decode_batch = None

    # ── preemption and release ───────────────────────────────────────────────────────────────

    def _latest_group(self) -> Group:
        rows = np.concatenate([self._decoding_rows(), int_array(self._prefilling)])
        sequence = self._sequence_of_row[int(rows[np.argmax(self.rows.arrival[rows])])]
        assert sequence is not None
        return sequence.group

    def _preempt(self, group: Group) -> None:
        """Take the rows away from a group, which waits to come back: all of it, or nothing.

        Its blocks come back at once, or with the result of the last launched step that names them
        (the one that swaps them out, maybe); tokens of launched steps are kept.
        """
        if not self._try_swap_out(group):
            group.swapped = None
        group.num_preemptions += 1
        self.num_preemptions += 1
        group.is_resuming = True
        self._num_resuming += 1
        for sequence in list(group.sequences):
            self._stop_running(sequence.row)
            self._release_when_processed(sequence.row)

    def _try_swap_out(self, group: Group) -> bool:
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
        self.rows.last_step[rows] = self._step_id + 1
        self.num_swaps += 1
        return True

    def _retire_row(self, row: int) -> None:
        """The row's sequence has ended: results that still arrive for it are dropped."""
        sequence = self._sequence_of_row[row]
        assert sequence is not None
        group = sequence.group
        self.rows.is_wanted[row] = False
        if not group.is_resuming:
            self._hand_over(group, row)
        self._stop_running(row)
        if row not in self._releasing:
            self._release_when_processed(row)

    def _hand_over(self, group: Group, row: int) -> None:
        """A sequence ends whose row may compute the prompt for the others of its group. Nobody can
        take that over half-way: they start again."""
        if row in self._awaiting:
            group.is_fanned_out |= len(group.sequences) == 1
            return
        shared = len(group.request.prompt_token_ids) // self.manager.block_size
        is_half_way = self.rows.num_computed[row] < shared * self.manager.block_size
        is_needed = not group.is_fanned_out or is_half_way
        if group.sequences and is_needed and not group.is_failing:
            self._preempt(group)
        group.is_fanned_out |= not group.sequences

    def _stop_running(self, row: int) -> None:
        if self.rows.is_decoding[row]:
            self.rows.is_decoding[row] = False
            self._decode_batch = None
        elif row in self._prefilling:
            self._prefilling.remove(row)
        self._awaiting.discard(row)

    def _release_when_processed(self, row: int) -> None:
        if self.rows.last_step[row] <= self._processed:
            self._release(row)
        else:
            self._releasing.append(row)

    def _release(self, row: int) -> None:
        sequence = self._sequence_of_row[row]
        assert sequence is not None
        group = sequence.group
        if self.rows.is_wanted[row]:
            sequence.token_ids = self.rows.token_ids(row)
        elif group.swapped is not None:
            self.manager.drop_swapped([group.swapped.pop(sequence.index)])
        sequence.row = -1
        self._sequence_of_row[row] = None
        self.manager.free(row)
        self.rows.give_back(row)
        if group.is_resuming and group.sequences and not group.rows:
            group.is_resuming = False
            self._num_resuming -= 1
            self._wait_again(group)

    def _wait_again(self, group: Group) -> None:
        """Back into the queue, before every later arrival."""
        index = 0
        for other in self._waiting:
            if other.arrival > group.arrival:
                break
            index += 1
        self._waiting.insert(index, group)

    # ── results ──────────────────────────────────────────────────────────────────────────────

    def update(self, result: StepResult) -> StepOutputs:
        """Digest the result of the oldest launched step."""
        launched = self._launched.popleft()
        assert launched.step_id == result.step_id, "results must arrive in the order of launch"
        self._processed = launched.step_id
        self.manager.commit(launched.batch.rows, launched.batch.num_scheduled_tokens)
        for parent, child in launched.forks:
            self.manager.follow(parent, child)
        for transfer in result.finished_transfers:
            self._arrive(transfer)
        rows, token_ids, logprobs = launched.sampled_rows, result.token_ids, result.logprobs
        wanted: BoolArray = self.rows.is_wanted[rows]
        if not wanted.all():
            rows, token_ids = rows[wanted], token_ids[wanted]
            logprobs = logprobs and logprobs.only(wanted)
        prompts = tuple(
            replace(prompt, owner=int(self.rows.number[prompt.owner]))
            for prompt in result.prompt_logprobs
            if self.rows.is_wanted[prompt.owner]
        )
        ended = self.rows.receive(rows, token_ids)
        if self.manager.prefix_caching:
            self._publish_generated(rows)
        numbers = self.rows.number[rows]
        finished = tuple([self._finish(row) for row in ended.tolist()])
        self._release_processed(launched)
        return StepOutputs(numbers, token_ids, finished, logprobs, prompts)

    def fail(self, step_id: int, error: str) -> StepOutputs:
        """The oldest launched step failed: its requests end, everything else goes on."""
        launched = self._launched.popleft()
        assert launched.step_id == step_id, "failures must arrive in the order of launch"
        self._processed = launched.step_id
        failed = [row for row in self._rows_failed_with(launched) if self.rows.is_wanted[row]]
        for row in failed:
            sequence = self._sequence_of_row[row]
            assert sequence is not None
            sequence.group.is_failing = True
        finished = [self._finish(row, FinishReason.ERROR, error) for row in failed]
        self._give_up_transfers(launched)
        self._release_processed(launched)
        empty = int_array([])
        return StepOutputs(empty.astype(np.int64), empty, tuple(finished))

    def _publish_generated(self, rows: IntArray) -> None:
        """Rows whose computed tokens, all but the last received, fill a block just now."""
        computed = self.rows.num_received[rows] - 1
        for row in rows[computed % self.manager.block_size == 0].tolist():
            if not self._shares_blocks(row):
                continue
            count = int(self.rows.num_received[row]) - 1
            self.manager.publish(row, self.rows.first_token_ids(row, count))

    def _rows_failed_with(self, failed: Launched) -> list[int]:
        """Rows of a failed step, and those that share blocks which it should have filled; what
        these published since is not to be hit either."""
        rows = self._with_their_groups(set(failed.rows()))
        blocks = {block_id for _, block_id in failed.published}
        while True:
            sharing = {
                row
                for row, sequence in enumerate(self._sequence_of_row)
                if sequence is not None
                and not blocks.isdisjoint(self.manager.block_ids(row).tolist())
            }
            spoiled = self._with_their_groups(sharing)
            later = {
                block_id
                for launched in self._launched
                for row, block_id in launched.published
                if row in rows | spoiled
            }
            if spoiled <= rows and later <= blocks:
                break
            rows |= spoiled
            blocks |= later
        self.manager.unpublish(blocks)
        return sorted(rows)

    def _give_up_transfers(self, failed: Launched) -> None:
        """Swaps of a failed step may not have happened: their groups are recomputed."""
        for command in failed.commands:
            if isinstance(command, SwapIn):
                group, tables = self._arriving.pop(command.transfer_id)
                self.manager.drop_swapped(tables)
                group.is_arriving = False
                if group.sequences:
                    self._preempt(group)
            elif isinstance(command, SwapOut):
                for row in list(self._releasing):
                    sequence = self._sequence_of_row[row]
                    assert sequence is not None
                    group = sequence.group
                    if group.swapped and self.rows.last_step[row] == failed.step_id:
                        self.manager.drop_swapped(group.swapped.values())
                        group.swapped = None

    def _with_their_groups(self, rows: set[int]) -> set[int]:
        """The rows, and those of the other sequences of their requests."""
        found = set(rows)
        for row in rows:
            sequence = self._sequence_of_row[row]
            if sequence is not None:
                found.update(sequence.group.rows)
        return found

    def _finish(
        self, row: int, reason: FinishReason | None = None, error: str | None = None
    ) -> Finished:
        sequence = self._sequence_of_row[row]
        assert sequence is not None
        group = sequence.group
        if reason is None:
            is_stop = self.rows.ended_by_stop(row)
            reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
        num_tokens = int(self.rows.num_received[row]) - len(group.request.prompt_token_ids)
        self._forget(sequence)
        return Finished(sequence.number, reason, num_tokens, error, group.num_cached_tokens)

    def _release_processed(self, launched: Launched) -> None:
        if launched.commands:
            self.manager.retire(launched.commands)
        if self._releasing:
            due = [row for row in self._releasing if self.rows.last_step[row] <= self._processed]
            for row in due:
                self._releasing.remove(row)
                self._release(row)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken. For tests and debug runs."""
        self.manager.check()
        owned = {s.row for s in self._sequences.values() if s.row >= 0}
        used = {row for row, s in enumerate(self._sequence_of_row) if s is not None}
        assert used == owned | set(self._releasing), "a row is owned by nobody"
        assert len(used) == self.rows.num_used, "the free rows are wrong"
        groups = {id(s.group): s.group for s in self._sequences.values()}.values()
        assert self._num_resuming == sum(g.is_resuming for g in groups), "resuming is miscounted"
        for group in groups:
            waits = not group.is_fanned_out and not group.is_resuming and group.rows
            expected = len(group.sequences) - 1 if waits else 0
            if group.is_arriving:
                expected = len(group.sequences)
            assert len(self._awaiting.intersection(group.rows)) == expected
        assert self._awaiting <= owned, "a row awaits a fan-out for nobody"
        arrivals = [group.arrival for group in self._waiting]
        assert arrivals == sorted(arrivals), "the queue is out of order"
