"""Sampling against a plain reference: temperature, then top-k, top-p, min-p."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from octavo.core.plan import NO_TOKEN
from octavo.core.sampling_params import SamplingParams
from octavo.execution.sampling import sampler as sampler_module
from octavo.execution.sampling.sampler import Sampler

INF = math.inf


def reference(logits: Sequence[float], params: SamplingParams) -> tuple[NDArray[np.float64], float]:
    """Each token's probability, and how near a filter's limit came to keeping another set."""
    scaled = np.asarray(logits, dtype=np.float64)
    scaled = (scaled - scaled.max()) / params.temperature
    order = np.argsort(-scaled, kind="stable")
    weights = np.exp(scaled[order])
    if params.top_k > 0:
        weights[params.top_k :] = 0.0
    weights /= weights.sum()
    before = np.cumsum(weights) - weights
    margin = float(np.abs(before[1:] - params.top_p).min(initial=1.0)) if params.top_p < 1 else 1.0
    weights[before >= params.top_p] = 0.0
    ratio = weights / weights[0]
    if params.min_p:
        margin = min(margin, float(np.abs(ratio[1:] - params.min_p).min(initial=1.0)))
    weights[ratio < params.min_p] = 0.0
    probabilities = np.zeros(len(weights))
    probabilities[order] = weights / weights.sum()
    return probabilities, margin


def draw(
    logits: torch.Tensor, params: SamplingParams, *, seed: int = 0, first: int = 0
) -> NDArray[np.int64]:
    """One token a row of ``logits [n, vocab]``, as one sequence at ``n`` places draws them."""
    sampler = Sampler(1)
    sampler.set_row(0, params, seed)
    rows = np.zeros(len(logits), dtype=np.int32)
    return sampler.sample(logits.float(), rows, np.arange(first, first + len(logits)))


def shares(logits: Sequence[float], params: SamplingParams, count: int) -> NDArray[np.float64]:
    """How often each token is drawn by ``count`` noises that are spread evenly."""
    noise = (np.arange(count) + 0.5) / count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "uniform", lambda seeds, indices: noise)
        tokens = draw(torch.tensor([list(logits)]).expand(count, -1), params)
    return np.bincount(tokens, minlength=len(logits)) / count


def check(logits: Sequence[float], params: SamplingParams, count: int = 1000) -> None:
    found, (expected, _) = shares(logits, params, count), reference(logits, params)
    # A token owns one interval of noise: its share is right to within one noise at each end.
    np.testing.assert_allclose(found, expected, atol=1.001 / count + 1e-6)
    assert not found[expected == 0].any(), "a filtered token was drawn"


def spread(vocab: int, scale: float = 1.5, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(vocab, generator=generator) * scale).tolist()


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"top_k": 4},
    {"top_k": -1},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 6, "top_p": 0.8},
    {"top_k": 6, "min_p": 0.3},
    {"top_p": 0.9, "min_p": 0.1},
    {"temperature": 0.7, "top_k": 8, "top_p": 0.9, "min_p": 0.15},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_the_reference_is_hugging_faces(options: dict[str, float]) -> None:
    params = SamplingParams(**options)
    scores = torch.tensor([spread(40)], dtype=torch.float64)
    warpers = [TemperatureLogitsWarper(float(params.temperature))]
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    for warper in warpers:
        scores = warper(None, scores)
    np.testing.assert_allclose(scores.softmax(-1)[0], reference(spread(40), params)[0], atol=1e-12)


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [13, 700])
def test_each_token_has_its_probability(vocab: int, options: dict[str, float]) -> None:
    check(spread(vocab), SamplingParams(**options), 2000)


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_frequencies_over_real_noise(options: dict[str, float]) -> None:
    logits, params, count = spread(12), SamplingParams(**options), 20_000
    tokens = draw(torch.tensor([logits]).expand(count, -1), params, seed=7)
    counts = np.bincount(tokens, minlength=12)
    expected = reference(logits, params)[0] * count
    kept = expected > 0
    assert not counts[~kept].any()
    assert counts[expected > 10].all()
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = max(int(kept.sum()) - 1, 1)
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


@given(
    logits=st.lists(
        st.floats(-30, 30, width=32) | st.just(-INF) | st.sampled_from([0.0, 1.0]),
        min_size=1,
        max_size=30,
    ),
    temperature=st.floats(0.05, 100),
    top_k=st.integers(-1, 40),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)
def test_any_row_equals_the_reference(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    assume(max(logits) > -INF)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected, margin = reference(logits, params)
    assume(margin > 1e-5)
    found = shares(logits, params, 200)
    # Which of equal tokens top-k or top-p keeps is open, so compare the sorted shares.
    np.testing.assert_allclose(np.sort(found), np.sort(expected), atol=1.001 / 200 + 1e-5)
    assert (found > 0).sum() <= (expected > 0).sum()


# ── edges ────────────────────────────────────────────────────────────────────────────────────


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-INF, -5.0, -6.0, -INF]])
    greedy = SamplingParams(temperature=0.0, top_k=3, top_p=0.1, min_p=1.0)
    assert draw(logits, greedy).tolist() == [1, 1]


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_p": 1e-9},
        {"top_p": 1e-50},
        {"top_p": 5e-324},
        {"top_k": 7, "top_p": 5e-324},
        {"min_p": 1.0},
        {"temperature": 1e-3},
        {"temperature": 1e-7},
        {"temperature": 1e-300},
        {"temperature": 5e-324, "top_k": 5},
        {"temperature": 100.0, "top_k": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [1, 2, 50, 600])
def test_limits_that_leave_the_best_token(vocab: int, options: dict[str, float]) -> None:
    logits = torch.tensor([spread(vocab)]).expand(300, -1)
    assert set(draw(logits, SamplingParams(**options)).tolist()) == {int(logits[0].argmax())}


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_k": 100}, {"top_k": 2**31 - 1}], ids=str)
def test_top_k_of_the_whole_vocabulary_or_more(options: dict[str, int]) -> None:
    check(spread(5), SamplingParams(**options))


def test_huge_temperature_is_almost_flat() -> None:
    found = shares(spread(50), SamplingParams(temperature=100.0), 5000)
    np.testing.assert_allclose(found, 1 / 50, rtol=0.06)


@pytest.mark.parametrize("temperature", [100.0, 1.0, 1e-300])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.5}], ids=str)
def test_the_largest_floats_do_not_overflow(temperature: float, options: dict[str, float]) -> None:
    limit = torch.finfo(torch.float32).max
    logits = torch.tensor([[-limit, limit, 0.0, -INF, limit / 2]]).expand(100, -1)
    params = SamplingParams(temperature=temperature, **options)
    assert set(draw(logits, params).tolist()) == {1}


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_forbidden_tokens_are_never_drawn(options: dict[str, float]) -> None:
    logits = [-INF, 0.5, -INF, 0.25, -INF, -INF]
    check(logits, SamplingParams(**options))
    check([-INF] * 600 + [1.0] + [-INF] * 3, SamplingParams(**options), 50)


def test_flat_logits_need_more_than_the_candidates() -> None:
    """Top-p keeps about 1,100 of 2,000 tokens: the first 512 are not enough."""
    logits, params = spread(2000, 0.01), SamplingParams(top_p=0.55)
    expected, _ = reference(logits, params)
    assert (expected > 0).sum() > 2 * sampler_module._NUM_CANDIDATES
    found = shares(logits, params, 4000)
    assert (found > 0).sum() == pytest.approx((expected > 0).sum(), abs=1), "float32 sums"
    np.testing.assert_allclose(found, expected, atol=2e-3)


@pytest.mark.parametrize("options", [{"top_k": 600}, {"top_k": 600, "top_p": 0.95}], ids=str)
def test_top_k_beyond_the_candidates(options: dict[str, float]) -> None:
    logits, params = spread(1000, 0.01), SamplingParams(**options)
    found, (expected, _) = shares(logits, params, 4000), reference(logits, params)
    assert set(np.flatnonzero(found)) == set(np.flatnonzero(expected))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 3}, 3),
        ({"top_p": 0.45}, 5),
        ({"min_p": 1.0}, 10),
        ({"top_k": 4, "top_p": 0.6}, 3),
    ],
    ids=str,
)
def test_ties(options: dict[str, float], kept: int) -> None:
    """Among equal tokens some are kept, all with the same share."""
    found = shares([2.0] * 10, SamplingParams(**options), 3000)
    np.testing.assert_allclose(found[found > 0], 1 / kept, atol=1e-3)
    assert (found > 0).sum() == kept


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_seeds_of_64_bits(seed: int) -> None:
    logits = torch.tensor([spread(20)]).expand(500, -1)
    tokens = draw(logits, SamplingParams(), seed=seed)
    assert tokens.tolist() == draw(logits, SamplingParams(), seed=seed).tolist()
    assert tokens.tolist() != draw(logits, SamplingParams(), seed=seed ^ 2**63).tolist()
    assert tokens.tolist() != draw(logits, SamplingParams(), seed=seed ^ 1).tolist()


# ── rows among rows ──────────────────────────────────────────────────────────────────────────

ROWS = [
    SamplingParams(temperature=temperature, **options)
    for temperature in (0.0, 0.6, 1.3)
    for options in (
        {},
        {"min_p": 0.1},
        {"top_k": 1},
        {"top_k": 20},
        {"top_p": 0.9},
        {"top_p": 0.5, "min_p": 0.05},
        {"top_k": 530, "top_p": 0.99},
        {"top_k": 10_000},
    )
]


def mixed(vocab: int) -> tuple[Sampler, torch.Tensor]:
    """A sampler of many kinds of rows, and logits of which every third row is almost flat."""
    sampler = Sampler(len(ROWS))
    logits = torch.tensor([spread(vocab, seed=row) for row in range(len(ROWS))])
    logits[::3] *= 0.01
    for row, params in enumerate(ROWS):
        sampler.set_row(row, params, seed=row * 2**59)
    return sampler, logits


@given(data=st.data())
def test_a_token_does_not_depend_on_the_other_rows(data: st.DataObject) -> None:
    sampler, logits = mixed(700)
    indices = np.arange(len(ROWS)) * 11
    chosen = data.draw(st.permutations(range(len(ROWS))))[: data.draw(st.integers(1, len(ROWS)))]
    rows = np.array(chosen, dtype=np.int32)
    together = sampler.sample(logits[chosen], rows, indices[rows])
    for place, row in enumerate(chosen):
        one = np.array([row], dtype=np.int32)
        assert sampler.sample(logits[[row]], one, indices[one])[0] == together[place]


def test_nor_on_threads_that_share_a_large_vocabulary() -> None:
    """PyTorch splits a single row's sum over threads when it is long; nothing may depend on it."""
    sampler, logits = mixed(70_000)
    rows, indices = np.arange(len(ROWS), dtype=np.int32), np.arange(len(ROWS))
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = sampler.sample(logits, rows, indices)
        torch.set_num_threads(2)
        for row in rows:
            one = rows[row : row + 1]
            assert sampler.sample(logits[row : row + 1], one, indices[one])[0] == together[row]
    finally:
        torch.set_num_threads(num_threads)


