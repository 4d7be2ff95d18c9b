"""Beam searches through scheduler, manager and toy executor: candidates fork and die, blocks follow
them, and whatever happens beside them or to them, the same beams come out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.plan import CopyBlocks, StepPlan
from octavo.core.request import ContextLengthError, FinishReason, RequestError
from scheduling.harness import Harness, beam_request, moves, request
from scheduling.test_beam_search import plain_search
from toy_executor import expected_tokens, token_logprobs

pytestmark = pytest.mark.usefixtures("translation")

PROMPT = list(range(10))
STOPS = tuple(range(8))


def check(harness: Harness, first: int, expected: list[tuple[list[int], float, float]]) -> None:
    for index, (tokens, total, score) in enumerate(expected):
        beam = harness.beams[first + index]
        assert (beam.token_ids.tolist(), beam.cumulative_logprob, beam.score) == (
            tokens,
            total,
            score,
        )


def num_copies(plan: StepPlan) -> int:
    return sum(len(c.sources) for c in plan.commands if isinstance(c, CopyBlocks))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("length", [1, 3, 4, 10])
def test_the_best_beams_come_out(depth: int, width: int, length: int) -> None:
    harness = Harness(depth=depth, max_num_seqs=6, eager=False)
    harness.add(beam_request(0, PROMPT[:length], 12, width, stops=STOPS))
    harness.run()
    expected = plain_search(PROMPT[:length], width, 12, stops=STOPS)
    check(harness, 0, expected)
    for index, (tokens, _, _) in enumerate(expected):
        is_stop = tokens[-1] in STOPS
        assert harness.finished[index].reason is (
            FinishReason.STOP if is_stop else FinishReason.LENGTH
        )
    assert harness.executor.plans[0].batch.num_tokens == length, "the prompt runs once"
    assert all(len(plan.batch.rows) == width for plan in harness.executor.plans[1:])


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.5, 2.0])
def test_the_parameters_arrive(early_stopping: Any, length_penalty: float) -> None:
    harness = Harness()
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    harness.add(beam_request(0, PROMPT, 12, 3, stops=STOPS, min_tokens=2, **options))
    harness.run()
    check(harness, 0, plain_search(PROMPT, 3, 12, stops=STOPS, min_tokens=2, **options))


def test_n_of_the_beams_are_results() -> None:
    harness = Harness()
    harness.add(beam_request(0, PROMPT, 5, 4, n=2))
    harness.run()
    assert sorted(harness.beams) == sorted(harness.finished) == [0, 1]
    check(harness, 0, plain_search(PROMPT, 4, 5)[:2])


def test_log_probabilities_of_the_chosen_path() -> None:
    harness = Harness()
    harness.add(beam_request(0, PROMPT, 5, 3, logprobs=2))
    harness.run()
    for beam in harness.beams.values():
        assert beam.logprobs is not None
        for index in range(len(beam.token_ids)):
            context = PROMPT + beam.token_ids[:index].tolist()
            logprobs = token_logprobs(context)
            assert beam.logprobs.logprobs[index] == logprobs[beam.token_ids[index]]
            assert beam.logprobs.top_logprobs[index].tolist() == sorted(logprobs)[:-3:-1]


class Scripted(Harness):
    """Beams whose next steps are chosen by the test: ``script[i]`` lists (parent, token) pairs."""

    def __init__(self, script: list[list[tuple[int, int]]], **options: Any) -> None:
        super().__init__(**options)
        width = len(script[0])
        likely = [np.full((1 if i == 0 else width, 97), -50.0) for i in range(len(script))]
        for logprobs, pairs in zip(likely, script, strict=True):
            for place, (parent, token) in enumerate(pairs):
                logprobs[parent, token] = -1 - place / 64
        self.tables: list[list[list[int]]] = []
        self._width = width
        self._likely = iter(likely)

    def script_step(self) -> None:
        """Run a step whose candidates get the next log probabilities."""
        beams = self.scheduler.state.sequences[0].group.beams
        assert beams is not None
        logprobs = next(self._likely).astype(np.float32)
        # Sums start anew, so that only the script decides.
        beams.search.scores = np.zeros_like(beams.search.scores)
        order = np.argsort(-logprobs, axis=1, kind="stable")
        ids = order[:, : 2 * self._width].astype(np.int32)
        values = np.take_along_axis(logprobs, order, 1)[:, : 2 * self._width]
        advance = beams.search.advance
        beams.search.advance = lambda *_: advance(ids, values)  # type: ignore[method-assign]
        self.step()
        if 0 in self.scheduler.state.sequences:
            beams.search.advance = advance  # type: ignore[method-assign]

    def blocks(self) -> list[list[int]]:
        """The candidates' block tables, best first."""
        group = self.scheduler.state.sequences[0].group
        assert group.beams is not None
        rows = [group.sequences[place].row for place in group.beams.places]
        return [self.manager.block_ids(row).tolist() for row in rows]

    def rows(self) -> list[int]:
        group = self.scheduler.state.sequences[0].group
        assert group.beams is not None
        return [group.sequences[place].row for place in group.beams.places]


