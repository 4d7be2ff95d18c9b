"""An engine of one manager under arrivals, on its own clock: normalized latency at a rate.

A request's normalized latency is its seconds from arrival to end over the tokens of its output
(Kwon et al., SOSP 2023, section 6.1), and the mean over all requests is what their figures show.
Requests arrive for a fixed time and all of them are awaited: overload shows in how long they wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from octavo.bench.paper.engines import WARM_UP_MOST, Engine, MakeRequest, check_ended, plain_request
from octavo.workload.arrivals import poisson_times
from octavo.workload.items import WorkItem, WorkloadError

if TYPE_CHECKING:
    from octavo.bench.paper.report import PaperOptions


REAL_RATES: tuple[float, ...] = (0.5, 1, 2, 4, 8, 16, 32, 64, 128)
REAL_DURATION_S = 20.0


@dataclass(frozen=True, slots=True)
class Served:
    """``normalized_latency_s``: mean seconds an output token; ``requests_per_s`` over the run."""

    normalized_latency_s: float
    requests_per_s: float
    mean_running: float
    num_preemptions: int
    num_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Arrivals at each of ``rates`` a second in turn, for ``duration_s`` seconds, of at most
    ``num_requests`` (None: as many as come), until normalized latency passes ``stop_at_s``."""

    rates: Sequence[float]
    duration_s: float
    num_requests: int | None
    stop_at_s: float
    seed: int = 0

    def __str__(self) -> str:
        most = "" if self.num_requests is None else f", {self.num_requests} at most"
        return f"Poisson arrivals for {self.duration_s:g} s{most}"


def load_of(
    options: PaperOptions, rates: Sequence[float], duration_s: float, stop_at_s: float
) -> Load:
    """What is asked for, else a figure's ``rates`` and ``duration_s``; a real engine's may be any,
    so that it gets `REAL_RATES` for `REAL_DURATION_S`.

    Raises:
        WorkloadError: a rate or the duration is not above 0, or has no end.
    """
    if options.model is not None:
        rates, duration_s = REAL_RATES, REAL_DURATION_S
    rates = tuple(sorted(set(options.rates))) or rates
    duration_s = duration_s if options.duration_s is None else options.duration_s
    for name, value in (*(("rates", rate) for rate in rates), ("duration", duration_s)):
        if not 0 < value < math.inf:
            raise WorkloadError(f"{name} must be above 0 and finite, got {value:g}")
    return Load(
        rates=rates,
        duration_s=duration_s,
        num_requests=options.num_requests,
        stop_at_s=stop_at_s,
        seed=options.seed,
    )


def arriving(items: Sequence[WorkItem], rate: float, load: Load) -> list[WorkItem]:
    """``items`` in turn, again from the first where they do not suffice, as they arrive: a Poisson
    process of which it is known that ``rate`` times the duration came. So that a short run has the
    rate that it is named by, too: of 24 expected 16 may come otherwise."""
    count = max(round(rate * load.duration_s), 1)
    if load.num_requests is not None:
        count = min(count, load.num_requests)
    times = poisson_times(count, count / rate, seed=load.seed)
    return [
        replace(items[place % len(items)], arrival_s=time)
        for place, time in enumerate(times.tolist())
    ]


def sweep(
    engine: Engine,
    items: Sequence[WorkItem],
    load: Load,
    *,
    make: MakeRequest = plain_request,
    per_request: int = 1,
    found: dict[float, Served] | None = None,
) -> dict[float, Served]:
    """Serve at each rate, up to the first that is hopeless; ``found`` gets each as it is known."""
    found = {} if found is None else found
    engine.warm_up(
        [make(engine, n * per_request, item) for n, item in enumerate(items[:WARM_UP_MOST])]
    )
    for rate in load.rates:
        found[rate] = serve(engine, arriving(items, rate, load), make=make, per_request=per_request)
        if found[rate].normalized_latency_s > load.stop_at_s:
            break
    return found


def serve(
    engine: Engine,
    items: Sequence[WorkItem],
    *,
    make: MakeRequest = plain_request,
    per_request: int = 1,
) -> Served:
    """Serve ``items`` as they arrive. ``per_request`` numbers are kept for each: its sequences.

    Raises:
        RuntimeError: a request failed.
    """
    core = engine.core
    scheduler = core.scheduler
    requests = [make(engine, number * per_request, item) for number, item in enumerate(items)]
    num_running, num_preemptions = 0, scheduler.num_preemptions

    def look() -> None:
        nonlocal num_running
        num_running = scheduler.num_running

    core.on_plan = look
    ends: dict[int, float] = {}
    num_added, busy_s, running_s = 0, 0.0, 0.0
    engine.start()
    while num_added < len(items) or core.has_work:
        if not core.has_work:
            engine.wait_until(items[num_added].arrival_s)
        before = engine.now_s
        while num_added < len(items) and items[num_added].arrival_s <= before:
            scheduler.add(requests[num_added])
            num_added += 1
        finished = core.step().finished
        after = engine.now_s
        busy_s += after - before
        running_s += num_running * (after - before)
        check_ended(finished)
        for each in finished:
            # The last of its sequences to end counts.
            ends[each.number // per_request] = after
    core.on_plan = None
    normalized = [
        (ends[number] - item.arrival_s) / item.num_output_tokens
        for number, item in enumerate(items)
    ]
    return Served(
        normalized_latency_s=float(np.mean(normalized)),
        requests_per_s=len(items) / engine.now_s,
        mean_running=running_s / busy_s if busy_s else 0.0,
        num_preemptions=scheduler.num_preemptions - num_preemptions,
        num_requests=len(items),
    )


def shown_rate(curve: dict[float, Served], bound_s: float) -> str:
    """`sustained_rate` as text, ``≥`` before it where the highest rate measured was not enough."""
    return f"{'' if _is_enough(curve, bound_s) else '≥ '}{sustained_rate(curve, bound_s):.2f}"


def shown_ratio(
    curves: dict[str, dict[float, Served]], name: str, other: str, bound_s: float
) -> str:
    """How many times the rate of ``other`` the manager ``name`` sustains, as text: ``≥`` before it
    as in `shown_rate`, a dash where a curve is missing or that of ``other`` has no such rate."""
    if name not in curves or other not in curves or not _is_enough(curves[other], bound_s):
        return "–"
    base = sustained_rate(curves[other], bound_s)
    if not base:
        return "–"
    is_enough = _is_enough(curves[name], bound_s)
    return f"{'' if is_enough else '≥ '}{sustained_rate(curves[name], bound_s) / base:.1f}×"


def _is_enough(curve: dict[float, Served], bound_s: float) -> bool:
    """Whether the highest rate measured was too much."""
    return list(curve.values())[-1].normalized_latency_s > bound_s


def sustained_rate(curve: dict[float, Served], bound_s: float) -> float:
    """The rate at which normalized latency reaches ``bound_s``, between measured ones by a line;
    the highest measured where it stays below."""
    rates = list(curve)
    previous_rate, previous = 0.0, 0.0
    for rate in rates:
        latency = curve[rate].normalized_latency_s
        if latency > bound_s:
            if previous_rate == 0.0:
                return 0.0
            share = (bound_s - previous) / (latency - previous)
            return previous_rate + share * (rate - previous_rate)
        previous_rate, previous = rate, latency
    return previous_rate
