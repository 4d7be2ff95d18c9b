from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.plan import NO_TOKEN, StepResult
from octavo.core.request import ContextLengthError, FinishReason, QueueFullError
from octavo.memory.paged import PagedManager
from octavo.scheduling.scheduler import SchedulerConfig
from scheduling.harness import Harness, request
from toy_executor import expected_tokens

pytestmark = pytest.mark.usefixtures("translation")

PROMPTS = [list(range(3)), list(range(17)), [5] * 9, list(range(40, 70))]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(("budget", "num_blocks"), [(64, 65), (7, 65), (4, 65), (64, 14), (7, 14)])
def test_tokens_do_not_depend_on_scheduling(
    depth: int, caching: bool, budget: int, num_blocks: int
) -> None:
    harness = Harness(
        depth=depth,
        max_num_batched_tokens=budget,
        num_blocks=num_blocks,
        eager=False,
        prefix_caching=caching,
    )
    harness.add(*(request(i, p, 20, seed=i) for i, p in enumerate(PROMPTS)))
    harness.run()
    for number, prompt in enumerate(PROMPTS):
        assert harness.tokens[number] == expected_tokens(prompt, 20, seed=number)
        assert harness.finished[number].reason is FinishReason.LENGTH
    assert (harness.scheduler.num_preemptions > 0) == (num_blocks == 14)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_token_ends_a_sequence_and_the_overrun_is_dropped(depth: int) -> None:
    full = expected_tokens([1, 2], 30)
    stop = full[11]
    harness = Harness(depth=depth)
    harness.add(request(0, [1, 2], 30, stops=(stop,)), request(1, [1, 2], 30))
    harness.run()
    assert harness.tokens[0] == full[: full.index(stop) + 1]
    assert harness.finished[0].reason is FinishReason.STOP
    assert harness.tokens[1] == full


def test_a_length_stop_costs_no_extra_step() -> None:
    harness = Harness(depth=2)
    harness.add(request(0, [1, 2], 5))
    harness.run()
    assert len(harness.executor.plans) == 5


def test_a_prompt_is_computed_in_chunks_beside_decoding_rows() -> None:
    harness = Harness(max_num_batched_tokens=8)
    harness.add(request(0, [1, 2], 10))
    harness.step()
    harness.add(request(1, list(range(20)), 2))
    for _ in range(3):
        harness.step()
    counts = [p.batch.num_scheduled_tokens.tolist() for p in harness.executor.plans]
    assert counts == [[2], [1, 7], [1, 7], [1, 6]]
    samples = [p.batch.samples.tolist() for p in harness.executor.plans]
    assert samples == [[True], [True, False], [True, False], [True, True]]


def test_first_come_first_served() -> None:
    harness = Harness(max_num_seqs=2)
    harness.add(*(request(i, [i] * 3, 4) for i in range(5)))
    ended = []
    while harness.core.has_work:
        before = set(harness.finished)
        harness.step()
        if set(harness.finished) != before:
            ended.append(set(harness.finished) - before)
    assert ended == [{0, 1}, {2, 3}, {4}]


def test_the_latest_arrival_is_preempted_and_resumes_before_later_ones() -> None:
    harness = Harness(num_blocks=9, max_num_seqs=3)
    harness.add(request(0, [1] * 8, 16), request(1, [2] * 8, 16), request(2, [3] * 8, 8))
    harness.run()
    order = list(harness.finished)
    assert harness.scheduler.num_preemptions >= 1
    assert order == [0, 1, 2]
    inits = [init for plan in harness.executor.plans for init in plan.row_inits]
    resumed = [init for init in inits if len(init.token_ids) > 8]
    assert resumed, "recomputation runs prompt and generated tokens as one prefill"


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    harness = Harness(num_blocks=5)
    harness.add(request(0, [1] * 10, 7))
    with pytest.raises(ContextLengthError, match="18 tokens"):
        harness.add(request(1, [1] * 10, 8))
    harness.run()
    assert len(harness.tokens[0]) == 7


