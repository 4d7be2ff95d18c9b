"""Puts a workload together from what a command line names."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from octavo.workload.arrivals import arrival_times, rescaled, with_arrivals
from octavo.workload.items import WorkItem, WorkloadError
from octavo.workload.traces import load_trace


def make_workload(
    *,
    trace: str | None,
    num_requests: int,
    input_len: int,
    output_len: int,
    arrivals: str = "all-at-once",
    rate: float | None = None,
    cv: float = 1.0,
    max_total_len: int | None = None,
    seed: int = 0,
) -> list[WorkItem]:
    """``num_requests`` items: of fixed lengths, or from a trace.

    From a trace with its own arrivals the first items are taken; from a table of lengths a random
    sample. ``arrivals`` ``trace`` keeps the trace's times, scaled to ``rate`` if one is given.
    Items longer than ``max_total_len`` tokens, prompt and output together, are left out.

    Raises:
        WorkloadError: the trace cannot be read or used like that.
    """
    if num_requests < 1:
        raise WorkloadError(f"num_requests must be at least 1, got {num_requests}")
    if trace is None:
        if arrivals == "trace":
            raise WorkloadError("arrivals=trace needs a trace")
        if input_len < 1 or output_len < 1:
            raise WorkloadError("input_len and output_len must be at least 1")
        items = [WorkItem(0.0, input_len, output_len)] * num_requests
    else:
        items = _from_trace(trace, num_requests, max_total_len, seed)
    if arrivals == "trace":
        if rate is not None:
            return rescaled(items, rate)
        if items[-1].arrival_s <= 0 < len(items) - 1:
            raise WorkloadError(
                f"{trace} has lengths only, and no arrivals; choose poisson, gamma or constant"
            )
        return items
    return with_arrivals(items, arrival_times(arrivals, len(items), rate=rate, cv=cv, seed=seed))


def num_fitting(trace: str, max_total_len: int) -> int:
    """How many requests of the trace have at most so many tokens, prompt and output together.

    Raises:
        WorkloadError: the trace cannot be read.
    """
    return len(_fitting(trace, max_total_len))


def _fitting(trace: str, max_total_len: int | None) -> list[WorkItem]:
    items = load_trace(trace)
    if max_total_len is None:
        return items
    return [i for i in items if i.num_prompt_tokens + i.num_output_tokens <= max_total_len]


def _from_trace(
    trace: str, num_requests: int, max_total_len: int | None, seed: int
) -> list[WorkItem]:
    items = _fitting(trace, max_total_len)
    if len(items) < num_requests:
        raise WorkloadError(
            f"{trace} has only {len(items)} requests"
            + (f" of at most {max_total_len} tokens" if max_total_len is not None else "")
            + f", fewer than the {num_requests} asked for"
        )
    if items[-1].arrival_s > 0:
        start = items[0].arrival_s
        return [replace(item, arrival_s=item.arrival_s - start) for item in items[:num_requests]]
    chosen = np.random.default_rng(seed).choice(len(items), num_requests, replace=False)
    return [items[i] for i in chosen.tolist()]
