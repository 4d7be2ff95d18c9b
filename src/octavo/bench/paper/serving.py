"""An engine of one manager under arrivals, on the simulator's clock: normalized latency at a rate.

A request's normalized latency is its seconds from arrival to end over the tokens of its output
(Kwon et al., SOSP 2023, section 6.1), and the mean over all requests is what their figures show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.bench.paper.engine import build_core, plain_request
from octavo.bench.paper.managers import Pool
from octavo.core.request import Request
from octavo.scheduling.preemption import RECOMPUTE, PreemptionPolicy
from octavo.simulate.executor import Latency, SimulatedExecutor
from octavo.workload.arrivals import arrival_times, with_arrivals
from octavo.workload.items import WorkItem

MakeRequest = Callable[[int, WorkItem], Request]


@dataclass(frozen=True, slots=True)
class Served:
    """``normalized_latency_s``: mean seconds an output token; ``requests_per_s`` over the run."""

    normalized_latency_s: float
    requests_per_s: float
    mean_running: float
    num_preemptions: int


def serve(
    name: str,
    pool: Pool,
    items: Sequence[WorkItem],
    latency: Latency,
    *,
    make: MakeRequest = plain_request,
    per_request: int = 1,
    preemption: PreemptionPolicy = RECOMPUTE,
    num_host_blocks: int = 0,
    prefix_caching: bool = False,
) -> Served:
    """Serve ``items`` as they arrive. ``per_request`` numbers are kept for each: its sequences."""
    core = build_core(
        name,
        pool,
        num_requests=len(items) * per_request + 1,
        latency=latency,
        preemption=preemption,
        num_host_blocks=num_host_blocks,
        prefix_caching=prefix_caching,
    )
    scheduler, executor = core.scheduler, core.executor
    assert isinstance(executor, SimulatedExecutor)
    num_running = 0

    def look() -> None:
        nonlocal num_running
        num_running = scheduler.num_running

    core.on_plan = look
    ends: dict[int, float] = {}
    num_added, busy_s, running_s = 0, 0.0, 0.0
    while len(ends) < len(items):
        if not core.has_work:
            executor.now_s = max(executor.now_s, items[num_added].arrival_s)
        while num_added < len(items) and items[num_added].arrival_s <= executor.now_s:
            scheduler.add(make(num_added * per_request, items[num_added]))
            num_added += 1
        before = executor.now_s
        outputs = core.step()
        busy_s += executor.now_s - before
        running_s += num_running * (executor.now_s - before)
        for finished in outputs.finished:
            # The last of its sequences to end counts.
            ends[finished.number // per_request] = executor.now_s
        if scheduler.num_waiting == scheduler.num_running == 0 and num_added == len(items):
            break
    normalized = [
        (ends[number] - item.arrival_s) / item.num_output_tokens
        for number, item in enumerate(items)
        if number in ends
    ]
    assert len(normalized) == len(items), "a request did not end"
    return Served(
        normalized_latency_s=float(np.mean(normalized)),
        requests_per_s=len(items) / executor.now_s,
        mean_running=running_s / busy_s if busy_s else 0.0,
        num_preemptions=scheduler.num_preemptions,
    )


def sweep(
    rates: Sequence[float],
    items: Sequence[WorkItem],
    run: Callable[[list[WorkItem]], Served],
    *,
    seed: int,
    stop_at_s: float,
) -> dict[float, Served]:
    """Poisson arrivals at each rate, up to the first at which the mean passes ``stop_at_s``."""
    found: dict[float, Served] = {}
    for rate in rates:
        times = arrival_times("poisson", len(items), rate=rate, seed=seed)
        found[rate] = run(with_arrivals(items, times))
        if found[rate].normalized_latency_s > stop_at_s:
            break
    return found


def shown_rate(curve: dict[float, Served], bound_s: float) -> str:
    """`sustained_rate` as text, ``≥`` before it where the highest rate measured was not enough."""
    is_enough = list(curve.values())[-1].normalized_latency_s > bound_s
    return f"{'' if is_enough else '≥ '}{sustained_rate(curve, bound_s):.2f}"


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
