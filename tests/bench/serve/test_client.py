from __future__ import annotations

import asyncio
import re

import pytest

from octavo.bench.serve.client import connected
from octavo.bench.serve.metrics import Load
from octavo.config import ConfigError
from octavo.workload.items import WorkItem

from .fake_server import FakeServer


def send(url: str, items: list[WorkItem], max_concurrency: int | None = None, **options) -> Load:  # type: ignore[no-untyped-def]
    async def run() -> Load:
        async with connected(url, **options) as client:
            return await client.run(items, max_concurrency=max_concurrency)

    return asyncio.run(run())


def test_every_request_is_sent_and_timed(fake: FakeServer) -> None:
    items = [WorkItem(0.01 * i, 5 + i, 3) for i in range(4)]
    load = send(fake.url + "/v1", items, api_key="k", highest_token_id=200)
    assert load.model == "fake"
    assert sorted(len(body["prompt"]) for body in fake.bodies) == [5, 6, 7, 8]
    assert all(100 <= token < 200 for body in fake.bodies for token in body["prompt"])
    assert all(body["ignore_eos"] and body["max_tokens"] == 3 for body in fake.bodies)
    assert fake.keys == {"Bearer k"}
    for sample, item in zip(load.samples, items, strict=True):
        assert sample.error is None
        assert sample.start_s == pytest.approx(item.arrival_s)
        assert (sample.num_prompt_tokens, sample.num_output_tokens) == (item.num_prompt_tokens, 3)
        assert len(sample.gaps_s) == 2
        assert sample.first_token_s is not None
        assert 0 < sample.first_token_s <= sample.last_token_s <= sample.end_s
    assert load.seconds >= load.samples[3].start_s + load.samples[3].end_s


def test_the_loop_is_open_unless_it_is_bounded(fake: FakeServer) -> None:
    """The server answers none of four before all have come."""
    load = send(fake.url, [WorkItem(0.0, 16, 2)] * 4)
    assert [sample.error for sample in load.samples] == [None] * 4
    assert fake.most_at_once == 4


def test_a_bound_on_requests_at_once_holds(fake: FakeServer) -> None:
    load = send(fake.url, [WorkItem(0.0, 5, 2)] * 6, max_concurrency=2)
    assert [sample.error for sample in load.samples] == [None] * 6
    assert fake.most_at_once <= 2
    starts = [sample.start_s for sample in load.samples]
    assert starts == sorted(starts)
    # Who waits for a place starts when it has it: no earlier than the first end.
    assert starts[-1] >= min(sample.start_s + sample.end_s for sample in load.samples)


@pytest.mark.parametrize(
    ("length", "word"), [(13, "400: .*unlucky"), (14, "told no usage"), (15, "is not OpenAI's")]
)
def test_a_request_that_fails_says_why(fake: FakeServer, length: int, word: str) -> None:
    bad, good = send(fake.url, [WorkItem(0.0, length, 3), WorkItem(0.0, 4, 3)], model="x").samples
    assert good.error is None
    assert bad.error is not None
    assert re.search(word, bad.error)


def test_a_server_that_is_not_there_is_named() -> None:
    """In words, not as an object of the library."""
    words = r"http://127\.0\.0\.1:9 does not list a model"
    with pytest.raises(ConnectionError, match=words) as caught:
        send("http://127.0.0.1:9", [WorkItem(0.0, 1, 1)])
    assert "Key(" not in str(caught.value)


@pytest.mark.parametrize("url", ["nowhere", "", "ftp://127.0.0.1", "http://", "http:///v1"])
@pytest.mark.parametrize("model", [None, "named"])
def test_an_url_that_is_none_is_refused(url: str, model: str | None) -> None:
    with pytest.raises(ConfigError, match="url must begin with http://"):
        send(url, [WorkItem(0.0, 1, 1)], model=model)


def test_prompts_need_more_than_one_token_id(fake: FakeServer) -> None:
    with pytest.raises(ConfigError, match="highest_token_id must be above 100"):
        send(fake.url, [WorkItem(0.0, 1, 1)], highest_token_id=100)
