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
        self._gaps: list[Seconds] = []

    def note(self, now_s: float, outputs: StepOutputs) -> None:
        """The results of a step are there."""
        numbers = outputs.numbers
        if len(numbers):
            gaps = now_s - self._last_s[numbers]
            self._last_s[numbers] = now_s
            self.num_tokens[numbers] += 1
            self._gaps.append(gaps)
            # The gap of a first token is not a number, and so is their sum then.
            if np.isnan(gaps.sum()):
                self.first_s[numbers[np.isnan(gaps)]] = now_s
        for finished in outputs.finished:
            number = finished.number
            assert number not in self.finished, f"request {number} ended twice"
            self.finished[number] = finished
            self.end_s[number] = now_s
            self.num_cached_tokens += finished.num_cached_tokens

    @property
    def gaps_s(self) -> Seconds:
        """Every time between two tokens of a request."""
        gaps = np.concatenate(self._gaps) if self._gaps else np.zeros(0)
        return gaps[~np.isnan(gaps)]

    def outcome(self) -> Outcome:
        """Once everything has ended."""
        return Outcome.of(
            self.arrival_s,
            self.first_s,
            self.end_s,
            self.gaps_s,
            int(self.num_tokens.sum()),
            sum(f.reason is FinishReason.ERROR for f in self.finished.values()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Seconds, and tokens and requests a second, from the first arrival to the last end. ``ttft_s``
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

    @classmethod
    def of(
        cls,
        arrival_s: Seconds,
        first_s: Seconds,
        end_s: Seconds,
        gaps_s: Seconds,
        num_tokens: int,
        num_failed: int = 0,
    ) -> Outcome:
        span = float(np.nanmax(end_s) - arrival_s.min()) if len(end_s) else 0.0
        served = len(arrival_s) - num_failed
        return cls(
            num_requests=len(arrival_s),
            num_failed=num_failed,
            num_tokens=num_tokens,
            span_s=span,
            tokens_per_s=num_tokens / span if span else 0.0,
            requests_per_s=served / span if span else 0.0,
            ttft_s=percentiles(first_s - arrival_s),
            itl_s=percentiles(gaps_s),
            e2e_s=percentiles(end_s - arrival_s),
        )


def percentiles(values: Seconds) -> dict[str, float]:
    """``mean`` and each of ``PERCENTILES``; 0 of nothing, as of requests with a single token."""
    values = values[~np.isnan(values)]
    if not len(values):
        return {"mean": 0.0, **{f"p{p}": 0.0 for p in PERCENTILES}}
    found = np.percentile(values, PERCENTILES).tolist()
    named = {f"p{p}": value for p, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(values.mean()), **named}
