"""The server through OpenAI's own client, against the real engine and a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from tiny_model import MAX_LEN
from tiny_server import TinyServer, wait_for

MESSAGES: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}]},
]


@pytest.fixture(scope="module")
def client(server: TinyServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("tiny", "octavo")
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="Hello", max_tokens=12, temperature=0, user="me"
    )
    (choice,) = answer.choices
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "tiny"
    assert len(choice.text) == 12
    assert choice.text.isalpha()
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == 17
    # Sixteen tokens are OpenAI's default.
    assert len(client.completions.create(model="tiny", prompt="Hello").choices[0].text) == 16


def test_streamed_completion_is_the_whole_one_in_pieces(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "prompt": "Hello", "max_tokens": 30, "temperature": 0}
    whole = client.completions.create(**options)
    chunks = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1].finish_reason == "length"


def test_prompts_as_token_ids_and_several_in_one_request(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "max_tokens": 9, "temperature": 0}
    hello, bye = "Hello", "Good bye"
    one, two = (
        client.completions.create(prompt=prompt, **options).choices[0].text
        for prompt in (hello, bye)
    )
    both = client.completions.create(prompt=[hello, bye], **options)
    assert [(choice.index, choice.text) for choice in both.choices] == [(0, one), (1, two)]
    assert both.usage is not None
    assert both.usage.prompt_tokens == len(hello) + len(bye)
    assert both.usage.completion_tokens == 18
    texts = ["", ""]
    for chunk in client.completions.create(prompt=[hello, bye], stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [one, two]
    ids = [41, 70, 77, 77, 80]
    same = client.completions.create(prompt=ids, **options)
    lists = client.completions.create(prompt=[ids, ids], **options)
    assert same.usage is not None
    assert same.usage.prompt_tokens == 5
    assert [choice.text for choice in lists.choices] == [same.choices[0].text] * 2


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=8, temperature=0
    )
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content is not None
    assert len(choice.message.content) == 8
    assert choice.finish_reason == "length"
    # The template spells its special tokens, which are one token each.
    text = "system\nBe brief.\nuser\nHi\n!\nassistant\n"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(text) + 5


def test_streamed_chat_starts_with_the_role(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert all(delta.role is None for delta in deltas[1:])
    content = "".join(delta.content or "" for delta in deltas)
    assert content == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_a_chat_without_a_limit_fills_the_context(client: openai.OpenAI) -> None:
    filler = "x" * (MAX_LEN - 60)
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": filler}], temperature=0
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == MAX_LEN
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_cut_and_tokens_after_them_do_not_count(
    client: openai.OpenAI, stream: bool
) -> None:
    options: Any = {"model": "tiny", "prompt": "Hello", "temperature": 0, "max_tokens": 40}
    text = client.completions.create(**options).choices[0].text
    stop = text[10:14]
    cut = text.index(stop)
    if stream:
        chunks = list(
            client.completions.create(
                **options, stop=stop, stream=True, stream_options={"include_usage": True}
            )
        )
        got = "".join(chunk.choices[0].text for chunk in chunks[:-1])
        reason, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
    else:
        answer = client.completions.create(**options, stop=[stop, "zzzzzz"])
        got, reason = answer.choices[0].text, answer.choices[0].finish_reason
        usage = answer.usage
    assert got == text[:cut]
    assert reason == "stop"
    assert usage is not None
    assert usage.completion_tokens == cut + 4


def test_stop_tokens_and_seeds(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "prompt": "Hello", "max_tokens": 30, "temperature": 1.0}
    one, two, other = (
        client.completions.create(**options, seed=seed).choices[0].text for seed in (7, 7, 8)
    )
    assert one == two != other
    greedy = options | {"temperature": 0}
    text = client.completions.create(**greedy).choices[0].text
    letter = text[3]
    (token,) = [i for i in range(3, 259) if _byte_of(i) == letter]
    answer = client.completions.create(**greedy, extra_body={"stop_token_ids": [token]})
    assert answer.choices[0].text == text[: text.index(letter)]
    assert answer.choices[0].finish_reason == "stop"


def _byte_of(token_id: int) -> str:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())[token_id - 3]


def test_many_async_clients_at_once_get_what_they_would_alone(server: TinyServer) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int, stream: bool) -> str:
        options: Any = {
            "model": "tiny",
            "prompt": "p" * (1 + number * 13 % 40),
            "max_tokens": 5 + number,
            "temperature": 0.8,
            "seed": number,
        }
        if not stream:
            return (await client.completions.create(**options)).choices[0].text
        chunks = await client.completions.create(**options, stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def main() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            alone = [await ask(client, number, False) for number in range(20)]
            tasks = [ask(client, n, s) for n in range(20) for s in (False, True)]
            together = await asyncio.gather(*tasks)
            assert together == [text for text in alone for _ in range(2)]

    asyncio.run(main())
    server.wait_idle()


@pytest.mark.parametrize(
    ("num_chars", "reason"),
    [(5000, "the prompt alone has 5000"), (600_000, "600000 characters, far more")],
)
def test_long_texts_are_refused_without_holding_up_others(
    client: openai.OpenAI, num_chars: int, reason: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        client.completions.create(model="tiny", prompt="x" * num_chars)
    assert caught.value.code == "context_length_exceeded"
    messages: Any = [{"role": "user", "content": "x" * num_chars}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=messages)
    assert caught.value.code == "context_length_exceeded"


def test_metrics_count_exactly(server: TinyServer, client: openai.OpenAI) -> None:
    before = server.wait_idle()
    whole = client.completions.create(model="tiny", prompt="abcd", max_tokens=9, temperature=0)
    stop = whole.choices[0].text[4:7]
    cut = client.completions.create(
        model="tiny", prompt="abcd", max_tokens=3000, temperature=0, stop=stop
    )
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="", max_tokens=9)
    assert whole.usage is not None
    assert cut.usage is not None
    after = server.wait_idle()
    changes = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    num_tokens = whole.usage.completion_tokens + cut.usage.completion_tokens
    assert changes["octavo_prompt_tokens_total"] == 8
    assert changes["octavo_generation_tokens_total"] == num_tokens
    assert changes['octavo_request_success_total{finished_reason="length"}'] == 1
    assert changes['octavo_request_success_total{finished_reason="stop"}'] == 1
    assert changes["octavo_time_to_first_token_seconds_count"] == 2
    assert changes["octavo_inter_token_latency_seconds_count"] == num_tokens - 2
    assert changes["octavo_e2e_request_latency_seconds_count"] == 2
    assert "octavo_num_preemptions_total" not in changes
    # The stop string ended the request in the engine too.
    assert changes["octavo_engine_steps_total"] < 1000


def _ask_and_leave(server: TinyServer, stream: bool) -> None:
    """Ask for the longest completion and leave as soon as it runs."""
    body = {"prompt": "a", "max_tokens": MAX_LEN - 1, "ignore_eos": True, "stream": stream}

    async def main() -> None:
        async with httpx.AsyncClient() as client:
            task = asyncio.create_task(client.post(f"{server.url}/v1/completions", json=body))
            await asyncio.to_thread(
                wait_for, lambda: server.metrics()["octavo_num_requests_running"], "a running one"
            )
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(server: TinyServer, stream: bool) -> None:
    before = server.wait_idle()
    _ask_and_leave(server, stream)
    after = server.wait_idle()
    name = 'octavo_request_success_total{finished_reason="abort"}'
    assert after[name] - before[name] == 1
    assert after["octavo_engine_steps_total"] - before["octavo_engine_steps_total"] < MAX_LEN - 1


def test_leaving_in_the_midst_of_a_stream(server: TinyServer, client: openai.OpenAI) -> None:
    before = server.wait_idle()
    stream = client.completions.create(
        model="tiny", prompt=["a", "b"], max_tokens=MAX_LEN - 1, stream=True
    )
    next(iter(stream))
    stream.close()
    after = server.wait_idle()
    name = 'octavo_request_success_total{finished_reason="abort"}'
    assert after[name] - before[name] == 2