def test_logits_are_left_as_they_were() -> None:
    sampler, logits = mixed(700)
    before = logits.clone()
    sampler.sample(logits, np.arange(len(ROWS), dtype=np.int32), np.arange(len(ROWS)))
    assert torch.equal(logits, before)


def test_rows_pay_only_for_what_they_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("not needed")

    logits = torch.tensor([spread(700)]).expand(50, -1)
    for name in ("topk", "sort", "argsort"):
        monkeypatch.setattr(torch, name, never)
        monkeypatch.setattr(torch.Tensor, name, never)
    for options in ({}, {"min_p": 0.1}, {"top_k": 700}, {"top_k": 10**6, "min_p": 0.1}):
        draw(logits, SamplingParams(**options))
    for name in ("softmax", "cumsum"):
        monkeypatch.setattr(torch, name, never)
    draw(logits, SamplingParams(temperature=0.0, top_k=5, top_p=0.5))
    draw(logits, SamplingParams(top_k=1))


# ── logits that are no numbers ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("options", [{"temperature": 0.0}, *FILTERS], ids=str)
@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("vocab", [4, 600])
def test_a_row_that_is_not_finite_has_no_token(
    vocab: int, bad: float, options: dict[str, float]
) -> None:
    logits = torch.tensor([spread(vocab)] * 3)
    sound = draw(logits, SamplingParams(**options))
    logits[1, vocab // 2] = bad
    found = draw(logits, SamplingParams(**options))
    assert found[1] == NO_TOKEN
    assert [found[0], found[2]] == [sound[0], sound[2]]


@pytest.mark.parametrize("options", [{"temperature": 0.0}, *FILTERS], ids=str)
def test_nothing_allowed_is_no_token(options: dict[str, float]) -> None:
    assert list(draw(torch.full((1, 9), -INF), SamplingParams(**options))) == [NO_TOKEN]


def test_logit_bias_moves_its_own_row_only() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.0]]).repeat(3, 1)
    before = logits.clone()
    sampler = Sampler(4)
    rows = np.asarray([2, 0, 3], dtype=np.int32)
    for row, bias in ((2, {2: -100.0}), (0, {}), (3, {3: 50.0, 2: -1.0})):
        sampler.set_row(row, SamplingParams(temperature=0.0, logit_bias=bias), 0)
    indices = np.zeros(3, dtype=np.int64)
    assert sampler.sample(logits, rows, indices).tolist() == [1, 2, 3]
    assert torch.equal(logits, before), "the caller's logits are left alone"
    sampler.set_row(2, SamplingParams(temperature=0.0), 0)
    assert sampler.sample(logits, rows, indices).tolist() == [2, 2, 3], "a new row starts without"


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.9}], ids=str)
def test_logit_bias_comes_before_the_filters(options: dict[str, float]) -> None:
    bias = {0: 2.0, 3: -100.0}
    logits = [0.0, 1.0, 2.0, 3.0]
    biased = SamplingParams(logit_bias=bias, **options)
    plain = SamplingParams(**options)
    moved = [value + bias.get(i, 0.0) for i, value in enumerate(logits)]
    np.testing.assert_allclose(shares(logits, biased, 500), shares(moved, plain, 500))
