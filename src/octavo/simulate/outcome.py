"""What became of a workload's requests: when each token came, and the figures that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.core.request import Finished, FinishReason, StepOutputs
from octavo.workload.items import WorkItem

Seconds = NDArray[np.float64]
PERCENTILES = (50, 90, 99)


class TokenTimes:
    """Notes the tokens of requests, which are named by their place in the workload."""

    def __init__(self, items: Sequence[WorkItem]) -> None:
        self.arrival_s: Seconds = np.array([item.arrival_s for item in items])
        self.first_s: Seconds = np.full(len(items), np.nan)
        self.end_s: Seconds = np.full(len(items), np.nan)
        self.num_tokens = np.zeros(len(items), dtype=np.int64)
        self.num_cached_tokens = 0
        self.finished: dict[int, Finished] = {}
        self._last_s: Seconds = np.full(len(items), np.nan)
        self._gaps: list[tuple[float, Seconds]] = []

    def note(self, now_s: float, outputs: StepOutputs) -> None:
        """The results of a step are there."""
        numbers = outputs.numbers
        if len(numbers):
            gaps = now_s - self._last_s[numbers]
            self._last_s[numbers] = now_s
            self.num_tokens[numbers] += 1
            self._gaps.append((now_s, gaps))
            # The gap of a first token is not a number, and so is their sum then.
            if np.isnan(gaps.sum()):
                self.first_s[numbers[np.isnan(gaps)]] = now_s
        for finished in outputs.finished:
            number = finished.number
            assert number not in self.finished, f"request {number} ended twice"
            self.finished[number] = finished
            self.end_s[number] = now_s
            self.num_cached_tokens += finished.num_cached_tokens

    def gaps_s(self, begin_s: float = 0.0, end_s: float = np.inf) -> Seconds:
        """Every time between two tokens of a request that ended in the window."""
        found = [gaps for now_s, gaps in self._gaps if begin_s <= now_s <= end_s]
        gaps = np.concatenate(found) if found else np.zeros(0)
        return gaps[~np.isnan(gaps)]

    def num_waiting(self, at_s: float) -> int:
        """Requests that have come and got no token by then."""
        has_first = self.first_s <= at_s
        return int(((self.arrival_s <= at_s) & ~has_first).sum())

    def outcome(self, begin_s: float | None = None) -> Outcome:
        """Once everything has ended: of all, or with ``begin_s`` of the requests that came and the
        tokens that were made from then to the last arrival, while the load was at its height."""
        failed = {n for n, f in self.finished.items() if f.reason is FinishReason.ERROR}
        if begin_s is None:
            span = float(np.nanmax(self.end_s) - self.arrival_s.min()) if len(self.end_s) else 0.0
            chosen = np.ones(len(self.arrival_s), dtype=np.bool_)
            gaps, num_tokens = self.gaps_s(), int(self.num_tokens.sum())
        else:
            end_s = float(self.arrival_s.max())
            span = end_s - begin_s
            chosen = self.arrival_s >= begin_s
            gaps = self.gaps_s(begin_s, end_s)
            is_inside = (self.first_s >= begin_s) & (self.first_s <= end_s)
            num_tokens = len(gaps) + int(is_inside.sum())
        num_requests = int(chosen.sum())
        num_failed = sum(bool(chosen[number]) for number in failed)
        return Outcome(
            num_requests=num_requests,
            num_failed=num_failed,
            num_tokens=num_tokens,
            span_s=span,
            tokens_per_s=num_tokens / span if span else 0.0,
            requests_per_s=(num_requests - num_failed) / span if span else 0.0,
            ttft_s=percentiles((self.first_s - self.arrival_s)[chosen]),
            itl_s=percentiles(gaps),
            e2e_s=percentiles((self.end_s - self.arrival_s)[chosen]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Tokens and requests a second over ``span_s`` seconds, and what requests waited. ``ttft_s``
    (time to the first token), ``itl_s`` (between two tokens) and ``e2e_s`` by percentile:
    ``p50``, ``p90``, ``p99``, and ``mean``."""

    num_requests: int
    num_failed: int
    num_tokens: int
    span_s: float
    tokens_per_s: float
    requests_per_s: float
    ttft_s: dict[str, float]
    itl_s: dict[str, float]
    e2e_s: dict[str, float]


def percentiles(values: Seconds) -> dict[str, float]:
    """``mean`` and each of ``PERCENTILES``; 0 of nothing, as of requests with a single token."""
    values = values[~np.isnan(values)]
    if not len(values):
        return {"mean": 0.0, **{f"p{p}": 0.0 for p in PERCENTILES}}
    found = np.percentile(values, PERCENTILES).tolist()
    named = {f"p{p}": value for p, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(values.mean()), **named}
