"""Whether the engine gets on, what a request's time went into, and what many leave behind."""

from __future__ import annotations

import asyncio
import os
import signal

from engine.client_harness import collect, engine_of, is_idle, run, until
from octavo.core.sampling_params import SamplingParams
from toy_executor import expected_tokens


def test_an_engine_that_hangs_in_a_step_is_noticed_until_it_goes_on() -> None:
    async def test() -> None:
        async with engine_of("toy-hangs") as engine:
            assert engine.silent_s == 0
            params = SamplingParams(max_tokens=9, seed=0, ignore_eos=True)
            task = asyncio.create_task(collect(engine.submit([1], params)))
            await until(lambda: engine.silent_s > 0.3)
            assert engine.is_healthy  # what silence means is the server's to say
            waiting = engine.submit([1], params)
            await asyncio.sleep(0)
            waiting.abort()  # tells nothing of the engine
            assert engine.silent_s > 0.3
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGUSR1)
            assert list((await task).token_ids) == expected_tokens([1], 9)
            await until(lambda: engine.silent_s == 0 and is_idle(engine))

    run(test())


def test_silence_ends_after_requests_that_no_step_has_seen() -> None:
    async def test() -> None:
        async with engine_of() as engine:
            for _ in range(20):
                engine.submit([1], SamplingParams(max_tokens=5)).abort()
            await until(lambda: engine.silent_s == 0)

    run(test())


def test_a_life_is_told_in_parts() -> None:
    async def test() -> None:
        async with engine_of("toy-slow", max_num_seqs=1) as engine:
            params = SamplingParams(max_tokens=20, ignore_eos=True)
            streams = [engine.submit([1, 2], params) for _ in range(3)]
            await asyncio.gather(*map(collect, streams))
            lives = [stream.life() for stream in streams]
            queues = [life.queue_s for life in lives if life.queue_s is not None]
            assert len(queues) == 3
            assert queues == sorted(queues)
            assert queues[2] - queues[0] > 0.15  # two requests of twenty steps of 5 ms before it
            for life in lives:
                assert (life.num_prompt_tokens, life.num_tokens, life.max_tokens) == (2, 20, 20)
                assert life.queue_s is not None
                assert life.prefill_s is not None
                assert life.decode_s is not None
                assert life.queue_s + life.prefill_s + life.decode_s <= life.whole_s + 0.001

    run(test())


def test_a_thousand_aborted_requests_leave_no_task_and_no_block() -> None:
    async def test() -> None:
        async with engine_of(max_num_seqs=8) as engine:
            params = SamplingParams(max_tokens=400, ignore_eos=True)
            await collect(engine.submit([1], SamplingParams(max_tokens=3)))
            before = len(asyncio.all_tasks())

            async def leave(number: int) -> None:
                async with engine.submit([1, 2], params) as stream:
                    if number % 2:
                        await anext(stream)

            for start in range(0, 1000, 50):
                await asyncio.gather(*(leave(number) for number in range(start, start + 50)))
            assert engine.num_outstanding == 0
            await until(lambda: is_idle(engine) and engine.silent_s == 0)
            assert len(asyncio.all_tasks()) == before
            assert engine.stats.num_free_blocks == engine.stats.num_usable_blocks

    run(test())
