"""One workload at one rate after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.bench.serve.client import Client
from octavo.bench.serve.metrics import Load, figures
from octavo.config import ConfigError
from octavo.workload.arrivals import PROCESSES
from octavo.workload.items import WorkItem, WorkloadError
from octavo.workload.workload import make_workload

# Requests without end a second: all at once.
UNLIMITED = math.inf
# Each run of a sweep has prompts of its own, or a prefix cache would answer for the last run's.
_MAX_RUNS = 1000
_WARMUP_RUN = _MAX_RUNS - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is sent, but for the rate; the fields are `make_workload`'s.

    Raises:
        ConfigError: there are no such arrivals, or a cv without gamma's, that changes nothing.
    """

    trace: str | None = None
    num_requests: int = 64
    input_len: int = 64
    output_len: int = 48
    max_total_len: int | None = None
    arrivals: str = "poisson"
    cv: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.arrivals not in PROCESSES:
            raise ConfigError(
                f"arrivals must be one of {', '.join(PROCESSES)}, got {self.arrivals!r}"
            )
        if self.cv != 1.0 and self.arrivals != "gamma":
            raise ConfigError(
                f"cv {self.cv:g} needs gamma arrivals, not {self.arrivals}; send --arrivals gamma"
            )

    def description(self) -> str:
        """In a line: lengths and arrivals."""
        lengths = f"lengths of {Path(self.trace).name}" if self.trace else self._fixed_lengths()
        burstiness = f", cv {self.cv:g}" if self.arrivals == "gamma" else ""
        return f"{self.num_requests} requests a rate, {lengths}, {self.arrivals}{burstiness}"

    def _fixed_lengths(self) -> str:
        return f"{self.input_len} tokens in, {self.output_len} out"

    def items(self, rate: float | None) -> list[WorkItem]:
        """At ``rate`` requests a second; None: a trace's own times; infinite: all at once.

        Raises:
            WorkloadError: the trace cannot be read or used like that.
        """
        return make_workload(
            trace=self.trace,
            num_requests=self.num_requests,
            input_len=self.input_len,
            output_len=self.output_len,
            arrivals="all-at-once" if rate == UNLIMITED else self.arrivals,
            rate=None if rate == UNLIMITED else rate,
            cv=self.cv,
            max_total_len=self.max_total_len,
            seed=self.seed,
        )


@dataclass(slots=True)
class Sweep:
    """Runs ``work`` against ``client`` at rates that are asked for, and keeps the results.

    ``on_run`` is called with each run's report as it ends.
    """

    client: Client
    work: Work
    objectives: Mapping[str, float]
    max_concurrency: int | None = None
    on_run: Callable[[dict[str, Any]], None] = lambda _: None
    reports: list[dict[str, Any]] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)

    async def warm_up(self, num_requests: int) -> None:
        """Send that many of the workload's requests, one after another, and forget them.

        Raises:
            ConfigError: one fails.
        """
        items = self.work.items(UNLIMITED)
        items = [items[number % len(items)] for number in range(num_requests)]
        load = await self.client.run(items, seed=self._seed(_WARMUP_RUN), max_concurrency=1)
        for sample in load.samples:
            if sample.error is not None:
                raise ConfigError(f"a request of the warm-up failed: {sample.error}")

    async def run(self, rate: float | None) -> dict[str, Any]:
        """One run; raises as `Work.items`."""
        items = self.work.items(rate)
        seed = self._seed(len(self.loads))
        load = await self.client.run(items, seed=seed, max_concurrency=self.max_concurrency)
        report = {
            "request_rate": "inf" if rate == UNLIMITED else rate,
            "arrivals": "all-at-once" if rate == UNLIMITED else self.work.arrivals,
            "cv": self.work.cv,
            "max_concurrency": self.max_concurrency,
            **figures(load, self.objectives),
        }
        self.loads.append(load)
        self.reports.append(report)
        self.on_run(report)
        return report

    async def run_up_to_capacity(self, count: int) -> None:
        """All requests at once, then ``count`` rates evenly up to the throughput of that.

        Raises:
            RuntimeError: the server completed no request of the first run.
        """
        capacity = (await self.run(UNLIMITED))["request_throughput"]
        if not capacity:
            raise RuntimeError(
                "no request was served when all came at once, so there is no rate to sweep up to: "
                + "; ".join(self.reports[0]["errors"])
            )
        for step in range(1, count + 1):
            await self.run(float(f"{capacity * step / count:.3g}"))

    def _seed(self, run: int) -> int:
        return self.work.seed * _MAX_RUNS + run


def parse_rates(text: str) -> list[float]:
    """``1,2,4`` to requests a second, in this order; ``inf`` is all at once.

    Raises:
        WorkloadError: one is not a number above 0, or there are too many or none.
    """
    rates = []
    for part in text.replace(",", " ").split():
        try:
            rate = float(part)
        except ValueError:
            rate = 0.0
        if not rate > 0:
            raise WorkloadError(f"rates are numbers above 0 such as 1,2,4 or inf; got {part!r}")
        rates.append(rate)
    if not 1 <= len(rates) < _WARMUP_RUN:
        raise WorkloadError(f"rates must name 1 to {_WARMUP_RUN - 1} rates, got {len(rates)}")
    return rates


def rates_of(rate: float | None, rates: str | None, arrivals: str) -> Sequence[float | None]:
    """What ``--rate`` and ``--rates`` ask for: 1 request a second, or a trace's own times, where
    neither is given.

    Raises:
        WorkloadError: a rate is not above 0, both are given, or the arrivals know no rate.
    """
    if arrivals == "all-at-once" and not (rate is None and rates is None):
        raise WorkloadError("arrivals all-at-once have no rate; leave rate and rates out")
    if rates is not None:
        if rate is not None:
            raise WorkloadError("send either rate or rates")
        return [_in_range(one) for one in parse_rates(rates)]
    if rate is None:
        return [None if arrivals == "trace" else UNLIMITED if arrivals == "all-at-once" else 1.0]
    if not rate > 0:
        raise WorkloadError(f"rate must be above 0 requests a second, got {rate:g}")
    return [_in_range(rate)]


def check_arrivals(arrivals: str, rates: Sequence[float | None]) -> None:
    """Refuse arrivals asked for beside nothing but infinite rates, where all come at once.

    Raises:
        ConfigError: they would change nothing.
    """
    if arrivals != "all-at-once" and rates and all(rate == UNLIMITED for rate in rates):
        raise ConfigError(
            f"--arrivals {arrivals} changes nothing at a rate of inf, where all come at once; give "
            "a rate that is finite, or leave --arrivals out"
        )


def _in_range(rate: float) -> float:
    """Slower than one request in eleven days nothing is sent, and faster than one in a nanosecond
    is at once."""
    if rate != UNLIMITED and not 1e-6 <= rate <= 1e9:
        raise WorkloadError(
            f"rate must be from 1e-06 to 1e+09 requests a second, or inf, got {rate:g}"
        )
    return rate
