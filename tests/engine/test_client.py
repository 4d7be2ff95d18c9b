"""`AsyncEngine` with a real child process over the toy executor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.client_harness import COMMAND, DEADLINE_S, collect, engine_of, is_idle, run, until
from engine.toy_process import EOS
from octavo.config import EngineConfig
from octavo.core.request import ContextLengthError, FinishReason, QueueFullError, RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.engine.client import (
    AsyncEngine,
    EngineConfigError,
    EngineDeadError,
    EngineStartError,
)
from octavo.engine.logprobs import TokenLogprobs
from octavo.engine.output import OutputText
from octavo.engine.stream import RequestState, RequestStream
from octavo.text.tokenizer import Tokenizer
from text.tiny_tokenizers import tiny_tokenizer
from toy_executor import VOCAB, expected_tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_many_requests_at_once_get_exactly_their_tokens(depth: int) -> None:
    async def test() -> None:
        async with engine_of(depth=depth, max_num_seqs=4) as engine:
            prompts = [[n % VOCAB] * (1 + n % 9) for n in range(30)]
            streams = [
                engine.submit(p, SamplingParams(max_tokens=3 + n % 11, seed=n))
                for n, p in enumerate(prompts)
            ]
            results = await asyncio.gather(*map(collect, streams))
            for n, (prompt, stream, result) in enumerate(
                zip(prompts, streams, results, strict=True)
            ):
                expected = expected_tokens(prompt, 3 + n % 11, n, (EOS,))
                assert list(result.token_ids) == expected
                is_stop = expected[-1] == EOS
                assert result.finish_reason is (
                    FinishReason.STOP if is_stop else FinishReason.LENGTH
                )
                assert stream.num_tokens == len(expected)
                assert stream.num_prompt_tokens == len(prompt)
            await until(lambda: is_idle(engine))
            assert engine.num_outstanding == 0

    run(test())


def test_without_a_seed_requests_differ() -> None:
    async def test() -> None:
        async with engine_of() as engine:
            params = SamplingParams(max_tokens=20, ignore_eos=True)
            one, two = await asyncio.gather(
                *(collect(engine.submit([1], params)) for _ in range(2))
            )
            assert one.token_ids != two.token_ids

    run(test())


def test_a_stop_string_ends_the_text_and_the_request() -> None:
    async def test() -> None:
        tokenizer = tiny_tokenizer("byte_level")
        async with engine_of("toy-slow", tokenizer) as engine:
            params = SamplingParams(max_tokens=60, seed=3, ignore_eos=True)
            whole = await collect(engine.submit([1, 2], params))
            assert list(whole.token_ids) == expected_tokens([1, 2], 60, 3)
            assert whole.text == tokenizer.decode(whole.token_ids)
            stop = whole.text[10:13]
            params = SamplingParams(max_tokens=400, seed=3, ignore_eos=True, stop=(stop,))
            stream = engine.submit([1, 2], params)
            cut = await collect(stream)
            assert cut.text == whole.text[: whole.text.index(stop)]
            assert cut.finish_reason is FinishReason.STOP
            assert stream.num_tokens == len(cut.token_ids) < 60
            await until(lambda: is_idle(engine))
            assert engine.stats.num_steps < 60 + 60

    run(test())


def test_tokens_after_a_stop_string_lose_their_log_probabilities() -> None:
    async def test() -> None:
        tokenizer = tiny_tokenizer("byte_level")
        ids = tokenizer.encode("abcdef", add_special_tokens=False)
        assert len(ids) > 2
        output = OutputText(tokenizer, [1], SamplingParams(stop=tokenizer.decode(ids[:2])))
        state = RequestState(1, 1, output, 0.0, None, 16)
        values = [TokenLogprobs(token_id, -1.0, 1) for token_id in ids]
        state.receive(ids[:1], None, None, 1.0, values[:1])
        state.receive(ids[1:], None, None, 1.0, values[1:])
        delta = await state.take()
        assert delta is not None
        assert (delta.text, delta.finish_reason) == ("", FinishReason.STOP)
        assert delta.token_ids == tuple(ids[:2])
        assert delta.logprobs == tuple(values[:2])
        assert await state.take() is None

    run(test())


def test_bad_words_are_forbidden_by_their_tokens() -> None:
    async def test() -> None:
        tokenizer = tiny_tokenizer("byte_level")
        async with engine_of(tokenizer=tokenizer) as engine:
            word = tokenizer.decode([40])  # of the toy's vocabulary
            request = engine.resolve([1], SamplingParams(bad_words=word))
            assert not request.params.bad_words
            assert request.params.bad_words_token_ids
            with pytest.raises(RequestError, match="bad_words"):
                engine.resolve([1], SamplingParams(bad_words="\ud800"))
        async with engine_of() as engine:
            with pytest.raises(RequestError, match="bad_words need a tokenizer"):
                engine.resolve([1], SamplingParams(bad_words="a"))

    run(test())


def test_the_tokenizers_end_tokens_stop_too() -> None:
    async def test() -> None:
        tokenizer = tiny_tokenizer("byte_level")
        async with engine_of(tokenizer=tokenizer) as engine:
            assert engine.limits.eos_token_ids == (EOS, *tokenizer.eos_token_ids)

    run(test())


async def _by_abort(engine: AsyncEngine, stream: RequestStream) -> None:
    stream.abort()
    stream.abort()
    assert [delta async for delta in stream] == []


async def _by_leaving_the_block(engine: AsyncEngine, stream: RequestStream) -> None:
    async with stream:
        pass


async def _by_cancellation(engine: AsyncEngine, stream: RequestStream) -> None:
    task = asyncio.create_task(collect(stream))
    await until(lambda: stream.num_tokens > 3)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("leave", [_by_abort, _by_leaving_the_block, _by_cancellation])
def test_leaving_early_frees_everything(leave: Any) -> None:
    async def test() -> None:
        async with engine_of("toy-slow") as engine:
            stream = engine.submit([1, 2, 3], SamplingParams(max_tokens=500, ignore_eos=True))
            await anext(stream)
            await leave(engine, stream)
            assert stream.finish_reason is FinishReason.ABORT
            assert engine.num_outstanding == 0
            await until(lambda: is_idle(engine))
            assert engine.stats.num_steps < 400

    run(test())


def test_dropping_a_stream_aborts_its_request() -> None:
    async def test() -> None:
        async with engine_of("toy-slow") as engine:
            async for _ in engine.submit([1], SamplingParams(max_tokens=500, ignore_eos=True)):
                break
            await until(lambda: engine.num_outstanding == 0 and is_idle(engine))
            assert engine.stats.num_steps < 400

    run(test())


def test_the_door_refuses_at_once_and_keeps_nothing() -> None:
    async def test() -> None:
        async with engine_of("toy-slow", max_num_seqs=1, max_queued_requests=2) as engine:
            params = SamplingParams(max_tokens=5)
            for prompt in ([], [VOCAB], [-1], [2**80]):
                with pytest.raises(RequestError):
                    engine.submit(prompt, params)
            with pytest.raises(ContextLengthError, match="508 in the prompt, 5 in max_tokens"):
                engine.submit([1] * 508, params)
            with pytest.raises(RequestError, match="stop needs a tokenizer"):
                engine.submit([1], SamplingParams(stop="x"))
            assert engine.num_outstanding == 0
            streams = [engine.submit([1], params) for _ in range(3)]
            with pytest.raises(QueueFullError, match="try again later"):
                engine.submit([1], params)
            for stream in streams:
                await collect(stream)
            await collect(engine.submit([1], params))

    run(test())


def test_a_choice_counts_as_a_request_of_its_own() -> None:
    """At the door, and in what is told about the queue."""

    async def test() -> None:
        async with engine_of("toy-slow", max_num_seqs=2, max_queued_requests=3) as engine:
            params = SamplingParams(max_tokens=500, ignore_eos=True)
            streams = [
                *engine.submit_samples([1], params, 2),
                *engine.submit_samples([2], params, 2),
            ]
            await anext(streams[0])
            await until(lambda: (engine.stats.num_running, engine.stats.num_waiting) == (2, 2))
            with pytest.raises(QueueFullError, match=r"^4 requests .* of at most 5 .* n choices"):
                engine.submit_samples([3], params, 2)
            streams += [engine.submit([3], params)]
            await until(lambda: engine.stats.num_waiting == 3)
            with pytest.raises(QueueFullError, match=r"^5 requests"):
                engine.submit([4], params)
            for stream in streams:
                stream.abort()
            await until(lambda: is_idle(engine))

    run(test())


def test_when_the_engine_is_killed_every_request_fails_and_none_is_taken() -> None:
    async def test() -> None:
        async with engine_of("toy-slow") as engine:
            params = SamplingParams(max_tokens=500, ignore_eos=True)
            streams = [engine.submit([n], params) for n in range(3)]
            await anext(streams[0])
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
            assert [type(result) for result in results] == [EngineDeadError] * 3
            assert "SIGKILL" in str(results[0])
            assert not engine.is_healthy
            with pytest.raises(EngineDeadError):
                engine.submit([1], params)

    run(test())


def test_a_bug_in_the_engine_is_told_in_one_line() -> None:
    async def test() -> None:
        async with engine_of("toy-bug") as engine:
            with pytest.raises(EngineDeadError, match=r"^KeyError: 'a bug'$"):
                await collect(engine.submit([1], SamplingParams(max_tokens=10, ignore_eos=True)))
            assert engine.error is not None
            assert "Traceback" in engine.error

    run(test())


def test_an_engine_that_exits_tells_its_code() -> None:
    async def test() -> None:
        async with engine_of("toy-exits") as engine:
            assert engine.death is None
            with pytest.raises(EngineDeadError, match="ended with exit code 7"):
                await collect(engine.submit([1], SamplingParams(max_tokens=10, ignore_eos=True)))
            assert "ended with exit code 7" in str(engine.death)

    run(test())


def test_a_failed_step_fails_its_requests_only() -> None:
    async def test() -> None:
        async with engine_of("toy-fails-step") as engine:
            params = SamplingParams(max_tokens=5, seed=0, ignore_eos=True)
            failed = await collect(engine.submit([1], params))
            assert failed.finish_reason is FinishReason.ERROR
            assert failed.error == "step 2 was told to fail"
            fine = await collect(engine.submit([1], params))
            assert list(fine.token_ids) == expected_tokens([1], 5)

    run(test())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("toy-refuses", "kv_memory asks for too much; ask for less"),
        ("toy-lacks", "the host refuses addresses; use less"),
        ("toy-raises", "OSError: the disk is on fire"),
        ("toy-crashes", "the engine process was ended by SIGABRT"),
    ],
)
def test_a_failed_start_says_why_in_one_line(model: str, reason: str) -> None:
    async def test() -> None:
        with pytest.raises(EngineStartError) as caught:
            async with engine_of(model):
                pass
        assert str(caught.value) == reason
        assert isinstance(caught.value, EngineConfigError) == (model == "toy-refuses")

    run(test())


def test_a_tokenizer_that_cannot_be_loaded_stops_the_start() -> None:
    def load() -> Tokenizer:
        raise ValueError("no tokenizer here")

    async def test() -> None:
        before = psutil.Process().children()
        with pytest.raises(ValueError, match="no tokenizer here"):
            await AsyncEngine.start(EngineConfig(model="toy"), load, command=COMMAND)
        assert psutil.Process().children() == before

    run(test())


def test_a_start_can_be_cancelled() -> None:
    async def test() -> None:
        command = (sys.executable, "-c", "import time; time.sleep(1000)")
        before = psutil.Process().children()
        task = asyncio.create_task(AsyncEngine.start(EngineConfig(model="toy"), command=command))
        await until(lambda: psutil.Process().children() != before)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert psutil.Process().children() == before

    run(test())


def test_closing_drains_and_then_ends_what_is_left() -> None:
    async def test() -> None:
        async with engine_of("toy-slow") as engine:
            params = SamplingParams(max_tokens=20, seed=0, ignore_eos=True)
            task = asyncio.create_task(collect(engine.submit([1], params)))
            closing = asyncio.create_task(engine.close(drain_timeout_s=DEADLINE_S))
            await asyncio.sleep(0)
            with pytest.raises(EngineDeadError, match="shutting down"):
                engine.submit([1], params)
            assert list((await task).token_ids) == expected_tokens([1], 20)
            await closing
        async with engine_of("toy-slow") as engine:
            params = SamplingParams(max_tokens=500, ignore_eos=True)
            task = asyncio.create_task(collect(engine.submit([1], params)))
            draining = asyncio.create_task(engine.close(drain_timeout_s=DEADLINE_S))
            await asyncio.sleep(0)
            await engine.close()
            await draining
            with pytest.raises(EngineDeadError, match="stopped before the request ended"):
                await task

    run(test())


def test_nothing_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
from octavo.config import EngineConfig
from octavo.engine.client import AsyncEngine

async def main():
    engine = await AsyncEngine.start(EngineConfig(model="toy"), command={COMMAND!r})
    print(engine.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    with parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        assert list(tmp_path.iterdir()) == []
        parent.kill()
    deadline = time.monotonic() + DEADLINE_S
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the engine outlives its parent"
        time.sleep(0.01)
