"""From requests as a client saw them to the figures of a run. Knows no network and no clock.

Names and meanings are those of ``vllm bench serve``:

====  ==============================================================================
TTFT  time to first token: from the request's start to its first event with a choice
TPOT  time per output token of a request, without the first: (last - first) / (n - 1)
ITL   inter-token latency: every gap between two events, of all requests together
E2EL  end-to-end latency: from the request's start to the end of its stream
====  ==============================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.percentiles import summary
from octavo.bench.serve.objectives import meets

METRICS = ("ttft", "tpot", "itl", "e2el")
# The prefix of each figure's name, by what `summary` calls it.
_STATISTICS = {
    "mean": "mean",
    "std": "std",
    "median": "p50",
    "p90": "p90",
    "p95": "p95",
    "p99": "p99",
    "max": "max",
}
_MAX_ERRORS = 5


@dataclass(slots=True)
class Sample:
    """One request as the client saw it. ``start_s`` counts from the run's start and is when the
    request was due; the other times are seconds from then."""

    start_s: float
    first_token_s: float | None = None
    last_token_s: float = 0.0
    end_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error: str | None = None

    def values(self) -> dict[str, float]:
        """The request's own figures in seconds, by metric. ``itl`` is its longest gap; ``tpot`` is
        0 with one token, which has no time after the first."""
        assert self.first_token_s is not None
        rest = max(self.num_output_tokens - 1, 1)
        return {
            "ttft": self.first_token_s,
            "tpot": (self.last_token_s - self.first_token_s) / rest,
            "itl": max(self.gaps_s, default=0.0),
            "e2el": self.end_s,
        }


@dataclass(frozen=True, slots=True)
class Load:
    """A run: its requests in the order of the workload, and its length in seconds."""

    model: str
    samples: Sequence[Sample]
    seconds: float


def figures(load: Load, objectives: Mapping[str, float] | None = None) -> dict[str, Any]:
    """A run's figures, flat, under ``vllm bench serve``'s names; latencies in milliseconds.

    A latency that no request had is None. With ``objectives`` (see `parse_objectives`)
    ``request_goodput`` is the rate and ``goodput_share`` the share, of all requests sent, of those
    that were served and met all of them.
    """
    done = [sample for sample in load.samples if sample.error is None]
    values = [sample.values() for sample in done]
    num_input = sum(sample.num_prompt_tokens for sample in done)
    num_output = sum(sample.num_output_tokens for sample in done)
    errors = sorted({sample.error for sample in load.samples if sample.error is not None})
    report: dict[str, Any] = {
        "model_id": load.model,
        "num_prompts": len(load.samples),
        "completed": len(done),
        "failed": len(load.samples) - len(done),
        "errors": errors[:_MAX_ERRORS],
        "duration": load.seconds,
        "total_input_tokens": num_input,
        "total_cached_tokens": sum(sample.num_cached_tokens for sample in done),
        "total_output_tokens": num_output,
        "request_throughput": len(done) / load.seconds,
        "output_throughput": num_output / load.seconds,
        "total_token_throughput": (num_input + num_output) / load.seconds,
        "max_concurrent_requests": most_at_once(load.samples),
    }
    series = {
        "ttft": [value["ttft"] for value in values],
        # As vLLM counts: a request of one token has no time after the first.
        "tpot": [
            value["tpot"]
            for value, sample in zip(values, done, strict=True)
            if sample.num_output_tokens > 1
        ],
        "itl": [gap for sample in done for gap in sample.gaps_s],
        "e2el": [value["e2el"] for value in values],
    }
    for name in METRICS:
        found = summary([1e3 * value for value in series[name]])
        for prefix, key in _STATISTICS.items():
            report[f"{prefix}_{name}_ms"] = found.get(key)
    if objectives:
        good = sum(meets(value, objectives) for value in values)
        report["goodput_objectives_s"] = dict(objectives)
        report["request_goodput"] = good / load.seconds
        report["goodput_share"] = good / len(load.samples)
    return report


def most_at_once(samples: Sequence[Sample]) -> int:
    """The largest number of requests that were due and not yet ended."""
    changes = [(sample.start_s, 1) for sample in samples]
    changes += [(sample.start_s + sample.end_s, -1) for sample in samples]
    number = most = 0
    for _, change in sorted(changes):
        number += change
        most = max(most, number)
    return most