ALL = [[(0, 20), (0, 21), (0, 22), (0, 23)]]


def keep(count: int, first: int = 30) -> list[list[tuple[int, int]]]:
    return [[(i, first + 4 * step + i) for i in range(4)] for step in range(count)]


def test_two_candidates_die_and_two_fork() -> None:
    """Kwon et al., figure 9: candidates 1 and 2 go on twice each, 0 and 3 die; their blocks are
    free at once, and what the children have in common is shared."""
    harness = Scripted(
        [*ALL, *keep(4), [(1, 60), (1, 61), (2, 62), (2, 63)], *keep(3)], num_blocks=40
    )
    harness.add(beam_request(0, PROMPT[:8], 20, 4))
    for _ in range(5):
        harness.script_step()
    rows, before = harness.rows(), harness.blocks()
    # Eight tokens of the prompt and four of their own, all computed: a block each.
    assert [table[:2] for table in before] == [before[0][:2]] * 4
    assert len({table[2] for table in before}) == 4
    references = harness.manager.pool.references
    assert [references[b] for b in before[0]] == [4, 4, 1]
    free = harness.manager.num_free_blocks
    harness.script_step()
    after = harness.blocks()
    taken = {b for t in after for b in t}
    assert harness.rows()[0] == rows[1], "the first child goes on in its parent's row"
    assert harness.rows()[2] == rows[2]
    assert {harness.rows()[1], harness.rows()[3]} == {rows[0], rows[3]}
    # The step that ran had given each a second block of its own; those of the dead are free.
    assert after[0] == after[1]
    assert after[2] == after[3]
    assert after[0][:3] == before[1]
    assert after[2][:3] == before[2]
    assert not taken & {before[0][2], before[3][2]}
    assert harness.manager.num_free_blocks == free - 4 + 4
    assert [references[b] for b in after[0]] == [4, 4, 2, 2]
    harness.script_step()
    # The half-full blocks: the first writer copies, the second writes in place.
    (copy,) = moves(harness.executor.plans[-1])
    assert isinstance(copy, CopyBlocks)
    assert sorted(copy.sources.tolist()) == sorted([after[0][3], after[2][3]])
    assert len({table[3] for table in harness.blocks()}) == 4
    harness.run()


def test_two_samples_share_a_half_full_block() -> None:
    """Kwon et al., figure 8: the first write copies, the second writes in place."""
    harness = Harness()
    harness.add(request(0, PROMPT[:7], 4, n=2))
    harness.step()
    rows = [harness.scheduler.state.sequences[i].row for i in range(2)]
    tables = [harness.manager.block_ids(row).tolist() for row in rows]
    assert tables[0] == tables[1]
    assert [harness.manager.pool.references[b] for b in tables[0]] == [2, 2]
    harness.step()
    (copy,) = moves(harness.executor.plans[-1])
    assert isinstance(copy, CopyBlocks)
    assert copy.sources.tolist() == [tables[0][1]]
    tables = [harness.manager.block_ids(row).tolist() for row in rows]
    assert tables[0][0] == tables[1][0]
    assert {tables[0][1], tables[1][1]} == {copy.sources[0], copy.destinations[0]}
    assert [harness.manager.pool.references[b] for b in tables[0]] == [2, 1]
    harness.run()


