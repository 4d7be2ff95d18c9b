"""Forbidden tokens against Hugging Face's processors, over steps, and among other rows."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
)

from execution.sampling.rows import edited, random_logits, start
from octavo.core.plan import NO_TOKEN, int_array
from octavo.core.sampling_params import SamplingParams
from octavo.execution.sampling.masks import TokenMasks
from octavo.execution.sampling.penalties import Penalties
from octavo.execution.sampling.sampler import Sampler

VOCAB = 30
STOPS = (2, 7)


@pytest.mark.parametrize("num_output", range(6))
def test_min_tokens_is_hugging_faces(num_output: int) -> None:
    prompt, output, logits = [5, 6, 7], [1] * num_output, random_logits(1, VOCAB)
    sampler = Sampler(1)
    start(sampler, 0, SamplingParams(min_tokens=4), prompt, output, stops=STOPS)
    found = edited(sampler, logits, [0], [3 + num_output])
    processor = MinNewTokensLengthLogitsProcessor(3, 4, list(STOPS), device="cpu")
    assert torch.equal(found, processor(torch.tensor([prompt + output]), logits))


def test_min_tokens_over_steps() -> None:
    """The stop token is by far the likeliest, and comes as soon as it may."""
    logits = torch.zeros(1, VOCAB)
    logits[0, STOPS[0]] = 50.0
    sampler, tokens = Sampler(1), []
    start(sampler, 0, SamplingParams(min_tokens=3), [4, 4], stops=STOPS)
    for length in range(2, 7):
        tokens += sampler.sample(logits, int_array([0]), np.array([length])).tolist()
    assert not set(tokens[:3]) & set(STOPS)
    assert tokens[3:] == [2, 2]


WORDS = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple),
    min_size=1,
    max_size=6,
    unique=True,
)


@given(words=WORDS, output=st.lists(st.integers(0, 3), max_size=8), data=st.data())
def test_bad_words_are_hugging_faces(
    words: list[tuple[int, ...]], output: list[int], data: st.DataObject
) -> None:
    """Resumed after any of the tokens; the rest is sampled."""
    resumed = data.draw(st.integers(0, len(output)))
    sampler, logits = Sampler(1), random_logits(1, VOCAB)
    params = SamplingParams(bad_words_token_ids=tuple(words))
    # What the prompt ends with does not count.
    start(sampler, 0, params, [0, 1, 2, 3], output[:resumed])
    for token in output[resumed:]:
        sampler._advance(int_array([0]), np.array([token]))
    found = edited(sampler, logits, [0], [4 + len(output)])
    processor = NoBadWordsLogitsProcessor([list(word) for word in words])
    expected = processor(torch.tensor([output], dtype=torch.int64), logits.clone())
    assert torch.equal(found, expected)


def test_bad_words_never_come_out() -> None:
    words = ((3, 4), (5,), (1, 1, 1), (6, 6))
    sampler = Sampler(1)
    start(sampler, 0, SamplingParams(bad_words_token_ids=words, temperature=3.0), [3], seed=5)
    tokens: list[int] = []
    for step in range(300):
        logits = random_logits(1, 8, seed=step)
        tokens += sampler.sample(logits, int_array([0]), np.array([1 + step])).tolist()
    text = "".join(map(str, tokens))
    assert not any("".join(map(str, word)) in text for word in words)
    assert all(part in text for part in ("3", "4", "11", "6")), "the parts are allowed"


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9}])
def test_only_allowed_tokens_come_out(options: dict[str, float]) -> None:
    logits = random_logits(200, VOCAB)
    sampler = Sampler(1)
    start(sampler, 0, SamplingParams(allowed_token_ids=(4, 9, 20), **options), [1])
    tokens = sampler.sample(logits, np.zeros(200, dtype=np.int32), np.arange(1, 201))
    assert set(tokens.tolist()) == {4, 9, 20}


def test_masks_come_before_biases_and_penalties() -> None:
    """Neither lifts a forbidden token; bias comes before penalties."""
    params = SamplingParams(
        allowed_token_ids=(1, 2, 3, 4),
        bad_words_token_ids=((2,),),
        min_tokens=5,
        logit_bias={0: 100.0, 2: 100.0, 3: 100.0, 4: 10.0},
        repetition_penalty=2.0,
    )
    sampler, logits = Sampler(1), torch.full((1, 6), -4.0)
    start(sampler, 0, params, [4, 1], stops=(3,))
    found = edited(sampler, logits, [0], [2])
    assert found.tolist() == [[-math.inf, -8.0, -math.inf, -math.inf, 3.0, -math.inf]]


MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(presence_penalty=1.0, top_p=0.9),
    SamplingParams(frequency_penalty=-1.0, min_tokens=3),
    SamplingParams(allowed_token_ids=tuple(range(0, VOCAB, 3))),
    SamplingParams(bad_words_token_ids=((1,), (2, 3), (3, 3)), temperature=2.0),
    SamplingParams(logit_bias={4: 3.0, 5: -100.0}, min_p=0.1),
    SamplingParams(
        allowed_token_ids=tuple(range(20)),
        bad_words_token_ids=((1,), (2, 3), (4,)),
        min_tokens=6,
        logit_bias={9: 2.0},
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.1,
        top_k=7,
    ),
]


def run_rows(groups: list[list[int]], num_tokens: int = 12) -> dict[int, list[int]]:
    """Each row's tokens when the rows of a group are sampled together."""
    found: dict[int, list[int]] = {}
    sampler = Sampler(len(MIXED))
    for group in groups:
        for row in group:
            start(sampler, row, MIXED[row], [row, 2, 2], seed=row * 7, stops=STOPS)
            found[row] = []
        for step in range(num_tokens):
            logits = random_logits(len(MIXED), VOCAB, seed=step)[group]
            lengths = np.full(len(group), 3 + step, dtype=np.int64)
            tokens = sampler.sample(logits, int_array(group), lengths)
            for row, token in zip(group, tokens.tolist(), strict=True):
                found[row].append(token)
    return found


