"""The pool grows and shrinks while it serves: what was accepted ends with its own tokens, and no
memory goes that anybody reads."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.plan import CreateBlocks, ReleaseBlocks
from octavo.core.request import (
    AsleepError,
    ContextLengthError,
    PoolBusyError,
    PoolSizeError,
    RequestError,
)
from octavo.scheduling import resizing as module
from octavo.scheduling.resizing import PoolResized
from scheduling.harness import Harness, beam_request, request
from toy_executor import expected_tokens

pytestmark = pytest.mark.usefixtures("translation")


def harness(**options: Any) -> Harness:
    """32 blocks of 4 tokens."""
    return Harness(**{"prefix_caching": True, "max_model_len": 60} | options)


def resized(engine: Harness) -> PoolResized:
    engine.run()
    ended = engine.scheduler.resizing.take_ended()
    assert ended is not None
    assert engine.executor.num_present == ended.num_blocks + 1, "policy and memory disagree"
    return ended


def resize(engine: Harness, num_blocks: int) -> None:
    engine.scheduler.resizing.resize(num_blocks)
    assert resized(engine) == PoolResized(num_blocks)
    assert engine.manager.num_usable_blocks == num_blocks


def serve(engine: Harness, number: int, prompt: list[int], count: int) -> None:
    engine.add(request(number, prompt, count))
    engine.run()
    assert engine.tokens[number] == expected_tokens(prompt, count)


@pytest.mark.parametrize("depth", [1, 2])
def test_what_waits_before_the_queue_can_be_finished_too(depth: int) -> None:
    """The pool shrinks behind it; who comes later is refused."""
    engine = harness(depth=depth)
    scheduler, promised = engine.scheduler, request(5, [7] * 9, 50)
    scheduler.state.promised[5] = promised
    scheduler.resizing.resize(9)
    for _ in range(6):
        engine.step()
    assert scheduler.resizing.take_ended() is None
    assert engine.manager.num_usable_blocks >= 15, "as many as it needs"
    with pytest.raises(ContextLengthError):
        engine.add(request(6, [7] * 9, 50))
    del scheduler.state.promised[5]
    scheduler.add(promised, is_promised=True)
    engine.tokens[5] = []
    assert resized(engine) == PoolResized(9)
    assert engine.tokens[5] == expected_tokens([7] * 9, 50)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_idle_pool_shrinks_and_grows_beyond_what_it_was(depth: int) -> None:
    engine = harness(depth=depth)
    serve(engine, 0, list(range(20)), 9)
    resize(engine, 9)
    serve(engine, 1, list(range(20)), 9)
    resize(engine, 40)
    engine.add(*(request(n, [n] * 9, 30) for n in range(2, 6)))
    engine.run()
    assert not engine.scheduler.num_preemptions
    assert all(engine.tokens[n] == expected_tokens([n] * 9, 30) for n in range(2, 6))


def test_free_blocks_go_first_then_the_longest_unused() -> None:
    engine = harness()
    for number in range(3):
        serve(engine, number, [number] * 17, 1)
    assert engine.manager.pool.num_cached == 12
    resize(engine, 12)
    assert engine.manager.pool.num_cached == 12
    resize(engine, 10)
    serve(engine, 10, [0] * 17, 1)
    assert engine.finished[10].num_cached_tokens == 8, "of a prompt the tail goes first"
    serve(engine, 11, [2] * 17, 1)
    assert engine.finished[11].num_cached_tokens == 16


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_what_runs_is_preempted_as_it_must_and_ends(depth: int, preemption: str) -> None:
    engine = harness(depth=depth, preemption=preemption, num_host_blocks=40)
    engine.add(*(request(n, [n] * 9, 19) for n in range(4)))
    for _ in range(15):
        engine.step()
    before = engine.manager.num_free_blocks
    engine.scheduler.resizing.resize(7)
    for _ in range(4):
        engine.step()
    assert engine.manager.num_usable_blocks <= 32 - before, "what is idle goes at once"
    assert resized(engine) == PoolResized(7)
    assert engine.scheduler.num_preemptions
    assert all(engine.tokens[n] == expected_tokens([n] * 9, 19) for n in range(4))


def test_who_was_accepted_is_served_and_others_are_refused_from_the_start() -> None:
    engine = harness()
    engine.add(request(0, [1] * 30, 20))
    engine.step()
    engine.add(request(1, [2] * 40, 10))
    engine.scheduler.resizing.resize(5)
    with pytest.raises(ContextLengthError, match="more than the model's 60 tokens or than the KV"):
        engine.add(request(2, [3] * 18, 6))
    engine.add(request(3, [3] * 12, 6))
    assert resized(engine) == PoolResized(5)
    assert engine.tokens[0] == expected_tokens([1] * 30, 20)
    assert engine.tokens[1] == expected_tokens([2] * 40, 10)
    assert engine.tokens[3] == expected_tokens([3] * 12, 6)


def test_a_later_resize_takes_an_earlier_ones_place() -> None:
    engine = harness()
    engine.add(request(0, [1] * 30, 20))
    engine.step()
    engine.scheduler.resizing.resize(5)
    engine.step()
    engine.step()
    assert engine.manager.num_usable_blocks < 32
    assert engine.scheduler.resizing.take_ended() is None
    engine.scheduler.resizing.resize(20)
    assert resized(engine) == PoolResized(20)


def test_a_resize_comes_in_pieces_between_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BLOCKS_A_STEP", 3)
    engine = harness()
    engine.add(request(0, [1] * 4, 30))
    engine.step()
    first = len(engine.executor.plans)
    engine.scheduler.resizing.resize(32 - 9)
    for _ in range(6):
        engine.step()
    kinds = [
        any(isinstance(c, CreateBlocks | ReleaseBlocks) for c in plan.commands)
        for plan in engine.executor.plans[first:]
    ]
    assert kinds == [True, False] * 3
    assert resized(engine) == PoolResized(23)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_machine_without_memory_changes_nothing(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BLOCKS_A_STEP", 3)
    engine = harness(depth=depth)
    engine.executor.max_present = 40
    engine.add(request(0, [1] * 9, 30))
    engine.scheduler.resizing.resize(50)
    assert resized(engine) == PoolResized(32, "no memory")
    assert engine.tokens[0] == expected_tokens([1] * 9, 30)
    resize(engine, 39)


def test_memory_that_cannot_be_given_back_stays_in_use() -> None:
    engine = harness()
    engine.executor.refuses_release = True
    engine.scheduler.resizing.resize(10)
    assert resized(engine) == PoolResized(32, "not given back")
    engine.executor.refuses_release = False
    resize(engine, 10)


def test_a_resize_whose_step_fails_ends_and_others_go_on() -> None:
    for num_blocks in (40, 20):
        engine = harness()
        engine.executor.fail_steps = {1}
        engine.scheduler.resizing.resize(num_blocks)
        while engine.core.has_work:
            engine.step()
        ended = engine.scheduler.resizing.take_ended()
        assert ended is not None
        assert ended.error is not None
        assert "step 1 was told to fail" in ended.error
        serve(engine, 1, [4] * 10, 8)


def test_sizes_that_cannot_be_are_refused() -> None:
    engine = harness()
    for num_blocks in (0, -1, 200):
        with pytest.raises(PoolSizeError, match="from 1 to 199 blocks of 4 tokens"):
            engine.scheduler.resizing.resize(num_blocks)
    fixed = harness(max_blocks=None)
    for ask in (lambda: fixed.scheduler.resizing.resize(5), fixed.scheduler.resizing.sleep):
        with pytest.raises(PoolSizeError, match="start the engine with --kv virtual"):
            ask()


def test_registered_prefixes_are_kept_and_leave_room() -> None:
    engine = harness()
    engine.add(request(1, [7] * 13, 1, pins_prefix=True))
    engine.run()
    with pytest.raises(PoolSizeError, match="keep 3 blocks, which would leave 2 of 5, but 3 must"):
        engine.scheduler.resizing.resize(5)
    resize(engine, 6)
    serve(engine, 2, [*[7] * 8, 5], 3)
    assert engine.finished[2].num_cached_tokens == 8
    with pytest.raises(ContextLengthError):
        engine.add(request(3, [1] * 10, 6))
    with pytest.raises(RequestError, match="would leave 2 of 6"):
        engine.add(request(4, [6] * 5, 1, pins_prefix=True))


def test_a_prefix_that_is_kept_already_is_registered_again_whatever_runs() -> None:
    engine = harness()
    engine.add(request(1, [7] * 13, 1, pins_prefix=True))
    engine.run()
    engine.add(request(2, [1] * 30, 30))
    engine.step()
    engine.scheduler.resizing.resize(8)
    with pytest.raises(RequestError, match="does not fit now: its 1 blocks would leave 4"):
        engine.add(request(3, [6] * 5, 1, pins_prefix=True))
    engine.add(request(4, [7] * 13, 1, pins_prefix=True))
    assert resized(engine) == PoolResized(8)
    assert engine.manager.num_pinned_blocks == 3
    assert engine.prefixes[4].error is None


@pytest.mark.parametrize("depth", [1, 2])
def test_asleep_there_is_no_block_and_no_request(depth: int) -> None:
    engine = harness(depth=depth)
    engine.add(request(1, [7] * 13, 1, pins_prefix=True), request(2, [3] * 13, 8))
    with pytest.raises(PoolBusyError, match="2 requests run or wait"):
        engine.scheduler.resizing.sleep()
    engine.run()
    engine.add(request(3, [4] * 13, 8))
    with pytest.raises(PoolBusyError, match="1 request runs or waits"):
        engine.scheduler.resizing.sleep()
    engine.run()
    engine.scheduler.resizing.sleep()
    with pytest.raises(PoolBusyError, match="being resized"):
        engine.scheduler.resizing.sleep()
    assert resized(engine) == PoolResized(0)
    assert engine.scheduler.resizing.is_asleep
    assert engine.scheduler.resizing.num_lasting_blocks == 32
    assert not engine.scheduler.drop_prefix(1), "registered prefixes went with it"
    with pytest.raises(AsleepError, match="wake it up"):
        engine.add(request(3, [1], 2))
    with pytest.raises(PoolBusyError, match="wake it up before"):
        engine.scheduler.resizing.resize(5)
    engine.scheduler.resizing.sleep()
    assert resized(engine) == PoolResized(0), "asleep already"
    engine.executor.max_present = 20
    engine.scheduler.resizing.wake_up()
    assert resized(engine) == PoolResized(0, "no memory")
    assert engine.scheduler.resizing.is_asleep
    engine.executor.max_present = None
    for _ in range(2):
        engine.scheduler.resizing.wake_up()
        assert resized(engine) == PoolResized(32)
        assert not engine.scheduler.resizing.is_asleep
    serve(engine, 4, [3] * 13, 8)
    assert engine.finished[4].num_cached_tokens == 0, "the cache went too"


@given(
    sizes=st.lists(st.integers(8, 40), min_size=1, max_size=6),
    seed=st.integers(0, 5),
    depth=st.sampled_from([1, 2]),
    eager=st.booleans(),
    preemption=st.sampled_from(["recompute", "swap"]),
    sharing=st.booleans(),
)
def test_any_mix_ends_with_its_own_tokens_however_the_pool_changes(
    sizes: list[int], seed: int, depth: int, eager: bool, preemption: str, sharing: bool
) -> None:
    """Samples, beams, hits and aborts; the toy arena faults where memory is absent."""
    engine = harness(
        max_num_seqs=6,
        depth=depth,
        eager=eager,
        preemption=preemption,
        num_host_blocks=30,
        sharing=sharing,
        max_num_batched_tokens=24,
    )
    singles = {}
    for index, size in enumerate(sizes):
        first = 100 * index
        prompts = [[(seed + k) % 3] * (3 + 5 * k) for k in range(3)]
        for k, prompt in enumerate(prompts):
            one = request(first + k, prompt, 6 + k, seed=k)
            if one.num_blocks(4, sharing=sharing) <= engine.scheduler.state.num_lasting_blocks:
                engine.add(one)
                singles[first + k] = expected_tokens(prompt, 6 + k, seed=k)
        for extra in (
            request(first + 10, [1, 2, 3], 6, n=3),
            beam_request(first + 20, [seed] * 6, 5, 2),
        ):
            if extra.num_blocks(4, sharing=sharing) <= engine.scheduler.state.num_lasting_blocks:
                engine.add(extra)
        for _ in range(3 + seed):
            engine.step()
        if seed % 2:
            engine.scheduler.abort(first + 10)
        engine.scheduler.resizing.resize(size)
        for _ in range(2):
            engine.step()
    engine.run()
    if engine.scheduler.resizing.take_ended() is None:
        raise AssertionError("the last resize never ended")
    assert engine.manager.num_usable_blocks == sizes[-1]
    assert engine.executor.num_present == sizes[-1] + 1
    for number, tokens in singles.items():
        assert engine.tokens[number] == tokens
