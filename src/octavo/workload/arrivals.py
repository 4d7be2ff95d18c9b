"""When requests come: repeatable arrival times from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from octavo.workload.items import WorkItem, WorkloadError

_LEAST_CV, _MOST_CV = 0.001, 1000.0
PROCESSES = ("all-at-once", "constant", "poisson", "gamma", "trace")


def arrival_times(
    process: str, count: int, *, rate: float | None = None, cv: float = 1.0, seed: int = 0
) -> NDArray[np.float64]:
    """``count`` times in seconds, ascending, the first at 0.

    ``rate`` is requests a second. ``gamma`` has gaps of coefficient of variation ``cv``: 1 is
    Poisson, more is burstier.

    Raises:
        WorkloadError: an unknown process, a rate that is not positive or so low that times are no
            numbers, or a cv out of range.
    """
    if process == "all-at-once":
        return np.zeros(count)
    if process not in PROCESSES or process == "trace":
        raise WorkloadError(f"arrivals must be one of {', '.join(PROCESSES)}, got {process!r}")
    if rate is None or not 0 < rate < float("inf"):
        raise WorkloadError(f"{process} arrivals need a rate above 0 requests a second, got {rate}")
    if not _LEAST_CV <= cv <= _MOST_CV:
        raise WorkloadError(f"cv must be from {_LEAST_CV:g} to {_MOST_CV:g}, got {cv:g}")
    random = np.random.default_rng(seed)
    if process == "constant":
        gaps = np.full(count, 1 / rate)
    elif process == "poisson":
        gaps = random.exponential(1 / rate, count)
    else:
        shape = cv**-2
        gaps = random.gamma(shape, 1 / (rate * shape), count)
    with np.errstate(over="ignore"):
        times = np.cumsum(gaps)
    if not np.isfinite(times).all():
        raise WorkloadError(f"a rate of {rate:g} requests a second is too low; ask for more")
    return times - times[0] if count else times


def poisson_times(count: int, span_s: float, *, seed: int = 0) -> NDArray[np.float64]:
    """``count`` times in seconds, ascending: a Poisson process that brings so many in ``span_s``.
    Given their number, its times are independent and uniform."""
    return np.sort(np.random.default_rng(seed).uniform(0.0, span_s, count))


def with_arrivals(items: Sequence[WorkItem], times: NDArray[np.float64]) -> list[WorkItem]:
    """The items in their order, at other times."""
    pairs = zip(items, times.tolist(), strict=True)
    return [replace(item, arrival_s=time) for item, time in pairs]


def rescaled(items: Sequence[WorkItem], rate: float) -> list[WorkItem]:
    """A trace's own arrivals, stretched or squeezed to ``rate`` requests a second on average.

    Raises:
        WorkloadError: the trace has no arrivals, or the rate is not above 0.
    """
    if not 0 < rate < float("inf"):
        raise WorkloadError(f"trace arrivals need a rate above 0 requests a second, got {rate}")
    span = items[-1].arrival_s if items else 0.0
    if span <= 0:
        raise WorkloadError("this trace has lengths only; choose poisson, gamma or constant")
    factor = (len(items) - 1) / span / rate
    return [replace(item, arrival_s=item.arrival_s * factor) for item in items]
