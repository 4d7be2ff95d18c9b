"""The papers' baselines under the scheduler: reservations, and batches that nobody joins."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.core.plan import CopyBlocks
from octavo.core.request import ContextLengthError, FinishReason, Request
from octavo.memory.reservation import RESERVES
from scheduling.harness import Harness, beam_request, request
from toy_executor import expected_tokens


def requests(count: int = 12) -> list[Request]:
    generator = np.random.default_rng(5)
    return [
        request(
            10 * number,
            generator.integers(0, 97, generator.integers(1, 20)).tolist(),
            int(generator.integers(1, 12)),
            seed=number,
        )
        for number in range(count)
    ]


def check_tokens(harness: Harness, items: list[Request]) -> None:
    for item in items:
        for index in range(item.n):
            expected = expected_tokens(
                item.prompt_token_ids.tolist(), item.max_tokens, item.seed + index
            )
            assert harness.tokens[item.number + index] == expected


@pytest.mark.parametrize("reserve", RESERVES)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("budget", [64, 5])
def test_the_same_tokens_and_nobody_is_preempted(
    reserve: str, depth: int, is_static: bool, budget: int
) -> None:
    harness = Harness(
        reserve=reserve,
        depth=depth,
        is_static=is_static,
        max_model_len=32,
        max_num_batched_tokens=budget,
    )
    items = requests()
    harness.add(*items)
    harness.run()
    check_tokens(harness, items)
    assert harness.scheduler.num_preemptions == 0
    deltas = sum(len(plan.table_deltas) for plan in harness.executor.plans)
    assert deltas == 0, "a sequence has its whole run from the start"


@pytest.mark.parametrize("reserve", RESERVES)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prompt", [3, 8, 21])
def test_samples_have_runs_of_their_own(reserve: str, depth: int, prompt: int) -> None:
    harness = Harness(reserve=reserve, depth=depth, max_model_len=32)
    first = request(0, range(prompt), 6, n=3)
    others = [request(10, range(40, 47), 9), request(20, range(5), 7, n=2)]
    harness.add(first, *others)
    harness.step()
    harness.step()
    tables = [list(harness.executor.tables[row].values()) for row in range(3)]
    blocks = [block_id for table in tables for block_id in table]
    assert len(blocks) == len(set(blocks)) > 0
    assert all(table == list(range(table[0], table[0] + len(table))) for table in tables)
    harness.run()
    check_tokens(harness, [first, *others])
    commands = [c for plan in harness.executor.plans for c in plan.commands]
    copied = sum(len(c.sources) for c in commands if isinstance(c, CopyBlocks))
    assert copied == 2 * -(-prompt // 4) + 1 * 2
    assert harness.scheduler.num_preemptions == 0


@pytest.mark.parametrize("reserve", RESERVES)
@pytest.mark.parametrize("depth", [1, 2])
def test_beams_copy_and_give_the_same_results(reserve: str, depth: int) -> None:
    """A pool that just holds them, with another request that waits for their memory."""
    found = []
    for options in ({}, {"reserve": reserve, "num_blocks": 34}):
        harness = Harness(depth=depth, max_model_len=32, **options)  # type: ignore[arg-type]
        items = [beam_request(0, range(9), 15, 4, stops=(3, 40)), request(10, range(4), 20)]
        items.append(beam_request(20, range(30, 35), 9, 3, n=2))
        harness.add(*items)
        harness.run()
        found.append((harness.tokens, {n: beam.score for n, beam in harness.beams.items()}))
    assert found[0] == found[1]
    assert harness.scheduler.num_preemptions == 0


@pytest.mark.parametrize("reserve", RESERVES)
def test_aborts_and_failures_leave_nothing_behind(reserve: str) -> None:
    harness = Harness(reserve=reserve, depth=2, max_model_len=32, max_num_batched_tokens=6)
    harness.add(request(0, range(20), 9, n=3), request(10, range(5), 9))
    harness.step()
    harness.scheduler.abort(0)
    for _ in range(6):
        harness.step()
    harness.scheduler.abort(10)
    harness.executor.fail_steps.add(harness.scheduler.state.step_id + 1)
    harness.add(request(20, range(4), 3))
    harness.run()
    assert harness.finished[1].reason is FinishReason.ERROR
    assert harness.scheduler.usage().free == harness.scheduler.usage().capacity


def test_what_can_never_be_reserved_is_refused() -> None:
    harness = Harness(reserve="oracle", num_blocks=13, max_model_len=64)
    harness.add(request(0, range(10), 23))
    with pytest.raises(ContextLengthError, match="16 blocks"):
        harness.add(request(10, range(10), 24))
    with pytest.raises(ContextLengthError, match="16 blocks"):
        harness.add(request(20, range(10), 4, n=4))
    harness.run()


@pytest.mark.parametrize("reserve", [None, "max"])
@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_joins_a_static_batch(reserve: str | None, depth: int) -> None:
    """The second batch begins when the longest of the first has ended, and a request that comes
    meanwhile waits though there is room."""
    harness = Harness(
        reserve=reserve, depth=depth, is_static=True, max_num_seqs=3, max_model_len=32
    )
    items = [request(10 * i, range(i, i + 4), 3 + 4 * i) for i in range(5)]
    harness.add(*items[:2])
    harness.step()
    harness.add(*items[2:])
    harness.run()
    check_tokens(harness, items)
    starts = {
        harness.executor.plans[index].step_id: len(plan.row_inits)
        for index, plan in enumerate(harness.executor.plans)
        if plan.row_inits
    }
    assert list(starts.values()) == [2, 3]
    # The longest of the first two makes 7 tokens.
    assert min(step for step in starts if step > 1) == 8


def test_a_static_batch_is_larger_than_a_steps_budget() -> None:
    harness = Harness(is_static=True, max_num_batched_tokens=5, max_model_len=32)
    items = [request(10 * i, range(i, i + 8), 4) for i in range(6)]
    harness.add(*items)
    harness.run()
    check_tokens(harness, items)
    assert [len(plan.row_inits) for plan in harness.executor.plans if plan.row_inits] == [4, 2]


@pytest.mark.parametrize("reserve", [None, *RESERVES])
@pytest.mark.parametrize("is_static", [False, True])
def test_whatever_comes_and_goes(reserve: str | None, is_static: bool) -> None:
    """Samples and beams arrive, are aborted and fail at random: what ends has its own tokens, and
    nothing is left behind."""
    for seed in range(3):
        random = np.random.default_rng([seed, is_static])
        harness = Harness(
            reserve=reserve,
            is_static=is_static,
            depth=1 + seed % 2,
            num_blocks=int(random.integers(17, 60)),
            max_model_len=32,
            max_num_seqs=6,
            max_num_batched_tokens=int(random.integers(6, 40)),
        )
        items: list[Request] = []
        for _ in range(250):
            if len(items) < 25 and random.random() < 0.4:
                prompt = random.integers(0, 97, random.integers(1, 20)).tolist()
                number, max_tokens = 10 * len(items), int(random.integers(1, 12))
                if random.random() < 0.3:
                    item = beam_request(number, prompt, max_tokens, int(random.integers(1, 5)))
                else:
                    n = int(random.integers(1, 4))
                    item = request(number, prompt, max_tokens, seed=number, n=n, stops=(7, 50))
                try:
                    harness.add(item)
                except ContextLengthError:
                    continue
                items.append(item)
            if items and random.random() < 0.06:
                harness.scheduler.abort(items[random.integers(len(items))].number)
            if random.random() < 0.02:
                harness.executor.fail_steps.add(harness.scheduler.state.step_id + 1)
            harness.step()
        harness.run()
        num_compared = 0
        for item in items:
            for index in range(0 if item.beam_width else item.n):
                finished = harness.finished.get(item.number + index)
                if finished is None or finished.reason is FinishReason.ERROR:
                    continue
                prompt = item.prompt_token_ids.tolist()
                assert harness.tokens[finished.number] == expected_tokens(
                    prompt, item.max_tokens, item.seed + index, item.stop_token_ids
                )
                num_compared += 1
        assert num_compared > 5
        usage = harness.scheduler.usage()
        assert usage.free == usage.capacity
