"""Preemption by swapping: blocks go to host memory and come back, shared ones once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.plan import SwapIn, SwapOut
from octavo.core.request import FinishReason
from octavo.scheduling.preemption import PreemptionPolicy
from scheduling.harness import Harness, request
from toy_executor import expected_tokens

pytestmark = pytest.mark.usefixtures("translation")


def commands(harness: Harness, kind: type) -> list[object]:
    return [c for plan in harness.executor.plans for c in plan.commands if isinstance(c, kind)]


def swapping(**options: object) -> Harness:
    base: dict[str, object] = {
        "num_blocks": 14,
        "num_host_blocks": 40,
        "preemption": "swap",
        "max_num_seqs": 4,
    }
    return Harness(**(base | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_a_swapped_sequence_computes_nothing_twice(depth: int, eager: bool, caching: bool) -> None:
    harness = swapping(depth=depth, eager=eager, prefix_caching=caching)
    harness.add(*(request(i, [i] * 9, 20, seed=i) for i in range(3)))
    harness.run()
    for i in range(3):
        assert harness.tokens[i] == expected_tokens([i] * 9, 20, seed=i)
    assert harness.scheduler.num_swaps == harness.scheduler.num_preemptions > 0
    assert len(commands(harness, SwapOut)) == len(commands(harness, SwapIn))
    computed = sum(plan.batch.num_tokens for plan in harness.executor.plans)
    assert computed == 3 * (9 + 20 - 1)


def test_full_host_memory_recomputes_instead() -> None:
    harness = swapping(num_host_blocks=1)
    harness.add(*(request(i, [i] * 9, 20, seed=i) for i in range(3)))
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    assert harness.scheduler.num_swaps == 0
    for i in range(3):
        assert harness.tokens[i] == expected_tokens([i] * 9, 20, seed=i)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_group_is_swapped_whole_and_stays_shared(depth: int) -> None:
    harness = swapping(num_blocks=17, depth=depth, max_num_seqs=5)
    prompt = list(range(18))
    harness.add(request(0, [1] * 9, 24), request(10, prompt, 12, seed=10, n=3))
    harness.run()
    assert harness.tokens[0] == expected_tokens([1] * 9, 24)
    for index in range(3):
        assert harness.tokens[10 + index] == expected_tokens(prompt, 12, 10 + index)
    outs = commands(harness, SwapOut)
    assert outs
    assert all(len(out.block_ids) < 3 * 5 for out in outs)  # type: ignore[attr-defined]


def test_swapped_groups_come_back_before_anybody_new() -> None:
    harness = swapping(num_blocks=12, max_num_seqs=3)
    harness.add(*(request(i, [i] * 9, 16, seed=i) for i in range(5)))
    started: list[int] = []
    while harness.core.has_work:
        harness.step()
        started += [n for n in harness.tokens if harness.tokens[n] and n not in started]
    assert started == [0, 1, 2, 3, 4]
    assert harness.scheduler.num_swaps > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_an_aborted_sequence_leaves_no_host_block(depth: int) -> None:
    harness = swapping(depth=depth)
    harness.add(*(request(i, [i] * 9, 20, seed=i) for i in range(3)))
    while not harness.scheduler.num_swaps:
        harness.step()
    assert harness.scheduler.abort(2)
    harness.scheduler.check()
    harness.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_swap_is_recomputed(depth: int) -> None:
    for failing in range(3, 40):
        harness = swapping(depth=depth)
        harness.executor.fail_steps = {failing}
        harness.add(*(request(i, [i] * 9, 20, seed=i) for i in range(3)))
        harness.run()
        for i in range(3):
            if harness.finished[i].reason is not FinishReason.ERROR:
                assert harness.tokens[i] == expected_tokens([i] * 9, 20, seed=i)


def test_auto_takes_the_cheaper_way() -> None:
    costs = {"block_bytes": 1000, "copy_bytes_per_s": 1e6, "prefill_tokens_per_s": 1e3}
    policy = PreemptionPolicy(mode="auto", **costs)  # type: ignore[arg-type]
    assert policy.prefers_swap(num_blocks=1, num_tokens=16), "2 ms against 16 ms"
    assert not policy.prefers_swap(num_blocks=10, num_tokens=16), "20 ms against 16 ms"
    assert PreemptionPolicy(mode="swap").prefers_swap(10**6, 1)
    assert not PreemptionPolicy().prefers_swap(1, 10**6)
    with pytest.raises(ValueError, match="recompute, swap, auto"):
        PreemptionPolicy(mode="hope")
    with pytest.raises(ValueError, match="above 0"):
        PreemptionPolicy(mode="auto", copy_bytes_per_s=0.0)


@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 14), st.integers(1, 3)),
        min_size=2,
        max_size=6,
    ),
    num_blocks=st.integers(24, 34),
    num_host_blocks=st.integers(0, 30),
    budget=st.integers(4, 40),
    depth=st.sampled_from([1, 2]),
    caching=st.booleans(),
    data=st.data(),
)
def test_any_mix_ends_with_the_right_tokens(
    shapes: list[tuple[int, int, int]],
    num_blocks: int,
    num_host_blocks: int,
    budget: int,
    depth: int,
    caching: bool,
    data: st.DataObject,
) -> None:
    harness = swapping(
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_num_seqs=6,
        max_num_batched_tokens=budget + 2,
        depth=depth,
        prefix_caching=caching,
        eager=data.draw(st.booleans()),
    )
    if data.draw(st.integers(0, 3)) == 0:
        harness.executor.fail_steps = {data.draw(st.integers(1, 20))}
    aborted = set()
    for index, (length, count, n) in enumerate(shapes):
        first = 10 * index
        prompt = [*range(length - 1), index % 2]
        harness.add(request(first, prompt, count, seed=first, n=n, stops=(5, 60)))
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
            prompt = [*range(length - 1), index % 2]
            expected = expected_tokens(prompt, count, number, (5, 60))
            tokens = harness.tokens[number]
            ended = harness.finished.get(number)
            if number in aborted or (ended and ended.reason is FinishReason.ERROR):
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected
