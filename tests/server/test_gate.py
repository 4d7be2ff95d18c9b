"""Keys, names, CORS, request ids, JSON logs, and the answer to a bug."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from fastapi import FastAPI
from tiny_model import MAX_LEN
from tiny_server import TinyServer, wait_for

from octavo.config import ConfigError, ServerConfig, api_keys_of, client_key
from octavo.engine.logs import JSONFormatter, TextFormatter
from octavo.server.app import add_error_handlers
from octavo.server.gate import Gate

SECRET = "a very private prompt"


@pytest.fixture(scope="module")
def server(tiny_model: Any) -> Iterator[TinyServer]:
    server = TinyServer(
        tiny_model,
        engine={"attention": "gather"},
        server={
            "served_model_names": ["small", "tiny", "*"],
            "api_keys": ["key-one", "key-two"],
            "cors_origins": ["https://app.example"],
            "log_format": "json",
            "log_level": "info",
        },
    )
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def client_of(server: TinyServer, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def logged(server: TinyServer, request_id: str) -> dict[str, Any]:
    """The line in the log about a request."""

    def find() -> dict[str, Any] | None:
        lines = [json.loads(line) for line in server.errors]
        found = [line for line in lines if line.get("request_id") == request_id]
        assert len(found) <= 1
        return found[0] if found else None

    return wait_for(find, f"a line about {request_id}")


def test_either_key_opens_and_nothing_else_does(server: TinyServer) -> None:
    for key in ("key-one", "key-two"):
        with client_of(server, key) as client:
            assert client.completions.create(model="tiny", prompt="x").choices[0].text
    for key in ("key-three", "key-one2", "ключ"):
        headers = {"Authorization": f"Bearer {key}".encode()}
        response = httpx.get(f"{server.url}/v1/models", headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
    with client_of(server, "wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    for headers in ({}, {"Authorization": "Basic key-one"}, {"Authorization": "key-one"}):
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 401
        assert httpx.post(f"{server.url}/tokenize", headers=headers).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics"])
def test_probes_need_no_key(server: TinyServer, path: str) -> None:
    assert httpx.get(server.url + path).status_code == 200
    headers = {"Authorization": "Bearer key-one"}
    document = httpx.get(f"{server.url}/openapi.json", headers=headers).json()
    assert document["security"] == [{"key": []}]
    assert document["paths"][path]["get"]["security"] == []


def test_keys_come_from_the_environment_and_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "one, two")
    assert api_keys_of([]) == ("one", "two")
    assert api_keys_of(["three"]) == ("three",)
    assert (client_key(None), client_key("three")) == ("one", "three")
    monkeypatch.delenv("OCTAVO_API_KEY")
    assert api_keys_of([]) == ()
    assert client_key(None) is None
    assert "one" not in repr(ServerConfig(api_keys=("one",)))


@pytest.mark.parametrize("key", ["se cret", "secr\net", "secrét"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    for given, kept in ((key, ""), (None, key)):
        monkeypatch.setenv("OCTAVO_API_KEY", kept)
        with pytest.raises(ConfigError, match="cannot be sent in a header") as refused:
            client_key(given)
        assert key not in str(refused.value)


def test_several_names_and_any(server: TinyServer) -> None:
    with client_of(server, "key-one") as client:
        assert [model.id for model in client.models.list().data] == ["small", "tiny"]
        assert client.models.retrieve("gpt-4o").id == "gpt-4o"
        for name in ("small", "tiny", "anything/at-all"):
            assert client.completions.create(model=name, prompt="x").model == name
    headers = {"Authorization": "Bearer key-one"}
    body = {"prompt": "x"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
    assert answer.json()["model"] == "small"


def test_cors_for_the_origins_that_may(server: TinyServer) -> None:
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    url = f"{server.url}/v1/chat/completions"
    for origin, status in (("https://app.example", 200), ("https://other.example", 400)):
        answer = httpx.options(url, headers=preflight | {"Origin": origin})
        assert answer.status_code == status
        allowed = answer.headers.get("access-control-allow-origin")
        assert allowed == (origin if status == 200 else None)
    refused = httpx.get(f"{server.url}/v1/models", headers={"Origin": "https://app.example"})
    assert refused.status_code == 401  # and the page may read why
    assert refused.headers["access-control-allow-origin"] == "https://app.example"


def test_without_origins_there_is_no_cors(tiny_model: Any) -> None:
    plain = TinyServer(tiny_model, engine={"attention": "gather"})
    try:
        url = plain.wait_ready().url
        headers = {"Origin": "https://app.example"}
        answer = httpx.get(url + "/health", headers=headers)
        assert "access-control-allow-origin" not in answer.headers
        assert httpx.options(url + "/v1/models", headers=headers).status_code == 405
    finally:
        plain.stop()


@pytest.mark.parametrize("num_bytes", [60_000, 70_000, 100_000])
@pytest.mark.parametrize("where", ["query", "header", "headers", "method"])
def test_a_head_that_comes_at_once_is_limited_too(
    server: TinyServer, num_bytes: int, where: str
) -> None:
    head = {
        "query": b"GET /version?a=%b HTTP/1.1\r\nHost: x" % (b"x" * num_bytes),
        "header": b"GET /version HTTP/1.1\r\nHost: x\r\nA: " + b"x" * num_bytes,
        "method": b"x" * num_bytes + b" /version HTTP/1.1\r\nHost: x",
        "headers": b"GET /version HTTP/1.1\r\nHost: x"
        + b"".join(b"\r\nA%d: %b" % (n, b"x" * 1000) for n in range(num_bytes // 1000)),
    }[where]
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port), timeout=10) as connection:
        connection.sendall(head + b"\r\nConnection: close\r\n\r\n")
        answer = connection.makefile("rb").read()
    status = (405 if where == "method" else 200) if num_bytes < 65536 else 431
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert (b"request_headers_too_large" in answer) == (status == 431)


def test_request_ids_are_kept_where_they_are_sane(server: TinyServer) -> None:
    for given, is_kept in (("my-id_1.2:3", True), ("x" * 129, False), ('a"b', False)):
        headers = {"X-Request-Id": given}
        got = httpx.get(f"{server.url}/health", headers=headers).headers["x-request-id"]
        assert (got == given) == is_kept
        assert got
    one, two = (httpx.get(f"{server.url}/version").headers["x-request-id"] for _ in range(2))
    assert one != two


@pytest.mark.parametrize("stream", [False, True])
def test_each_request_is_one_line_without_its_text(server: TinyServer, stream: bool) -> None:
    headers = {"Authorization": "Bearer key-one", "X-Request-Id": f"line-{stream}"}
    body = {"prompt": SECRET, "max_tokens": 7, "n": 2, "stream": stream}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
    assert f"cmpl-line-{stream}" in answer.text
    line = logged(server, f"line-{stream}")
    assert (line["level"], line["message"]) == ("info", "POST /v1/completions")
    assert (line["status"], line["finish_reason"], line["choices"]) == (200, "length", 2)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (len(SECRET), 14)
    assert 0 <= line["queue_s"] <= line["duration_s"]
    assert {"prefill_s", "decode_s", "time", "logger"} <= line.keys()
    refused = headers | {"X-Request-Id": f"refused-{stream}"}
    httpx.post(f"{server.url}/v1/completions", json=body | {"n": 0}, headers=refused)
    assert logged(server, f"refused-{stream}")["status"] == 400
    assert SECRET not in "".join(server.errors)
    assert "key-one" not in "".join(server.errors)


def test_a_client_that_leaves_is_a_line_too(server: TinyServer) -> None:
    headers = {"Authorization": "Bearer key-one", "X-Request-Id": "gone"}
    body = {"prompt": "a", "max_tokens": MAX_LEN - 1, "ignore_eos": True, "stream": True}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers) as response:
        next(response.iter_raw())
    assert logged(server, "gone")["finish_reason"] == "abort"


def test_the_log_begins_with_where_memory_went(server: TinyServer) -> None:
    ready = json.loads(server.errors[0])
    assert (ready["message"], ready["model"], ready["url"]) == ("ready", "small", server.url)
    assert ready["kv_bytes"] == ready["num_blocks"] * ready["block_bytes"]
    assert ready["num_kv_tokens"] == (ready["num_blocks"] - 1) * ready["block_size"]
    assert {"weight_bytes", "workspace_bytes", "max_model_len"} <= ready.keys()
    assert server.lines[0] == "Loading small ...\n"
    assert re.search(r"^Memory: weights .* KV cache [0-9.]+ [GM]iB = ", "".join(server.lines), re.M)


@pytest.mark.parametrize("is_in_a_route", [False, True])
def test_a_bug_is_answered_in_openais_shape_and_logged(
    caplog: pytest.LogCaptureFixture, is_in_a_route: bool
) -> None:
    async def plain(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("something private")

    app: Any = plain
    if is_in_a_route:
        app = FastAPI()
        app.add_api_route("/v1/models", functools.partial(plain, None, None, None))
        add_error_handlers(app)

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app=Gate(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get("/v1/models", headers={"X-Request-Id": "bug"})

    response = asyncio.run(main())
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "bug"
    assert response.json()["error"]["code"] == "internal_error"
    assert "private" not in response.text
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.__dict__["request_id"] == "bug"


def test_log_lines_carry_what_was_given(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        try:
            raise ValueError("two\nlines")
        except ValueError:
            logging.getLogger("x").exception("it %s", "failed", extra={"n": 1, "odd": {1, 2}})
    (record,) = caplog.records
    line = JSONFormatter().format(record)
    assert "\n" not in line
    fields = json.loads(line)
    assert (fields["level"], fields["message"], fields["n"]) == ("error", "it failed", 1)
    assert "ValueError" in fields["exception"]
    assert TextFormatter("p: ").format(record).startswith("p: ERROR x: it failed n=1 odd={1, 2}\n")
