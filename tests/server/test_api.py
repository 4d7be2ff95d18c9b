"""The fields and endpoints beyond a plain completion, through OpenAI's client where it has them."""

from __future__ import annotations

import string
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from tiny_model import MAX_LEN, token_of
from tiny_server import TinyServer

from octavo import __version__

OPTIONS: Any = {"model": "tiny", "max_tokens": 12, "temperature": 20.0}
HELLO_IDS = [token_of(letter) for letter in "Hello"]


@pytest.fixture(scope="module")
def client(server: TinyServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def texts_of(stream: Any, num_choices: int) -> list[str]:
    """Each choice's text; every index gets its own chunks and exactly one reason."""
    texts, reasons = [""] * num_choices, [0] * num_choices
    for chunk in stream:
        for choice in chunk.choices:
            assert not reasons[choice.index]
            delta = getattr(choice, "delta", None)
            texts[choice.index] += choice.text if delta is None else delta.content or ""
            reasons[choice.index] += choice.finish_reason is not None
    assert reasons == [1] * num_choices
    return texts


def test_n_choices_have_the_seeds_after_the_first(client: openai.OpenAI) -> None:
    alone = [
        client.completions.create(prompt="Hello", seed=40 + i, **OPTIONS).choices[0].text
        for i in range(3)
    ]
    assert len(set(alone)) == 3
    answer = client.completions.create(prompt=["Hello", "Bye"], n=3, seed=40, best_of=3, **OPTIONS)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices[:3]] == alone
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("Hello") + len("Bye")  # a prompt counts once
    assert answer.usage.completion_tokens == 6 * 12
    stream = client.completions.create(
        prompt=["Hello", "Bye"], n=3, seed=40, stream=True, **OPTIONS
    )
    assert texts_of(stream, 6) == [choice.text for choice in answer.choices]
    largest = client.completions.create(prompt="Hello", n=2, seed=2**63 - 1, **OPTIONS)
    smallest = client.completions.create(prompt="Hello", seed=-(2**63), **OPTIONS)
    assert largest.choices[1].text == smallest.choices[0].text


def test_n_without_a_seed_differs_and_chats_have_it_too(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    answer = client.chat.completions.create(messages=messages, n=4, **OPTIONS)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in answer.choices}) == 4
    seeded = client.chat.completions.create(messages=messages, n=2, seed=5, **OPTIONS)
    stream = client.chat.completions.create(messages=messages, n=2, seed=5, stream=True, **OPTIONS)
    assert texts_of(stream, 2) == [choice.message.content for choice in seeded.choices]


def test_leaving_a_request_of_many_choices_ends_them_all(
    server: TinyServer, client: openai.OpenAI
) -> None:
    before = server.wait_idle()
    stream = client.completions.create(
        model="tiny", prompt="a", n=5, max_tokens=MAX_LEN - 1, stream=True
    )
    next(iter(stream))
    stream.close()
    after = server.wait_idle()
    name = 'octavo_request_success_total{finished_reason="abort"}'
    assert after[name] - before[name] == 5


@pytest.mark.parametrize("prompt", ["Hello", HELLO_IDS])
def test_echo_puts_the_prompt_before_the_text(client: openai.OpenAI, prompt: Any) -> None:
    greedy = OPTIONS | {"temperature": 0}
    plain = client.completions.create(prompt=prompt, **greedy).choices[0].text
    answer = client.completions.create(prompt=prompt, echo=True, n=2, **greedy)
    assert [choice.text for choice in answer.choices] == ["Hello" + plain] * 2
    stream = client.completions.create(prompt=prompt, echo=True, n=2, stream=True, **greedy)
    assert texts_of(stream, 2) == ["Hello" + plain] * 2


def test_echo_of_nothing_more_is_the_prompt_alone(
    server: TinyServer, client: openai.OpenAI
) -> None:
    before = server.wait_idle()
    options: Any = {"model": "tiny", "prompt": ["Hello", "Bye"], "echo": True, "max_tokens": 0}
    answer = client.completions.create(**options)
    assert [choice.text for choice in answer.choices] == ["Hello", "Bye"]
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 0)
    assert texts_of(client.completions.create(**options, stream=True), 2) == ["Hello", "Bye"]
    assert server.wait_idle()["octavo_engine_steps_total"] == before["octavo_engine_steps_total"]


def test_logit_bias_forces_and_forbids(client: openai.OpenAI) -> None:
    bias = {str(token_of(letter)): -100 for letter in string.ascii_lowercase}
    bias[str(token_of("q"))] = 100
    greedy = OPTIONS | {"temperature": 0}
    answer = client.completions.create(prompt="Hello", logit_bias=bias, **greedy)
    assert answer.choices[0].text == "q" * 12
    text = client.completions.create(prompt="Hello", **greedy).choices[0].text
    banned = {str(token_of(letter)): -100 for letter in set(text)}
    other = client.completions.create(prompt="Hello", logit_bias=banned, **greedy).choices[0].text
    assert not set(other) & set(text)


def test_usage_in_every_chunk_and_its_details(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        prompt="Hello",
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
        extra_body={"ignore_eos": True},  # at this temperature an early end is likely
        **OPTIONS,
    )
    *chunks, last = stream
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert counts == sorted(counts)
    assert len(counts) == len(chunks)
    assert last.usage is not None
    assert last.usage.completion_tokens == 12
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == 0


def test_max_completion_tokens_wins(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=30,
        max_completion_tokens=4,
        user="me",
        store=False,
        metadata={"a": "b"},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def post(server: TinyServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body)


def test_tokenize_and_back(server: TinyServer, client: openai.OpenAI) -> None:
    answer = post(server, "/tokenize", {"model": "tiny", "prompt": "Hello"}).json()
    assert answer == {"count": 5, "max_model_len": MAX_LEN, "tokens": HELLO_IDS}
    assert post(server, "/detokenize", {"tokens": HELLO_IDS}).json() == {"prompt": "Hello"}
    messages: Any = [{"role": "user", "content": "Hé"}]
    chat = post(server, "/tokenize", {"messages": messages}).json()
    spelled = "<|im_start|>user\nHé<|im_end|>\n"
    text = post(server, "/detokenize", {"tokens": chat["tokens"]}).json()["prompt"]
    assert text == spelled + "<|im_start|>assistant\n"
    bare = post(server, "/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert post(server, "/detokenize", {"tokens": bare["tokens"]}).json()["prompt"] == spelled
    usage = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens == chat["count"]
    assert post(server, "/tokenize", {"prompt": ""}).json()["tokens"] == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x" * 600_000}, None),
        ("/detokenize", {}, None),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_400(
    server: TinyServer, path: str, body: dict[str, Any], param: str | None
) -> None:
    response = post(server, path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert post(server, path, body | {"model": "nobody"}).status_code in (400, 404)


def test_version_ready_and_the_model_card(server: TinyServer) -> None:
    assert httpx.get(f"{server.url}/version").json() == {"version": __version__}
    assert httpx.get(f"{server.url}/ready").json() == {"status": "ready"}
    card = httpx.get(f"{server.url}/v1/models/tiny").json()
    assert (card["id"], card["root"], card["max_model_len"]) == ("tiny", "tiny", MAX_LEN)
