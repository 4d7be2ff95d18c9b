"""Digests the results of launched steps: tokens, ends, failures, arrivals of swapped blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from octavo.core.plan import (
    NO_TOKEN,
    BoolArray,
    IntArray,
    StepResult,
    SwapIn,
    SwapOut,
    int_array,
)
from octavo.core.request import BeamResult, Finished, FinishReason, StepOutputs
from octavo.scheduling.beams import BeamDigest
from octavo.scheduling.groups import Launched
from octavo.scheduling.prefixes import PrefixRegistry
from octavo.scheduling.resizing import PoolResizing
from octavo.scheduling.state import SchedulerState

_NOT_FINITE = (
    "the logits of the sequence are not finite (NaN or infinity): the weights are damaged, or a "
    "value left the range of the dtype"
)


class ResultDigest:
    """Takes results in the order of launch into a `SchedulerState`."""

    def __init__(
        self, state: SchedulerState, prefixes: PrefixRegistry, resizing: PoolResizing
    ) -> None:
        self.state = state
        self._resizing = resizing
        self._beams = BeamDigest(state)
        self._prefixes = prefixes

    def update(self, result: StepResult) -> StepOutputs:
        """Digest the result of the oldest launched step."""
        launched = self.state.launched.popleft()
        assert launched.step_id == result.step_id, "results must arrive in the order of launch"
        self.state.processed = launched.step_id
        # First: beams that die may give back what the step copied from.
        self.state.manager.retire(launched.commands)
        self.state.manager.commit(launched.batch.rows, launched.batch.num_scheduled_tokens)
        for parent, child in launched.forks:
            self.state.manager.follow(parent, child)
        for transfer in result.finished_transfers:
            self.state.arrive(transfer)
        rows, token_ids, logprobs = launched.sampled_rows, result.token_ids, result.logprobs
        failed: list[Finished] = []
        if not result.is_finite:
            bad = set(rows[token_ids == NO_TOKEN].tolist())
            failed = self._end_failed(launched, bad, _NOT_FINITE)
        prompts = tuple(
            replace(prompt, owner=int(self.state.rows.number[prompt.owner]))
            for prompt in result.prompt_logprobs
            if self.state.rows.is_wanted[prompt.owner]
        )
        wanted: BoolArray = self.state.rows.is_wanted[rows]
        beam_ends: list[Finished] = []
        beams: list[BeamResult] = []
        if self.state.rows.num_beams and (is_beam := self.state.rows.is_beam[rows]).any():
            is_beam &= wanted
            wanted &= ~is_beam
            beam_ends, beams = self._beams.update(rows, is_beam, logprobs)
        if not wanted.all():
            rows, token_ids = rows[wanted], token_ids[wanted]
            logprobs = logprobs and logprobs.only(wanted)
        ended = self.state.rows.receive(rows, token_ids)
        if self.state.manager.prefix_caching:
            self._publish_generated(rows)
        numbers = self.state.rows.number[rows]
        finished = (*failed, *[self._finish(row) for row in ended.tolist()], *beam_ends)
        # Before anybody can take the blocks of a request that has just ended.
        pinned = self._prefixes.settle(finished)
        self.state.release_processed()
        if result.resized is not None:
            self._resizing.digest(launched.commands, result.resized)
        return StepOutputs(numbers, token_ids, finished, logprobs, prompts, tuple(beams), pinned)

    def fail(self, step_id: int, error: str) -> StepOutputs:
        """The oldest launched step failed: its requests end, everything else goes on."""
        launched = self.state.launched.popleft()
        assert launched.step_id == step_id, "failures must arrive in the order of launch"
        self.state.processed = launched.step_id
        self.state.manager.retire(launched.commands)
        finished = self._end_failed(launched, set(launched.rows()), error)
        self._give_up_transfers(launched)
        pinned = self._prefixes.settle(finished)
        self.state.release_processed()
        self._resizing.fail(launched.commands, error)
        empty = int_array([])
        return StepOutputs(empty.astype(np.int64), empty, tuple(finished), prefixes=pinned)

    def _end_failed(self, launched: Launched, rows: set[int], error: str) -> list[Finished]:
        """End the requests of ``rows``, for which a launched step has failed."""
        spoiled = self._rows_failed_with(launched, rows)
        failed = [row for row in spoiled if self.state.rows.is_wanted[row]]
        for row in failed:
            sequence = self.state.sequence_of_row[row]
            assert sequence is not None
            sequence.group.is_ending = True
        finished = []
        for row in failed:
            sequence = self.state.sequence_of_row[row]
            # Beams end together, with the first of their rows.
            if sequence is None or not self.state.rows.is_wanted[row]:
                continue
            if sequence.group.beams is not None:
                finished += self._beams.fail(sequence.group, error)
            else:
                finished.append(self._finish(row, FinishReason.ERROR, error))
        return finished

    def _publish_generated(self, rows: IntArray) -> None:
        """Rows whose computed tokens, all but the last received, fill a block just now."""
        computed = self.state.rows.num_received[rows] - 1
        for row in rows[computed % self.state.manager.block_size == 0].tolist():
            count = int(self.state.rows.num_received[row]) - 1
            self.state.manager.publish(row, self.state.rows.first_token_ids(row, count))

    def _rows_failed_with(self, launched: Launched, failed: set[int]) -> list[int]:
        """Rows for which a step has failed, and those that share blocks which it should have
        filled; what these published since is not to be hit either."""
        rows = self._with_their_groups(failed)
        blocks = {block_id for row, block_id in launched.published if row in rows}
        while True:
            sharing = {
                row
                for row, sequence in enumerate(self.state.sequence_of_row)
                if sequence is not None
                and not blocks.isdisjoint(self.state.manager.block_ids(row).tolist())
            }
            spoiled = self._with_their_groups(sharing)
            later = {
                block_id
                for launched in self.state.launched
                for row, block_id in launched.published
                if row in rows | spoiled
            }
            if spoiled <= rows and later <= blocks:
                break
            rows |= spoiled
            blocks |= later
        self.state.manager.unpublish(blocks)
        return sorted(rows)

    def _give_up_transfers(self, failed: Launched) -> None:
        """Swaps of a failed step may not have happened: their groups are recomputed."""
        for command in failed.commands:
            if isinstance(command, SwapIn):
                group, tables = self.state.arriving.pop(command.transfer_id)
                self.state.manager.drop_swapped(tables)
                group.is_arriving = False
                if group.sequences:
                    self.state.preempt(group)
            elif isinstance(command, SwapOut):
                for row in list(self.state.releasing):
                    sequence = self.state.sequence_of_row[row]
                    assert sequence is not None
                    group = sequence.group
                    if group.swapped and self.state.rows.last_step[row] == failed.step_id:
                        self.state.manager.drop_swapped(group.swapped.values())
                        group.swapped = None

    def _with_their_groups(self, rows: set[int]) -> set[int]:
        """The rows, and those of the other sequences of their requests."""
        found = set(rows)
        for row in rows:
            sequence = self.state.sequence_of_row[row]
            if sequence is not None:
                found.update(sequence.group.rows)
        return found

    def _finish(
        self, row: int, reason: FinishReason | None = None, error: str | None = None
    ) -> Finished:
        sequence = self.state.sequence_of_row[row]
        assert sequence is not None
        group = sequence.group
        if reason is None:
            is_stop = self.state.rows.ended_by_stop(row)
            reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
        num_tokens = int(self.state.rows.num_received[row]) - len(group.request.prompt_token_ids)
        self.state.forget(sequence)
        return Finished(sequence.number, reason, num_tokens, error, group.num_cached_tokens)