def test_blocks_move_only_where_a_candidate_dies() -> None:
    harness = Scripted([*ALL, *keep(6)], num_blocks=40)
    harness.add(beam_request(0, PROMPT, 20, 4))
    for _ in range(7):
        harness.script_step()
    for plan in harness.executor.plans[2:]:
        assert plan.row_forks.rows.tolist() == plan.row_forks.parents.tolist()
        assert not plan.row_inits
    # The prompt's half-full block, copied by three of four.
    assert [num_copies(plan) for plan in harness.executor.plans] == [0, 3, 0, 0, 0, 0, 0]
    harness.scheduler.abort(0)
    for number in range(1, 4):
        harness.scheduler.abort(number)
    harness.run()


@given(
    length=st.integers(1, 9),
    width=st.integers(2, 6),
    block_size=st.integers(1, 5),
    depth=st.sampled_from([1, 2]),
)
def test_at_most_a_block_is_copied_for_each_candidate_and_step(
    length: int, width: int, block_size: int, depth: int
) -> None:
    harness = Harness(num_blocks=120, block_size=block_size, max_num_seqs=6, depth=depth)
    harness.add(beam_request(0, PROMPT[:length], 14, width, stops=STOPS))
    harness.run()
    check(harness, 0, plain_search(PROMPT[:length], width, 14, stops=STOPS))
    for plan in harness.executor.plans:
        assert num_copies(plan) <= width
        if block_size == 1:
            assert not num_copies(plan), "full blocks are never written"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_group_waits_for_its_result_and_others_do_not(depth: int) -> None:
    harness = Harness(depth=depth, max_num_seqs=6)
    harness.add(beam_request(0, PROMPT, 12, 3), request(10, PROMPT, 20, seed=3))
    harness.run()
    check(harness, 0, plain_search(PROMPT, 3, 12))
    assert harness.tokens[10] == expected_tokens(PROMPT, 20, 3)
    sizes = [len(plan.batch.rows) for plan in harness.executor.plans[1:12]]
    assert sizes == ([4] * 11 if depth == 1 else [1, 4] * 5 + [1])


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("budget", [64, 7])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_beams_are_the_same(
    depth: int, caching: bool, budget: int, preemption: str
) -> None:
    harness = Harness(
        num_blocks=20,
        max_num_seqs=7,
        depth=depth,
        prefix_caching=caching,
        max_num_batched_tokens=budget,
        num_host_blocks=60,
        preemption=preemption,
        eager=False,
    )
    for first in (0, 10, 20):
        harness.add(beam_request(first, [first, *PROMPT], 17, 3, stops=STOPS[:2]))
        harness.add(request(first + 5, [first, *PROMPT], 17, seed=first))
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    if preemption == "swap" and budget == 64:
        assert harness.scheduler.num_swaps > 0
    for first in (0, 10, 20):
        check(harness, first, plain_search([first, *PROMPT], 3, 17, stops=STOPS[:2]))
        assert harness.tokens[first + 5] == expected_tokens([first, *PROMPT], 17, first)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("sharing", [True, False])
