"""The offline `LLM` when it is interrupted, or a step or a row of it fails: it goes on."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.llm_harness import GREEDY, TEXTS, one
from engine.tiny_engine import is_idle, make_llm
from octavo.core.plan import IntArray, StepPlan, StepResult
from octavo.core.request import FinishReason
from octavo.core.sampling_params import SamplingParams
from octavo.engine.llm import LLM


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
