"""Everything at once for a while, and then the counts that it began with.

Ten seconds in CI; an hour with ``--long`` (``make test-long``).
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tiny_model import MAX_LEN
from tiny_server import TinyServer, wait_for

SHORT_S, LONG_S = 8.0, 3600.0
NUM_CLIENTS = 12
SHORT_GROWTH_BYTES, LONG_GROWTH_BYTES = 12 * 2**20, 24 * 2**20


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[TinyServer]:
    server = TinyServer(
        tiny_model,
        # A pool that twelve long requests do not fit in, so that some are preempted.
        engine={"kv_memory": "320KiB", "max_num_seqs": 8, "max_queued_requests": 16},
        server={"max_request_bytes": 64 * 1024},
    )
    try:
        yield server.wait_ready()
    finally:
        server.stop()


class Client:
    """Asks for something at random, again and again, and checks what it gets. Counts by kind."""

    def __init__(self, server: TinyServer, seed: int, counts: Counter[str]) -> None:
        self._url = f"{server.url}/v1/completions"
        self._random = random.Random(seed)
        self._counts = counts
        # Greedy answers to the same prompt are the same, whatever runs beside them.
        self._known: dict[tuple[str, int], str] = {}

    async def run(self, until_s: float) -> None:
        kinds = (self.whole, self.streamed, self.several, self.leave, self.wrong, self.huge)
        async with httpx.AsyncClient(timeout=120) as client:
            while time.monotonic() < until_s:
                kind = self._random.choice(kinds)
                await kind(client)
                self._counts[kind.__name__] += 1

    def _body(self, **changes: Any) -> dict[str, Any]:
        prompt = "ab" * self._random.randint(1, 50)
        max_tokens = self._random.randint(1, 150)
        return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | changes

    def _check(self, body: dict[str, Any], text: str) -> None:
        assert len(text) == body["max_tokens"]
        key = (body["prompt"], body["max_tokens"])
        assert self._known.setdefault(key, text) == text

    async def _post(self, client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
        while (answer := await client.post(self._url, json=body)).status_code == 429:
            self._counts["full"] += 1
            await asyncio.sleep(0.01)
        return answer.raise_for_status().json()

    async def whole(self, client: httpx.AsyncClient) -> None:
        body = self._body()
        answer = await self._post(client, body)
        self._check(body, answer["choices"][0]["text"])
        assert answer["usage"]["completion_tokens"] == body["max_tokens"]

    async def streamed(self, client: httpx.AsyncClient) -> None:
        body = self._body(stream=True)
        text = ""
        async with client.stream("POST", self._url, json=body) as response:
            if response.status_code == 429:
                return
            async for line in response.aiter_lines():
                if line and line != "data: [DONE]":
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        self._check(body, text)

    async def several(self, client: httpx.AsyncClient) -> None:
        answer = await self._post(client, self._body(n=3, temperature=1, stop=["q", "zz"]))
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert all("q" not in choice["text"] for choice in answer["choices"])

    async def leave(self, client: httpx.AsyncClient) -> None:
        body = self._body(max_tokens=400, ignore_eos=True, stream=self._random.random() < 0.5)
        task = asyncio.create_task(client.post(self._url, json=body))
        await asyncio.sleep(self._random.random() / 4)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def wrong(self, client: httpx.AsyncClient) -> None:
        body = self._body(max_tokens=self._random.choice([-1, 0, MAX_LEN, "x"]))
        assert (await client.post(self._url, json=body)).status_code == 400

    async def huge(self, client: httpx.AsyncClient) -> None:
        assert (await client.post(self._url, json={"prompt": "x" * 70_000})).status_code == 413


def test_after_a_soak_the_counts_are_what_they_were(
    server: TinyServer, request: pytest.FixtureRequest
) -> None:
    processes = [psutil.Process(pid) for pid in (server.process.pid, server.engine_pid)]
    counts: Counter[str] = Counter()
    clients = [Client(server, seed, counts) for seed in range(NUM_CLIENTS)]

    async def soak(seconds: float) -> None:
        end = time.monotonic() + seconds
        await asyncio.gather(*(client.run(end) for client in clients))

    def held() -> tuple[int, ...]:
        numbers = [n for p in processes for n in (p.num_fds(), p.num_threads())]
        return (*numbers, int(server.metrics()["octavo_front_end_tasks"]))

    asyncio.run(soak(3.0))  # threads start and caches fill
    server.wait_idle()
    time.sleep(0.2)
    before, memory = held(), [process.memory_info().rss for process in processes]
    is_long = request.config.getoption("--long")
    asyncio.run(soak(LONG_S if is_long else SHORT_S))
    metrics = server.wait_idle()
    assert {"whole", "streamed", "several", "leave", "wrong", "huge"} <= counts.keys()
    wait_for(lambda: held() == before, f"descriptors, threads and tasks as before: {before}")
    assert metrics["octavo_num_requests_outstanding"] == 0
    assert metrics['octavo_request_success_total{finished_reason="error"}'] == 0
    assert metrics["octavo_num_preemptions_total"] > 0
    most = LONG_GROWTH_BYTES if is_long else SHORT_GROWTH_BYTES
    for process, first in zip(processes, memory, strict=True):
        assert process.memory_info().rss - first < most
    assert not server.errors, "".join(server.errors)
    assert httpx.get(f"{server.url}/health").status_code == 200
