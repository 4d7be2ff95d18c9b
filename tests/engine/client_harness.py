"""`AsyncEngine` over the toy process, for a test's coroutine with a deadline."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from octavo.config import EngineConfig
from octavo.engine.client import AsyncEngine
from octavo.engine.output import OutputDelta
from octavo.engine.stream import RequestStream
from octavo.text.tokenizer import Tokenizer

COMMAND = (sys.executable, str(Path(__file__).with_name("toy_process.py")))
DEADLINE_S = 30.0


def run(test: Coroutine[Any, Any, None]) -> None:
    async def within_deadline() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test

    asyncio.run(within_deadline())


@asynccontextmanager
async def engine_of(
    model: str = "toy", tokenizer: Tokenizer | None = None, **options: Any
) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(model=model, block_size=4, **options)
    engine = await AsyncEngine.start(config, tokenizer, command=COMMAND)
    try:
        yield engine
    finally:
        await engine.close()
        assert engine.pid is not None
        assert not psutil.pid_exists(engine.pid)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def is_idle(engine: AsyncEngine) -> bool:
    stats = engine.stats
    return not stats.num_running and not stats.num_waiting and stats.kv_cache_usage == 0


async def collect(stream: RequestStream) -> OutputDelta:
    """All deltas as one."""
    text, token_ids, last = "", [], None
    async for delta in stream:
        assert last is None or last.finish_reason is None, "a delta after the last"
        text += delta.text
        token_ids += delta.token_ids
        last = delta
    assert last is not None
    return OutputDelta(text, tuple(token_ids), last.finish_reason, last.error)
