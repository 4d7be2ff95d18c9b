"""Registered prefixes: computed once, kept whatever else runs, refused where they would not fit."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.request import ContextLengthError, FinishReason, RequestError
from octavo.scheduling import prefixes as module
from scheduling.harness import Harness, request
from toy_executor import expected_tokens

pytestmark = pytest.mark.usefixtures("translation")

PREFIX = list(range(1, 11))  # two blocks of four, and two tokens more


def harness(**options: Any) -> Harness:
    """32 blocks of 4 tokens, of which a sequence takes 10 at most."""
    return Harness(**{"prefix_caching": True, "max_model_len": 40} | options)


def registered(engine: Harness, number: int, tokens: list[int], salt: bytes = b"") -> None:
    engine.add(request(number, tokens, 1, salt=salt, pins_prefix=True))
    engine.run()
    assert engine.prefixes[number].error is None


@pytest.mark.parametrize("depth", [1, 2])
def test_what_begins_with_a_registered_prefix_hits_all_of_it(depth: int) -> None:
    engine = harness(depth=depth)
    registered(engine, 1, PREFIX)
    assert engine.prefixes[1].num_tokens == 10
    assert engine.prefixes[1].num_pinned_tokens == 8
    assert engine.manager.usage().cached == 8
    engine.add(request(2, [*PREFIX, 50], 3), request(3, PREFIX[:9], 3), request(4, PREFIX[:8], 3))
    engine.run()
    assert [engine.finished[n].num_cached_tokens for n in (2, 3, 4)] == [8, 8, 4]
    assert engine.tokens[2] == expected_tokens([*PREFIX, 50], 3)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [1, 2])
def test_pressure_never_evicts_it(depth: int, preemption: str) -> None:
    engine = harness(
        num_blocks=14, depth=depth, preemption=preemption, num_host_blocks=24, max_num_seqs=4
    )
    registered(engine, 1, PREFIX)
    others = [request(n, [n] * 9, 20) for n in range(2, 10)]
    engine.add(*others)
    engine.run()
    assert engine.scheduler.num_preemptions, "there was no pressure"
    for other in others:
        prompt = other.prompt_token_ids.tolist()
        assert engine.tokens[other.number] == expected_tokens(prompt, 20)
    engine.add(request(50, [*PREFIX, 50], 3))
    engine.run()
    assert engine.finished[50].num_cached_tokens == 8
    assert engine.tokens[50] == expected_tokens([*PREFIX, 50], 3)


def test_it_survives_a_reset_and_a_drop_makes_it_evictable() -> None:
    engine = harness()
    registered(engine, 1, PREFIX)
    engine.scheduler.reset_prefix_cache()
    assert engine.manager.usage().cached == 8
    assert engine.scheduler.drop_prefix(1)
    assert not engine.scheduler.drop_prefix(1)
    assert engine.manager.num_pinned_blocks == 0
    assert engine.manager.usage().cached == 8, "cached like others"
    engine.scheduler.reset_prefix_cache()
    assert engine.manager.usage().cached == 0
    engine.scheduler.check()


def test_the_same_prefix_twice_is_kept_until_both_are_dropped() -> None:
    engine = harness()
    registered(engine, 1, PREFIX)
    registered(engine, 2, PREFIX)
    assert engine.manager.num_pinned_blocks == 2
    engine.scheduler.drop_prefix(1)
    assert engine.manager.num_pinned_blocks == 2
    engine.scheduler.drop_prefix(2)
    assert engine.manager.num_pinned_blocks == 0


def test_salts_keep_prefixes_apart() -> None:
    engine = harness()
    registered(engine, 1, PREFIX, b"a")
    engine.add(request(2, [*PREFIX, 9], 1), request(3, [*PREFIX, 9], 1, salt=b"a"))
    engine.run()
    assert engine.finished[2].num_cached_tokens == 0
    assert engine.finished[3].num_cached_tokens == 8


def refusal(engine: Harness, tokens: list[int], max_tokens: int = 1) -> str:
    with pytest.raises(RequestError) as caught:
        engine.add(request(99, tokens, max_tokens, pins_prefix=True))
    assert not engine.scheduler.has_work
    engine.scheduler.check()
    return str(caught.value)


def test_refusals_say_why() -> None:
    assert "--no-prefix-caching" in refusal(harness(prefix_caching=False), PREFIX)
    assert "--no-sharing" in refusal(harness(sharing=False), PREFIX)
    assert "less than a block of 4" in refusal(harness(), [1, 2, 3])
    # 12 blocks, 10 of them promised to a sequence of 40 tokens.
    small = harness(num_blocks=13)
    text = refusal(small, list(range(12)))
    assert "its 3 blocks would leave 9 of 12, but 10 must remain" in text
    registered(small, 1, PREFIX)
    assert "its 1 blocks would leave 9" in refusal(small, [*PREFIX, 7, 7])
    registered(small, 2, PREFIX[:4])
    small.scheduler.drop_prefix(1)
    small.scheduler.drop_prefix(2)
    registered(small, 3, list(range(20, 28)))


def test_their_number_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PREFIXES", 1)
    engine = harness()
    registered(engine, 1, PREFIX)
    assert "the most there can be" in refusal(engine, PREFIX)


def test_what_needs_the_room_of_pinned_blocks_is_refused_at_the_door() -> None:
    engine = harness(num_blocks=17)
    samples = request(2, [5] * 4, 29, n=2)  # a shared block and 7 for each: 15 of 16
    engine.add(samples)
    engine.run()
    registered(engine, 4, PREFIX)
    with pytest.raises(ContextLengthError, match="beside registered prefixes"):
        engine.add(request(6, [5] * 4, 29, n=2))
    engine.add(request(8, [6] * 4, 25, n=2))
    engine.run()
    assert engine.finished[8].reason is FinishReason.LENGTH


def test_a_request_that_was_taken_in_keeps_its_room() -> None:
    engine = harness(num_blocks=17)
    engine.add(request(2, [5] * 4, 29, n=2))
    with pytest.raises(RequestError, match="a request under way may need 15"):
        engine.add(request(4, PREFIX, 1, pins_prefix=True))
    engine.run()
    # One that comes in between door and end counts, too.
    engine.add(request(5, PREFIX, 1, pins_prefix=True), request(6, [5] * 4, 29, n=2))
    engine.run()
    assert "a request under way may need 15" in str(engine.prefixes[5].error)
    assert engine.manager.num_pinned_blocks == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("fails", [1, 2])
def test_a_failed_step_registers_nothing(depth: int, fails: int) -> None:
    """A prompt of two chunks; either may fail."""
    engine = harness(depth=depth, max_num_batched_tokens=8)
    engine.executor.fail_steps.add(fails)
    engine.add(request(1, PREFIX, 1, pins_prefix=True))
    engine.run()
    assert "was told to fail" in str(engine.prefixes[1].error)
    assert engine.manager.num_pinned_blocks == 0
    registered(engine, 2, PREFIX)
    assert engine.prefixes[2].num_pinned_tokens == 8


def test_a_neighbours_failure_takes_nothing_away() -> None:
    engine = harness(depth=2)
    registered(engine, 1, PREFIX)
    engine.add(request(2, [*PREFIX, 9, 9, 9, 9, 9], 3))
    engine.executor.fail_steps.add(engine.scheduler.state.step_id + 1)
    engine.run()
    assert engine.finished[2].reason is FinishReason.ERROR
    engine.add(request(3, [*PREFIX, 9, 9, 9, 9, 9], 3))
    engine.run()
    assert engine.finished[3].num_cached_tokens == 8
    assert engine.tokens[3] == expected_tokens([*PREFIX, 9, 9, 9, 9, 9], 3)


def test_a_reset_midway_fails_the_registration() -> None:
    engine = harness(max_num_batched_tokens=8)
    engine.add(request(1, PREFIX, 1, pins_prefix=True))
    engine.step()
    engine.scheduler.reset_prefix_cache()
    engine.run()
    assert "register it again" in str(engine.prefixes[1].error)
    assert engine.manager.num_pinned_blocks == 0


def test_giving_up_registers_nothing() -> None:
    engine = harness(depth=2, max_num_batched_tokens=8)
    engine.add(request(1, PREFIX, 1, pins_prefix=True))
    engine.step()
    assert engine.scheduler.abort(1)
    engine.run()
    assert not engine.prefixes
    assert engine.manager.num_pinned_blocks == 0


def test_samples_beams_and_many_prefixes_together() -> None:
    engine = harness(num_blocks=41, depth=2, max_num_seqs=6)
    for number, first in enumerate((1, 40, 80)):
        registered(engine, number, [first, *PREFIX])
    prompts = {n: [(1, 40, 80)[n % 3], *PREFIX, n, n] for n in range(10, 20)}
    engine.add(*[request(n, p, 12) for n, p in prompts.items()])
    engine.add(request(30, [1, *PREFIX, 7], 6, n=3, seed=5))
    engine.run()
    for number, prompt in prompts.items():
        assert engine.tokens[number] == expected_tokens(prompt, 12)
        assert engine.finished[number].num_cached_tokens >= 8
    for index in range(3):
        assert engine.tokens[30 + index] == expected_tokens([1, *PREFIX, 7], 6, 5 + index)
    for number in range(3):
        assert engine.scheduler.drop_prefix(number)
    assert engine.manager.num_free_blocks == 40


def test_blocks_that_may_still_fail_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    every_block = set(range(33))
    monkeypatch.setattr(module.PrefixRegistry, "_in_flight", lambda self: every_block)
    engine = harness()
    engine.add(request(1, PREFIX, 1, pins_prefix=True))
    engine.run()
    assert "register it again" in str(engine.prefixes[1].error)
    assert engine.manager.num_pinned_blocks == 0


@given(
    acts=st.lists(
        st.tuples(
            st.sampled_from(["register", "request", "drop", "reset", "abort", "fail"]),
            st.integers(0, 2),
            st.integers(1, 14),
            st.integers(0, 3),
        ),
        min_size=4,
        max_size=14,
    ),
    num_blocks=st.integers(14, 24),
    depth=st.sampled_from([1, 2]),
    preemption=st.sampled_from(["recompute", "swap"]),
)
def test_any_mix_keeps_what_is_registered_and_only_that(
    acts: list[tuple[str, int, int, int]], num_blocks: int, depth: int, preemption: str
) -> None:
    """Requests and prefixes begin with one of three stories."""
    engine = harness(
        num_blocks=num_blocks,
        depth=depth,
        preemption=preemption,
        num_host_blocks=12,
        max_num_batched_tokens=12,
    )
    stories = [[20 * story + i for i in range(16)] for story in range(3)]
    asked: dict[int, list[int]] = {}
    registering: dict[int, list[int]] = {}
    gone: set[int] = set()
    for number, (act, story, length, num_steps) in enumerate(acts):
        if act in ("register", "request"):
            tokens = stories[story][:length]
            item = (
                request(number, tokens, 1, pins_prefix=True)
                if act == "register"
                else request(number, [*tokens, 90 + number], 9, seed=number)
            )
            with suppress(RequestError):
                engine.add(item)
                known = registering if item.pins_prefix else asked
                known[number] = item.prompt_token_ids.tolist()
        elif act == "drop" and engine.prefixes:
            gone.update(n for n in engine.prefixes if engine.scheduler.drop_prefix(n))
        elif act == "reset":
            engine.scheduler.reset_prefix_cache()
        elif act == "abort" and registering:
            number = max(registering)
            if engine.scheduler.abort(number):
                del registering[number]
        elif act == "fail":
            engine.executor.fail_steps.add(engine.scheduler.state.step_id + 1 + length % 3)
        for _ in range(num_steps):
            engine.step()
    engine.run()
    assert engine.prefixes.keys() == registering.keys()
    for number, prompt in asked.items():
        expected = expected_tokens(prompt, 9, number)
        failed = engine.finished[number].reason is FinishReason.ERROR
        assert engine.tokens[number] == expected[: len(engine.tokens[number])]
        assert failed or len(engine.tokens[number]) == 9
    kept = [n for n, found in engine.prefixes.items() if found.error is None and n not in gone]
    engine.executor.fail_steps.clear()
    for number in kept:
        tokens = registering[number]
        engine.add(request(100 + number, [*tokens, 89], 2))
        engine.run()
        assert engine.finished[100 + number].num_cached_tokens >= len(tokens) // 4 * 4
        assert engine.tokens[100 + number] == expected_tokens([*tokens, 89], 2)
        assert engine.scheduler.drop_prefix(number)
    assert engine.manager.num_pinned_blocks == 0
    engine.scheduler.reset_prefix_cache()
    assert engine.manager.usage().free == engine.manager.usage().capacity
