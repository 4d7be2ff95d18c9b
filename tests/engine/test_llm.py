"""The offline `LLM` on tiny random models, one with a byte-level tokenizer and one without."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.tiny_engine import is_idle, make_llm, pool, save_gguf, save_llama
from execution.models.tiny_models import tiny_llama
from octavo.core.plan import IntArray, StepPlan, StepResult
from octavo.core.request import ContextLengthError, FinishReason, RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.engine.llm import LLM, Completion
from octavo.text.chat_template import ChatTemplateError

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
TEXTS = ["hello", "hello world 12", "né", "Once", "日本", "a", "  ", "12 12"]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.fixture(scope="module")
def shared(gguf: Path) -> Iterator[LLM]:
    with make_llm(gguf, max_num_seqs=3, max_queued_requests=2) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The shared engine; whatever a test does, nothing is left behind."""
    yield shared
    assert is_idle(shared)


def one(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> Completion:
    (completion,) = llm.generate(prompt, params)
    return completion


# ── results ──────────────────────────────────────────────────────────────────────────────────


def test_a_text_and_its_tokens_are_the_same_prompt(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("hello world 12")
    expected = one(llm, "hello world 12")
    assert expected.finish_reason is FinishReason.LENGTH
    assert len(expected.token_ids) == 24
    assert expected.num_prompt_tokens == len(ids)
    assert expected.error is None
    for prompt in (ids, tuple(ids), [ids], np.array(ids), [np.array(ids)], list(np.array(ids))):
        assert one(llm, prompt) == expected
    assert llm.generate(["hello world 12", ids], GREEDY) == [expected, expected]


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    """More prompts than the queue takes (2), of different lengths."""
    prompts = [text * (1 + index % 3) for index, text in enumerate(TEXTS * 3)]
    params = [replace(GREEDY, max_tokens=1 + index % 7) for index in range(len(prompts))]
    results = llm.generate(prompts, params)
    for prompt, item, result in zip(prompts, params, results, strict=True):
        assert result == one(llm, prompt, item)
        assert len(result.token_ids) == item.max_tokens


def test_the_text_is_the_decoded_tokens(llm: LLM) -> None:
    assert llm.tokenizer is not None
    for text, result in zip(TEXTS, llm.generate(TEXTS, GREEDY), strict=True):
        prompt = llm.tokenizer.encode(text)
        whole = llm.tokenizer.decode([*prompt, *result.token_ids])
        assert whole == llm.tokenizer.decode(prompt) + result.text


def test_defaults(llm: LLM) -> None:
    results = llm.generate(["hello", "hello"])
    assert all(0 < len(result.token_ids) <= 16 for result in results)
    assert llm.generate([]) == []


def test_seeds(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=-3)
    first, second = llm.generate(["hello"] * 2, params)
    assert first == second == one(llm, "hello", params)
    others = [replace(params, seed=seed) for seed in (-(2**63), 2**63 - 1, 3, None, None)]
    results = llm.generate(["hello"] * 5, others)
    assert len({result.token_ids for result in [first, *results]}) == 6


def test_max_tokens_none_is_all_the_room(llm: LLM) -> None:
    result = one(llm, [5] * 100, replace(GREEDY, max_tokens=None))
    assert len(result.token_ids) == llm.report.max_model_len - 100
    assert result.finish_reason is FinishReason.LENGTH


# ── stopping ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_string_cuts_text_and_usage(gguf: Path, depth: int) -> None:
    with make_llm(gguf, depth=depth) as llm:
        whole = one(llm, "hello")
        start = next(i for i in range(3, len(whole.text) - 1) if whole.text[i : i + 2].isascii())
        stop = whole.text[start : start + 2]
        cut = whole.text.index(stop)
        params = replace(GREEDY, stop=("never this", stop))
        # Beside a request that runs on; stops are matched while its steps are in flight.
        result, other = llm.generate(["hello", "hello"], [params, GREEDY])
        assert other == whole
        assert result.text == whole.text[:cut]
        assert result.finish_reason is FinishReason.STOP
        count = len(result.token_ids)
        assert result.token_ids == whole.token_ids[:count]
        assert count < len(whole.token_ids)
        assert llm.tokenizer is not None
        prompt = llm.tokenizer.encode("hello")
        shorter = llm.tokenizer.decode([*prompt, *whole.token_ids[: count - 1]])
        assert stop not in shorter.removeprefix("hello"), "usage ends with the token that stopped"
        while llm._core.has_work:  # the step in flight when the request was aborted
            llm._core.step()
        assert is_idle(llm)


def test_a_stop_token_ends_and_is_no_text(llm: LLM) -> None:
    whole = one(llm, "Once")
    stop = whole.token_ids[10]
    first = whole.token_ids.index(stop)
    result = one(llm, "Once", replace(GREEDY, stop_token_ids=(stop,)))
    assert result.finish_reason is FinishReason.STOP
    assert result.token_ids == whole.token_ids[: first + 1]
    assert whole.text.startswith(result.text.rstrip("\ufffd"))
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.encode("Once")
    expected = llm.tokenizer.decode([*prompt, *result.token_ids[:-1]]).removeprefix("Once")
    assert result.text == expected


def test_end_of_sequence(tmp_path: Path) -> None:
    """The model's own end, taken from what a first model says it would say."""
    path = save_gguf(tmp_path / "first.gguf")
    with make_llm(path) as llm:
        whole = one(llm, "hello")
    end = whole.token_ids[7]
    path = save_gguf(tmp_path / "second.gguf", **{"tokenizer.ggml.eos_token_id": end})
    with make_llm(path) as llm:
        result = one(llm, "hello", replace(GREEDY, ignore_eos=False))
        assert result.finish_reason is FinishReason.STOP
        assert result.token_ids == whole.token_ids[: whole.token_ids.index(end) + 1]
        assert one(llm, "hello").token_ids == whole.token_ids, "ignore_eos"


@pytest.mark.parametrize("depth", [1, 2])
def test_min_tokens_and_the_end(gguf: Path, tmp_path: Path, depth: int) -> None:
    """Neither the end of sequence, a stop token nor a stop string comes too early."""
    with make_llm(gguf) as llm:
        whole = one(llm, "hello")
    eos, stop = whole.token_ids[2], whole.token_ids[4]
    path = save_gguf(tmp_path / "model.gguf", **{"tokenizer.ggml.eos_token_id": eos})
    with make_llm(path, depth=depth) as llm:
        params = replace(GREEDY, ignore_eos=False, min_tokens=9, stop_token_ids=(stop,))
        assert len(one(llm, "hello", replace(params, min_tokens=0)).token_ids) <= 3
        result = one(llm, "hello", params)
        assert not {eos, stop} & set(result.token_ids[:9])
        assert len(result.token_ids) > 9
        plain = one(llm, "hello")
        text = replace(GREEDY, stop=(plain.text[0],), min_tokens=5)
        result = one(llm, "hello", text)
        assert result.token_ids[:5] == plain.token_ids[:5]
        assert result.text.startswith(plain.text[0])
        assert is_idle(llm)


@pytest.mark.parametrize("depth", [1, 2])
def test_what_ended_the_text_may_stay_in_it(gguf: Path, depth: int) -> None:
    with make_llm(gguf, depth=depth) as llm:
        whole = one(llm, "hello")
        start = next(i for i in range(3, len(whole.text) - 1) if whole.text[i : i + 2].isascii())
        stop = whole.text[start : start + 2]
        params = replace(GREEDY, stop=(stop,), include_stop_str_in_output=True)
        result = one(llm, "hello", params)
        assert result.text == whole.text[: whole.text.index(stop) + 2]
        hidden = one(llm, "hello", replace(params, include_stop_str_in_output=False))
        assert result.token_ids == hidden.token_ids
        assert result.text == hidden.text + stop
        token = whole.token_ids[10]
        by_token = replace(GREEDY, stop_token_ids=(token,), include_stop_str_in_output=True)
        result = one(llm, "hello", by_token)
        assert llm.tokenizer is not None
        prompt = llm.tokenizer.encode("hello")
        assert result.finish_reason is FinishReason.STOP
        assert result.token_ids[-1] == token
        decoded = llm.tokenizer.decode([*prompt, *result.token_ids])
        assert result.text == decoded.removeprefix("hello")
        assert is_idle(llm)


# ── penalties, masks, log probabilities ──────────────────────────────────────────────────────

MIXED = [
    replace(GREEDY, repetition_penalty=1.5),
    replace(GREEDY, presence_penalty=2.0, frequency_penalty=1.0, logprobs=3),
    replace(GREEDY, bad_words=("12", "né"), logprobs=0, prompt_logprobs=0),
    replace(GREEDY, allowed_token_ids=tuple(range(60, 90)), prompt_logprobs=5),
    replace(GREEDY, temperature=1.5, seed=4, repetition_penalty=1.2, logprobs=20),
    replace(GREEDY, min_tokens=20, stop_token_ids=tuple(range(100, 164)), logprobs=1),
]


def test_they_change_what_comes_out(llm: LLM) -> None:
    plain = llm.generate(TEXTS, GREEDY)
    for params in MIXED[:2]:
        found = llm.generate(TEXTS, params)
        assert any(a.token_ids != b.token_ids for a, b in zip(found, plain, strict=True))
    varied = llm.generate(TEXTS, MIXED[1])
    num_distinct = [sum(len(set(a.token_ids)) for a in results) for results in (plain, varied)]
    assert num_distinct[0] < num_distinct[1], "less is said twice"
    words = tuple({word for result in plain for word in result.text if word.isascii()})
    assert llm.tokenizer is not None
    banned = {llm.tokenizer.encode(word, add_special_tokens=False)[0] for word in words}
    assert banned & {token_id for result in plain for token_id in result.token_ids}
    for result in llm.generate(TEXTS, replace(GREEDY, bad_words=words)):
        assert not banned & set(result.token_ids)
    for result in llm.generate(TEXTS, MIXED[3]):
        assert set(result.token_ids) <= set(range(60, 90))


def test_repetition_penalty_is_transformers(llm: LLM) -> None:
    reference = tiny_llama(vocab_size=269)
    reference.generation_config.eos_token_id = None
    for prompt in ([5, 90, 17], [7] * 9, [3, 4, 5, 6, 200]):
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": 24, "repetition_penalty": 1.5}
        whole = reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
        found = one(llm, prompt, replace(GREEDY, repetition_penalty=1.5))
        assert list(found.token_ids) == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [5, 40])
def test_preempted_and_pipelined_requests_give_the_same(
    gguf: Path, depth: int, num_blocks: int
) -> None:
    prompts = [text * 3 for text in TEXTS[: len(MIXED)]]
    with make_llm(gguf, max_num_seqs=1, max_num_batched_tokens=512) as llm:
        expected = [one(llm, *item) for item in zip(prompts, MIXED, strict=True)]
    with make_llm(
        gguf,
        depth=depth,
        block_size=16,
        kv_memory=pool(num_blocks),
        prefix_caching=True,
        max_num_batched_tokens=11,
        max_num_seqs=5,
    ) as llm:
        for _ in range(2):
            found = llm.generate(prompts, MIXED)
            for a, b in zip(found, expected, strict=True):
                assert without_logprobs(a) == without_logprobs(b)
                check_close(a.logprobs, b.logprobs)
                check_close(a.prompt_logprobs, b.prompt_logprobs)
        assert (llm._core.scheduler.num_preemptions > 0) == (num_blocks == 5)


def without_logprobs(result: Completion) -> Completion:
    return replace(result, logprobs=None, prompt_logprobs=None)


def check_close(found: Any, expected: Any) -> None:
    """Lists of `TokenLogprobs`, up to rounding."""
    assert (found is None) == (expected is None)
    for a, b in zip(found or (), expected or (), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.token_id, a.rank) == (b.token_id, b.rank)
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
            assert [i for i, _ in a.top] == [i for i, _ in b.top]


def reference_logprobs(token_ids: list[int]) -> torch.Tensor:
    """``[length, vocab]``: the distribution after each token, by transformers."""
    with torch.inference_mode():
        logits = tiny_llama(vocab_size=269)(torch.tensor([token_ids])).logits[0]
    return logits.double().log_softmax(-1)


def test_logprobs_are_transformers(llm: LLM) -> None:
    params = replace(GREEDY, logprobs=4, prompt_logprobs=2)
    prompt = [5, 90, 17, 33, 200, 4]
    result = one(llm, prompt, params)
    assert result.token_ids == one(llm, prompt).token_ids
    table = reference_logprobs([*prompt, *result.token_ids])
    assert result.logprobs is not None
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == 6
    scores = [*result.prompt_logprobs[1:], *result.logprobs]
    assert [score.token_id for score in scores if score] == [*prompt[1:], *result.token_ids]
    for i, score in enumerate(scores):
        assert score is not None
        assert score.logprob == pytest.approx(float(table[i, score.token_id]), abs=1e-3)
        assert score.rank == 1 + int((table[i] > table[i, score.token_id]).sum())
        values, ids = table[i].topk(2 if i < 5 else 4)
        assert [token_id for token_id, _ in score.top] == ids.tolist()
        assert [value for _, value in score.top] == pytest.approx(values.tolist(), abs=1e-3)
    assert all(score.rank == 1 for score in result.logprobs), "greedy"
    assert all(score.top[0] == (score.token_id, score.logprob) for score in result.logprobs)


def test_logprobs_of_a_random_request(llm: LLM) -> None:
    """Of the raw distribution, so the temperature and the penalties do not show."""
    params = replace(GREEDY, temperature=3.0, seed=1, frequency_penalty=1.0, logprobs=0)
    result = one(llm, [5, 90, 17], params)
    again = one(llm, [5, 90, 17], replace(GREEDY, prompt_logprobs=0))
    forced = one(llm, [5, 90, 17, *result.token_ids], replace(GREEDY, prompt_logprobs=0))
    assert again.prompt_logprobs is not None
    assert again.logprobs is None
    assert forced.prompt_logprobs is not None
    check_close(forced.prompt_logprobs[3:], result.logprobs)
    assert max(score.rank for score in forced.prompt_logprobs[1:] if score) > 5


def test_prompt_logprobs_take_no_cached_prefix(gguf: Path) -> None:
    """Else the positions in the cache would have none; others still share their blocks."""
    params, prompt = replace(GREEDY, prompt_logprobs=1), [5, 90, 17, 33, 200, 4] * 10
    with make_llm(gguf, prefix_caching=True, block_size=16, max_num_batched_tokens=25) as llm:
        one(llm, prompt)
        for _ in range(2):
            result = one(llm, prompt, params)
            assert result.num_cached_tokens == 0
            assert result.prompt_logprobs is not None
            assert len(result.prompt_logprobs) == 60
            assert all(result.prompt_logprobs[1:])
        plain = one(llm, prompt)
        assert plain.num_cached_tokens == 48
        assert plain.token_ids == result.token_ids


def test_a_stop_string_cuts_logprobs_too(llm: LLM) -> None:
    whole = one(llm, "hello", replace(GREEDY, logprobs=0))
    start = next(i for i in range(3, len(whole.text) - 1) if whole.text[i : i + 2].isascii())
    params = replace(GREEDY, logprobs=0, stop=(whole.text[start : start + 2],))
    result = one(llm, "hello", params)
    assert result.logprobs is not None
    assert [score.token_id for score in result.logprobs] == list(result.token_ids)
    while llm._core.has_work:
        llm._core.step()


# ── errors at the door ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([[]], GREEDY, RequestError, "the prompt is empty"),
        ("", GREEDY, RequestError, "the prompt is empty"),
        ([["a", "b"]], GREEDY, RequestError, "a token id must be an integer, got 'a'"),
        ([5, "a"], GREEDY, RequestError, "a token id must be an integer, got 'a'"),
        (["a", 5], GREEDY, RequestError, "a prompt must be a text or a list of token ids, got 5"),
        ([True, False], GREEDY, RequestError, "a token id must be an integer, got True"),
        ([[3, True]], GREEDY, RequestError, "got True"),
        ([1.0, 2.0], GREEDY, RequestError, r"got 1\.0"),
        ([None], GREEDY, RequestError, "got None"),
        ([[3, 4], None], GREEDY, RequestError, "got None"),
        ([3, -1], GREEDY, RequestError, "token id -1 is out of range"),
        ([3, 269], GREEDY, RequestError, "token id 269 is out of range: .* 0 to 268"),
        ([3, 2**31], GREEDY, RequestError, "token id 2147483648 is out of range"),
        ([3, 10**400], GREEDY, RequestError, "is out of range"),
        ([3, -(10**400)], GREEDY, RequestError, "is out of range"),
        ("half \ud800 a pair", GREEDY, RequestError, "not valid Unicode"),
        ([5] * 128, GREEDY, ContextLengthError, "the prompt alone has 128; shorten"),
        ([5] * 5000, replace(GREEDY, max_tokens=None), ContextLengthError, "the prompt alone"),
        ([5] * 100, replace(GREEDY, max_tokens=29), ContextLengthError, "for at most 28 tokens"),
        ("hello", replace(GREEDY, max_tokens=2**31 - 1), ContextLengthError, "ask for at most"),
        ("hello", replace(GREEDY, stop_token_ids=(269,)), RequestError, "stop_token_ids: 269"),
        (
            "hello",
            replace(GREEDY, allowed_token_ids=(269,)),
            RequestError,
            "allowed_token_ids: 269",
        ),
        ("hello", replace(GREEDY, bad_words=("\ud800",)), RequestError, "bad_words: .* Unicode"),
        (
            "hello",
            replace(GREEDY, allowed_token_ids=(5,), bad_words_token_ids=((5,),)),
            RequestError,
            "allowed_token_ids, bad_words and min_tokens .* no token",
        ),
        (
            [5] * 100,
            replace(GREEDY, min_tokens=29, max_tokens=None),
            RequestError,
            "min_tokens is 29, but at most 28",
        ),
        ("hello", [GREEDY, GREEDY], RequestError, "1 prompts but 2 sampling parameters"),
        (["hello", "a", "b"], [GREEDY] * 2, RequestError, "3 prompts but 2 sampling"),
        (["hello"], [], RequestError, "1 prompts but 0 sampling"),
    ],
)
def test_errors_at_the_door_leave_nothing_behind(
    llm: LLM, prompt: Any, params: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llm.generate(prompt, params)
    assert is_idle(llm)
    if isinstance(params, SamplingParams):
        bad = [prompt] if isinstance(prompt, str) or not isinstance(prompt[0], list) else prompt
        with pytest.raises(RequestError):
            llm.generate(["hello", *bad], params)
    assert is_idle(llm)


def test_longer_than_the_pool(gguf: Path) -> None:
    """Refused at once, with the option that helps; the longest that fits is served."""
    with make_llm(gguf, kv_memory=pool(4)) as llm:
        for count in (66, 100):
            with pytest.raises(ContextLengthError, match=r"holds 64 tokens \(raise --kv-memory"):
                llm.generate([5] * (count - 24), GREEDY)
        assert len(one(llm, [5] * (65 - 24)).token_ids) == 24
        assert is_idle(llm)


# ── chat ─────────────────────────────────────────────────────────────────────────────────────

MESSAGES = [{"role": "user", "content": "hello"}]
RENDERED = "<|im_start|>user\nhello<|end|>\n<|im_start|>assistant\n"


def test_chat_renders_the_template(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(RENDERED, add_special_tokens=False)
    assert ids[0] == 1
    expected = one(llm, ids)
    assert llm.chat(MESSAGES, GREEDY) == expected
    other = [*MESSAGES, {"role": "assistant", "content": "12"}, {"role": "user", "content": "né"}]
    results = llm.chat([MESSAGES, other, MESSAGES], GREEDY)
    assert results[0] == results[2] == expected
    assert results[1] == llm.chat(other, GREEDY)
    assert llm.chat([], GREEDY) == []


def test_an_answer_may_take_all_the_room(llm: LLM) -> None:
    answer = llm.chat(MESSAGES)
    assert (
        answer.finish_reason is FinishReason.STOP
        or answer.num_prompt_tokens + len(answer.token_ids) == llm.report.max_model_len
    )


def test_messages_that_the_template_refuses(llm: LLM) -> None:
    with pytest.raises(ChatTemplateError, match="must have a role"):
        llm.chat([MESSAGES, [{"content": "hello"}]], GREEDY)


# ── interrupts and failures ──────────────────────────────────────────────────────────────────


def wrap_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch, before: dict[int, Any]) -> None:
    """Call ``before[n]`` when the model runs for the n-th time from now."""
    runner = llm._core.executor._runner  # type: ignore[attr-defined]
    run, count = type(runner).run, iter(range(1, 10**6))

    def wrapped(plan: StepPlan) -> StepResult:
        before.get(next(count), lambda: None)()
        return run(runner, plan)

    monkeypatch.setattr(runner, "run", wrapped)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_interrupt_leaves_a_usable_engine(
    gguf: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Ctrl-C in the middle of the model's work; the step is finished, the requests are dropped."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with make_llm(gguf, depth=depth, max_num_seqs=3, max_queued_requests=2) as llm:
        expected = llm.generate(TEXTS, GREEDY)
        interrupt = {n: lambda: signal.raise_signal(signal.SIGINT) for n in (1, 6, 30)}
        for step in (1, 6, 30):
            with monkeypatch.context() as patch:
                wrap_runs(llm, patch, {step: interrupt[step]})
                with pytest.raises(KeyboardInterrupt):
                    llm.generate(TEXTS, GREEDY)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert llm._core.scheduler.num_waiting == llm._core.scheduler.num_running == 0
            assert llm.generate(TEXTS, GREEDY) == expected
            assert is_idle(llm)


def test_a_second_interrupt_does_not_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = []

    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        handlers.append(signal.getsignal(signal.SIGINT))

    wrap_runs(llm, monkeypatch, {2: twice})
    with pytest.raises(KeyboardInterrupt):
        llm.generate("hello", GREEDY)
    assert handlers == [signal.default_int_handler]


def test_a_programs_own_handler_is_left(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        wrap_runs(llm, monkeypatch, {2: lambda: signal.raise_signal(signal.SIGINT)})
        assert len(one(llm, "hello").token_ids) == 24
    finally:
        signal.signal(signal.SIGINT, previous)
    assert seen == [signal.SIGINT]


def test_other_threads_may_generate(llm: LLM) -> None:
    """Signal handlers can only be set in the main one."""
    expected, found = llm.generate("hello", GREEDY), []
    thread = threading.Thread(target=lambda: found.extend(llm.generate("hello", GREEDY)))
    thread.start()
    thread.join()
    assert found == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_step_ends_its_requests_only(
    gguf: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    def fail() -> None:
        raise RuntimeError("the machine is on fire")

    with make_llm(gguf, depth=depth, max_num_seqs=3) as llm:
        expected = llm.generate(TEXTS, GREEDY)
        with monkeypatch.context() as patch:
            wrap_runs(llm, patch, {10: fail})
            results = llm.generate(TEXTS, GREEDY)
        failed = [result for result in results if result.finish_reason is FinishReason.ERROR]
        assert results[3:] == expected[3:], "requests that had not begun"
        assert len(failed) == 3
        for result, whole in zip(failed, expected, strict=False):
            assert result.error is not None
            assert "failed: RuntimeError: the machine is on fire" in result.error
            assert len(result.token_ids) == 9
            assert result.token_ids == whole.token_ids[:9]
        assert is_idle(llm)
        assert llm.generate(TEXTS, GREEDY) == expected


def test_logits_that_are_no_numbers_fail_their_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate(TEXTS[:3], GREEDY)
    model = llm._core.executor._runner.model  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        logits = model.logits
        patch.setattr(model, "logits", lambda hidden: logits(hidden) * torch.nan)
        for params in (GREEDY, SamplingParams(seed=1), SamplingParams(top_p=0.5, seed=1)):
            result = one(llm, "hello", params)
            assert result.finish_reason is FinishReason.ERROR
            assert result.token_ids == ()
            assert result.text == ""
            assert result.error is not None
            assert "the logits of the sequence are not finite" in result.error
    assert llm.generate(TEXTS[:3], GREEDY) == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_without_numbers_fails_alone(
    gguf: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else its request asks for, and though a step more of it may be under way."""
    kinds = (
        GREEDY,
        SamplingParams(top_p=0.5, seed=1, logprobs=2),
        SamplingParams(presence_penalty=1.0, bad_words=("x y",), temperature=0),
        SamplingParams(use_beam_search=True, beam_width=2, temperature=0),
    )
    long = "a" * 45  # nobody else comes so far
    with make_llm(gguf, depth=depth, max_num_seqs=8) as llm:
        expected = llm.generate(TEXTS[:3], GREEDY)
        sampler = llm._core.executor._runner.sampler  # type: ignore[attr-defined]
        sample = sampler.sample

        def spoiled(logits: torch.Tensor, rows: IntArray, indices: IntArray) -> IntArray:
            logits[torch.from_numpy(indices == len(long) + 3)] = torch.nan
            found: IntArray = sample(logits, rows, indices)
            return found

        monkeypatch.setattr(sampler, "sample", spoiled)
        for params in kinds:
            *others, last = llm.generate([*TEXTS[:3], long], [GREEDY] * 3 + [params])
            assert others == expected
            assert last.finish_reason is FinishReason.ERROR
            assert last.error is not None
            assert "the logits of the sequence are not finite" in last.error
            assert is_idle(llm)


def test_weights_that_are_no_numbers_do_not_haunt_the_cache(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaNs written into blocks are overwritten by whoever gets the blocks next."""
    expected = llm.generate(TEXTS, GREEDY)
    model = llm._core.executor._runner.model  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        norm = model.layers[0].attention_norm
        patch.setattr(model.layers[0], "attention_norm", lambda x: norm(x) * torch.nan)
        results = llm.generate(TEXTS, GREEDY)
        assert {result.finish_reason for result in results} == {FinishReason.ERROR}
    assert llm.generate(TEXTS, GREEDY) == expected


def test_the_progress_bar_goes_to_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(TEXTS[:2], GREEDY, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Generating" in captured.err
    llm.generate(TEXTS[:2], GREEDY)
    assert capsys.readouterr() == ("", "")


def test_a_closed_llm_says_so(gguf: Path) -> None:
    llm = make_llm(gguf)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate("hello", GREEDY)


# ── random weights ───────────────────────────────────────────────────────────────────────────


def test_random_weights_need_a_configuration_only(tmp_path: Path) -> None:
    save_llama(tmp_path)
    for file in tmp_path.iterdir():
        if file.name != "config.json":
            file.unlink()
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    found = []
    for source in (tmp_path, tmp_path / "config.json"):
        with make_llm(source, load_format="dummy") as llm:
            assert llm.tokenizer is None
            found.append(llm.generate([[3, 4, 5], [6, 7]], GREEDY))
            assert [len(result.token_ids) for result in found[-1]] == [24, 24]
            assert {result.text for result in found[-1]} == {""}
            with pytest.raises(RequestError, match="no tokenizer; give token ids"):
                llm.generate("hello")
            with pytest.raises(RequestError, match="no chat template"):
                llm.chat(MESSAGES)
            assert is_idle(llm)
    assert found[0] == found[1], "random, but always the same"


def test_eos_of_a_model_without_tokenizer(tmp_path: Path) -> None:
    save_llama(tmp_path)
    with make_llm(tmp_path, load_format="dummy") as llm:
        whole = one(llm, [3, 4, 5])
    config = json.loads((tmp_path / "config.json").read_text())
    config["eos_token_id"] = [whole.token_ids[4], 95]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    with make_llm(tmp_path, load_format="dummy") as llm:
        result = one(llm, [3, 4, 5], replace(GREEDY, ignore_eos=False))
        assert result.finish_reason is FinishReason.STOP
        first = whole.token_ids.index(whole.token_ids[4])
        assert result.token_ids == whole.token_ids[: first + 1]


# ── one call at a time ───────────────────────────────────────────────────────────────────────


def test_a_second_call_in_the_middle_of_a_stream_is_refused(llm: LLM) -> None:
    stream = llm.stream_chat(MESSAGES, replace(GREEDY, ignore_eos=True))
    first = next(stream)
    for call in (
        lambda: llm.generate("hello", GREEDY),
        lambda: next(llm.stream_chat(MESSAGES, GREEDY)),
    ):
        with pytest.raises(RuntimeError, match="in the middle of a stream_chat"):
            call()
    assert first + "".join(stream) == llm.chat(MESSAGES, replace(GREEDY, ignore_eos=True)).text
    assert is_idle(llm)


def test_a_stream_left_early_leaves_nothing_behind(llm: LLM) -> None:
    stream = llm.stream_chat(MESSAGES, replace(GREEDY, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert is_idle(llm)
    assert llm.generate("hello", GREEDY)


def test_a_stream_of_a_closed_llm_ends_with_an_error(gguf: Path) -> None:
    llm = make_llm(gguf)
    stream = llm.stream_chat(MESSAGES, replace(GREEDY, ignore_eos=True))
    next(stream)
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        list(stream)


def test_threads_take_turns(llm: LLM) -> None:
    expected = [llm.generate(text, GREEDY)[0].text for text in TEXTS]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda text: llm.generate(text, GREEDY)[0].text, TEXTS * 3))
    assert found == expected * 3


@pytest.mark.parametrize("prompts", [b"abc", {"a": 1}, 5, None])
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: object) -> None:
    with pytest.raises(RequestError, match="must be a"):
        llm.generate(prompts, GREEDY)  # type: ignore[arg-type]


def test_what_are_no_params_or_messages_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="params must be SamplingParams"):
        llm.generate("hi", {"temperature": 0})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="messages must be"):
        llm.chat("hi")  # type: ignore[arg-type]
