"""The offline `LLM` on tiny random models, one with a byte-level tokenizer and one without."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.llm_harness import GREEDY, TEXTS, one
from engine.tiny_engine import is_idle, make_llm, pool, save_gguf, save_llama
from octavo.core.request import ContextLengthError, FinishReason, RequestError, StepOutputs
from octavo.core.sampling_params import SamplingParams
from octavo.engine.llm import LLM
from octavo.text.chat_template import ChatTemplateError

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
    calls: list[Callable[[], object]] = [
        lambda: llm.generate("hello", GREEDY),
        lambda: llm.drop_prefix("prefix-1"),
        llm.reset_prefix_cache,
        llm.sleep,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            call()


@pytest.mark.parametrize("depth", [1, 2])
def test_calls_of_other_threads_are_told_of_the_end(
    gguf: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is under way, the other waits for its turn."""
    llm = make_llm(gguf, depth=depth)
    step, num_steps = llm._core.step, itertools.count()

    def closing_step() -> StepOutputs:
        outputs = step()
        if next(num_steps) == 3:
            llm.close()
        return outputs

    monkeypatch.setattr(llm._core, "step", closing_step)
    with ThreadPoolExecutor(2) as pool:
        for call in [pool.submit(llm.generate, TEXTS, GREEDY) for _ in range(2)]:
            with pytest.raises(RuntimeError, match="this LLM is closed"):
                call.result(timeout=60)


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


def test_a_request_that_a_stop_string_ended_says_what_was_cached(gguf: Path) -> None:
    with make_llm(gguf, prefix_caching=True, block_size=16) as llm:
        prompt = [5, 90, 17, 33, 200, 4] * 10
        whole = one(llm, prompt)
        start = next(i for i in range(3, len(whole.text) - 1) if whole.text[i : i + 2].isascii())
        result = one(llm, prompt, replace(GREEDY, stop=(whole.text[start : start + 2],)))
        assert len(result.token_ids) < len(whole.token_ids)
        assert (whole.num_cached_tokens, result.num_cached_tokens) == (0, 48)


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


@pytest.mark.parametrize(
    "prompts", [b"abc", {"a": 1}, 5, None, {1, 2}, np.array(1), [np.array(1)], [{1}]]
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: object) -> None:
    with pytest.raises(RequestError, match="must be a"):
        llm.generate(prompts, GREEDY)  # type: ignore[arg-type]


def test_what_are_no_params_or_messages_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="params must be SamplingParams"):
        llm.generate("hi", {"temperature": 0})  # type: ignore[arg-type]
    for messages in ("hi", 5, None, [5], [[]], [[5]], [MESSAGES, []], MESSAGES[0]):
        with pytest.raises(RequestError, match="messages must be"):
            llm.chat(messages)  # type: ignore[arg-type]
    for messages in ([], None, [5]):
        with pytest.raises(RequestError, match="messages must be"):
            llm.stream_chat(messages)  # type: ignore[arg-type]