def test_a_resumed_group_makes_progress_before_it_is_preempted_again(
    monkeypatch: pytest.MonkeyPatch, depth: int, preemption: str, sharing: bool
) -> None:
    """Greedy rows, samples and beams on a pool that hardly holds one of them: no ping-pong."""
    harness = Harness(
        num_blocks=17 if sharing else 24,
        max_num_seqs=9,
        depth=depth,
        num_host_blocks=60,
        preemption=preemption,
        sharing=sharing,
        eager=False,
    )
    state = harness.scheduler.state
    lengths: dict[int, list[int]] = {}
    preempt = state.preempt

    def noting(group: Any) -> None:
        rows = state.rows.num_tokens[group.rows]
        lengths.setdefault(group.request.number, []).append(int(rows.sum()))
        preempt(group)

    monkeypatch.setattr(state, "preempt", noting)
    for first in range(0, 90, 10):
        prompt = [first, *PROMPT[:6]]
        if first % 30 == 0:
            harness.add(beam_request(first, prompt, 16, 3))
        else:
            harness.add(request(first, prompt, 16, seed=first, n=1 + first % 30 // 20))
    harness.run(max_steps=600)
    assert harness.scheduler.num_preemptions >= 5
    for found in lengths.values():
        assert found == sorted(set(found)), "preempted twice at one length"
    for first in range(0, 90, 10):
        prompt = [first, *PROMPT[:6]]
        if first % 30 == 0:
            check(harness, first, plain_search(prompt, 3, 16))
        else:
            for index in range(1 + first % 30 // 20):
                assert harness.tokens[first + index] == expected_tokens(prompt, 16, first + index)


def test_resumed_beams_share_what_they_have_in_common() -> None:
    """Blocks in use after the recomputation are not more than before it, by a block a beam."""
    harness = Harness(num_blocks=60, max_num_seqs=5)
    harness.add(beam_request(0, PROMPT, 30, 4))
    for _ in range(20):
        harness.step()
    used = harness.manager.num_usable_blocks - harness.manager.num_free_blocks
    harness.scheduler.state.preempt(harness.scheduler.state.latest_group())
    assert harness.manager.num_free_blocks == harness.manager.num_usable_blocks
    harness.step()
    again = harness.manager.num_usable_blocks - harness.manager.num_free_blocks
    assert again <= used + 4
    harness.run()
    check(harness, 0, plain_search(PROMPT, 4, 30))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_an_aborted_search_is_gone_at_once(depth: int, num_steps: int) -> None:
    harness = Harness(depth=depth, max_num_batched_tokens=4)
    harness.add(beam_request(0, PROMPT, 12, 3, n=2))
    for _ in range(num_steps):
        harness.step()
    assert not harness.scheduler.abort(2), "not a result"
    assert harness.scheduler.abort(0)
    assert not harness.scheduler.abort(0)
    harness.step()
    assert harness.scheduler.num_running == 3
    assert harness.scheduler.abort(1)
    harness.scheduler.check()
    assert not harness.scheduler.num_running
    harness.run(max_steps=2)
    assert not harness.beams


def test_the_other_results_of_a_search_go_on() -> None:
    harness = Harness()
    harness.add(beam_request(0, PROMPT, 6, 3))
    harness.step()
    assert harness.scheduler.abort(1)
    harness.run()
    assert sorted(harness.finished) == sorted(harness.beams) == [0, 2]
    expected = plain_search(PROMPT, 3, 6)
    assert [harness.tokens[i] for i in (0, 2)] == [expected[i][0] for i in (0, 2)]


@pytest.mark.parametrize("failing", range(1, 9))
@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_step_fails_the_search(failing: int, depth: int) -> None:
    harness = Harness(depth=depth, max_num_batched_tokens=4, max_num_seqs=4)
    harness.executor.fail_steps = {failing}
    harness.add(beam_request(0, PROMPT, 8, 3, n=2), request(10, [1], 6))
    harness.run()
    reasons = {harness.finished[i].reason for i in range(2)}
    assert reasons in ({FinishReason.ERROR}, {FinishReason.LENGTH})
    if reasons == {FinishReason.LENGTH}:
        check(harness, 0, plain_search(PROMPT, 3, 8)[:2])


def test_what_can_never_fit_counts_the_beams() -> None:
    harness = Harness(num_blocks=8, max_num_seqs=3)
    harness.add(beam_request(0, PROMPT, 3, 3))
    with pytest.raises(ContextLengthError, match="8 blocks"):
        harness.add(beam_request(10, PROMPT, 7, 3))
    with pytest.raises(RequestError, match="beam_width is 4, but only 3"):
        harness.add(beam_request(20, [1], 2, 4))
    harness.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_prompt_of_a_search_is_cached(depth: int) -> None:
    harness = Harness(depth=depth, prefix_caching=True)
    harness.add(beam_request(0, PROMPT, 6, 3))
    harness.run()
    harness.add(beam_request(10, PROMPT, 6, 3))
    harness.run()
    assert harness.finished[10].num_cached_tokens == 8
    check(harness, 10, plain_search(PROMPT, 3, 6))
