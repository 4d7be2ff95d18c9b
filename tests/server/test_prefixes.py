"""Registered prefixes over HTTP and from files: hits, refusals, nothing left of a dropped one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_server import TinyServer, wait_for

from octavo.config import ConfigError, EngineConfig
from octavo.server.prefixes import read_prefix_files

SYSTEM = {"role": "system", "content": "You are a very helpful assistant that answers briefly."}
TEXT = "A text that many prompts begin with, twice as long as a block."


@pytest.fixture(scope="module", params=["paged", "virtual"])
def own(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[TinyServer]:
    """Two prefixes from files, and room for few more."""
    folder = tmp_path_factory.mktemp("prefixes")
    (folder / "text.txt").write_text(TEXT)
    (folder / "chat.json").write_text(json.dumps([SYSTEM]))
    server = TinyServer(
        tiny_model,
        engine={
            "kv": request.param,
            "block_size": 16,
            "max_num_seqs": 4,
            "max_model_len": 512,
            "kv_memory": "512KiB",
        },
        server={
            "admin_endpoints": True,
            "prefixes": [str(folder / "text.txt"), str(folder / "chat.json")],
        },
    )
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def post(server: TinyServer, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    response = httpx.post(server.url + path, json=body, timeout=60)
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer if status == 200 else answer["error"]


def cached_tokens(server: TinyServer, path: str, body: dict[str, Any]) -> int:
    usage = post(server, path, {"max_tokens": 2} | body)["usage"]
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    return found


def listed(server: TinyServer) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = httpx.get(f"{server.url}/prefixes").json()["data"]
    return data


def num_pinned_blocks(server: TinyServer) -> float:
    return server.metrics()["octavo_num_pinned_blocks"]


def num_ends(server: TinyServer) -> dict[str, float]:
    prefix = "octavo_request_success_total"
    return {name: n for name, n in server.metrics().items() if name.startswith(prefix)}


def test_files_are_registered_before_the_first_request(own: TinyServer) -> None:
    text, chat = listed(own)[:2]
    assert text["num_tokens"] == len(TEXT)
    assert text["num_pinned_tokens"] == len(TEXT) // 16 * 16
    assert "".join(own.lines).count("tokens are kept") == 2
    assert cached_tokens(own, "/v1/completions", {"prompt": TEXT + " More"}) == len(TEXT) // 16 * 16
    for question in ("hi", "bye"):
        messages = [SYSTEM, {"role": "user", "content": question}]
        found = cached_tokens(own, "/v1/chat/completions", {"messages": messages})
        assert found == chat["num_pinned_tokens"] > 0


def test_registered_over_http_kept_and_dropped(own: TinyServer) -> None:
    before = num_pinned_blocks(own)
    ids = [5 + i % 20 for i in range(50)]
    card = post(own, "/prefixes", {"prompt": ids, "model": "tiny"})
    assert card == {"id": card["id"], "object": "prefix", "num_tokens": 50, "num_pinned_tokens": 48}
    assert listed(own)[-1] == card
    wait_for(lambda: num_pinned_blocks(own) == before + 3, "the pins to show")
    for number in range(12):  # pressure: the pool holds some 60 blocks
        post(own, "/v1/completions", {"prompt": [number] * 500, "max_tokens": 2})
    assert httpx.post(f"{own.url}/reset_prefix_cache").status_code == 200
    assert cached_tokens(own, "/v1/completions", {"prompt": [*ids, 1]}) == 48
    url = f"{own.url}/prefixes/{card['id']}"
    assert httpx.delete(url).json() == {"id": card["id"], "object": "prefix", "deleted": True}
    error = httpx.delete(url).json()["error"]
    assert httpx.delete(url).status_code == 404
    assert (error["param"], error["code"]) == ("id", "prefix_not_found")
    assert card not in listed(own)
    wait_for(lambda: num_pinned_blocks(own) == before, "the pins to go")
    httpx.post(f"{own.url}/reset_prefix_cache")
    assert cached_tokens(own, "/v1/completions", {"prompt": [*ids, 1]}) == 0


def test_a_prefix_has_its_salt(own: TinyServer) -> None:
    ids = [90 + i % 20 for i in range(40)]
    card = post(own, "/prefixes", {"prompt": ids, "cache_salt": "a"})
    found = [
        cached_tokens(own, "/v1/completions", {"prompt": [*ids, 1]} | salt)
        for salt in ({}, {"cache_salt": "b"}, {"cache_salt": "a"})
    ]
    assert found == [0, 0, 32]
    httpx.delete(f"{own.url}/prefixes/{card['id']}")


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        ({}, "prompt", "either"),
        ({"prompt": "x", "messages": []}, "prompt", "either"),
        ({"prompt": "too short"}, "prompt", "less than a block"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [99999] * 20}, "prompt", "out of range"),
        ({"prompt": [1] * 600}, "prompt", "context"),
        ({"prompt": ["a", "b"]}, "prompt", "int"),
        ({"prompt": 3}, "prompt", "int"),
        ({"prompt": [3] * 480}, "prompt", "does not fit"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "no tools"),
        ({"messages": [{"role": "user"}]}, "messages", "content"),
        ({"prompt": TEXT, "cache_salt": ""}, "cache_salt", "1 to 256"),
        ({"prompt": TEXT, "cache_salt": "x" * 257}, "cache_salt", "1 to 256"),
        ({"prompt": TEXT, "cache_salt": 7}, "cache_salt", "str"),
    ],
)
def test_a_refusal_names_the_field(
    own: TinyServer, body: dict[str, Any], param: str, word: str
) -> None:
    before = listed(own)
    ends = num_ends(own)
    error = post(own, "/prefixes", body, 400)
    assert error["param"] == param
    assert word in error["message"]
    assert listed(own) == before
    assert num_ends(own) == ends, "nothing that a client asked for has ended, or failed"
    post(own, "/prefixes", {"prompt": TEXT, "model": "other"}, 404)


def test_what_they_keep_is_described(own: TinyServer, server: TinyServer) -> None:
    paths = httpx.get(f"{own.url}/openapi.json").json()["paths"]
    assert paths["/prefixes"].keys() == {"get", "post"}
    assert "delete" in paths["/prefixes/{prefix_id}"]
    assert "/prefixes" not in httpx.get(f"{server.url}/openapi.json").json()["paths"]


def test_only_where_administration_is_enabled(server: TinyServer) -> None:
    for method, path in (
        ("POST", "/prefixes"),
        ("GET", "/prefixes"),
        ("DELETE", "/prefixes/prefix-0"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/kv/resize"),
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
        ("GET", "/is_sleeping"),
    ):
        answer = httpx.request(method, server.url + path)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "admin_endpoints_disabled"), path
        assert "--admin-endpoints" in error["message"]
    assert httpx.post(f"{server.url}/no/such/place").json()["error"]["code"] is None


# ── files ────────────────────────────────────────────────────────────────────────────────────────


def test_a_json_file_may_say_all_that_the_endpoint_takes(tmp_path: Path) -> None:
    path = tmp_path / "tenant.json"
    path.write_text(json.dumps({"messages": [SYSTEM], "cache_salt": "a"}))
    (body,) = read_prefix_files(EngineConfig(), [str(path)])
    assert (body.messages, body.cache_salt) == ([SYSTEM], "a")


@pytest.mark.parametrize("name", ["chat.json", "text.txt"])
def test_a_byte_order_mark_is_no_part_of_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps([SYSTEM]) if name == "chat.json" else TEXT, encoding="utf-8-sig")
    (body,) = read_prefix_files(EngineConfig(), [str(path)])
    expected = ([SYSTEM], None) if name == "chat.json" else (None, TEXT)
    assert (body.messages, body.prompt) == expected


@pytest.mark.parametrize(
    ("name", "data", "word"),
    [
        ("absent.txt", None, "No such file"),
        ("binary.txt", b"\xff\xfe", "not UTF-8"),
        ("broken.json", b"[{", "not valid JSON"),
        ("wrong.json", b"[1]", "messages"),
        ("both.json", b'{"prompt": "a", "messages": []}', "either prompt or messages"),
        ("number.json", b"7", "body"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, data: bytes | None, word: str) -> None:
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=word) as caught:
        read_prefix_files(EngineConfig(), [str(path)])
    assert name in str(caught.value)


@pytest.mark.parametrize("option", ["prefix_caching", "sharing"])
def test_files_need_a_cache(option: str) -> None:
    assert read_prefix_files(EngineConfig(**{option: False}), []) == []  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--no-prefix-caching"):
        read_prefix_files(EngineConfig(**{option: False}), ["x"])  # type: ignore[arg-type]


def test_a_prefix_that_cannot_be_kept_ends_the_start(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("short")
    server = TinyServer(tiny_model, server={"prefixes": [str(path)]})
    try:
        assert server.wait_exit() == 1
        assert any("short.txt: the prefix has 5 tokens" in line for line in server.errors)
    finally:
        server.stop()
