"""Starting, stopping and dying: exit codes, last words, and no process left behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_model import MAX_LEN, write_tiny_model
from tiny_server import TinyServer, is_running, wait_for

LONG = {"prompt": "a", "max_tokens": MAX_LEN - 1, "ignore_eos": True, "stream": True}

Start = Callable[..., TinyServer]


@pytest.fixture
def start(tiny_model: Path) -> Iterator[Start]:
    servers = []

    def start(model: Path | str = tiny_model, **options: Any) -> TinyServer:
        engine = {"attention": "gather"} | options.pop("engine", {})
        servers.append(TinyServer(model, engine=engine, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def events(response: httpx.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line:
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_with_nothing_left(start: Start, number: signal.Signals) -> None:
    server = start().wait_ready()
    body = LONG | {"max_tokens": 700}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        stream = events(response)
        text = next(stream)["choices"][0]["text"]
        server.signal(number)
        for event in stream:
            if event == "[DONE]":
                break
            text += event["choices"][0]["text"]
        assert event == "[DONE]"
        assert len(text) == 700
    assert server.wait_exit() == 0
    assert not is_running(server.engine_pid)
    assert not server.errors, "".join(server.errors)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_what_outlasts_the_drain_is_told(start: Start) -> None:
    server = start(server={"drain_timeout_s": 0}).wait_ready()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG) as response:
        stream = events(response)
        next(stream)
        server.signal(signal.SIGTERM)
        *_, error, done = stream
    assert error["error"]["code"] == "engine_unavailable"
    assert done == "[DONE]"
    assert server.wait_exit() == 0
    assert not is_running(server.engine_pid)


def test_a_second_signal_cuts_the_drain_short(start: Start) -> None:
    server = start(server={"drain_timeout_s": 3000}).wait_ready()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG) as response:
        stream = events(response)
        next(stream)
        server.signal(signal.SIGTERM)
        # New requests are refused at once while the old one drains.
        wait_for(lambda: _is_refused(server), "the server to refuse")
        server.signal(signal.SIGTERM)
        *_, error, _ = stream
    assert "error" in error
    assert server.wait_exit() == 0


def _is_refused(server: TinyServer) -> bool:
    try:
        return httpx.get(f"{server.url}/health").status_code == 503
    except httpx.TransportError:
        return True


def test_no_engine_outlives_a_killed_server(start: Start) -> None:
    server = start().wait_ready()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG) as response:
        next(events(response))
        server.signal(signal.SIGKILL)
        assert server.wait_exit() == -signal.SIGKILL
    wait_for(lambda: not is_running(server.engine_pid), "the engine to die with its parent")


def test_a_killed_engine_fails_its_requests_and_health(start: Start) -> None:
    server = start().wait_ready()
    before = server.metrics()
    assert before["octavo_engine_up"] == 1
    with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG) as response:
        stream = events(response)
        next(stream)
        os.kill(server.engine_pid, signal.SIGKILL)
        *_, error, done = stream
        assert "SIGKILL" in error["error"]["message"]
        assert done == "[DONE]"
    for path in ("/health", "/ready"):
        health = httpx.get(server.url + path)
        assert health.status_code == 503
        assert "the engine process was ended by SIGKILL" in health.json()["error"]["message"]
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_unavailable"
    # Counters keep their last values; gauges would pass for the present.
    metrics = server.metrics()
    assert metrics["octavo_engine_up"] == 0
    gone = {name for name in before if name not in metrics}
    assert {"octavo_num_requests_running", "octavo_num_kv_blocks"} <= gone
    process = "octavo_engine_process_"
    assert not any(name.startswith((process, "octavo_cache_config_")) for name in metrics)
    lost = [name for name in gone if not name.startswith(process)]
    assert not any("_total" in name or "_bucket" in name for name in lost)
    server.signal(signal.SIGTERM)
    assert server.wait_exit() == 1, "a supervisor that looks at nothing else is told, too"


def test_a_signal_while_the_model_loads(start: Start) -> None:
    server = start()
    wait_for(server.children, "the engine process")
    (engine,) = server.children()
    server.signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    assert not is_running(engine.pid)


def test_a_taken_port_is_told_before_the_model_is_loaded(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start("/nowhere", server={"port": port})
        assert server.wait_exit() == 1
    assert f"OSError: cannot listen on 127.0.0.1 port {port}" in server.errors[-1]


def test_a_missing_model_is_told(start: Start) -> None:
    server = start("/nowhere/model")
    assert server.wait_exit() == 1
    assert "no model '/nowhere/model'" in server.errors[-1]


def test_an_engine_that_cannot_start_is_told_in_one_line(start: Start) -> None:
    server = start(engine={"max_model_len": 100_000})
    assert server.wait_exit() == 1
    words = "EngineConfigError: max_model_len 100000 is more than the model's own"
    assert words in server.errors[-1]
    assert sum("Traceback" in line for line in server.errors) == 1  # the script's own


def test_the_printed_command_works_and_a_chat_needs_a_template(
    start: Start, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "plain", template=None)
    server = start(model, server={"served_model_names": []}).wait_ready()
    assert server.lines[1].startswith("plain: LlamaForCausalLM, float32")
    command = shlex.split(re.findall(r"^curl .*$", "".join(server.lines), re.MULTILINE)[0])
    answer = subprocess.run([*command, "-s"], capture_output=True, check=True).stdout
    assert json.loads(answer)["usage"]["completion_tokens"] == 32
    messages = [{"role": "user", "content": "hi"}]
    refusal = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": messages})
    assert refusal.status_code == 400
    assert "no chat template" in refusal.json()["error"]["message"]
