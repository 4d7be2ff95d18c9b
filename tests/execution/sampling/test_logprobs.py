"""Log probabilities against `log_softmax`, alone and among other rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from execution.sampling.rows import random_logits, start
from octavo.core.plan import StepLogprobs, TokenScores, int_array
from octavo.core.sampling_params import SamplingParams
from octavo.execution.sampling import logprobs as logprobs_module
from octavo.execution.sampling.logprobs import MAX_TOP, prompt_scores, token_scores
from octavo.execution.sampling.sampler import Sampler


def check(scores: TokenScores, logits: torch.Tensor, tokens: list[int], num_top: list[int]) -> None:
    table = logits.double().log_softmax(-1)
    assert len(scores) == len(tokens)
    for i, token in enumerate(tokens):
        own = table[i]
        count = min(num_top[i], len(own))
        assert scores.num_top[i] == count
        assert scores.logprobs[i] == pytest.approx(float(own[token]), abs=1e-5)
        assert scores.ranks[i] == 1 + int((logits[i] > logits[i, token]).sum())
        ids = scores.top_ids[i, :count].tolist()
        assert len(set(ids)) == count
        found = scores.top_logprobs[i, :count]
        np.testing.assert_allclose(found, own.topk(count).values, atol=1e-5)
        np.testing.assert_allclose(found, own[ids], atol=1e-5)


@pytest.mark.parametrize("vocab", [1, 7, 50, 3000])
@pytest.mark.parametrize("num_top", [[0, 0, 0], [1, 0, 5], [20, 20, 3], [64, 2, 21], [64] * 3])
def test_scores(vocab: int, num_top: list[int]) -> None:
    logits = random_logits(3, vocab)
    tokens = [int(logits[0].argmax()), vocab - 1, vocab // 2]
    scores = token_scores(logits, np.array(tokens), int_array(num_top))
    check(scores, logits, tokens, num_top)
    assert scores.ranks[0] == 1
    if num_top[0] and vocab > 1:
        assert scores.top_ids[0, 0] == tokens[0]


def test_more_than_a_beam_needs_is_refused() -> None:
    with pytest.raises(AssertionError, match="at most 64"):
        token_scores(random_logits(1, 99), np.array([1]), int_array([MAX_TOP + 1]))


@given(
    wanted=st.lists(st.sampled_from([0, 1, 5, 20, 21, 64]), min_size=1, max_size=6),
    vocab=st.sampled_from([10, 200]),
)
def test_scores_do_not_depend_on_the_neighbours(wanted: list[int], vocab: int) -> None:
    """Also of logits with many equal values."""
    logits = random_logits(len(wanted), vocab).round()
    tokens = np.arange(len(wanted))
    together = token_scores(logits, tokens, int_array(wanted))
    for i, count in enumerate(wanted):
        alone = token_scores(logits[[i]], tokens[[i]], int_array([count]))
        assert alone.logprobs[0] == together.logprobs[i]
        assert alone.ranks[0] == together.ranks[i]
        count = int(alone.num_top[0])
        assert alone.top_ids[0].tolist() == together.top_ids[i, :count].tolist()
        assert alone.top_logprobs[0].tolist() == together.top_logprobs[i, :count].tolist()


def test_of_equal_tokens_the_first_is_the_likeliest() -> None:
    logits = torch.zeros(1, 15)
    scores = token_scores(logits, np.array([0]), int_array([15]))
    assert scores.top_ids[0].tolist() == list(range(15))
    assert scores.ranks.tolist() == [1]


def test_they_are_of_the_raw_distribution() -> None:
    """Whatever the row does to its logits; rows that did not ask are left out."""
    sampler, logits = Sampler(3), random_logits(3, 40)
    params = SamplingParams(
        temperature=0.3, top_k=2, logit_bias={7: 100.0}, repetition_penalty=2.0, logprobs=4
    )
    start(sampler, 0, params, [1, 2])
    start(sampler, 1, SamplingParams(), [1, 2])
    start(sampler, 2, SamplingParams(logprobs=0, temperature=0.0), [1, 2])
    rows = int_array([2, 1, 0])
    tokens = sampler.sample(logits, rows, np.array([2, 2, 2]))
    assert tokens[2] == 7
    found = sampler.logprobs(logits, rows, tokens)
    assert found is not None
    assert found.places.tolist() == [0, 2]
    check(found.scores, logits[[0, 2]], tokens[[0, 2]].tolist(), [0, 4])


@pytest.mark.parametrize("length", [1, 3, 4, 9])
def test_prompt_scores_make_few_logits_at_a_time(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(logprobs_module, "PROMPT_SLICE", 4)
    hidden, weights = random_logits(length, 6, seed=1), random_logits(6, 30, seed=2)
    sizes = []

    def logits_of(part: torch.Tensor) -> torch.Tensor:
        sizes.append(len(part))
        return part @ weights

    tokens = list(range(length))
    scores = prompt_scores(logits_of, hidden, np.array(tokens), 3)
    check(scores, hidden @ weights, tokens, [3] * length)
    assert max(sizes) <= 4
    assert sum(sizes) == length


def test_a_step_cut_to_the_rows_that_are_wanted() -> None:
    scores = token_scores(random_logits(3, 9), np.array([1, 2, 3]), int_array([1, 1, 1]))
    step = StepLogprobs(int_array([0, 2, 5]), scores)
    kept = step.only(np.array([True, False, True, True, False, True]))
    assert kept is not None
    assert kept.places.tolist() == [0, 1, 3]
    kept = step.only(np.array([False, False, False, True, False, True]))
    assert kept is not None
    assert kept.places.tolist() == [1]
    assert kept.scores.logprobs.tolist() == scores.logprobs[2:].tolist()
    assert step.only(np.array([False, True, False, True, True, False])) is None
