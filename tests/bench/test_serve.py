"""The load generator against a small server of its own, which answers as told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from octavo.bench.percentiles import summary
from octavo.bench.serve import Sample, parse_slo, run, table
from octavo.config import ConfigError
from octavo.workload.items import WorkItem


class FakeServer(ThreadingHTTPServer):
    """Streams ``max_tokens`` chunks a request; a prompt of 13 tokens is refused."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "fake"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.keys.add(self.headers["Authorization"])
        if len(body["prompt"]) == 13:
            self._answer(400, json.dumps({"error": {"message": "unlucky"}}))
            return
        events = [{"choices": [{"text": "x"}]}] * body["max_tokens"]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        lines = [f"data: {json.dumps(e)}\n\n" for e in [*events, {"choices": [], "usage": usage}]]
        self._answer(200, "".join(lines) + "data: [DONE]\n\n")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_every_request_is_sent_and_counted(fake: FakeServer) -> None:
    items = [WorkItem(0.01 * i, 5 + i, 3) for i in range(4)]
    report = asyncio.run(
        run(fake.url + "/v1", items, api_key="k", highest_token_id=200, slo={"e2e": 60.0})
    )
    assert report["model"] == "fake"
    assert (report["num_completed"], report["num_failed"]) == (4, 0)
    assert (report["prompt_tokens"], report["output_tokens"]) == (5 + 6 + 7 + 8, 12)
    assert report["goodput_share"] == 1.0
    assert sorted(len(body["prompt"]) for body in fake.bodies) == [5, 6, 7, 8]
    assert all(100 <= token < 200 for body in fake.bodies for token in body["prompt"])
    assert fake.keys == {"Bearer k"}
    assert 0 < report["ttft_ms"]["p50"] <= report["e2e_ms"]["p50"]
    assert "4 of 4 requests" in table(report)


def test_a_refused_request_is_a_failure_and_not_a_latency(fake: FakeServer) -> None:
    items = [WorkItem(0.0, 13, 3), WorkItem(0.0, 4, 3)]
    report = asyncio.run(run(fake.url, items, model="fake", slo={"ttft": 60.0}))
    assert (report["num_completed"], report["num_failed"]) == (1, 1)
    assert "unlucky" in report["errors"][0]
    assert report["goodput_share"] == 0.5, "a failure is no goodput"


def test_latency_counts_from_the_intended_send_time() -> None:
    sample = Sample(intended_s=0.0, first_token_s=0.5, last_token_s=2.5, end_s=2.6)
    sample.gaps_s, sample.num_output_tokens = [0.5, 1.5], 3
    assert sample.values() == {"ttft": 0.5, "itl": 1.5, "tpot": 1.0, "e2e": 2.6}


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="does not list a model"):
        asyncio.run(run("http://127.0.0.1:9", [WorkItem(0.0, 1, 1)]))


def test_objectives() -> None:
    assert parse_slo("ttft=200ms, itl=0.05s") == {"ttft": 0.2, "itl": 0.05}
    assert parse_slo("") == {}
    for bad in ("ttft", "ttft=5", "speed=1s", "ttft=-1ms", "ttft=xms"):
        with pytest.raises(ConfigError, match="an objective is one of"):
            parse_slo(bad)


def test_summaries() -> None:
    figures = summary([float(i) for i in range(1, 101)])
    assert figures["mean"] == 50.5
    assert figures["p50"] == 50.5
    assert figures["max"] == 100.0
    assert summary([]) == {}
