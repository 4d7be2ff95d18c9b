"""Registered prefixes through `LLM` and through `AsyncEngine`: ids, usage, limits, giving up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.client_harness import collect, engine_of, run, until
from engine.tiny_engine import make_llm, pool, save_gguf
from octavo.core.request import (
    ContextLengthError,
    QueueFullError,
    RegisteredPrefix,
    RequestError,
)
from octavo.core.sampling_params import SamplingParams
from octavo.engine.client import EngineDeadError
from octavo.engine.llm import LLM
from octavo.engine.messages import FromEngine, PoolChanged, StepMessage
from octavo.engine.prefixes import PrefixTable, prefix_id, prefix_number
from toy_executor import VOCAB

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.fixture(params=["paged", "virtual"])
def llm(gguf: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with make_llm(
        gguf, kv=request.param, attention="auto", block_size=16, max_model_len=128,
        kv_memory=pool(16),
    ) as llm:  # fmt: skip
        yield llm
        llm._core.scheduler.check()


def used_blocks(llm: LLM) -> int:
    manager = llm._core.scheduler.manager
    return manager.num_usable_blocks - manager.num_free_blocks


# ── in process ───────────────────────────────────────────────────────────────────────────────────


def test_prompts_that_begin_with_a_prefix_find_all_its_blocks(llm: LLM) -> None:
    prefix = [5 + i % 40 for i in range(40)]
    (plain,) = llm.generate([[*prefix, 9]], GREEDY)
    name = llm.register_prefix(prefix)
    assert used_blocks(llm) == 2
    for number in range(12):  # other prompts take all blocks several times over
        llm.generate([[number, *range(50, 110)]], GREEDY)
    (again,) = llm.generate([[*prefix, 9]], GREEDY)
    assert again.num_cached_tokens == 32
    assert again.token_ids == plain.token_ids
    assert llm.drop_prefix(name)
    assert not llm.drop_prefix(name)
    assert not llm.drop_prefix("what")
    assert used_blocks(llm) == 0


def test_a_text_or_a_conversation_can_be_a_prefix(llm: LLM) -> None:
    system = {"role": "system", "content": "You answer in short sentences, whatever is asked."}
    llm.register_prefix([system])
    first = llm.chat([system, {"role": "user", "content": "hello"}], GREEDY)
    assert first.num_cached_tokens == 16 * used_blocks(llm) > 0
    text = "Once upon a time there was a cache that never forgot."
    llm.register_prefix(text)
    (second,) = llm.generate([text + " And then"], GREEDY)
    assert second.num_cached_tokens >= 16


def test_what_is_pinned_bounds_what_is_taken_in(llm: LLM) -> None:
    beams = SamplingParams(use_beam_search=True, beam_width=2, max_tokens=100, temperature=0)
    llm.generate([[1] * 16], beams)
    name = llm.register_prefix(list(range(100)))
    with pytest.raises(
        ContextLengthError, match="2 beams of 16 prompt and 100 new tokens do not fit"
    ):
        llm.generate([[1] * 16], beams)
    with pytest.raises(RequestError, match="the prefix does not fit"):
        llm.register_prefix(list(range(100, 127)) * 4)
    llm.drop_prefix(name)
    llm.generate([[1] * 16], beams)


def test_a_refused_prefix_leaves_nothing_behind(gguf: Path, llm: LLM) -> None:
    with pytest.raises(RequestError, match="less than a block"):
        llm.register_prefix([1, 2, 3])
    with pytest.raises(RequestError, match="empty"):
        llm.register_prefix([])
    with pytest.raises(ContextLengthError):
        llm.register_prefix([1] * 500)
    with pytest.raises(RequestError, match="out of range"):
        llm.register_prefix([10**6] * 20)
    assert used_blocks(llm) == 0
    with (
        make_llm(gguf, prefix_caching=False) as plain,
        pytest.raises(RequestError, match="caching"),
    ):
        plain.register_prefix([1] * 40)


def test_an_interrupt_registers_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm._core, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.register_prefix([1] * 40)
    assert not llm._core.has_work
    assert used_blocks(llm) == 0


def test_ids() -> None:
    assert prefix_number(prefix_id(12)) == 12
    for text in ("", "12", "prefix-", "prefix-x", "prefix-1x", "prefix--1", "prefix-01"):
        assert prefix_number(text) is None


# ── in another process ───────────────────────────────────────────────────────────────────────────

PREFIX = [n % VOCAB for n in range(10)]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_client_registers_lists_and_drops(depth: int) -> None:
    async def test() -> None:
        async with engine_of("toy-caches", depth=depth, max_num_seqs=4) as engine:
            longest = engine.limits.num_kv_tokens
            prefix = await engine.register_prefix(PREFIX)
            other, _ = await asyncio.gather(
                engine.register_prefix([*PREFIX, 1, 2, 3], "tenant"),
                collect(engine.submit([7], SamplingParams(max_tokens=9))),
            )
            assert (prefix.num_tokens, prefix.num_pinned_tokens) == (10, 8)
            assert engine.prefixes() == [prefix, other]
            await until(lambda: engine.stats.num_pinned_blocks == 2 + 3)
            assert engine.limits.num_kv_tokens == longest - 4 * 5
            engine.reset_prefix_cache()
            found = []
            for salt in ("", "tenant", "nobody"):
                (stream,) = engine.submit_samples([*PREFIX, 1, 2, 3, 4], GREEDY, 1, salt)
                await collect(stream)
                found.append(stream.num_cached_tokens)
            assert found == [8, 12, 0]
            assert engine.drop_prefix(prefix.id)
            assert not engine.drop_prefix(prefix.id)
            assert engine.drop_prefix(other.id)
            assert engine.prefixes() == []
            await until(lambda: engine.stats.num_pinned_blocks == 0)
            assert engine.limits.num_kv_tokens == longest

    run(test())


def test_the_engines_refusal_reaches_the_caller() -> None:
    async def test() -> None:
        async with engine_of("toy") as engine:
            with pytest.raises(RequestError, match="--no-prefix-caching"):
                await engine.register_prefix(PREFIX)
            assert engine.prefixes() == []
        async with engine_of("toy-caches", max_model_len=1020) as engine:
            with pytest.raises(RequestError, match="its 2 blocks would leave 254 of 256"):
                await engine.register_prefix(PREFIX)
            assert engine.num_outstanding == 0
        with pytest.raises(EngineDeadError):
            await engine.register_prefix(PREFIX)
        assert not engine.drop_prefix("prefix-0")

    run(test())


def test_a_full_queue_refuses_a_prefix() -> None:
    async def test() -> None:
        async with engine_of("toy-caches-slow", max_num_seqs=1, max_queued_requests=1) as engine:
            streams = [engine.submit([1], SamplingParams(max_tokens=200)) for _ in range(2)]
            with pytest.raises(QueueFullError):
                await engine.register_prefix(PREFIX)
            for stream in streams:
                stream.abort()

    run(test())


def test_who_gives_up_leaves_no_pin() -> None:
    async def test() -> None:
        async with engine_of("toy-caches-slow") as engine:
            for delay_s in (0.0, 0.001, 0.004, 0.006, 0.008, 0.012):
                task = asyncio.create_task(engine.register_prefix(PREFIX))
                await asyncio.sleep(delay_s)
                task.cancel()
                results = await asyncio.gather(task, return_exceptions=True)
                if not isinstance(results[0], BaseException):
                    assert engine.drop_prefix(results[0].id)
            stream = engine.submit([1], SamplingParams(max_tokens=3))
            await collect(stream)
            await until(lambda: engine.stats.num_pinned_blocks == 0)
            assert engine.prefixes() == []

    run(test())


def test_a_result_nobody_waits_for_is_dropped() -> None:
    dropped: list[int] = []
    table = PrefixTable(dropped.append)
    table.receive(RegisteredPrefix(1, 8, 8))
    table.receive(RegisteredPrefix(2, 8, error="no room"))
    assert dropped == [1]
    with table.expecting(3):  # and whoever waited left
        table.receive(RegisteredPrefix(3, 8, 8))
    assert dropped == [1, 3]
    with table.expecting(4) as take:
        table.receive(RegisteredPrefix(4, 8, error="no room"))
        with pytest.raises(RequestError, match="no room"):
            take()
    with table.expecting(5) as take, pytest.raises(RequestError, match="ended before"):
        take()
    with table.expecting(6) as take:
        table.receive(RegisteredPrefix(6, 9, 8))
        assert take().num_pinned_tokens == 8
    assert dropped == [1, 3]
    assert table.remove("prefix-6")
    assert dropped == [1, 3, 6]


def test_what_the_engine_forgot_is_not_listed() -> None:
    """News of a registration and of a sleep arrive in one read, before anybody takes the first."""
    dropped: list[int] = []
    table = PrefixTable(dropped.append)
    with table.expecting(1) as take:
        table.receive(RegisteredPrefix(1, 9, 8))
        take()
    with table.expecting(2) as take, table.expecting(3) as later:
        table.receive(RegisteredPrefix(2, 9, 8))
        table.clear()
        with pytest.raises(RequestError, match="put to sleep"):
            take()
        table.receive(RegisteredPrefix(3, 9, 8))
        assert later().id == "prefix-3"
    assert [prefix.id for prefix in table.listed()] == ["prefix-3"]
    assert dropped == [], "the engine knows of none"


def test_a_sleep_in_the_read_of_a_registration_fails_it() -> None:
    async def test() -> None:
        async with engine_of("toy-caches") as engine:
            digest = engine._connection._digest

            def digest_both(message: FromEngine) -> None:
                digest(message)
                if isinstance(message, StepMessage) and message.prefixes:
                    digest(PoolChanged(99, 1, drops_prefixes=True))

            engine._connection._digest = digest_both
            with pytest.raises(RequestError, match="put to sleep"):
                await engine.register_prefix(PREFIX)
            assert engine.prefixes() == []

    run(test())


def test_a_stopped_engine_ends_the_wait() -> None:
    async def test() -> None:
        async with engine_of("toy-caches-slow", max_num_batched_tokens=64) as engine:
            task = asyncio.create_task(engine.register_prefix([1] * 400))
            await asyncio.sleep(0)
            await engine.close()
            with pytest.raises(EngineDeadError):
                await task

    run(test())


@pytest.mark.parametrize("prefix", [None, 5, b"x" * 50, {"role": "user", "content": "Hi"}])
def test_what_is_no_prompt_is_refused(tmp_path: Path, prefix: Any) -> None:
    llm = make_llm(save_gguf(tmp_path / "m.gguf"), prefix_caching=True)
    with pytest.raises(RequestError):
        llm.register_prefix(prefix)
    assert llm.drop_prefix(prefix) is False
    llm.close()
