"""Beam search over HTTP: choices best first, whole at the end, and bad values named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from tiny_server import TinyServer

from octavo.core.sampling_params import SamplingParams
from octavo.engine.llm import LLM
from octavo.text.tokenizer import load_tokenizer

PROMPT = "tell me a story"
CHAT = [{"role": "user", "content": PROMPT}]


def _client(server: TinyServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def complete(server: TinyServer, *, beam: dict[str, Any] | None = None, **options: Any) -> Any:
    fields = {"use_beam_search": True, **(beam or {})}
    return _client(server).completions.create(
        **({"model": "tiny", "prompt": PROMPT, "max_tokens": 8} | options), extra_body=fields
    )


@pytest.fixture(scope="module", params=["paged", "virtual"])
def served(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[TinyServer]:
    """The common server, and one whose beams share blocks through slots."""
    if request.param == "paged":
        yield request.getfixturevalue("server")
        return
    own = TinyServer(tiny_model, engine={"kv": request.param})
    try:
        yield own.wait_ready()
    finally:
        own.stop()


@pytest.fixture(scope="module")
def beams(tiny_model: Path) -> Any:
    """What the engine finds in process: four beams. Attention over slots rounds elsewhere."""
    params = SamplingParams(use_beam_search=True, beam_width=4, max_tokens=8, logprobs=2)
    with LLM(str(tiny_model), threads=1, kv_memory="16MiB") as llm:
        return llm.generate(PROMPT, params)[0].beams


def test_completions(served: TinyServer, beams: Any) -> None:
    answer = complete(served, n=3, logprobs=2, beam={"beam_width": 4})
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == [beam.text for beam in beams[:3]]
    scores = [choice.score for choice in answer.choices]
    assert scores == sorted(scores, reverse=True)
    assert scores == pytest.approx([beam.score for beam in beams[:3]], abs=1e-5)
    for choice, beam in zip(answer.choices, beams, strict=False):
        found = choice.logprobs.token_logprobs
        assert found == pytest.approx([value.logprob for value in beam.logprobs], abs=1e-4)
        assert sum(found) / len(found) == pytest.approx(choice.score, abs=1e-5)
        assert choice.finish_reason == beam.finish_reason
    assert answer.usage.completion_tokens == 3 * 8
    served.wait_idle()


def test_the_width_is_n_where_none_is_given(served: TinyServer, beams: Any) -> None:
    answer = complete(served, n=4)
    assert [choice.text for choice in answer.choices] == [beam.text for beam in beams]
    one = complete(served, beam={"beam_width": 4})
    assert [choice.text for choice in one.choices] == [beams[0].text]


def test_a_stream_brings_each_beam_whole(served: TinyServer, beams: Any) -> None:
    stream = complete(
        served, n=2, stream=True, stream_options={"include_usage": True}, beam={"beam_width": 4}
    )
    *chunks, usage = list(stream)
    texts = {chunk.choices[0].index: chunk.choices[0].text for chunk in chunks}
    assert texts == {index: beams[index].text for index in range(2)}
    assert [chunk.choices[0].score for chunk in chunks] == pytest.approx(
        [beam.score for beam in beams[:2]], abs=1e-5
    )
    assert usage.usage.completion_tokens == 16


def test_chat(served: TinyServer) -> None:
    fields = {"use_beam_search": True, "beam_width": 3, "length_penalty": 0.5}
    options: dict[str, Any] = {"model": "tiny", "messages": CHAT, "n": 2, "max_tokens": 6}
    client = _client(served)
    answer = client.chat.completions.create(
        **options, logprobs=True, top_logprobs=1, extra_body=fields
    )
    assert len({choice.message.content for choice in answer.choices}) == 2
    for choice in answer.choices:
        total = sum(value.logprob for value in choice.logprobs.content)
        assert total / 6**0.5 == pytest.approx(choice.score, abs=1e-5)
    texts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(**options, stream=True, extra_body=fields):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(texts.values()) == [choice.message.content for choice in answer.choices]


def test_several_prompts_with_echo_and_prompt_log_probabilities(
    served: TinyServer, beams: Any, tiny_model: Path
) -> None:
    ids = load_tokenizer(tiny_model).encode(PROMPT)
    answer = complete(
        served,
        prompt=[ids, ids[:5]],
        n=2,
        echo=True,
        logprobs=1,
        beam={"beam_width": 4, "prompt_logprobs": 1},
    )
    assert [choice.text for choice in answer.choices[:2]] == [PROMPT + b.text for b in beams[:2]]
    assert all(choice.text.startswith(PROMPT[:5]) for choice in answer.choices[2:])
    for choice, prompt in zip(answer.choices, [ids, ids, ids[:5], ids[:5]], strict=True):
        assert len(choice.prompt_logprobs) == len(prompt)
        assert len(choice.logprobs.tokens) == len(prompt) + 8


def test_an_echo_alone_searches_nothing(server: TinyServer) -> None:
    for logprobs in (None, 1):
        answer = complete(
            server, n=2, max_tokens=0, echo=True, logprobs=logprobs, beam={"length_penalty": 2}
        )
        assert [choice.text for choice in answer.choices] == [PROMPT] * 2


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("n", {"n": 0}),
        ("n", {"n": 3, "beam_width": 2}),
        ("n", {"n": 33}),
        ("beam_width", {"beam_width": 0}),
        ("beam_width", {"beam_width": 33}),
        ("beam_width", {"beam_width": 2.5}),
        ("beam_width", {"beam_width": 2, "use_beam_search": False}),
        ("beam_width", {"beam_width": 32, "stop_token_ids": list(range(10, 43))}),
        ("length_penalty", {"length_penalty": 5.5}),
        ("length_penalty", {"length_penalty": 2, "use_beam_search": None}),
        ("early_stopping", {"early_stopping": "sometimes"}),
        ("early_stopping", {"early_stopping": True, "use_beam_search": False}),
        ("temperature", {"temperature": 0.7}),
        ("top_p", {"top_p": 0.9}),
        ("top_k", {"top_k": 5}),
        ("min_p", {"min_p": 0.1}),
        ("stop", {"stop": "x"}),
        ("presence_penalty", {"presence_penalty": -2.5}),
        ("frequency_penalty", {"frequency_penalty": 0.5}),
        ("repetition_penalty", {"repetition_penalty": 1.5}),
        ("logit_bias", {"logit_bias": {"5": 1}}),
        ("bad_words", {"bad_words": ["x"]}),
        ("allowed_token_ids", {"allowed_token_ids": [5]}),
        ("best_of", {"best_of": 2}),
        ("max_tokens", {"max_tokens": 0}),
    ],
)
def test_bad_values_are_named(server: TinyServer, field: str, fields: dict[str, Any]) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "use_beam_search": True, "max_tokens": 2} | fields
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert field in answer.json()["error"]["message"]


def test_more_beams_than_run_at_once(tiny_model: Path) -> None:
    server = TinyServer(tiny_model, engine={"max_num_seqs": 4, "sharing": False})
    try:
        server.wait_ready()
        body = {"model": "tiny", "prompt": PROMPT, "use_beam_search": True, "beam_width": 5}
        answer = httpx.post(f"{server.url}/v1/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "beam_width"
        assert len(complete(server, n=4).choices) == 4
        server.wait_idle()
    finally:
        server.stop()


def test_a_word_that_is_none_is_refused_with_those_that_are(server: TinyServer) -> None:
    body = {"prompt": "x", "use_beam_search": True, "early_stopping": "always"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "early_stopping"
    assert "must be true, false or \"never\", got 'always'" in error["message"]


def test_a_client_that_leaves_ends_the_search(served: TinyServer) -> None:
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "use_beam_search": True,
        "beam_width": 8,
        "n": 3,
        "max_tokens": 3000,
    }
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/completions", json=body, timeout=0.5)
    served.wait_idle()
