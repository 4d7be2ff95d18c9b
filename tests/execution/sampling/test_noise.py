"""Counter-based noise: uniform over counters and over seeds, and independent between them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.execution.sampling.noise import uniform

SEEDS = [0, 1, 2, 12345, 2**32, 2**63 - 1, 2**63, 2**64 - 1]


def over_counters(seed: int, count: int = 20_000, first: int = 0) -> NDArray[np.float64]:
    return uniform(np.full(count, seed, dtype=np.uint64), np.arange(first, first + count))


def over_seeds(counter: int, count: int = 20_000, first: int = 0) -> NDArray[np.float64]:
    seeds = np.arange(first, first + count, dtype=np.uint64)
    return uniform(seeds, np.full(count, counter, dtype=np.int64))


def chi_square(counts: NDArray[np.int64]) -> float:
    """Standard deviations above what uniform counts give."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def is_uniform(values: NDArray[np.float64]) -> bool:
    return chi_square(np.bincount((values * 64).astype(int), minlength=64)) < 4


def is_independent(first: NDArray[np.float64], second: NDArray[np.float64]) -> bool:
    """Pairs fill the unit square evenly."""
    cells = (first * 16).astype(int) * 16 + (second * 16).astype(int)
    return chi_square(np.bincount(cells, minlength=256)) < 4


@pytest.mark.parametrize("seed", SEEDS)
def test_uniform_over_counters(seed: int) -> None:
    values = over_counters(seed)
    assert values.min() >= 0
    assert values.max() < 1
    assert is_uniform(values)
    assert is_independent(values[:-1], values[1:]), "neighbouring tokens"
    assert is_uniform(over_counters(seed, first=2**31))


@pytest.mark.parametrize("counter", [0, 1, 7, 4096, 2**24])
def test_uniform_over_seeds(counter: int) -> None:
    """A client that numbers its requests 0, 1, 2 … gets unrelated samples."""
    values = over_seeds(counter)
    assert is_uniform(values)
    assert is_independent(values[:-1], values[1:])


@pytest.mark.parametrize("seed", SEEDS)
def test_seeds_are_independent_of_each_other(seed: int) -> None:
    values = over_counters(seed)
    for other in {(seed + 1) % 2**64, seed ^ 2**63, seed ^ 1}:
        assert is_independent(values, over_counters(other))
        assert is_independent(values[1:], over_counters(other)[:-1])


def test_no_two_of_many_seeds_and_counters_agree() -> None:
    seeds, counters = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300))
    assert len(np.unique(uniform(seeds.ravel(), counters.ravel()))) == 300 * 300


def test_a_number_does_not_depend_on_its_company() -> None:
    whole = over_counters(99, 50)
    for counter in (0, 1, 49):
        alone = uniform(np.array([99], dtype=np.uint64), np.array([counter]))
        assert alone[0] == whole[counter]


def test_values_are_fixed() -> None:
    """A seed means the same tokens in every version."""
    assert over_counters(0, 2).tolist() == [0.28176129772258496, 0.01403302919427496]
    assert over_counters(2**64 - 1, 1, first=2**31).tolist() == [0.9707449142029972]
