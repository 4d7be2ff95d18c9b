"""What capacity planning is about: setups of a replica, what each did at a rate, and the plan.

Values alone; `capacity` searches and simulates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.simulate.objectives import Objective
from octavo.simulate.outcome import Outcome

_DEFAULT_BUDGET = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One replica: ``tensor_parallel`` ranks of a model, and its engine's options. ``swap_bytes``
    are of host memory, for all ranks."""

    tensor_parallel: int = 1
    kv: str = "paged"
    block_size: int = 16
    max_num_batched_tokens: int = _DEFAULT_BUDGET
    swap_bytes: float = 0.0

    def describe(self) -> str:
        """In a few words, for a person."""
        swap = f", {self.swap_bytes / 2**30:g} GiB to swap" if self.swap_bytes else ""
        return (
            f"{self.tensor_parallel} rank(s), {self.kv}, blocks of {self.block_size}, "
            f"{self.max_num_batched_tokens} tokens a step{swap}"
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """What one replica, or a cluster, does at a rate; ``keeps_up``: its queue does not grow.
    ``is_settled``: it was simulated for at least twice as long as a request takes, so that as many
    end as come; otherwise the load still rises when the arrivals end."""

    rate: float
    outcome: Outcome
    keeps_up: bool
    num_preemptions: int = 0
    is_settled: bool = True

    def meets(self, objectives: Sequence[Objective]) -> bool:
        """Whether it keeps up and stays within all limits."""
        return self.keeps_up and all(o.value_s(self.outcome) <= o.limit_s for o in objectives)

    def figures(self) -> str:
        """The latencies that a person looks at first."""
        found = self.outcome
        behind = "" if self.keeps_up else ", falls behind"
        return (
            f"TTFT P99 {found.ttft_s['p99'] * 1e3:.0f} ms, "
            f"ITL P99 {found.itl_s['p99'] * 1e3:.1f} ms{behind}"
        )


@dataclass(frozen=True, slots=True)
class Sustained:
    """The highest rate at which a setup meets the objectives (0: at none), and all trials."""

    setup: Setup
    rate: float
    trials: tuple[Trial, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``num_replicas`` of ``setup`` serve ``rate`` requests a second. ``outcome`` is what the
    simulation of ``num_settled_replicas`` of them brought, at their share of the rate: all of them
    where the requests that may be simulated suffice for the load to settle (``is_settled``).
    ``candidates`` is what was tried for one replica."""

    model: str
    gpu: str
    rate: float
    objectives: tuple[Objective, ...]
    setup: Setup
    num_replicas: int
    num_gpus: int
    num_blocks: int
    replica_rate: float
    cost_per_million_tokens: float
    price_per_hour: float
    router: str
    outcome: Outcome
    num_simulated: int
    num_settled_replicas: int
    num_preemptions: int
    is_settled: bool
    candidates: tuple[Sustained, ...]
