"""Reports against other servers, each as a test that this one must pass.

Where another module looks at the same thing in more detail, its docstring says which.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tiny_model import MAX_LEN, token_of
from tiny_server import TinyServer, is_running, wait_for

LONG = {"prompt": "a", "max_tokens": MAX_LEN - 1, "ignore_eos": True}
BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, heads, dimensions, bytes

Start = Callable[..., TinyServer]


@pytest.fixture
def start(tiny_model: Path) -> Iterator[Start]:
    servers = []

    def start(**options: Any) -> TinyServer:
        engine = {"attention": "gather"} | options.pop("engine", {})
        servers.append(TinyServer(tiny_model, engine=engine, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def test_health_answers_200_while_the_engine_is_dead(start: Start) -> None:
    """See also test_life.py for an engine that hangs."""
    server = start().wait_ready()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}) as r:
        lines = r.iter_lines()
        next(lines)
        os.kill(server.engine_pid, signal.SIGKILL)
        killed = time.monotonic()
        last = [line for line in lines if line]
        assert time.monotonic() - killed < 2
    assert "engine_unavailable" in last[-2]
    for path in ("/health", "/ready"):
        assert httpx.get(server.url + path).status_code == 503


def test_orphans_hold_memory_after_the_parent_is_killed(start: Start) -> None:
    """See also test_process.py, where nothing but the closed standard input ends the engine."""
    server = start().wait_ready()
    server.signal(signal.SIGKILL)
    wait_for(lambda: not is_running(server.engine_pid), "the engine to end")


def test_generation_goes_on_after_a_non_streaming_client_disconnects(server: TinyServer) -> None:
    before = server.wait_idle()

    async def main() -> None:
        async with httpx.AsyncClient() as client:
            task = asyncio.create_task(client.post(f"{server.url}/v1/completions", json=LONG))
            while not (await asyncio.to_thread(server.metrics))["octavo_num_requests_running"]:
                pass
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    after = server.wait_idle()
    steps = "octavo_engine_steps_total"
    assert after[steps] - before[steps] < MAX_LEN - 1


def test_host_memory_grows_with_each_request(server: TinyServer) -> None:
    processes = [psutil.Process(pid) for pid in (server.process.pid, server.engine_pid)]

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        body = {"prompt": "x" * 500, "max_tokens": 4, "seed": number, "stream": number % 2 == 0}
        response = await client.post(f"{server.url}/v1/completions", json=body)
        response.raise_for_status()

    async def ask_many() -> None:
        limits = httpx.Limits(max_connections=8)
        async with httpx.AsyncClient(limits=limits, timeout=60) as client:
            await asyncio.gather(*(ask(client, number) for number in range(300)))

    def resident() -> list[int]:
        asyncio.run(ask_many())
        server.wait_idle()
        return [process.memory_info().rss for process in processes]

    resident()
    once, twice = resident(), resident()
    for name, first, second in zip(("front end", "engine"), once, twice, strict=True):
        # A kept prompt of 500 characters with its tokens alone would be 1.5 MB for 300.
        assert second - first < 1_000_000, f"the {name} grew from {first} to {second} bytes"


@pytest.mark.parametrize("stream", [False, True])
def test_an_emoji_split_over_tokens_arrives_as_replacement_characters(
    server: TinyServer, stream: bool
) -> None:
    """Every token is a byte here: four of them make the emoji, forced one after another."""
    emoji = "😀"
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": emoji}).json()["tokens"]
    assert len(tokens) == 4
    # The first three bytes are the prompt's end, the fourth is generated, then "a" again and again.
    bias = {str(token_of(letter)): -100 for letter in "bcdefghijklmnopqrstuvwxyz"}
    for prompt, forced, expected in (
        (tokens[:3], tokens[3], emoji),
        (tokens[:2], tokens[2], ""),
    ):
        body = {
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "logit_bias": bias | {str(token_of("a")): -100, str(forced): 100},
            "stream": stream,
        }
        text = _text_of(server, body)
        # What is not finished at the very end is one replacement character, never three.
        assert text == (expected or "\ufffd")


def test_a_stop_string_split_over_tokens_leaks_its_first_half(server: TinyServer) -> None:
    greedy = {"prompt": "Hello", "max_tokens": 40, "temperature": 0}
    whole = _text_of(server, greedy | {"stream": False})
    stop = whole[12:18]
    body = greedy | {"stop": [stop], "stream": True}
    seen = ""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        for choice in _choices(response):
            seen += choice["text"]
            assert whole[: whole.index(stop)].startswith(seen)
    assert seen == whole[: whole.index(stop)]


def test_a_request_larger_than_the_pool_blocks_the_queue_for_ever(start: Start) -> None:
    server = start(engine={"kv_memory": str(9 * BLOCK_BYTES)}).wait_ready()
    url = f"{server.url}/v1/completions"
    refused = httpx.post(url, json={"prompt": "x" * 100, "max_tokens": 30})  # of a context of 4096
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "the KV cache holds 128 tokens" in error["message"]
    fits = httpx.post(url, json={"prompt": "x" * 100, "max_tokens": 29})
    assert fits.json()["usage"]["completion_tokens"] == 29


def test_a_very_small_pool_hangs_instead_of_refusing(start: Start) -> None:
    none = start(engine={"kv_memory": str(BLOCK_BYTES)})
    assert none.wait_exit() == 1
    assert "kv_memory" in none.errors[-1]
    server = start(engine={"kv_memory": str(2 * BLOCK_BYTES)}).wait_ready()  # one block
    url = f"{server.url}/v1/completions"
    assert httpx.post(url, json={"prompt": "xx", "max_tokens": 16}).status_code == 400
    # Samples run together, prompts one after another.
    fits = {"prompt": ["xx"] * 6, "max_tokens": 15, "ignore_eos": True}
    never = httpx.post(url, json=fits | {"prompt": "xx", "n": 6})
    assert never.status_code == 400
    assert "6 samples of 2 prompt and 15 new tokens do not fit" in never.json()["error"]["message"]
    answer = httpx.post(url, json=fits, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 90
    server.wait_idle()


def _text_of(server: TinyServer, body: dict[str, Any]) -> str:
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        if body["stream"]:
            return "".join(choice["text"] for choice in _choices(response))
        response.read()
        text: str = response.json()["choices"][0]["text"]
        return text


def _choices(response: httpx.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line and line != "data: [DONE]":
            yield from json.loads(line.removeprefix("data: "))["choices"]