def test_the_queue_has_a_limit() -> None:
    harness = Harness(max_queued_requests=2)
    harness.add(request(0, [1], 2), request(1, [1], 2))
    with pytest.raises(QueueFullError, match="try again later"):
        harness.scheduler.add(request(2, [1], 2))
    harness.run()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_an_aborted_requests_blocks_are_free_within_two_steps(depth: int, num_steps: int) -> None:
    harness = Harness(depth=depth, max_num_batched_tokens=8)
    harness.add(request(0, [1, 2], 40), request(1, list(range(30)), 40))
    for _ in range(num_steps):
        harness.step()
    assert harness.scheduler.abort(1)
    assert not harness.scheduler.abort(1)
    for _ in range(2):
        harness.step()
    usage = harness.scheduler.usage()
    assert usage.free >= usage.capacity - 3 * 4, "request 0 holds at most three blocks"
    received = len(harness.tokens[1])
    harness.run()
    assert len(harness.tokens[1]) == received
    assert harness.tokens[0] == expected_tokens([1, 2], 40)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_step_fails_its_requests_and_nothing_else(depth: int) -> None:
    harness = Harness(depth=depth, max_num_seqs=2)
    harness.executor.fail_steps = {4}
    harness.add(*(request(i, [i + 1] * 3, 10) for i in range(3)))
    harness.run()
    for number in (0, 1):
        assert harness.finished[number].reason is FinishReason.ERROR
        assert "step 4" in (harness.finished[number].error or "")
    assert harness.tokens[2] == expected_tokens([3] * 3, 10)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("step", [1, 4])
def test_a_row_without_a_token_ends_alone(depth: int, step: int) -> None:
    """Prompts of a block and more: what the row has published must not be hit."""
    harness = Harness(depth=depth, prefix_caching=True)
    collect = harness.executor.collect

    def spoiled() -> StepResult:
        result = collect()
        if result.step_id == step:
            result.token_ids[1] = NO_TOKEN
        return result

    harness.executor.collect = spoiled  # type: ignore[method-assign]
    prompts = [[i + 1] * 9 for i in range(3)]
    harness.add(*(request(i, prompt, 10) for i, prompt in enumerate(prompts)))
    harness.run()
    assert harness.finished[1].reason is FinishReason.ERROR
    assert "not finite" in (harness.finished[1].error or "")
    for number in (0, 2):
        assert harness.tokens[number] == expected_tokens(prompts[number], 10)
    harness.add(request(3, prompts[1], 10))
    harness.run()
    assert harness.tokens[3] == expected_tokens(prompts[1], 10)


def test_steady_decode_is_planned_by_what_changed() -> None:
    """Between block boundaries the batch is the very same object and the manager is not asked."""

    class Counting(PagedManager):
        calls = 0

        def grow(self, row: int, num_tokens: int, *, reserve: int = 0) -> bool:
            Counting.calls += 1
            return super().grow(row, num_tokens, reserve=reserve)

    harness = Harness(
        num_blocks=200, block_size=16, max_num_seqs=8, max_num_batched_tokens=128, kv="paged"
    )
    harness.scheduler.state.manager = Counting(200, 16, 8)
    for i in range(8):
        harness.scheduler.add(request(i, [1] * 16, 33))
    for _ in range(32):
        harness.core.step()
    plans = harness.executor.plans[1:]
    assert Counting.calls == 16, "8 rows crossed two boundaries in 31 steps"
    assert all(p.batch is plans[0].batch for p in plans)
    assert sum(bool(len(p.table_deltas)) for p in plans) == 2
    assert not any(p.row_inits for p in plans)


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_share_a_prefix_in_the_very_step_that_computes_it(depth: int) -> None:
    harness = Harness(depth=depth, prefix_caching=True)
    prompt = list(range(18))
    harness.add(*(request(i, [*prompt, i], 5, seed=i) for i in range(3)))
    harness.run()
    first = harness.executor.plans[0]
    assert first.batch.num_scheduled_tokens.tolist() == [19, 3, 3]
    assert [init.num_computed_tokens for init in first.row_inits] == [0, 16, 16]
    assert [harness.finished[i].num_cached_tokens for i in range(3)] == [0, 16, 16]
    for i in range(3):
        assert harness.tokens[i] == expected_tokens([*prompt, i], 5, seed=i)


def test_a_follow_up_hits_the_answer_too() -> None:
    harness = Harness(prefix_caching=True)
    harness.add(request(0, list(range(10)), 10))
    harness.run()
    follow_up = [*range(10), *harness.tokens[0], 1, 2]
    harness.add(request(1, follow_up, 4))
    harness.run()
    assert harness.finished[1].num_cached_tokens == 16, "19 tokens are computed: four full blocks"
    assert harness.tokens[1] == expected_tokens(follow_up, 4)
    assert harness.scheduler.usage().cached > 0
    harness.scheduler.reset_prefix_cache()
    assert harness.scheduler.usage().cached == 0


