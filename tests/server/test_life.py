"""What the server costs while nothing happens, and what is left after much has."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tiny_model import MAX_LEN
from tiny_server import TinyServer, wait_for

TOY = [sys.executable, str(Path(__file__).parents[1] / "engine" / "toy_process.py")]
NUM_STREAMS = 1000
WINDOW_S = 2.0
GAUGES = (
    "octavo_num_requests_running",
    "octavo_num_requests_waiting",
    "octavo_num_requests_outstanding",
    "octavo_kv_cache_usage_perc",
)


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[TinyServer]:
    model = tmp_path / "toy-hangs"
    model.mkdir()
    server = TinyServer(
        model,
        engine={"load_format": "dummy"},
        server={"stall_timeout_s": 0.3, "log_level": "warning"},
        command=TOY,
    )
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def test_health_fails_while_the_engine_hangs_and_recovers(hanging: TinyServer) -> None:
    url = hanging.url
    assert httpx.get(f"{url}/health").status_code == 200

    async def main() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            body = {"prompt": [1], "max_tokens": 9, "ignore_eos": True}
            task = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))

            async def until(path: str, status: int) -> httpx.Response:
                while (answer := await client.get(url + path)).status_code != status:
                    await asyncio.sleep(0.02)
                return answer

            async with asyncio.timeout(30):
                error = (await until("/health", 503)).json()["error"]
                assert "makes no progress" in error["message"]
                assert error["code"] == "engine_unavailable"
                assert (await client.get(f"{url}/ready")).status_code == 503
                os.kill(hanging.engine_pid, signal.SIGUSR1)
                assert (await task).json()["usage"]["completion_tokens"] == 9
                await until("/health", 200)
                await until("/ready", 200)

    asyncio.run(main())


def test_an_idle_server_uses_no_cpu(server: TinyServer) -> None:
    server.wait_idle()
    processes = [psutil.Process(pid) for pid in (server.process.pid, server.engine_pid)]

    def cpu_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    # Measured in CPU seconds, which do not depend on what else runs: a loop that polls every
    # millisecond takes a hundred times as much.
    before = cpu_s()
    time.sleep(WINDOW_S)
    assert cpu_s() - before <= 0.05


def test_a_thousand_aborted_streams_leave_nothing_behind(server: TinyServer) -> None:
    body = {"prompt": "a", "max_tokens": MAX_LEN - 1, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    request = f"{head}Content-Type: application/json\r\n\r\n".encode() + data

    async def leave(number: int, room: asyncio.Semaphore) -> None:
        async with room:
            reader, writer = await asyncio.open_connection(*server.address)
            writer.write(request)
            assert b"200 OK" in await reader.readline()
            if number % 2:  # leave at the first event, or before it
                await reader.readuntil(b"data: ")
            writer.close()

    async def main(num_streams: int) -> None:
        room = asyncio.Semaphore(50)
        async with asyncio.timeout(120):
            await asyncio.gather(*(leave(number, room) for number in range(num_streams)))

    def counts() -> tuple[int, ...]:
        found = []
        for pid in (server.process.pid, server.engine_pid):
            process = psutil.Process(pid)
            found += [process.num_fds(), process.num_threads()]
        return (*found, int(server.metrics()["octavo_front_end_tasks"]))

    asyncio.run(main(10))
    server.wait_idle()
    before = _settled(counts)
    metrics = server.metrics()
    asyncio.run(main(NUM_STREAMS))
    after = server.wait_idle()
    wait_for(lambda: counts() == before, f"descriptors, threads and tasks as before: {before}")
    name = 'octavo_request_success_total{finished_reason="abort"}'
    assert after[name] - metrics[name] == NUM_STREAMS
    assert all(server.metrics()[gauge] == 0 for gauge in GAUGES)


def _settled(counts: Any) -> Any:
    """Counts that two looks in a row agree on: connections take a moment to close."""

    def same() -> Any:
        first = counts()
        time.sleep(0.1)
        return first if counts() == first else None

    return wait_for(same, "counts that stay")
