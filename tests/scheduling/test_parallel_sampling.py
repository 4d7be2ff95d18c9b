"""Several samples of one request: one prefill, shared blocks, copies only where they write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.plan import CopyBlocks
from octavo.core.request import ContextLengthError, FinishReason, RequestError
from scheduling.harness import Harness, moves, request
from toy_executor import expected_tokens

pytestmark = pytest.mark.usefixtures("translation")

STORY = list(range(12))
PROMPT = STORY[:10]


def check(harness: Harness, first: int, n: int, prompt: list[int], count: int, seed: int) -> None:
    for index in range(n):
        expected = expected_tokens(prompt, count, seed + index)
        assert harness.tokens[first + index] == expected
        assert harness.finished[first + index].reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("length", [1, 4, 10, 12])
def test_the_prompt_runs_once(depth: int, caching: bool, length: int) -> None:
    harness = Harness(depth=depth, prefix_caching=caching, eager=False)
    harness.add(request(0, STORY[:length], 9, seed=5, n=3))
    harness.run()
    check(harness, 0, 3, STORY[:length], 9, seed=5)
    plans = harness.executor.plans
    assert [p.batch.num_tokens for p in plans] == [length] + [3] * 8
    assert [len(f.destination_rows) for f in plans[0].fan_outs] == [2]
    assert not any(p.fan_outs for p in plans[1:])


def test_the_half_full_block_is_copied_by_all_writers_but_the_last() -> None:
    harness = Harness()
    harness.add(request(0, PROMPT, 9, n=3))
    harness.step()
    usage = harness.scheduler.usage()
    assert usage.capacity - usage.free == 3 * 4, "three samples on the prompt's three blocks"
    assert usage.live == 10
    harness.step()
    (copy,) = moves(harness.executor.plans[1])
    assert isinstance(copy, CopyBlocks)
    assert len(copy.sources) == 2
    assert len(set(copy.sources.tolist())) == 1
    usage = harness.scheduler.usage()
    assert usage.capacity - usage.free == 5 * 4, "two full blocks shared, three tails"
    harness.run()


def test_a_full_prompt_block_is_never_copied() -> None:
    harness = Harness()
    harness.add(request(0, PROMPT[:8], 9, n=3))
    harness.run()
    assert not any(moves(p) for p in harness.executor.plans)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("budget", [64, 7])
def test_groups_are_preempted_and_resumed_whole(depth: int, caching: bool, budget: int) -> None:
    harness = Harness(
        num_blocks=17,
        max_num_seqs=6,
        depth=depth,
        prefix_caching=caching,
        max_num_batched_tokens=budget,
        eager=False,
    )
    for first in (0, 10, 20):
        harness.add(request(first, [first, *PROMPT], 17, seed=first, n=2))
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    for first in (0, 10, 20):
        check(harness, first, 2, [first, *PROMPT], 17, seed=first)


def test_a_resumed_group_shares_its_prompt_again() -> None:
    """Without sharing the group would not fit in the pool a second time."""
    harness = Harness(num_blocks=14, max_num_seqs=4, max_model_len=64)
    prompt = list(range(24))
    harness.add(request(0, [1] * 9, 20), request(10, prompt, 8, seed=10, n=3))
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    check(harness, 10, 3, prompt, 8, seed=10)
    inits = [i for p in harness.executor.plans[1:] for i in p.row_inits if len(i.token_ids) > 24]
    assert {i.num_computed_tokens for i in inits} == {0, 24}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 4, 9])
def test_one_sample_may_be_given_up(depth: int, victim: int, num_steps: int) -> None:
    """Even the one whose row computes the prompt for all."""
    harness = Harness(depth=depth, max_num_batched_tokens=4)
    harness.add(request(0, PROMPT, 12, n=3))
    for _ in range(num_steps):
        harness.step()
    assert harness.scheduler.abort(victim)
    harness.scheduler.check()
    harness.run()
    for number in range(3):
        expected = expected_tokens(PROMPT, 12, number)
        if number == victim:
            assert harness.tokens[number] == expected[: len(harness.tokens[number])]
        else:
            assert harness.tokens[number] == expected


def test_a_stop_token_ends_its_own_sample() -> None:
    full = [expected_tokens(PROMPT, 20, seed) for seed in range(2)]
    stop = next(token for token in full[0] if token not in full[1])
    harness = Harness(depth=2)
    harness.add(request(0, PROMPT, 20, stops=(stop,), n=2))
    harness.run()
    assert harness.tokens[0] == full[0][: full[0].index(stop) + 1]
    assert harness.tokens[1] == full[1]


@pytest.mark.parametrize("failing", [1, 2, 3, 5])
def test_a_failed_step_fails_every_sample(failing: int) -> None:
    harness = Harness(depth=2, max_num_batched_tokens=4)
    harness.executor.fail_steps = {failing}
    harness.add(request(0, PROMPT, 6, n=3), request(10, [1], 6))
    harness.run()
    assert [harness.finished[i].reason for i in range(3)] == [FinishReason.ERROR] * 3


def test_what_can_never_fit_counts_the_samples() -> None:
    harness = Harness(num_blocks=8, max_num_seqs=3)
    harness.add(request(0, PROMPT, 3, n=3))
    with pytest.raises(ContextLengthError, match="8 blocks"):
        harness.add(request(10, PROMPT, 7, n=3))
    with pytest.raises(RequestError, match="n is 4, but only 3"):
        harness.add(request(20, [1], 2, n=4))
    harness.run()


shapes = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=6
)


@given(
    shapes=shapes,
    num_blocks=st.integers(24, 40),
    budget=st.integers(4, 40),
    depth=st.sampled_from([1, 2]),
    caching=st.booleans(),
    data=st.data(),
)
def test_any_mix_of_groups_ends_with_the_right_tokens(
    shapes: list[tuple[int, int, int]],
    num_blocks: int,
    budget: int,
    depth: int,
    caching: bool,
    data: st.DataObject,
) -> None:
    harness = Harness(
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        depth=depth,
        prefix_caching=caching,
        eager=data.draw(st.booleans()),
    )
    if data.draw(st.integers(0, 3)) == 0:
        harness.executor.fail_steps = {data.draw(st.integers(1, 12))}
    aborted = set()
    for index, (length, count, n) in enumerate(shapes):
        first = 10 * index
        prompt = [*range(length - 1), index % 2]
        harness.add(request(first, prompt, count, seed=first, n=n))
        for _ in range(data.draw(st.integers(0, 3))):
            harness.step()
        if data.draw(st.integers(0, 3)) == 0:
            victim = 10 * data.draw(st.integers(0, index)) + data.draw(st.integers(0, 2))
            if harness.scheduler.abort(victim):
                aborted.add(victim)
            harness.scheduler.check()
    harness.run()
    for index, (length, count, n) in enumerate(shapes):
        for number in range(10 * index, 10 * index + n):
            expected = expected_tokens([*range(length - 1), index % 2], count, number)
            tokens = harness.tokens[number]
            failed = number in harness.finished and (
                harness.finished[number].reason is FinishReason.ERROR
            )
            if number in aborted or failed:
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected
