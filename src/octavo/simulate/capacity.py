"""How many replicas of what make serve a workload within its objectives, and what that costs.

One replica is simulated at rising rates until it fails an objective, for every way to set it up:
the ranks that share a model first, with the defaults; then, for the ranks that cost least, token
budgets, block sizes, the manager and swapping, each kept only where it sustains more. The rate
that all have to serve over what one sustains is the number of replicas; the whole cluster is then
simulated at the full rate, and grows until it meets the objectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.scheduling.preemption import PreemptionPolicy
from octavo.simulate.capacity_plan import Plan, Setup, Sustained, Trial
from octavo.simulate.cluster import Cluster
from octavo.simulate.gpus import GPU
from octavo.simulate.latency import LatencyModel
from octavo.simulate.objectives import Objective, ObjectiveError
from octavo.simulate.replica import ReplicaConfig
from octavo.simulate.routing import ROUTERS
from octavo.simulate.shape import ModelShape
from octavo.workload.arrivals import arrival_times, with_arrivals
from octavo.workload.items import WorkItem

MAX_REPLICAS = 1000
_PAGE_BYTES = 2 << 20
_MOST_MAPPED_TOKENS = 256
_BUDGETS = (8192, 2048, 1024, 512)
_BLOCK_SIZES = (16, 32, 64)
_MAX_NUM_SEQS = 1024
# Rates are found to 3 %; a variant has to sustain 2 % more than what it replaces.
_PRECISION, _GAIN = 1.03, 1.02
# A rate so far below saturation that requests hardly meet each other.
_LOWEST_SHARE = 1 / 100
_FEWEST = 200
# At any rate and span: a queue that grows shows well before, and a trial ends.
_MOST = 20_000
# A rate so far above what replicas take in a burst that no setup of them could serve it.
_HOPELESS = 100
# The load of a simulation rises for this part of its arrivals, which does not count.
_RISE = 0.2
# Requests without a token when the last one comes: more, and the replica does not keep up.
_MOST_WAITING = 0.05


@dataclass(slots=True, kw_only=True)
class Planner:
    """``items`` are the lengths to serve, sampled from a trace; their own arrivals, scaled to the
    rate, are the cluster's with ``keeps_arrivals``. ``span_s`` seconds of arrivals are simulated
    for each trial of one replica, as far as 20,000 requests allow, and of the cluster as far as
    ``num_verified`` do."""

    gpu: GPU
    shape: ModelShape
    objectives: tuple[Objective, ...]
    items: Sequence[WorkItem]
    keeps_arrivals: bool = False
    ranks: tuple[int, ...] = (1, 2, 4, 8)
    router: str = "least-loaded"
    span_s: float = 60.0
    num_verified: int = 20_000
    swap_bytes: float = 32 * 2**30
    seed: int = 0
    tell: Callable[[str], None] = lambda text: None
    _trials: dict[tuple[Setup, float], Trial] = field(default_factory=dict, init=False)
    _saturations: dict[Setup, float] = field(default_factory=dict, init=False)

    def plan(self, rate: float) -> Plan:
        """The cheapest plan for ``rate`` requests a second.

        Raises:
            ObjectiveError: nothing meets the objectives, or more than ``MAX_REPLICAS`` would.
            ValueError: the rate, or a model that does not fit the GPU.
        """
        if not 0 < rate < math.inf:
            raise ValueError(f"rate must be above 0 requests a second, got {rate}")
        setups = self._base_setups()
        fastest = max(self._saturation(setup) for setup in setups)
        if rate > _HOPELESS * MAX_REPLICAS * fastest:
            raise self._too_many(rate, rate / fastest, fastest)
        candidates = [self._sustained_at_best_budget(setup) for setup in setups]
        feasible = [found for found in candidates if found.rate > 0]
        if not feasible:
            raise ObjectiveError(self._infeasible(candidates))
        # Fewer ranks may cost less although they sustain less each: what counts is whole replicas.
        best = min(feasible, key=lambda found: self._cost(found, rate))
        # No variant of it makes up for that.
        if rate > 2 * MAX_REPLICAS * max(found.rate for found in feasible):
            raise self._too_many(rate, rate / best.rate, best.rate)
        for change in self._variants(best):
            variant = replace(best.setup, **change)
            if not self._trial(variant, best.rate * _GAIN).meets(self.objectives):
                self.tell(f"{variant.describe()}: no more than {best.rate:.2f} requests/s")
                continue
            found = self.sustained(variant, at_least=best.rate * _GAIN)
            candidates.append(found)
            best = found
        return self._verified(best, rate, candidates)

    def latency(self, setup: Setup) -> LatencyModel:
        """Of one rank of the setup's."""
        shape = self.shape.split(setup.tensor_parallel)
        return self.gpu.latency(shape, setup.block_size)

    def config(self, setup: Setup) -> ReplicaConfig:
        """The engine of the setup.

        Raises:
            ValueError: weights leave no room for keys and values.
        """
        shape = self.shape.split(setup.tensor_parallel)
        left = self.gpu.memory_bytes - self.gpu.reserved_bytes - shape.memory_bytes
        rank_block_bytes = shape.token_bytes * setup.block_size
        num_blocks = int(max(left, 0.0) // rank_block_bytes)
        longest = self._longest
        if (num_blocks - 1) * setup.block_size < longest:
            raise ValueError(
                f"{self.shape.name} on {setup.tensor_parallel} {self.gpu.name}: weights take "
                f"{shape.memory_bytes / 2**30:.1f} of {self.gpu.memory_bytes / 2**30:.1f} GiB, and "
                f"what is left holds no request of {longest} tokens; use more ranks, a larger GPU, "
                "or leave out longer requests (--max-total-len)"
            )
        block_bytes = int(self.shape.token_bytes * setup.block_size)
        return ReplicaConfig(
            num_blocks=num_blocks,
            kv=setup.kv,
            block_size=setup.block_size,
            block_bytes=block_bytes,
            num_host_blocks=int(setup.swap_bytes // block_bytes),
            max_num_seqs=min(_MAX_NUM_SEQS, setup.max_num_batched_tokens),
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_model_len=max(self.shape.max_position_embeddings, longest),
            prefix_caching=any(item.prefix_hashes for item in self.items),
            finds_prefix_groups=any(item.prefix_hashes for item in self.items),
            preemption=PreemptionPolicy(
                mode="swap" if setup.swap_bytes else "recompute", block_bytes=block_bytes
            ),
        )

    @property
    def _longest(self) -> int:
        return max(item.num_prompt_tokens + item.num_output_tokens for item in self.items)

    def sustained(self, setup: Setup, *, at_least: float = 0.0) -> Sustained:
        """The highest rate at which one replica meets the objectives: from what it does when it
        has all it can take, up or down until one rate is met and another is not."""
        low, high = at_least, 1.1 * at_least or self._saturation(setup)
        while self._trial(setup, high).meets(self.objectives):
            low, high = high, 1.5 * high
        lowest = high * _LOWEST_SHARE
        is_feasible = low or self._trial(setup, lowest).meets(self.objectives)
        while is_feasible and not low:
            if high / 2 <= lowest:
                low = lowest
            elif self._trial(setup, high / 2).meets(self.objectives):
                low = high / 2
            else:
                high /= 2
        while low and high / low > _PRECISION:
            middle = math.sqrt(low * high)
            if self._trial(setup, middle).meets(self.objectives):
                low = middle
            else:
                high = middle
        trials = [trial for (tried, _), trial in self._trials.items() if tried == setup]
        trials.sort(key=lambda trial: trial.rate)
        self.tell(f"{setup.describe()}: {low:.2f} requests/s")
        return Sustained(setup, low, tuple(trials))

    def _too_many(self, rate: float, num_replicas: float, replica_rate: float) -> ObjectiveError:
        return ObjectiveError(
            f"{rate:g} requests/s need {num_replicas:,.4g} replicas at {replica_rate:.3g} each, "
            f"and {MAX_REPLICAS} are simulated at most; lower the rate, relax the objectives, or "
            "split the work over clusters"
        )

    def _saturation(self, setup: Setup) -> float:
        """Requests a second of as many as run at once, submitted together."""
        if setup in self._saturations:
            return self._saturations[setup]
        items = [
            replace(self.items[i % len(self.items)], arrival_s=0.0) for i in range(2 * _FEWEST)
        ]
        cluster = Cluster(self.config(setup), self.latency(setup), seed=self.seed)
        found = self._saturations[setup] = cluster.run(items).outcome().requests_per_s
        return found

    def _trial(self, setup: Setup, rate: float) -> Trial:
        key = setup, rate
        if key not in self._trials:
            count = min(max(_FEWEST, int(rate * self.span_s)), _MOST)
            items = self._arriving(rate, count, self.seed)
            self._trials[key] = self._simulate(setup, items, rate)
        return self._trials[key]

    def _arriving(self, rate: float, count: int, seed: int) -> list[WorkItem]:
        """Lengths come again where the trace has fewer."""
        chosen = [self.items[index % len(self.items)] for index in range(count)]
        return with_arrivals(chosen, arrival_times("poisson", count, rate=rate, seed=seed))

    def _simulate(
        self, setup: Setup, items: Sequence[WorkItem], rate: float, num_replicas: int = 1
    ) -> Trial:
        cluster = Cluster(
            self.config(setup),
            self.latency(setup),
            num_replicas,
            ROUTERS[self.router](),
            seed=self.seed,
        )
        times = cluster.run(items)
        last_s = items[-1].arrival_s
        most_waiting = max(_MOST_WAITING * len(items), num_replicas)
        keeps_up = times.num_waiting(last_s) <= most_waiting
        outcome = times.outcome(_RISE * last_s)
        is_settled = last_s > 2 * outcome.e2e_s["mean"]
        return Trial(rate, outcome, keeps_up, cluster.num_preemptions, is_settled)

    def _base_setups(self) -> list[Setup]:
        found, reasons = [], []
        for ranks in self.ranks:
            setup = Setup(tensor_parallel=ranks)
            try:
                if ranks > self.gpu.max_ranks:
                    raise ValueError(f"a host has {self.gpu.max_ranks} {self.gpu.name} at most")
                self.config(setup)
            except ValueError as error:
                reasons.append(str(error))
            else:
                found.append(setup)
        if not found:
            raise ValueError(reasons[-1])
        for reason in reasons:
            self.tell(f"Left out: {reason}")
        return found

    def _sustained_at_best_budget(self, setup: Setup) -> Sustained:
        """Large chunks of prompts keep decoding rows waiting, small ones prompts: the default
        unless it fails, then the largest that does not."""
        found = self.sustained(setup)
        for budget in _BUDGETS[1:]:
            if found.rate:
                break
            found = self.sustained(replace(setup, max_num_batched_tokens=budget))
        return found

    def _variants(self, base: Sustained) -> list[dict[str, Any]]:
        """What may be changed, one after the other."""
        setup = base.setup
        budgets = [b for b in _BUDGETS if b < setup.max_num_batched_tokens]
        variants: list[dict[str, Any]] = [{"max_num_batched_tokens": each} for each in budgets]
        variants += [{"block_size": size} for size in _BLOCK_SIZES[1:]]
        rank_token_bytes = int(self.shape.token_bytes / setup.tensor_parallel)
        mapped = _PAGE_BYTES // math.gcd(_PAGE_BYTES, rank_token_bytes)
        if mapped <= _MOST_MAPPED_TOKENS:
            variants.append({"kv": "virtual", "block_size": mapped})
        if self.swap_bytes and any(trial.num_preemptions for trial in base.trials):
            variants.append({"swap_bytes": self.swap_bytes})
        return variants

    def _cost(self, found: Sustained, rate: float) -> tuple[int, float]:
        """GPUs; of as many, what can serve more comes first."""
        num_replicas = math.ceil(rate / found.rate)
        return num_replicas * found.setup.tensor_parallel, -num_replicas * found.rate

    def _verified(self, best: Sustained, rate: float, candidates: list[Sustained]) -> Plan:
        num_replicas = math.ceil(rate / best.rate)
        while True:
            if num_replicas > MAX_REPLICAS:
                raise self._too_many(rate, num_replicas, best.rate)
            trial, count = self._cluster_trial(best.setup, rate, num_replicas)
            num_settled = num_replicas
            if trial.meets(self.objectives) and not trial.is_settled:
                # Too many for the requests that may be simulated: a part of them at its share of
                # the rate shows what becomes of the load when it has risen.
                num_settled = max(1, int(num_replicas * self.num_verified / rate / self.span_s))
                share = rate * num_settled / num_replicas
                trial, count = self._cluster_trial(best.setup, share, num_settled)
            if trial.meets(self.objectives):
                break
            num_replicas += max(1, num_replicas // 20)
        num_gpus = num_replicas * best.setup.tensor_parallel
        num_tokens = sum(item.num_output_tokens for item in self.items) / len(self.items)
        tokens_an_hour = rate * num_tokens * 3600
        return Plan(
            model=self.shape.name,
            gpu=self.gpu.name,
            rate=rate,
            objectives=self.objectives,
            setup=best.setup,
            num_replicas=num_replicas,
            num_gpus=num_gpus,
            num_blocks=self.config(best.setup).num_blocks,
            replica_rate=best.rate,
            cost_per_million_tokens=num_gpus * self.gpu.price_per_hour / tokens_an_hour * 1e6,
            price_per_hour=self.gpu.price_per_hour,
            router=self.router,
            outcome=trial.outcome,
            num_simulated=count,
            num_settled_replicas=num_settled,
            num_preemptions=trial.num_preemptions,
            is_settled=trial.is_settled,
            candidates=tuple(candidates),
        )

    def _cluster_trial(self, setup: Setup, rate: float, num_replicas: int) -> tuple[Trial, int]:
        items = self._cluster_items(rate, num_replicas)
        trial = self._simulate(setup, items, rate, num_replicas)
        self.tell(f"{num_replicas} replica(s) at {rate:g} requests/s: {trial.figures()}")
        return trial, len(items)

    def _cluster_items(self, rate: float, num_replicas: int) -> list[WorkItem]:
        wanted = max(_FEWEST * num_replicas, int(rate * self.span_s))
        count = min(wanted, self.num_verified)
        if self.keeps_arrivals and count <= len(self.items):
            chosen = self.items[:count]
            span = chosen[-1].arrival_s
            factor = (count - 1) / rate / span if span else 0.0
            return [replace(item, arrival_s=item.arrival_s * factor) for item in chosen]
        return self._arriving(rate, count, self.seed + 1)

    def _infeasible(self, candidates: Sequence[Sustained]) -> str:
        """What is missed even at the lowest rate tried, and by how much."""
        trials = [found.trials[0] for found in candidates]
        parts = []
        for objective in self.objectives:
            least = min(objective.value_s(trial.outcome) for trial in trials)
            if least > objective.limit_s:
                parts.append(
                    f"{objective.name} is {least * 1e3:.3g} ms at best, and "
                    f"{objective.limit_s * 1e3:.3g} ms is asked"
                )
        missed = "; ".join(parts) or "no setup meets all objectives at once"
        return (
            f"{self.shape.name} on {self.gpu.name} cannot meet the objectives at any rate: "
            f"{missed}. Relax them, allow more ranks (--tensor-parallel), leave out longer "
            "requests (--max-total-len), or choose a faster GPU"
        )
