"""Samples of one request share its prompt; prompts that begin alike share what is cached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import BadRequestError, OpenAI
from tiny_server import TinyServer


def _client(server: TinyServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def complete(client: OpenAI, prompt: list[int], **options: object) -> object:
    return client.completions.create(
        model="tiny",
        prompt=prompt,
        temperature=0,
        max_tokens=4,
        **options,  # type: ignore[call-overload]
    )


@pytest.fixture(scope="module", params=["paged", "virtual"])
def own(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[TinyServer]:
    """A server of its own, whose cache nobody else fills."""
    engine = {"kv": request.param, "block_size": 16, "max_num_seqs": 4}
    server = TinyServer(tiny_model, engine=engine, server={"admin_endpoints": True})
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def test_a_second_prompt_is_found_in_the_cache(own: TinyServer) -> None:
    prompt = [5 + i % 20 for i in range(50)]
    first = complete(_client(own), prompt)
    second = complete(_client(own), prompt)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 48
    assert first.choices[0].text == second.choices[0].text


def test_a_salt_keeps_tenants_apart(own: TinyServer) -> None:
    prompt = [7 + i % 20 for i in range(50)]
    found = [
        complete(
            _client(own), prompt, extra_body={"cache_salt": salt}
        ).usage.prompt_tokens_details.cached_tokens
        for salt in ("a", "b", "a")
    ]
    assert found == [0, 0, 48]
    for bad in ("", "x" * 257, 7, ["a"], {}):
        with pytest.raises(BadRequestError, match="cache_salt") as caught:
            complete(_client(own), prompt, extra_body={"cache_salt": bad})
        assert caught.value.param == "cache_salt"


def test_the_cache_can_be_reset_where_that_is_enabled(own: TinyServer, server: TinyServer) -> None:
    prompt = [9 + i % 20 for i in range(50)]
    complete(_client(own), prompt)
    assert httpx.post(f"{own.url}/reset_prefix_cache").status_code == 200
    again = complete(_client(own), prompt)
    assert again.usage.prompt_tokens_details.cached_tokens == 0
    assert httpx.post(f"{server.url}/reset_prefix_cache").status_code == 404


def test_samples_count_their_prompt_once(own: TinyServer) -> None:
    answer = _client(own).completions.create(
        model="tiny", prompt=[5] * 20, n=3, seed=1, max_tokens=6, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == 20
    assert answer.usage.completion_tokens == 18
    alone = [
        _client(own).completions.create(
            model="tiny", prompt=[5] * 20, seed=1 + i, max_tokens=6, extra_body={"ignore_eos": True}
        )
        for i in range(3)
    ]
    assert [c.text for c in answer.choices] == [a.choices[0].text for a in alone]


def test_more_samples_than_run_at_once_are_refused(own: TinyServer) -> None:
    with pytest.raises(BadRequestError, match="n is 5"):
        _client(own).completions.create(model="tiny", prompt=[5] * 4, n=5, max_tokens=2)
