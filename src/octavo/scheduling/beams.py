"""Beam searches on rows: results go to the search, and rows and blocks follow its candidates.

A beam waits for the result of its step before it runs again: the host chooses its next token. The
first child of a candidate goes on in its parent's row; only where a candidate dies and another
forks do blocks change hands. Decides nothing about tokens (`beam_search`).
"""

from __future__ import annotations

import numpy as np

from octavo.core.plan import BoolArray, IntArray, RowForks, RowInit, StepLogprobs, int_array
from octavo.core.request import BeamResult, Finished, FinishReason
from octavo.scheduling.beam_search import Survivors
from octavo.scheduling.groups import Group, Sequence
from octavo.scheduling.state import SchedulerState

Ended = tuple[list[Finished], list[BeamResult]]


class BeamDigest:
    """Takes the results of beams' rows into a `SchedulerState`."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state

    def update(
        self, sampled_rows: IntArray, is_beam: BoolArray, logprobs: StepLogprobs | None
    ) -> Ended:
        """Digest a step that ``is_beam`` of the rows took part in; blocks of candidates that die
        are free at once, since no launched step names them."""
        assert logprobs is not None, "beams need log probabilities"
        indices = np.flatnonzero(is_beam)
        places = np.searchsorted(logprobs.places, indices)
        scores = logprobs.scores
        ready: list[Group] = []
        for row, place in zip(sampled_rows[indices].tolist(), places.tolist(), strict=True):
            sequence = self.state.sequence_of_row[row]
            assert sequence is not None
            group = sequence.group
            # What arrives for a preempted group is computed again.
            if group.beams is None or not self.state.rows.is_wanted[row] or group.is_resuming:
                continue
            count = scores.num_top[place]
            group.beams.arrived[sequence.index] = (
                scores.top_ids[place, :count],
                scores.top_logprobs[place, :count],
            )
            if len(group.beams.arrived) == group.beams.search.num_candidates:
                ready.append(group)
        finished: list[Finished] = []
        results: list[BeamResult] = []
        for group in ready:
            if not self._advance(group):
                ends, found = self._end(group)
                finished += ends
                results += found
        return finished, results

    def _advance(self, group: Group) -> bool:
        """Whether the search goes on."""
        beams = group.beams
        assert beams is not None
        tops = [beams.arrived[index] for index in beams.places]
        beams.arrived.clear()
        survivors = beams.search.advance(
            np.stack([ids for ids, _ in tops]), np.stack([values for _, values in tops])
        )
        if survivors is None:
            return False
        self._move(group, survivors)
        return True

    def _move(self, group: Group, survivors: Survivors) -> None:
        """Give every survivor a row with its parent's blocks."""
        beams, state = group.beams, self.state
        assert beams is not None
        if not group.is_fanned_out:
            group.is_fanned_out = True
            state.joining += group.sequences[1:]
        parents = [beams.places[rank] for rank in survivors.parents.tolist()]
        kept = set(parents)
        dead = [index for index in range(len(group.sequences)) if index not in kept]
        for index in dead:
            state.manager.free(group.sequences[index].row)
        vacant = iter(dead)
        beams.places = []
        for parent, token_id in zip(parents, survivors.token_ids.tolist(), strict=True):
            if parent in kept:
                kept.discard(parent)
                place = parent
            else:
                place = next(vacant)
            beams.places.append(place)
            row, parent_row = group.sequences[place].row, group.sequences[parent].row
            if row != parent_row:
                num_computed = int(state.rows.num_computed[parent_row])
                state.manager.fork(parent_row, row, num_computed)
                state.rows.num_computed[row] = num_computed
            state.continuing[row] = (parent_row, token_id)
        rows = group.rows
        state.awaiting.difference_update(rows)
        state.rows.num_tokens[rows] = state.rows.num_computed[rows] + 1
        state.rows.is_decoding[rows] = True
        state.decode_batch = None

    def fail(self, group: Group, error: str) -> list[Finished]:
        """The group ends without results."""
        beams, request = group.beams, group.request
        assert beams is not None
        wanted = [index for index in range(request.n) if index not in beams.unwanted]
        self.state.forget_group(group)
        return [Finished(request.number + i, FinishReason.ERROR, 0, error) for i in wanted]

    def _end(self, group: Group) -> Ended:
        beams, request = group.beams, group.request
        assert beams is not None
        finished, results = [], []
        for index, found in enumerate(beams.search.finished[: request.n]):
            if index in beams.unwanted:
                continue
            number, token_ids = request.number + index, found.token_ids()
            reason = FinishReason.STOP if found.is_stopped else FinishReason.LENGTH
            cached = group.num_cached_tokens
            finished.append(Finished(number, reason, len(token_ids), None, cached))
            results.append(
                BeamResult(number, token_ids, found.score, found.total, found.logprobs())
            )
        self.state.forget_group(group)
        return finished, results


def take_row_changes(state: SchedulerState) -> tuple[list[RowInit], RowForks]:
    """What the executor must be told of beams before their next step, once: rows that are new to
    it, and where the others go on."""
    inits = [_joining_init(state, sequence) for sequence in state.joining]
    for sequence in state.joining:
        del state.continuing[sequence.row]
    state.joining.clear()
    pairs = [(row, parent, token) for row, (parent, token) in state.continuing.items()]
    state.continuing.clear()
    rows, parents, token_ids = int_array(pairs).reshape(-1, 3).T
    return inits, RowForks(rows, parents, token_ids)


def _joining_init(state: SchedulerState, sequence: Sequence) -> RowInit:
    sequence.token_ids = state.known_token_ids(sequence)
    num_computed = int(state.rows.num_computed[sequence.row])
    return sequence.row_init(num_computed, state.manager.block_ids(sequence.row))
