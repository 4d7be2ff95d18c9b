"""Penalties against Hugging Face's and plain loops, and their state over steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from execution.sampling.rows import edited, random_logits, start
from octavo.core.plan import int_array
from octavo.core.sampling_params import SamplingParams
from octavo.execution.sampling import penalties as penalties_module
from octavo.execution.sampling.sampler import Sampler

VOCAB = 50
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=30)


def reference(
    logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> torch.Tensor:
    """One row, token by token."""
    result, counts = logits.double().clone(), Counter(output)
    for token in {*prompt, *output}:
        value = float(result[token])
        penalty = params.repetition_penalty
        value = value / penalty if value > 0 else value * penalty
        value -= params.frequency_penalty * counts[token]
        value -= params.presence_penalty * (counts[token] > 0)
        result[token] = value
    return result


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0, 100.0])
@pytest.mark.parametrize("output", [[], [4], [4, 9, 4, 30]], ids=str)
def test_repetition_is_hugging_faces(penalty: float, output: list[int]) -> None:
    prompt, logits, sampler = [3, 4, 4, 49, 0], random_logits(1, VOCAB), Sampler(1)
    start(sampler, 0, SamplingParams(repetition_penalty=penalty), prompt, output)
    found = edited(sampler, logits, [0], [len(prompt + output)])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits)
    torch.testing.assert_close(found, expected)


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([1.0, 0.7, 1.5]),
            st.sampled_from([0.0, -2.0, 0.5]),
            st.sampled_from([0.0, -1.0, 1.7]),
            TOKENS.filter(bool),
            TOKENS,
        ),
        min_size=1,
        max_size=5,
    )
)
def test_any_rows_equal_the_reference(
    rows: list[tuple[float, float, float, list[int], list[int]]],
) -> None:
    sampler, logits = Sampler(8), random_logits(len(rows), VOCAB)
    order = list(range(7, 7 - len(rows), -1))
    expected = []
    for row, own, (repetition, frequency, presence, prompt, output) in zip(
        order, logits, rows, strict=True
    ):
        params = SamplingParams(
            repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
        )
        start(sampler, row, params, prompt, output)
        expected.append(reference(own, params, prompt, output))
    lengths = [len(prompt) + len(output) for *_, prompt, output in rows]
    found = edited(sampler, logits, order, lengths)
    torch.testing.assert_close(found, torch.stack(expected).float())


@pytest.mark.parametrize("first_width", [1, 3, 256])
def test_steps_equal_a_fresh_start(monkeypatch: pytest.MonkeyPatch, first_width: int) -> None:
    """A row that sampled its tokens, one that resumes after them, and the reference agree."""
    monkeypatch.setattr(penalties_module, "_FIRST_WIDTH", first_width)
    params = [
        SamplingParams(seed=1, repetition_penalty=1.2, temperature=2.0),
        SamplingParams(seed=2, frequency_penalty=1.0, presence_penalty=-0.5, temperature=2.0),
        SamplingParams(seed=3),
        SamplingParams(presence_penalty=2.0, temperature=0.0),
    ]
    prompts = [[1, 2, 2], [5], [7, 8], [9, 9, 9, 9]]
    sampler = Sampler(4)
    for row, (own, prompt) in enumerate(zip(params, prompts, strict=True)):
        start(sampler, row, own, prompt, seed=row)
    outputs: list[list[int]] = [[] for _ in params]
    for step in range(40):
        logits = random_logits(4, VOCAB, seed=step % 5)
        # Rows join and leave the batch; the order changes.
        rows = [row for row in ((step + i) % 4 for i in range(4)) if (step + row) % 3 or step < 4]
        lengths = [len(prompts[row]) + len(outputs[row]) for row in rows]
        found = edited(sampler, logits[rows], rows, lengths)
        for place, row in enumerate(rows):
            expected = reference(logits[row], params[row], prompts[row], outputs[row])
            torch.testing.assert_close(found[place], expected.float())
            fresh = Sampler(4)
            start(fresh, 3, params[row], prompts[row], outputs[row], seed=row)
            resumed = edited(fresh, logits[[row]], [3], [lengths[place]])
            assert torch.equal(resumed[0], found[place])
        tokens = sampler.sample(logits[rows], int_array(rows), np.array(lengths, dtype=np.int64))
        for row, token in zip(rows, tokens.tolist(), strict=True):
            outputs[row].append(token)
    assert len(set(outputs[3])) > 10, "presence penalties make a greedy row wander"


def test_a_forbidden_token_stays_forbidden() -> None:
    logits, sampler = random_logits(1, VOCAB), Sampler(1)
    logits[0, 3:] = -torch.inf
    for penalty in (1e-300, 0.1, 100.0):
        params = SamplingParams(repetition_penalty=penalty, frequency_penalty=-2.0)
        start(sampler, 0, params, list(range(VOCAB)), [7, 8])
        found = edited(sampler, logits, [0], [VOCAB + 2])
        assert torch.isinf(found[0, 3:]).all()
        assert torch.isfinite(found[0, :3]).all()


def test_the_callers_logits_are_left_alone() -> None:
    logits, sampler = random_logits(2, VOCAB), Sampler(2)
    before = logits.clone()
    params = SamplingParams(repetition_penalty=2.0, bad_words_token_ids=((4,),))
    start(sampler, 1, params, [1, 2, 3])
    sampler.sample(logits, int_array([0, 1]), np.array([3, 3]))
    assert torch.equal(logits, before)
