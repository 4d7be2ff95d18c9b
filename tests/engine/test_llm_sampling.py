"""Penalties, masks and log probabilities of the offline `LLM`, beside Transformers'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.llm_harness import GREEDY, TEXTS, one
from engine.tiny_engine import make_llm, pool
from execution.models.tiny_models import tiny_llama
from octavo.engine.llm import LLM, Completion

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
