"""First come, first served; iteration-level batching; chunked prefill; preemption by recomputation.

The scheduler makes a `StepPlan` out of queue, rows and blocks, and digests `StepResult`s. There is
no prefill or decode mode: a row runs as many tokens as it lacks, within the budget. It reads no
clock, imports no torch and never asks the executor.

What a launched step names (rows, blocks) is released only when the result of the last launched
step that names it has been processed: ``last_step[row] <= processed``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from octavo.core.plan import (
    Batch,
    BoolArray,
    IntArray,
    KVCommand,
    KVUsage,
    RowInit,
    StepPlan,
    StepResult,
    int_array,
)
from octavo.core.protocols import KVManager
from octavo.core.request import (
    ContextLengthError,
    Finished,
    FinishReason,
    QueueFullError,
    Request,
    StepOutputs,
)
from octavo.scheduling.rows import RowTable


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of admission. ``max_num_batched_tokens`` is the token budget of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_queued_requests: int

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence decodes one token "
                "a step"
            )


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence's life outside the columns. ``token_ids`` is current only while it waits."""

    request: Request
    arrival: int
    token_ids: IntArray
    row: int = -1
    is_resuming: bool = False
    num_preemptions: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    step_id: int
    batch: Batch
    sampled_rows: IntArray
    commands: tuple[KVCommand, ...]
    # Blocks that this step fills and others may hit already: (row, block id).
    published: tuple[tuple[int, int], ...]


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
        self._arrivals = 0
        self._step_id = 0
        self._processed = 0
        self._sequences: dict[int, _Sequence] = {}
        self._sequence_of_row: list[_Sequence | None] = [None] * config.max_num_seqs
        self._waiting: deque[_Sequence] = deque()
        self._prefilling: list[int] = []
        self._releasing: list[int] = []
        self._num_resuming = 0
        self._launched: deque[_Launched] = deque()
        self._decode_batch: Batch | None = None
        self._published: list[tuple[int, int]] = []

    # ── what the outside asks ────────────────────────────────────────────────────────────────

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that own a row and are still wanted."""
        return len(self._sequences) - len(self._waiting)

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
        if request.max_length > self.config.max_model_len or self.manager.can_never_fit(
            request.max_length - 1
        ):
            raise ContextLengthError(
                f"the request may grow to {request.max_length} tokens, more than the model's "
                f"{self.config.max_model_len} or than the KV cache can hold"
            )
        if not self.has_room:
            raise QueueFullError(
                f"{len(self._waiting)} requests wait already (max_queued_requests); try again later"
            )
        assert request.number not in self._sequences, f"request {request.number} exists"
        sequence = _Sequence(request, self._arrivals, request.prompt_token_ids)
        self._arrivals += 1
        self._sequences[request.number] = sequence
        self._waiting.append(sequence)

    def abort(self, number: int) -> bool:
        """Forget a request; its blocks are free at once, or with the last step that names them.

        False when there is no such request (it may have just ended).
        """
        sequence = self._sequences.pop(number, None)
        if sequence is None:
            return False
        if sequence.row < 0:
            self._waiting.remove(sequence)
        else:
            self._retire_row(sequence.row)
        return True

    # ── planning ─────────────────────────────────────────────────────────────────────────────

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run before a result arrives."""
        num_preemptions = self.num_preemptions
        stalled = self._grow_decoding_rows()
        decode = self._current_decode_batch(stalled)
        budget = self.config.max_num_batched_tokens - (decode.num_tokens if decode else 0)
        chunks, budget = self._plan_chunks(budget)
        inits: list[RowInit] = []
        if not stalled and num_preemptions == self.num_preemptions:
            self._admit(budget, chunks, inits)
        batch = self._join(decode, chunks)
        if batch is None:
            return None
        self._step_id += 1
        drained = self.manager.drain()
        plan = StepPlan(
            step_id=self._step_id,
            batch=batch,
            row_inits=tuple(inits),
            table_deltas=drained.table_deltas,
            commands=drained.commands,
        )
        self._note_launch(plan, len(chunks))
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
                self._preempt(self._latest_row())
        return {row for row in stalled if self.rows.is_decoding[row]}

    def _is_release_due(self) -> bool:
        """Whether a launched step will give a row's blocks back: one that ended or was preempted,
        or one whose last step is in flight."""
        running = len(self._decoding_rows()) + len(self._prefilling)
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
        if self.manager.prefix_caching:
            tokens = self.rows.first_token_ids(row, num_tokens)
            for block_id in self.manager.publish(row, tokens):
                self._published.append((row, block_id))

    def _admit(self, budget: int, chunks: list[tuple[int, int]], inits: list[RowInit]) -> None:
        """Admit waiting sequences in order of arrival while rows, budget and blocks last."""
        while self._waiting and self.rows.num_free and budget > 0 and not self._num_resuming:
            sequence = self._waiting[0]
            row = self.rows.peek()
            admission = self.manager.admit(
                row,
                sequence.token_ids,
                reserve=self._reserve_for(sequence),
                salt=sequence.request.cache_salt,
            )
            if admission is None:
                return
            self._waiting.popleft()
            cached = admission.num_cached_tokens
            if not sequence.num_preemptions:
                sequence.num_cached_tokens = cached
            self.rows.take(sequence.request, sequence.arrival, sequence.token_ids, cached)
            sequence.row = row
            self._sequence_of_row[row] = sequence
            self._prefilling.append(row)
            inits.append(
                RowInit(
                    row=row,
                    token_ids=sequence.token_ids,
                    num_computed_tokens=cached,
                    block_ids=self.manager.block_ids(row),
                    params=sequence.request.params,
                    seed=sequence.request.seed,
                )
            )
            count = min(budget, len(sequence.token_ids) - cached)
            chunks.append((row, count))
            self._publish(row, cached + count)
            budget -= count

    def _reserve_for(self, sequence: _Sequence) -> int:
        """Blocks to leave free at admission, so that it does not preempt itself at once.

        A new sequence leaves one block in a hundred; a resumed one leaves every running row a
        block to go on with, so that it makes progress before it can be preempted again.
        """
        num_running = self.rows.num_used
        if sequence.num_preemptions:
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

    def _note_launch(self, plan: StepPlan, num_chunks: int) -> None:
        columns, batch = self.rows, plan.batch
        rows = batch.rows
        columns.num_computed[rows] += batch.num_scheduled_tokens
        columns.last_step[rows] = plan.step_id
        sampled = plan.sampled_rows()
        counts = columns.num_tokens[sampled] + 1
        columns.num_tokens[sampled] = counts
        published, self._published = tuple(self._published), []
        self._launched.append(_Launched(plan.step_id, batch, sampled, plan.commands, published))
        if num_chunks:
            caught_up = rows[-num_chunks:][batch.samples[-num_chunks:]]
            if len(caught_up):
                done = set(caught_up.tolist())
                self._prefilling = [row for row in self._prefilling if row not in done]
                columns.is_decoding[caught_up] = True
                self._decode_batch = None
        # A length stop is known now: the row needs no further step.
        last = sampled[counts >= columns.max_length[sampled]]
        if len(last):
            columns.is_decoding[last] = False
            self._decode_batch = None

    # ── preemption and release ───────────────────────────────────────────────────────────────

    def _latest_row(self) -> int:
        rows = np.concatenate([self._decoding_rows(), int_array(self._prefilling)])
        return int(rows[np.argmax(self.rows.arrival[rows])])

    def _preempt(self, row: int) -> None:
        """Take the row away from its sequence, which waits to be recomputed.

        Its blocks come back at once, or with the result of the last launched step that names them;
        tokens of launched steps are kept.
        """
        sequence = self._sequence_of_row[row]
        assert sequence is not None
        sequence.is_resuming = True
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._num_resuming += 1
        self._stop_running(row)
        self._release_when_processed(row)

    def _retire_row(self, row: int) -> None:
        """The row's sequence has ended: results that still arrive for it are dropped."""
        sequence = self._sequence_of_row[row]
        assert sequence is not None
        if sequence.is_resuming:
            sequence.is_resuming = False
            self._num_resuming -= 1
        self.rows.is_wanted[row] = False
        self._stop_running(row)
        if row not in self._releasing:
            self._release_when_processed(row)

    def _stop_running(self, row: int) -> None:
        if self.rows.is_decoding[row]:
            self.rows.is_decoding[row] = False
            self._decode_batch = None
        elif row in self._prefilling:
            self._prefilling.remove(row)

    def _release_when_processed(self, row: int) -> None:
        if self.rows.last_step[row] <= self._processed:
            self._release(row)
        else:
            self._releasing.append(row)

    def _release(self, row: int) -> None:
        sequence = self._sequence_of_row[row]
        assert sequence is not None
        if sequence.is_resuming:
            sequence.is_resuming = False
            self._num_resuming -= 1
            sequence.token_ids = self.rows.token_ids(row)
            self._wait_again(sequence)
        sequence.row = -1
        self._sequence_of_row[row] = None
        self.manager.free(row)
        self.rows.give_back(row)

    def _wait_again(self, sequence: _Sequence) -> None:
        """Back into the queue, before every later arrival."""
        index = 0
        for other in self._waiting:
            if other.arrival > sequence.arrival:
                break
            index += 1
        self._waiting.insert(index, sequence)

    # ── results ──────────────────────────────────────────────────────────────────────────────

    def update(self, result: StepResult) -> StepOutputs:
        """Digest the result of the oldest launched step."""
        launched = self._launched.popleft()
        assert launched.step_id == result.step_id, "results must arrive in the order of launch"
        self._processed = launched.step_id
        self.manager.commit(launched.batch.rows, launched.batch.num_scheduled_tokens)
        rows, token_ids = launched.sampled_rows, result.token_ids
        wanted: BoolArray = self.rows.is_wanted[rows]
        if not wanted.all():
            rows, token_ids = rows[wanted], token_ids[wanted]
        ended = self.rows.receive(rows, token_ids)
        if self.manager.prefix_caching:
            self._publish_generated(rows)
        numbers = self.rows.number[rows]
        finished = tuple([self._finish(row) for row in ended.tolist()])
        self._release_processed(launched)
        return StepOutputs(numbers, token_ids, finished)

    def fail(self, step_id: int, error: str) -> StepOutputs:
        """The oldest launched step failed: its requests end, everything else goes on."""
        launched = self._launched.popleft()
        assert launched.step_id == step_id, "failures must arrive in the order of launch"
        self._processed = launched.step_id
        finished = []
        for row in self._rows_failed_with(launched):
            if self.rows.is_wanted[row]:
                finished.append(self._finish(row, FinishReason.ERROR, error))
        self._release_processed(launched)
        empty = int_array([])
        return StepOutputs(empty.astype(np.int64), empty, tuple(finished))

    def _publish_generated(self, rows: IntArray) -> None:
        """Rows whose computed tokens, all but the last received, fill a block just now."""
        computed = self.rows.num_received[rows] - 1
        for row in rows[computed % self.manager.block_size == 0].tolist():
            count = int(self.rows.num_received[row]) - 1
            self.manager.publish(row, self.rows.first_token_ids(row, count))

    def _rows_failed_with(self, failed: _Launched) -> list[int]:
        """Rows of a failed step, and those that share blocks which it should have filled; what
        these published since is not to be hit either."""
        rows = set(failed.batch.rows.tolist())
        blocks = {block_id for _, block_id in failed.published}
        while True:
            spoiled = {
                row
                for row, sequence in enumerate(self._sequence_of_row)
                if sequence is not None
                and not blocks.isdisjoint(self.manager.block_ids(row).tolist())
            }
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

    def _finish(
        self, row: int, reason: FinishReason | None = None, error: str | None = None
    ) -> Finished:
        sequence = self._sequence_of_row[row]
        assert sequence is not None
        request = sequence.request
        if reason is None:
            is_stop = self.rows.ended_by_stop(row)
            reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
        num_tokens = int(self.rows.num_received[row]) - len(request.prompt_token_ids)
        del self._sequences[request.number]
        self._retire_row(row)
        return Finished(request.number, reason, num_tokens, error, sequence.num_cached_tokens)

    def _release_processed(self, launched: _Launched) -> None:
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
        assert self._num_resuming == sum(
            s.is_resuming for s in self._sequence_of_row if s is not None
        ), "resuming sequences are miscounted"
        arrivals = [sequence.arrival for sequence in self._waiting]
        assert arrivals == sorted(arrivals), "the queue is out of order"
