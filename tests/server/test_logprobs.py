"""Log probabilities through OpenAI's client: shapes, and values as `LLM` has them in process."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tiny_model import VOCAB, token_of
from tiny_server import TinyServer

from octavo import LLM, SamplingParams
from octavo.engine.llm import Completion

GREEDY: Any = {"model": "tiny", "max_tokens": 8, "temperature": 0}
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
CHAT_PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
CLOSE = 1e-3


@pytest.fixture(scope="module")
def client(server: TinyServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), kv_memory="4MiB", threads=1, attention="gather") as llm:
        yield llm


def in_process(llm: LLM, prompt: str, **params: Any) -> Completion:
    (answer,) = llm.generate(
        prompt, SamplingParams(**{"temperature": 0.0, "max_tokens": 8} | params)
    )
    return answer


def check_completion(found: Any, expected: Any, num_top: int) -> None:
    """Token by token; every token is a character here, but those without one."""
    assert len(found.tokens) == len(expected)
    columns = (found.tokens, found.token_logprobs, found.top_logprobs)
    for token, logprob, top, value in zip(*columns, expected, strict=True):
        if value is None:
            assert (logprob, top) == (None, None)
            continue
        if len(token) == 1:
            assert token_of(token) == value.token_id
        assert logprob == pytest.approx(value.logprob, abs=CLOSE)
        assert top[token] >= logprob
        # Ids without a token are spelled alike, and all their logits are the same.
        assert 1 <= len(top) <= num_top + 1
        best = [logprob for _, logprob in value.top[:1]]
        assert max(top.values()) == pytest.approx(max([*best, value.logprob]), abs=CLOSE)


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_a_completions_are_those_of_the_engine(
    client: openai.OpenAI, llm: LLM, num_top: int
) -> None:
    answer = client.completions.create(prompt="Hello", logprobs=num_top, **GREEDY)
    (choice,) = answer.choices
    found: Any = choice.logprobs
    assert "".join(found.tokens) == choice.text
    assert found.text_offset == list(range(8))
    expected = in_process(llm, "Hello", logprobs=num_top)
    assert expected.text == choice.text
    check_completion(found, expected.logprobs, num_top)
    if num_top:  # greedy takes the likeliest
        assert all(
            logprob == max(top.values())
            for logprob, top in zip(found.token_logprobs, found.top_logprobs, strict=True)
        )
    assert client.completions.create(prompt="Hello", **GREEDY).choices[0].logprobs is None


def test_a_streams_are_those_of_the_whole(client: openai.OpenAI) -> None:
    options = GREEDY | {"prompt": ["Hello", "Bye"], "n": 2, "logprobs": 3, "seed": 3}
    options["temperature"] = 0.8
    whole = client.completions.create(**options)
    parts: list[Any] = [[[], [], [], []] for _ in whole.choices]
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            found: Any = choice.logprobs
            lists = (found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset)
            for part, values in zip(parts[choice.index], lists, strict=True):
                part += values
    for part, choice in zip(parts, whole.choices, strict=True):
        expected: Any = choice.logprobs
        assert part[0] == expected.tokens
        assert part[1] == pytest.approx(expected.token_logprobs, abs=CLOSE)
        assert [list(top) for top in part[2]] == [list(top) for top in expected.top_logprobs]
        assert part[3] == expected.text_offset == list(range(8))


def test_a_chats_are_those_of_the_engine(client: openai.OpenAI, llm: LLM) -> None:
    options = GREEDY | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 4}
    (choice,) = client.chat.completions.create(**options).choices
    assert choice.logprobs is not None
    content: Any = choice.logprobs.content
    assert "".join(token.token for token in content) == choice.message.content
    expected = in_process(llm, CHAT_PROMPT, logprobs=4)
    for token, value in zip(content, expected.logprobs or (), strict=True):
        assert token.bytes == list(token.token.encode())
        assert token.logprob == pytest.approx(value.logprob, abs=CLOSE)
        assert len(token.top_logprobs) == 4
        assert token.top_logprobs[0].token == token.token  # greedy
        logprobs = [top.logprob for top in token.top_logprobs]
        assert logprobs == sorted(logprobs, reverse=True)
        assert sum(map(math.exp, logprobs)) <= 1 + CLOSE
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**options, stream=True):
        (part,) = chunk.choices
        assert (part.logprobs is not None) == bool(part.delta.content)
        if part.logprobs is not None:
            streamed += part.logprobs.content or []
    assert [token.token for token in streamed] == [token.token for token in content]
    assert [len(token.top_logprobs) for token in streamed] == [4] * 8
    without: Any = GREEDY | {"messages": MESSAGES, "logprobs": True}
    (plain,) = client.chat.completions.create(**without).choices
    assert plain.logprobs is not None
    assert [token.top_logprobs for token in plain.logprobs.content or ()] == [[]] * 8
    for off in ({}, {"logprobs": False}, {"top_logprobs": 0}):
        (silent,) = client.chat.completions.create(messages=MESSAGES, **GREEDY | off).choices
        assert silent.logprobs is None


def test_parts_of_a_character_have_exact_bytes(client: openai.OpenAI, server: TinyServer) -> None:
    """Each of the emoji's four tokens is forced in turn; the last completes it."""
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": "😀"}).json()["tokens"]
    for given in range(4):
        body = {
            "prompt": [*tokens[:given], 80],
            "max_tokens": 1,
            "logprobs": 0,
            "allowed_token_ids": [tokens[given]],
        }
        choice = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]
        assert choice["logprobs"]["tokens"] == ["\ufffd"]
        answer = client.chat.completions.create(
            messages=MESSAGES,
            logprobs=True,
            extra_body={"allowed_token_ids": [tokens[given]]},
            **GREEDY | {"max_tokens": 1},
        ).choices[0]
        assert answer.logprobs is not None
        (token,) = answer.logprobs.content or ()
        assert (token.token, token.bytes) == ("\ufffd", [b"\xf0\x9f\x98\x80"[given]])


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_a_stop_string_drops_have_none(client: openai.OpenAI, stream: bool) -> None:
    options = GREEDY | {"prompt": "Hello", "max_tokens": 40, "logprobs": 2}
    text = client.completions.create(**options).choices[0].text
    stop = text[10:14]
    cut = text.index(stop)
    tokens: list[str] = []
    got = ""
    if stream:
        extra: Any = {"stream_options": {"include_usage": True}}
        *chunks, last = client.completions.create(**options, stop=stop, stream=True, **extra)
        usage = last.usage
    else:
        whole = client.completions.create(**options, stop=stop)
        chunks, usage = [whole], whole.usage  # type: ignore[list-item]
    for chunk in chunks:
        got += chunk.choices[0].text
        tokens += chunk.choices[0].logprobs.tokens  # type: ignore[union-attr, operator]
    assert got == text[:cut]
    # Those of the stop string were generated and count, nothing after them does.
    assert "".join(tokens) == text[: cut + 4]
    assert usage is not None
    assert usage.completion_tokens == len(tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_comes_first(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    options = GREEDY | {"prompt": ["Hello", "Bye"], "n": 2, "echo": True, "logprobs": 2}
    if stream:
        columns: list[Any] = [[[], [], [], []] for _ in range(4)]
        for chunk in client.completions.create(**options, stream=True):
            for choice in chunk.choices:
                part: Any = choice.logprobs
                lists = (part.tokens, part.token_logprobs, part.top_logprobs, part.text_offset)
                for column, values in zip(columns[choice.index], lists, strict=True):
                    column += values
        found = [
            openai.types.completion_choice.Logprobs.construct(
                tokens=c[0], token_logprobs=c[1], top_logprobs=c[2], text_offset=c[3]
            )
            for c in columns
        ]
    else:
        choices = client.completions.create(**options).choices
        found = [choice.logprobs for choice in choices]  # type: ignore[misc]
        for choice, logprobs in zip(choices, found, strict=True):
            assert "".join(logprobs.tokens or ()) == choice.text
    for index, logprobs in enumerate(found):
        prompt = ("Hello", "Hello", "Bye", "Bye")[index]
        expected = in_process(llm, prompt, logprobs=2, prompt_logprobs=2)
        assert expected.prompt_logprobs is not None
        values = [*expected.prompt_logprobs, *(expected.logprobs or ())]
        check_completion(logprobs, values, 2)
        assert logprobs.text_offset == list(range(len(prompt) + 8))


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_of_nothing_more_scores_the_prompt(
    client: openai.OpenAI, llm: LLM, stream: bool
) -> None:
    """What evaluation harnesses ask for."""
    options = GREEDY | {"prompt": ["Hello", "a", "Hello"], "n": 2, "max_tokens": 0, "logprobs": 1}
    if stream:
        *chunks, last = client.completions.create(
            **options, echo=True, stream=True, stream_options={"include_usage": True}
        )
        choices = sorted((c for chunk in chunks for c in chunk.choices), key=lambda c: c.index)
        usage = last.usage
    else:
        answer = client.completions.create(**options, echo=True)
        choices, usage = answer.choices, answer.usage
    assert [c.text for c in choices] == ["Hello"] * 2 + ["a"] * 2 + ["Hello"] * 2
    assert [c.finish_reason for c in choices] == ["length"] * 6
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (11, 0)
    assert choices[2].logprobs is not None
    assert choices[2].logprobs.token_logprobs == [None]
    for index in (0, 1, 4, 5):
        expected = in_process(llm, "Hello", prompt_logprobs=1)
        check_completion(choices[index].logprobs, expected.prompt_logprobs, 1)


def test_a_long_prompt_is_scored_in_chunks_and_again_when_it_is_cached(
    server: TinyServer, llm: LLM
) -> None:
    prompt = [70 + i * i % 26 for i in range(3000)]
    body = {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 5, "temperature": 0}
    answers = []
    for _ in range(2):
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        answers.append(answer["choices"][0]["logprobs"])
        assert answer["usage"]["completion_tokens"] == 1
    (expected,) = llm.generate(
        [prompt], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=5)
    )
    values = [value.logprob for value in (expected.prompt_logprobs or ()) if value is not None]
    for found in answers:
        assert len(found["tokens"]) == len(found["text_offset"]) == 3001
        assert found["token_logprobs"][1:-1] == pytest.approx(values, abs=CLOSE)


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_logprobs_are_vllms(server: TinyServer, llm: LLM, stream: bool) -> None:
    body = {"prompt": ["Hello", "Bye"], "max_tokens": 2, "prompt_logprobs": 3, "stream": stream}
    response = httpx.post(f"{server.url}/v1/completions", json=body | {"n": 2})
    found: dict[int, Any] = {}
    if stream:
        for line in response.text.splitlines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    assert ("prompt_logprobs" in choice) == (choice["index"] not in found)
                    found.setdefault(choice["index"], choice.get("prompt_logprobs"))
    else:
        choices = response.json()["choices"]
        assert all(choice["logprobs"] is None for choice in choices)
        found = {choice["index"]: choice["prompt_logprobs"] for choice in choices}
    assert len(found) == 4
    for index, values in found.items():
        prompt = ("Hello", "Hello", "Bye", "Bye")[index]
        first, *rest = in_process(llm, prompt, prompt_logprobs=3).prompt_logprobs or ()
        assert (first, values[0]) == (None, None)
        assert len(values) == len(prompt)
        for entry, letter, expected in zip(values[1:], prompt[1:], rest, strict=True):
            assert expected is not None
            ids = list(dict.fromkeys([expected.token_id, *(i for i, _ in expected.top)]))
            assert list(map(int, entry)) == ids
            own = entry[str(expected.token_id)]
            assert own["decoded_token"] == letter
            assert own["rank"] == expected.rank
            assert own["logprob"] == pytest.approx(expected.logprob, abs=CLOSE)
    plain = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert "prompt_logprobs" not in plain.json()["choices"][0]


def test_special_tokens_are_spelled_and_offsets_are_of_the_text(client: openai.OpenAI) -> None:
    prompt = [1, token_of("a"), 2, token_of("b"), VOCAB - 1]  # the last has no token
    answer = client.completions.create(
        prompt=prompt, echo=True, logprobs=0, **GREEDY | {"max_tokens": 1}
    ).choices[0]
    logprobs: Any = answer.logprobs
    assert answer.text[:2] == "ab"
    assert logprobs.tokens[:5] == ["<|im_start|>", "a", "<|im_end|>", "b", ""]
    assert logprobs.text_offset == [0, 0, 1, 1, 2, 2]


def test_a_whole_answer_of_twenty_is_a_distribution(client: openai.OpenAI) -> None:
    """The tiny model knows 26 letters; everything else has logit 0."""
    answer = client.completions.create(prompt="Hello", logprobs=20, **GREEDY).choices[0]
    logprobs: Any = answer.logprobs
    for top in logprobs.top_logprobs:
        assert 0.5 < sum(map(math.exp, top.values())) <= 1 + CLOSE


def test_the_best_of_several_are_those_with_the_highest_mean(client: openai.OpenAI) -> None:
    options = GREEDY | {"temperature": 1.0, "seed": 11, "logprobs": 0, "prompt": ["Hello", "Bye"]}
    extra: Any = {"extra_body": {"ignore_eos": True}}
    every = client.completions.create(n=5, **options, **extra).choices
    best = client.completions.create(n=2, best_of=5, **options, **extra)
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert best.usage is not None
    assert best.usage.completion_tokens == 2 * 5 * 8
    assert best.usage.prompt_tokens == 8

    def mean(choice: Any) -> float:
        values = choice.logprobs.token_logprobs
        return float(sum(values) / len(values))

    for prompt in range(2):
        ranked = sorted(every[prompt * 5 : prompt * 5 + 5], key=mean, reverse=True)
        chosen = best.choices[prompt * 2 : prompt * 2 + 2]
        assert [choice.text for choice in chosen] == [choice.text for choice in ranked[:2]]
    silent = options | {"logprobs": None}
    plain = client.completions.create(n=2, best_of=5, **silent, **extra).choices
    assert [choice.text for choice in plain] == [choice.text for choice in best.choices]
    assert plain[0].logprobs is None


def test_chat_takes_the_best_of_several_too(client: openai.OpenAI) -> None:
    options = GREEDY | {"temperature": 1.0, "seed": 11, "logprobs": True, "messages": MESSAGES}

    def ask(n: int, **extra: Any) -> Any:
        extra["ignore_eos"] = True
        return client.chat.completions.create(n=n, extra_body=extra, **options)

    def mean(choice: Any) -> float:
        values = [entry.logprob for entry in choice.logprobs.content]
        return float(sum(values) / len(values))

    ranked = sorted(ask(5).choices, key=mean, reverse=True)
    best = ask(2, best_of=5)
    assert [c.message.content for c in best.choices] == [c.message.content for c in ranked[:2]]
    assert best.usage.completion_tokens == 5 * 8
    options["logprobs"] = False
    plain = ask(2, best_of=5).choices
    assert [c.message.content for c in plain] == [c.message.content for c in ranked[:2]]
    assert plain[0].logprobs is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 3, "n": 2, "stream": True}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"logprobs": 20, "echo": True, "n": 128, "prompt": [70] * 2000}, "logprobs"),
        ({"prompt_logprobs": 20, "n": 128, "prompt": [70] * 2000}, "prompt_logprobs"),
    ],
)
def test_refusals_name_their_field(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    options = GREEDY | {"prompt": "x"} | fields
    extra = {"prompt_logprobs": options.pop("prompt_logprobs", None)}
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**options, extra_body=extra)
    assert caught.value.status_code == 400
    assert caught.value.param == param
