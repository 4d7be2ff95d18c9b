"""Which rows are scored, and that chunks of a prompt give the scores of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.core.plan import RowInit, int_array
from octavo.core.sampling_params import SamplingParams
from octavo.execution.sampling.prompts import PromptScorer

VOCAB = 11
PROMPT = int_array([3, 1, 4, 1, 5, 9])


def init(row: int, num_prompt_tokens: int | None = None, **params: int) -> RowInit:
    return RowInit(
        row=row,
        token_ids=PROMPT,
        num_computed_tokens=0,
        block_ids=int_array([]),
        params=SamplingParams(**params),
        seed=0,
        num_prompt_tokens=num_prompt_tokens,
    )


@pytest.mark.parametrize("chunks", [[6], [1, 2, 3], [4, 2]])
def test_chunks_give_the_scores_of_the_whole(chunks: list[int]) -> None:
    torch.manual_seed(0)
    states = torch.randn(len(PROMPT), VOCAB)
    table = states.log_softmax(dim=-1)
    scorer = PromptScorer()
    scorer.set_row(init(2, prompt_logprobs=1))
    scorer.set_row(init(1))
    found, start = [], 0
    for count in chunks:
        # A neighbour before it, which nobody scores.
        hidden = torch.cat([torch.zeros(2, VOCAB), states[start : start + count]])
        rows, counts = int_array([1, 2]), int_array([2, count])
        assert scorer.wants(rows)
        found += scorer.score(rows, int_array([0, start]), counts, hidden, lambda own: own)
        start += count
    assert not scorer.wants(int_array([1, 2]))
    assert [piece.owner for piece in found] == [2] * len(found)
    places = [p for piece in found for p in range(piece.start, piece.start + len(piece.token_ids))]
    assert places == list(range(1, len(PROMPT)))
    scores = np.concatenate([piece.scores.logprobs for piece in found])
    expected = [float(table[i - 1, PROMPT[i]]) for i in places]
    np.testing.assert_allclose(scores, expected, atol=1e-6)


def test_a_row_that_was_given_up_concerns_nobody_else() -> None:
    scorer = PromptScorer()
    scorer.set_row(init(0, prompt_logprobs=0))
    assert scorer.wants(int_array([0, 1]))
    assert not scorer.wants(int_array([1, 2]))
    scorer.set_row(init(0))
    assert not scorer.wants(int_array([0]))


def test_a_resumed_row_is_not_scored_again() -> None:
    scorer = PromptScorer()
    scorer.set_row(init(0, num_prompt_tokens=4, prompt_logprobs=1))
    assert not scorer.wants(int_array([0]))
