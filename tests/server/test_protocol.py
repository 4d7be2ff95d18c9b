"""What bodies are refused, and with which words. No server needed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.server.errors import APIError
from octavo.server.protocol import (
    UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
    decode_request,
)


def decode(**fields: Any) -> CompletionRequest:
    return decode_request(json.dumps(fields).encode(), CompletionRequest)


def test_everything_that_is_supported_reaches_the_sampling_params() -> None:
    body = decode(
        model="m",
        prompt="x",
        temperature=1,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        seed=-4,
        stop=["a", "b"],
        stop_token_ids=[7],
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True},
        logit_bias={"5": -100, "7": 0.5},
        presence_penalty=1,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        min_tokens=2,
        include_stop_str_in_output=True,
        bad_words=["no"],
        allowed_token_ids=[7, 9],
        logprobs=3,
        prompt_logprobs=0,
    )
    params = body.sampling_params(9)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1, 0.5, 3, 0.1)
    assert (params.seed, params.stop, params.stop_token_ids) == (-4, ("a", "b"), (7,))
    assert (params.ignore_eos, params.max_tokens) == (True, 9)
    assert params.logit_bias == ((5, -100.0), (7, 0.5))
    assert (params.presence_penalty, params.frequency_penalty) == (1, -0.5)
    assert (params.repetition_penalty, params.min_tokens) == (1.5, 2)
    assert params.include_stop_str_in_output
    assert (params.bad_words, params.allowed_token_ids) == (("no",), (7, 9))
    assert (params.logprobs, params.prompt_logprobs) == (3, 0)
    assert body.include_usage


def test_an_echo_asks_for_as_much_of_the_prompt() -> None:
    assert decode(prompt="x", echo=True).num_prompt_logprobs is None
    assert decode(prompt="x", echo=True, logprobs=3).num_prompt_logprobs == 3
    assert decode(prompt="x", echo=True, logprobs=3, prompt_logprobs=5).num_prompt_logprobs == 5
    assert decode(prompt="x", echo=True, logprobs=3, prompt_logprobs=1).num_prompt_logprobs == 3
    assert decode(prompt="x", logprobs=3, prompt_logprobs=1).num_prompt_logprobs == 1


def test_nulls_harmless_values_and_unknown_fields_are_taken() -> None:
    fields = {name: values[0] for name, values in UNSUPPORTED.items() if values}
    decode(prompt="x", **fields, user="u", store=True, metadata={"a": "b"}, brand_new=[1])
    nulls = dict.fromkeys(UNSUPPORTED) | dict.fromkeys(("stop", "seed", "stream_options", "top_k"))
    assert decode(prompt="x", **nulls).sampling_params(1).stop == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 200),
        ("n", True),
        ("echo", True),
        ("suffix", "end"),
        ("logprobs", 0),
        ("top_logprobs", 1),
        ("prompt_logprobs", 1),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("guided_regex", "a*"),
        ("return_token_ids", True),
        ("n_predict", 8),
        ("repeat_penalty", 1.1),
        ("chat_template", "{{ 1 }}" * 100),
    ],
)
def test_what_would_change_the_output_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(APIError) as caught:
        decode_request(json.dumps({field: value}).encode(), ChatRequest)
    assert caught.value.status == 400
    assert caught.value.param == field
    assert field in caught.value.message
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b"{", None),
        (b'{"prompt": "\xff"}', None),
        (b'{"prompt": "\\ud800"}', None),
        (b'{"temperature": NaN}', None),
        (b'{"temperature": 1e999}', "temperature"),
        (b'{"temperature": "1"}', "temperature"),
        (b'{"temperature": true}', "temperature"),
        (b'{"max_tokens": 1.5}', "max_tokens"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "seed"),
        (b'{"stop": [1]}', "stop"),
        (b'{"prompt": {"a": 1}}', "prompt"),
        (b'{"prompt": [1, null]}', "prompt"),
        (b'{"stream_options": {"include_usage": "yes"}}', "stream_options"),
        (b'{"stream_options": {"include_usage": true}}', "stream_options"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    ],
)
def test_wrong_json_and_wrong_types_are_told(body: bytes, param: str | None) -> None:
    with pytest.raises(APIError) as caught:
        decode_request(body, CompletionRequest)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert len(caught.value.message) < 600


@pytest.mark.parametrize(
    ("text", "half"),
    [
        (rb"\ud800", rb"\ud800"),
        (rb"a\uDC00b", rb"\uDC00"),
        (rb"\ud83d\ude00\ud83d!", rb"\ud83d!"),
        (rb"\ud800\u0041", rb"\ud800"),
        (rb"\\\\ud800\udfff", rb"\udfff"),
    ],
)
def test_half_of_a_surrogate_pair_is_told_as_one(text: bytes, half: bytes) -> None:
    body = b'{"prompt": "%b"}' % text
    with pytest.raises(APIError) as caught:
        decode_request(body, CompletionRequest)
    place = body.rindex(half)
    assert f"{half[:6].decode()} (byte {place}) is half of a surrogate pair" in caught.value.message


def test_what_only_looks_like_half_a_pair_is_a_text() -> None:
    for text, meant in ((rb"\\ud800", r"\ud800"), (rb"\ud83d\ude00", "😀")):
        assert decode_request(b'{"prompt": "%b"}' % text, CompletionRequest).prompt == meant
    with pytest.raises(APIError) as caught:
        decode_request(rb'{"prompt": "\\ud800"', CompletionRequest)
    assert "surrogate" not in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 2**200}, "seed"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": "y" * 2000}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [2**70]}, "stop_token_ids"),
    ],
)
def test_values_out_of_range_name_their_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(APIError) as caught:
        decode(**fields).sampling_params(1)
    assert caught.value.param == param
    assert len(caught.value.message) < 600


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_is_named(encoding: str) -> None:
    with pytest.raises(APIError, match="begins with a byte order mark; send it in UTF-8"):
        decode_request('{"prompt": "a"}'.encode(encoding), CompletionRequest)