def test_tenants_do_not_share() -> None:
    harness = Harness(prefix_caching=True)
    prompt = list(range(18))
    for number, salt in enumerate((b"a", b"b", b"a")):
        harness.add(request(number, prompt, 2, salt=salt))
        harness.run()
    assert [harness.finished[i].num_cached_tokens for i in range(3)] == [0, 0, 16]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_sequence_finds_its_blocks_again(depth: int) -> None:
    harness = Harness(num_blocks=14, depth=depth, prefix_caching=True, max_num_seqs=3)
    harness.add(*(request(i, [i] * 9, 20, seed=i) for i in range(3)))
    harness.run()
    assert harness.scheduler.num_preemptions
    resumed = [
        init
        for plan in harness.executor.plans
        for init in plan.row_inits
        if len(init.token_ids) > 9 and init.num_computed_tokens
    ]
    assert resumed, "recomputation starts from what is still cached"
    for i in range(3):
        assert harness.tokens[i] == expected_tokens([i] * 9, 20, seed=i)
        assert harness.finished[i].num_cached_tokens == 0, "its own blocks are no prefix hit"


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_failed_step_takes_those_with_it_that_hit_its_blocks(failing: int) -> None:
    """At depth 2, step N+1 is planned on what step N was to compute."""
    harness = Harness(depth=2, prefix_caching=True, max_num_batched_tokens=12)
    harness.executor.fail_steps = {failing}
    prompt = list(range(30))
    harness.add(request(0, prompt, 3), request(1, [*prompt[:20], 5, 6], 3))
    harness.run()
    for number, own in ((0, prompt), (1, [*prompt[:20], 5, 6])):
        if harness.finished[number].reason is not FinishReason.ERROR:
            assert harness.tokens[number] == expected_tokens(own, 3)
    harness.add(request(2, prompt, 3))
    harness.run()
    assert harness.tokens[2] == expected_tokens(prompt, 3), "nothing wrong stayed in the cache"


def test_the_budget_holds_every_running_sequence() -> None:
    with pytest.raises(ValueError, match="at least max_num_seqs"):
        SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=7, max_model_len=64, max_queued_requests=1
        )


def _prompts_apart(number: int, length: int) -> list[int]:
    return np.random.default_rng(number).integers(0, 97, length).tolist()


def _prompts_alike(number: int, length: int) -> list[int]:
    return [*range(length - 1), number % 3]


request_shapes = st.tuples(st.integers(1, 30), st.integers(1, 25), st.booleans())


@given(
    shapes=st.lists(request_shapes, min_size=1, max_size=9),
    num_blocks=st.integers(15, 40),
    budget=st.integers(3, 40),
    depth=st.sampled_from([1, 2]),
    data=st.data(),
)
def test_any_mix_of_requests_ends_with_the_right_tokens(
    shapes: list[tuple[int, int, bool]],
    num_blocks: int,
    budget: int,
    depth: int,
    data: st.DataObject,
) -> None:
    # Prompts are random, or begin alike so that prefixes are hit.
    alike = data.draw(st.booleans())
    prompt_of = _prompts_alike if alike else _prompts_apart
    harness = Harness(
        prefix_caching=alike,
        num_blocks=num_blocks,
        max_num_seqs=3,
        max_num_batched_tokens=budget,
        depth=depth,
        eager=data.draw(st.booleans()),
    )
    aborted = set()
    for number, (length, max_tokens, stops) in enumerate(shapes):
        prompt = prompt_of(number, length)
        harness.add(
            request(number, prompt, max_tokens, seed=number, stops=(3, 50) if stops else ())
        )
        for _ in range(data.draw(st.integers(0, 4))):
            harness.step()
        if data.draw(st.integers(0, 5)) == 0:
            victim = data.draw(st.integers(0, number))
            if harness.scheduler.abort(victim):
                aborted.add(victim)
            harness.scheduler.check()
    harness.run()
    for number, (length, max_tokens, stops) in enumerate(shapes):
        prompt = prompt_of(number, length)
        expected = expected_tokens(prompt, max_tokens, number, (3, 50) if stops else ())
        if number in aborted:
            assert harness.tokens[number] == expected[: len(harness.tokens[number])]
        else:
            assert harness.tokens[number] == expected
