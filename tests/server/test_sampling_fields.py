"""Penalties, masks and shortest lengths through OpenAI's client, on both endpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from tiny_model import token_of
from tiny_server import TinyServer

GREEDY: Any = {"model": "tiny", "temperature": 0, "max_tokens": 30}
END = 2  # the model's own end

Say = Callable[..., str]


@pytest.fixture(scope="module")
def client(server: TinyServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(params=["completion", "chat", "streamed chat"])
def say(client: openai.OpenAI, request: pytest.FixtureRequest) -> Say:
    """The text that the model says under some options."""
    messages: Any = [{"role": "user", "content": "Hello"}]

    def say(**fields: Any) -> str:
        options = GREEDY | fields
        if request.param == "completion":
            return client.completions.create(prompt="Hello", **options).choices[0].text
        if request.param == "chat":
            answer = client.chat.completions.create(messages=messages, **options)
            return answer.choices[0].message.content or ""
        stream = client.chat.completions.create(messages=messages, stream=True, **options)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    return say


def most_frequent(text: str) -> int:
    return max(map(text.count, text))


@pytest.mark.parametrize(
    ("fields", "neutral"),
    [
        ({"presence_penalty": 2.0}, {"presence_penalty": 0}),
        ({"frequency_penalty": 2.0}, {"frequency_penalty": 0.0}),
        ({"extra_body": {"repetition_penalty": 5.0}}, {"extra_body": {"repetition_penalty": 1}}),
    ],
)
def test_penalties_change_what_is_said(say: Say, fields: Any, neutral: Any) -> None:
    plain = say(max_tokens=200)
    assert say(max_tokens=200, **neutral) == plain
    changed = say(max_tokens=200, **fields)
    assert changed != plain
    if "frequency_penalty" in fields:  # it adds up, however far apart the logits are
        assert most_frequent(changed) < most_frequent(plain)


def test_a_repetition_penalty_is_for_the_prompt_too(client: openai.OpenAI) -> None:
    """The first token has no output before it."""
    letter = client.completions.create(prompt="Hello", **GREEDY).choices[0].text[0]
    prompt = letter * 3 + "Hello"
    options = GREEDY | {"max_tokens": 1, "logit_bias": {str(token_of(letter)): 100}}
    forced = client.completions.create(prompt=prompt, **options).choices[0].text
    assert forced == letter
    penalty = {"repetition_penalty": 100.0}
    other = client.completions.create(prompt=prompt, **options, extra_body=penalty).choices[0].text
    assert other != letter
    new = client.completions.create(prompt="?", **options, extra_body=penalty).choices[0].text
    assert new == letter


def test_min_tokens_keep_the_end_away(client: openai.OpenAI) -> None:
    options: Any = GREEDY | {"prompt": "Hello", "logit_bias": {str(END): 100}}
    answer = client.completions.create(**options)
    assert answer.usage is not None
    assert (answer.choices[0].text, answer.usage.completion_tokens) == ("", 1)
    answer = client.completions.create(**options, extra_body={"min_tokens": 5})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert len(answer.choices[0].text) == 5
    assert answer.choices[0].finish_reason == "stop"


def test_min_tokens_keep_stop_strings_away(say: Say) -> None:
    plain = say()
    stop = plain[2]
    assert say(stop=stop) == plain[: plain.index(stop)]
    longer = say(stop=stop, extra_body={"min_tokens": 12})
    assert plain.startswith(longer)
    assert len(longer) >= 12


def test_what_ended_the_text_may_stay_in_it(say: Say) -> None:
    plain = say()
    stop = plain[5:9]
    end = plain.index(stop) + 4
    kept = {"include_stop_str_in_output": True}
    assert say(stop=[stop], extra_body=kept) == plain[:end]
    assert say(stop=[stop], extra_body={"include_stop_str_in_output": False}) == plain[: end - 4]
    token = token_of(plain[5])
    first = plain.index(plain[5])
    ids = {"stop_token_ids": [token]}
    assert say(extra_body=ids) == plain[:first]
    assert say(extra_body=ids | kept) == plain[: first + 1]


def test_bad_words_never_come_out(say: Say) -> None:
    plain = say()
    bad = [plain[1:3], plain[7], plain[10:15]]
    assert say(extra_body={"bad_words": []}) == plain
    other = say(extra_body={"bad_words": bad})
    assert other[0] == plain[0]
    assert not any(word in other for word in bad)
    # Many at once are tokenized on a thread.
    many = [f"{number:060d}" for number in range(250)]
    assert say(extra_body={"bad_words": many}) == plain


def test_allowed_tokens_are_all_there_is(say: Say) -> None:
    allowed = [token_of(letter) for letter in "xyz"]
    text = say(extra_body={"allowed_token_ids": allowed})
    assert len(text) == 30
    assert set(text) <= set("xyz")
    assert say(extra_body={"allowed_token_ids": allowed[:1]}) == "x" * 30


def test_all_of_them_with_samples_and_a_seed(client: openai.OpenAI) -> None:
    options: Any = GREEDY | {"temperature": 1.0, "seed": 5, "n": 3, "presence_penalty": 1.5}
    options |= {"frequency_penalty": 0.5, "logprobs": 1}
    extra = {
        "repetition_penalty": 1.3,
        "min_tokens": 4,
        "bad_words": ["a", "qu"],
        "allowed_token_ids": [*map(token_of, "abcdefghquvwxyz"), END],
    }
    answer = client.completions.create(prompt="Hello", **options, extra_body=extra)
    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) == 3
    for text in texts:
        assert len(text) >= 4
        assert set(text) <= set("bcdefghquvwxyz")
        assert "qu" not in text
    again = client.completions.create(prompt="Hello", **options, extra_body=extra)
    assert [choice.text for choice in again.choices] == texts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"extra_body": {"repetition_penalty": 101}}, "repetition_penalty"),
        ({"extra_body": {"min_tokens": 31}}, "min_tokens"),
        ({"extra_body": {"min_tokens": -1}}, "min_tokens"),
        ({"extra_body": {"bad_words": [""]}}, "bad_words"),
        ({"extra_body": {"bad_words": ["x" * 100]}}, "bad_words"),
        ({"extra_body": {"allowed_token_ids": []}}, "allowed_token_ids"),
        ({"extra_body": {"allowed_token_ids": [10_000]}}, "allowed_token_ids"),
        ({"extra_body": {"allowed_token_ids": [END], "min_tokens": 1}}, "allowed_token_ids"),
        ({"extra_body": {"include_stop_str_in_output": "yes"}}, "include_stop_str_in_output"),
    ],
)
def test_what_is_out_of_range_is_400_and_named(say: Say, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        say(**fields)
    assert caught.value.status_code == 400
    assert caught.value.param == param
