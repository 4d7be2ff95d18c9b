"""The KV cache's memory over HTTP: resized while it serves, given back asleep, taken again."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_server import TinyServer, wait_for


@pytest.fixture(scope="module")
def own(tiny_model: Path) -> Iterator[TinyServer]:
    server = TinyServer(
        tiny_model,
        engine={"kv": "virtual", "max_num_seqs": 4, "max_model_len": 512, "kv_memory": "1MiB"},
        server={"admin_endpoints": True},
    )
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def post(server: TinyServer, path: str, body: Any = None, status: int = 200) -> dict[str, Any]:
    response = httpx.post(server.url + path, json=body, timeout=60)
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer if status == 200 else answer["error"]


def complete(server: TinyServer, count: int = 8, status: int = 200) -> dict[str, Any]:
    body = {"prompt": "Once upon a time", "max_tokens": count, "temperature": 0, "ignore_eos": True}
    return post(server, "/v1/completions", body, status)


def wait_until_taken_in(server: TinyServer, count: int) -> None:
    """What comes after a resize has begun may be too long for it, and is refused."""

    def is_taken_in() -> bool:
        metrics = server.metrics()
        names = ("octavo_num_requests_running", "octavo_num_requests_waiting")
        return sum(metrics[name] for name in names) >= count

    wait_for(is_taken_in, f"{count} requests to be taken in")


def resident_bytes(server: TinyServer) -> int:
    """What the memory file of the engine process holds."""
    files = Path(f"/proc/{server.engine_pid}/fd").iterdir()
    (file,) = [file for file in files if "octavo-blocks" in str(file.readlink())]
    return file.stat().st_blocks * 512


def test_it_grows_and_shrinks(own: TinyServer) -> None:
    text = complete(own)["choices"][0]["text"]
    card = post(own, "/kv/resize", {"kv_memory": "256KiB"})
    assert card["object"] == "kv_cache"
    assert card["num_bytes"] <= 256 * 2**10
    assert card["num_tokens"] == card["num_blocks"] * card["block_size"]
    assert resident_bytes(own) <= card["num_bytes"]
    metrics = own.metrics()
    assert metrics["octavo_num_kv_blocks"] == card["num_blocks"]
    assert any(f'num_bytes="{card["num_bytes"]}"' in name for name in metrics)
    assert complete(own)["choices"][0]["text"] == text
    error = complete(own, card["num_tokens"], 400)
    assert error["code"] == "context_length_exceeded"
    assert f"holds {card['num_tokens']} tokens at present" in error["message"]
    assert "POST /kv/resize" in error["message"]
    assert "up to 512" in error["message"]
    assert longest(own) == card["num_tokens"] + 1
    wider = post(own, "/kv/resize", {"kv_memory": 2 * 2**20})
    assert wider["num_blocks"] > 4 * card["num_blocks"]
    assert complete(own, card["num_tokens"])["usage"]["completion_tokens"] == card["num_tokens"]
    assert longest(own) == 512


def longest(server: TinyServer) -> int:
    """What the server says of the longest sequence, the same everywhere."""
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    tokens = post(server, "/tokenize", {"prompt": "a"})
    schemas = httpx.get(f"{server.url}/openapi.json").json()["components"]["schemas"]
    most = schemas["CompletionRequest"]["properties"]["max_tokens"]
    assert {model["max_model_len"], tokens["max_model_len"]} == {model["max_model_len"]}
    assert str(model["max_model_len"]) in str(most), most
    return int(model["max_model_len"])


def try_complete(server: TinyServer, count: int) -> str | None:
    """The text; None: it came after a resize had begun, and is too long for what will be left."""
    body = {"prompt": "Once upon a time", "max_tokens": count, "temperature": 0, "ignore_eos": True}
    response = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    if response.status_code == 400:
        return None
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == count
    text: str = response.json()["choices"][0]["text"]
    return text


def test_who_runs_is_served_first(own: TinyServer) -> None:
    post(own, "/kv/resize", {"kv_memory": "1MiB"})
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(try_complete, own, 450) for _ in range(4)]
        wait_until_taken_in(own, 1)
        card = post(own, "/kv/resize", {"kv_memory": "128KiB"})
        assert card["num_bytes"] <= 128 * 2**10
        texts = {future.result() for future in running}
    assert len(texts - {None}) == 1
    assert own.metrics()["octavo_num_kv_blocks"] == card["num_blocks"]
    post(own, "/kv/resize", {"kv_memory": "1MiB"})


def test_a_later_resize_takes_an_earlier_ones_place(own: TinyServer) -> None:
    post(own, "/kv/resize", {"kv_memory": "1MiB"})
    before = own.metrics()["octavo_num_kv_blocks"]
    with ThreadPoolExecutor(16) as pool:
        # Most of them wait for the others, so that the first resize cannot end soon.
        running = [pool.submit(try_complete, own, 450) for _ in range(12)]
        wait_until_taken_in(own, 5)
        first = pool.submit(post, own, "/kv/resize", {"kv_memory": "64KiB"}, 409)
        wait_for(lambda: own.metrics()["octavo_num_kv_blocks"] < before, "the pool to shrink")
        card = post(own, "/kv/resize", {"kv_memory": "1MiB"})
        assert card["num_blocks"] == before
        assert "another resize" in first.result()["message"]
        texts = {future.result() for future in running}
    assert len(texts - {None}) == 1


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"kv_memory": "lots"}, "a size such as"),
        ({"kv_memory": "90%"}, "kv_memory must be a size such as 2GiB"),
        ({"kv_memory": "auto" * 999}, "autoaut"),
        ({"kv_memory": 1}, "less than two blocks"),
        ({"kv_memory": -5}, "less than two blocks"),
        ({"kv_memory": "1000TiB"}, "can have from 1 to"),
        ({"kv_memory": None}, "str"),
        ({"kv_memory": 10**30}, "more than any machine has"),
    ],
)
def test_a_size_that_cannot_be_is_refused(own: TinyServer, body: dict[str, Any], word: str) -> None:
    error = post(own, "/kv/resize", body, 400)
    assert word in error["message"]
    assert error["param"] == "kv_memory"
    assert len(error["message"]) < 200
    assert "kv_memory" in post(own, "/kv/resize", {}, 400)["message"]
    unknown = {"kv_memory": "1MiB", "swap_memory": "1MiB"}
    assert "swap_memory" in post(own, "/kv/resize", unknown, 400)["message"]


def test_asleep_it_has_no_memory_and_says_so(own: TinyServer) -> None:
    text = complete(own)["choices"][0]["text"]
    prefix = post(own, "/prefixes", {"prompt": "A prefix that is longer than a block of tokens."})
    assert httpx.get(f"{own.url}/is_sleeping").json() == {"is_sleeping": False}
    blocks = own.metrics()["octavo_num_kv_blocks"]
    for _ in range(2):
        assert post(own, "/sleep") == {"status": "ok"}
    assert httpx.get(f"{own.url}/is_sleeping").json() == {"is_sleeping": True}
    assert resident_bytes(own) <= 2**16
    metrics = own.metrics()
    assert (metrics["octavo_num_kv_blocks"], metrics["octavo_is_sleeping"]) == (0, 1)
    error = complete(own, status=503)
    assert error["code"] == "engine_asleep"
    assert httpx.get(f"{own.url}/health").status_code == 200
    ready = httpx.get(f"{own.url}/ready")
    assert ready.status_code == 503
    assert "POST /wake_up" in ready.json()["error"]["message"]
    assert post(own, "/kv/resize", {"kv_memory": "1MiB"}, 409)["code"] == "kv_cache_busy"
    assert httpx.get(f"{own.url}/prefixes").json()["data"] == [], "documented: dropped"
    assert httpx.delete(f"{own.url}/prefixes/{prefix['id']}").status_code == 404
    assert post(own, "/wake_up?tags=weights") == {"status": "ok"}
    assert httpx.get(f"{own.url}/is_sleeping").json() == {"is_sleeping": True}
    for _ in range(2):
        assert post(own, "/wake_up?tags=kv_cache") == {"status": "ok"}
    assert httpx.get(f"{own.url}/is_sleeping").json() == {"is_sleeping": False}
    assert own.metrics()["octavo_num_kv_blocks"] == blocks
    assert complete(own)["choices"][0]["text"] == text
    assert post(own, "/sleep?level=2", status=400)["param"] == "level"
    assert post(own, "/wake_up?tags=dreams", status=400)["param"] == "tags"


def test_it_does_not_sleep_while_requests_run(own: TinyServer) -> None:
    post(own, "/kv/resize", {"kv_memory": "1MiB"})
    with ThreadPoolExecutor(12) as pool:
        running = [pool.submit(complete, own, 450) for _ in range(12)]
        wait_until_taken_in(own, 1)
        error = post(own, "/sleep", status=409)
        assert "let them end, or abort them, before the engine goes to sleep" in error["message"]
        assert {f.result()["usage"]["completion_tokens"] for f in running} == {450}
    post(own, "/sleep")
    post(own, "/wake_up")


def test_a_pool_of_one_allocation_says_what_to_do(server: TinyServer) -> None:
    for path in ("/kv/resize", "/sleep", "/wake_up"):
        assert httpx.post(server.url + path, json={"kv_memory": "1MiB"}).status_code == 404


def test_described(own: TinyServer) -> None:
    paths = httpx.get(f"{own.url}/openapi.json").json()["paths"]
    assert {"/kv/resize", "/sleep", "/wake_up", "/is_sleeping"} <= paths.keys()
