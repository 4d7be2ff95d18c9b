"""Every refusal has OpenAI's shape and the right status, and costs the server nothing."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from tiny_model import MAX_LEN
from tiny_server import TinyServer, wait_for

JSON = {"Content-Type": "application/json"}
LIMIT = 64 * 1024


@pytest.fixture(scope="module")
def server(tiny_model: Any) -> Iterator[TinyServer]:
    server = TinyServer(
        tiny_model,
        engine={"max_num_seqs": 1, "max_queued_requests": 2, "attention": "gather"},
        server={"max_request_bytes": LIMIT},
    )
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, its shape checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(error["message"]) < 700
    return error


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 129}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, None),
        (COMPLETIONS, {"prompt": [99999]}, None),
        (COMPLETIONS, {"prompt": [-1]}, None),
        (COMPLETIONS, {"prompt": [2**90]}, None),
        (COMPLETIONS, {"prompt": [[]]}, None),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 2**40}, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": MAX_LEN}, None),
        (COMPLETIONS, {"prompt": "x", "temperature": -0.1}, "temperature"),
        (COMPLETIONS, {"prompt": "x", "stop_token_ids": [5000]}, "stop_token_ids"),
        (COMPLETIONS, {"prompt": "x", "n": 0}, "n"),
        (COMPLETIONS, {"prompt": "x", "n": 129}, "n"),
        (COMPLETIONS, {"prompt": "x", "n": 4}, "n"),  # more than ever run and wait here
        (COMPLETIONS, {"prompt": ["x"] * 4}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "n": 2, "best_of": 3}, "best_of"),
        (COMPLETIONS, {"prompt": "x", "n": 2, "best_of": 1}, "best_of"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "x", "logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"prompt": "x", "logprobs": True}, "logprobs"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "x", "top_logprobs": 2}, "top_logprobs"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5000": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 100.5}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": "1"}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias"),
        (COMPLETIONS, {"prompt": [9] * (MAX_LEN + 1), "echo": True, "max_tokens": 0}, None),
        (COMPLETIONS, {"prompt": [999], "echo": True, "max_tokens": 0}, None),
        (CHAT, {"messages": [USER], "echo": True}, "echo"),
        (CHAT, {"messages": [USER], "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        (CHAT, {"messages": [USER], "top_logprobs": 5}, "top_logprobs"),
        (CHAT, {"messages": [USER], "top_logprobs": 5, "logprobs": False}, "top_logprobs"),
        (CHAT, {"messages": [USER], "logprobs": 1}, "logprobs"),
        (CHAT, {"messages": [USER], "prompt_logprobs": 1}, "prompt_logprobs"),
        (CHAT, {"messages": [USER], "best_of": 1, "bad_words": [""]}, "bad_words"),
        (CHAT, {"messages": [USER], "n": 2, "best_of": 1}, "best_of"),
        (CHAT, {"messages": [USER], "best_of": 2, "stream": True}, "best_of"),
        (CHAT, {"messages": [USER], "presence_penalty": 2.1}, "presence_penalty"),
        (COMPLETIONS, {"prompt": "x", "frequency_penalty": -2.1}, "frequency_penalty"),
        (COMPLETIONS, {"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
        (COMPLETIONS, {"prompt": "x", "min_tokens": -1}, "min_tokens"),
        (COMPLETIONS, {"prompt": "x", "min_tokens": 17}, "min_tokens"),
        (CHAT, {"messages": [USER], "min_tokens": MAX_LEN}, "min_tokens"),
        (
            COMPLETIONS,
            {"prompt": "x", "include_stop_str_in_output": 1},
            "include_stop_str_in_output",
        ),
        (COMPLETIONS, {"prompt": "x", "bad_words": "x"}, "bad_words"),
        (COMPLETIONS, {"prompt": "x", "bad_words": ["x" * 65]}, "bad_words"),
        (COMPLETIONS, {"prompt": "x", "bad_words": ["x"] * 257}, "bad_words"),
        (COMPLETIONS, {"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids"),
        (COMPLETIONS, {"prompt": "x", "allowed_token_ids": [5000]}, "allowed_token_ids"),
        (
            COMPLETIONS,
            {"prompt": "x", "allowed_token_ids": [2], "min_tokens": 1},
            "allowed_token_ids",
        ),
        (CHAT, {"messages": [USER], "response_format": {"type": "x"}}, "response_format"),
        (COMPLETIONS, {"prompt": "x", "stream": "yes"}, "stream"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": ["hi"]}, "messages"),
        (CHAT, {"messages": [{"content": "hi"}]}, "messages"),
        (CHAT, {"messages": [{"role": "robot", "content": "hi"}]}, "messages"),
        (CHAT, {"messages": [{"role": ["user"], "content": "hi"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (CHAT, {"messages": [USER, {"role": "tool", "content": "x"}]}, "messages"),
        (CHAT, {"messages": [USER], "max_completion_tokens": -5}, "max_completion_tokens"),
        (CHAT, {"messages": [USER], "tools": [{}]}, "tools"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_values_are_400(
    server: TinyServer, path: str, body: dict[str, Any], param: str | None, stream: bool
) -> None:
    response = httpx.post(server.url + path, json={"stream": stream} | body)
    error = refused(response, 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


def test_too_long_says_how_much_fits(server: TinyServer) -> None:
    body = {"prompt": "x" * 4000, "max_tokens": 97}
    error = refused(httpx.post(server.url + COMPLETIONS, json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert "at most 96 tokens" in error["message"]
    httpx.post(server.url + COMPLETIONS, json=body | {"max_tokens": 1}).raise_for_status()


def test_broken_bodies(server: TinyServer) -> None:
    for data in (b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": NaN}', b"[" * 60_000):
        refused(httpx.post(server.url + COMPLETIONS, content=data, headers=JSON), 400)


def test_other_content_types_are_415(server: TinyServer) -> None:
    for headers in ({}, {"Content-Type": "text/plain"}):
        response = httpx.post(server.url + CHAT, content=b"{}", headers=headers)
        assert "application/json" in refused(response, 415)["message"]


def test_compressed_bodies_are_415(server: TinyServer) -> None:
    headers = JSON | {"Content-Encoding": "gzip"}
    data = gzip.compress(b'{"prompt": "a", "max_tokens": 1}')
    response = httpx.post(f"{server.url}/v1/completions", headers=headers, content=data)
    assert "without the header Content-Encoding" in refused(response, 415)["message"]
    headers["Content-Encoding"] = "identity"
    body = b'{"prompt": "a", "max_tokens": 1}'
    response = httpx.post(f"{server.url}/v1/completions", headers=headers, content=body)
    assert response.status_code == 200


@pytest.mark.parametrize("factor", [1, 3, 40])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_large_bodies_are_413(server: TinyServer, factor: int, is_chunked: bool) -> None:
    data = b'{"prompt": "' + b"x" * (LIMIT * factor) + b'"}'

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(data), 10_000):
            yield data[start : start + 10_000]

    response = httpx.post(
        server.url + COMPLETIONS, content=chunks() if is_chunked else data, headers=JSON
    )
    assert refused(response, 413)["code"] == "request_too_large"
    assert httpx.get(server.url + "/health").status_code == 200


def test_unknown_models_and_routes_are_404(server: TinyServer) -> None:
    body = {"model": "gpt-7", "prompt": "x"}
    error = refused(httpx.post(server.url + COMPLETIONS, json=body), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'tiny'" in error["message"]
    error = refused(httpx.get(server.url + "/v1/embeddings"), 404)
    assert "GET /openapi.json lists what is served" in error["message"]
    refused(httpx.get(server.url + COMPLETIONS), 405)
    refused(httpx.get(server.url + "/v1/models/" + "x" * 1000), 404)


def test_a_full_queue_is_429_and_says_when_to_come_back(server: TinyServer) -> None:
    two = {"prompt": ["a"] * 2, "max_tokens": 5}
    long = two | {"max_tokens": MAX_LEN - 1, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + COMPLETIONS, json=long) as response:
        lines = response.iter_lines()
        next(lines)
        for stream in (False, True):  # one fits and one does not: neither is kept
            answer = httpx.post(server.url + COMPLETIONS, json=two | {"stream": stream})
            error = refused(answer, 429)
            assert error["code"] == "queue_full"
            assert " requests run or wait already, of at most 3 (" in error["message"]
            assert answer.headers["retry-after"] == "1"
        assert httpx.get(server.url + "/ready").status_code == 200
        with _waiting(server, long | {"prompt": "a"}):
            wait_for(lambda: httpx.get(server.url + "/ready").status_code == 503, "a full queue")
            reason = refused(httpx.get(server.url + "/ready"), 503)["message"]
            assert reason.startswith("the queue is full: 3 requests run or wait (each of")
            with (
                openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
                pytest.raises(openai.RateLimitError),
            ):
                client.completions.create(model="tiny", prompt="x")
    server.wait_idle()
    httpx.post(server.url + COMPLETIONS, json=two).raise_for_status()


@contextmanager
def _waiting(server: TinyServer, body: dict[str, Any]) -> Iterator[None]:
    """A request that has been sent and waits for its place."""
    data = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    with socket.create_connection(server.address) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        yield


def test_openais_client_raises_its_own_exceptions(server: TinyServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="temperature must be in") as bad:
            client.completions.create(model="tiny", prompt="x", temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="nobody", prompt="x")


def test_after_all_that_nothing_is_lost(server: TinyServer) -> None:
    metrics = server.wait_idle()
    assert metrics['octavo_request_success_total{finished_reason="error"}'] == 0
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    assert not server.errors, "".join(server.errors)