@given(order=st.permutations(range(len(MIXED))), cuts=st.sets(st.integers(1, len(MIXED) - 1)))
def test_a_token_does_not_depend_on_the_other_rows(order: list[int], cuts: set[int]) -> None:
    edges = [0, *sorted(cuts), len(order)]
    groups = [order[a:b] for a, b in pairwise(edges)]
    assert run_rows(groups) == run_rows([list(range(len(MIXED)))])


def test_rows_without_features_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("not needed")

    sampler, logits = Sampler(4), random_logits(2, VOCAB)
    start(sampler, 0, SamplingParams(), [1, 2])
    start(sampler, 1, SamplingParams(temperature=0.0), [1, 2], stops=STOPS)
    # Others have all of them, and min_tokens of row 3 are over.
    start(sampler, 2, MIXED[-1], [1, 2], stops=STOPS)
    start(sampler, 3, SamplingParams(min_tokens=2), [1, 2], [3, 3], stops=STOPS)
    for kind, names in (
        (Sampler, ("_edit", "_advance")),
        (TokenMasks, ("apply", "advance")),
        (Penalties, ("apply", "advance")),
    ):
        for name in names:
            monkeypatch.setattr(kind, name, never)
    monkeypatch.setattr(torch, "log_softmax", never)
    monkeypatch.setattr(torch.Tensor, "clone", never)
    rows = int_array([0, 1])
    tokens = sampler.sample(logits, rows, np.array([2, 2]))
    assert sampler.logprobs(logits, rows, tokens) is None
    sampler.sample(logits[:1], int_array([3]), np.array([4]))


def test_a_new_row_starts_without_the_old_ones_rules() -> None:
    sampler, logits = Sampler(1), random_logits(1, VOCAB)
    start(sampler, 0, MIXED[-1], [1, 2, 3], [4], stops=STOPS)
    assert not torch.equal(edited(sampler, logits, [0], [4]), logits)
    start(sampler, 0, SamplingParams(), [1, 2, 3], [4], stops=STOPS)
    assert torch.equal(edited(sampler, logits, [0], [4]), logits)


def test_a_row_that_may_sample_nothing_has_no_token() -> None:
    """The door refuses such requests; whatever comes through ends with an error."""
    sampler = Sampler(1)
    params = SamplingParams(allowed_token_ids=(3,), bad_words_token_ids=((3,),))
    start(sampler, 0, params, [1])
    found = sampler.sample(random_logits(1, VOCAB), int_array([0]), np.array([1]))
    assert found.tolist() == [NO_TOKEN]
