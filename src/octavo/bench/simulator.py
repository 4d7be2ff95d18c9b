"""How fast the simulator is, and what the policy itself costs.

The policy: the real scheduler and manager under an executor that does nothing. Every row decodes
without end, so the figure is that of the steady state: crossing blocks, advancing columns,
digesting tokens, publishing full blocks to the prefix cache.

The simulator: whole works with everything that it does, from arrivals over the latency model to the
time of each token.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from importlib.resources.abc import Traversable

import numpy as np

from octavo.core.plan import KVCapacity
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.memory.paged import PagedManager
from octavo.scheduling.scheduler import Scheduler, SchedulerConfig
from octavo.simulate.calibration import load_calibration
from octavo.simulate.cluster import Cluster
from octavo.simulate.executor import SimulatedExecutor
from octavo.simulate.replica import ReplicaConfig
from octavo.workload.arrivals import arrival_times, with_arrivals
from octavo.workload.items import WorkItem
from octavo.workload.traces import load_trace

ROWS = (1, 64, 256, 1024)
GOAL_ROWS = 256
GOAL_STEP_US = 256.0
GOAL_TOKENS_PER_SECOND = 1_000_000
GOAL_REQUESTS_PER_MINUTE = 20_000
_CALIBRATION = "h200-llama-3.1-8b"
_PROMPT_TOKENS = 128
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class SimulatorFigure:
    """Medians over rounds, in microseconds of one core: ``plan_us`` makes a plan, ``update_us``
    digests its result, ``step_us`` is a whole step with the simulated executor."""

    rows: int
    plan_us: float
    update_us: float
    step_us: float
    tokens_per_second: float


def measure(rows: int, *, steps: int = 200, rounds: int = 7) -> SimulatorFigure:
    """Decode ``rows`` sequences for ``rounds`` × ``steps`` steps."""
    total = _PROMPT_TOKENS + (rounds + 1) * steps + 8
    blocks = rows * -(-total // _BLOCK_SIZE) + 1
    manager = PagedManager(blocks, _BLOCK_SIZE, rows, prefix_caching=True)
    config = SchedulerConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=max(rows * _PROMPT_TOKENS, rows),
        max_model_len=total,
        max_queued_requests=rows,
    )
    scheduler = Scheduler(config, manager)
    executor = SimulatedExecutor(KVCapacity(blocks, _BLOCK_SIZE, 1))
    prompt = np.zeros(_PROMPT_TOKENS, dtype=np.int32)
    params = SamplingParams(temperature=0.0)
    for number in range(rows):
        max_tokens = total - _PROMPT_TOKENS
        scheduler.add(Request(number, prompt, params, max_tokens, 0, stop_token_ids=(1, 2)))
    plan_us, update_us, step_us = [], [], []
    _decode(scheduler, executor, steps)
    for _ in range(rounds):
        planning, updating, whole = _decode(scheduler, executor, steps)
        plan_us.append(planning / steps * 1e6)
        update_us.append(updating / steps * 1e6)
        step_us.append(whole / steps * 1e6)
    step = statistics.median(step_us)
    return SimulatorFigure(
        rows=rows,
        plan_us=statistics.median(plan_us),
        update_us=statistics.median(update_us),
        step_us=step,
        tokens_per_second=rows / step * 1e6,
    )


def _decode(
    scheduler: Scheduler, executor: SimulatedExecutor, steps: int
) -> tuple[float, float, float]:
    """Seconds spent planning, updating, and in all."""
    clock = time.perf_counter
    planning = updating = 0.0
    begun = clock()
    for _ in range(steps):
        start = clock()
        plan = scheduler.plan()
        planned = clock()
        assert plan is not None
        executor.launch(plan)
        result = executor.collect()
        collected = clock()
        scheduler.update(result)
        updating += clock() - collected
        planning += planned - start
    return planning, updating, clock() - begun


@dataclass(frozen=True, slots=True)
class WorkFigure:
    """A whole work through one simulated engine: seconds of one core, and what was simulated in
    each second or minute of them. The fastest of the rounds. ``predicted_tokens_per_s`` are output
    tokens a second of the engine that is simulated, on its own clock."""

    work: str
    seconds: float
    num_steps: int
    tokens_per_second: float
    requests_per_minute: float
    predicted_tokens_per_s: float


def measure_work(
    name: str, items: Sequence[WorkItem], max_num_seqs: int, *, rounds: int = 3
) -> WorkFigure:
    """Simulate ``items`` on an 8B of an H200."""
    latency = load_calibration(_CALIBRATION).latency()
    config = ReplicaConfig(num_blocks=57_000, max_num_seqs=max_num_seqs)
    seconds = []
    for _ in range(rounds):
        cluster = Cluster(config, latency)
        started = time.perf_counter()
        outcome = cluster.run(items).outcome()
        seconds.append(time.perf_counter() - started)
    fastest = min(seconds)
    return WorkFigure(
        work=name,
        seconds=fastest,
        num_steps=cluster.num_steps,
        tokens_per_second=outcome.num_tokens / fastest,
        requests_per_minute=outcome.num_requests / fastest * 60,
        predicted_tokens_per_s=outcome.tokens_per_s,
    )


@dataclass(frozen=True, slots=True)
class ClusterFigure:
    """A cluster's run: ``seconds`` of one core and ``peak_gib`` of this process's memory for
    ``span_s`` of simulated time, and what came out."""

    num_replicas: int
    rate: float
    num_requests: int
    seconds: float
    peak_gib: float
    num_steps: int
    span_s: float
    tokens_per_second: float
    ttft_p99_s: float
    itl_p99_s: float


def measure_cluster(num_replicas: int, rate: float, num_requests: int) -> ClusterFigure:
    """Requests of ShareGPT's lengths arrive as a Poisson process, ``rate`` a second, at replicas of
    an 8B, one H200 each; the router sends each to the least loaded.

    Raises:
        ValueError: a number is below 1, or the rate not above 0.
    """
    if num_requests < 1 or not 0 < rate < float("inf"):
        raise ValueError(
            f"num_requests must be at least 1 and rate above 0, got {num_requests} and {rate:g}"
        )
    items = load_trace(str(sharegpt()))
    items = [items[place % len(items)] for place in range(num_requests)]
    items = with_arrivals(items, arrival_times("poisson", num_requests, rate=rate))
    config = ReplicaConfig(num_blocks=57_000, max_num_seqs=1024)
    started = time.perf_counter()
    cluster = Cluster(config, load_calibration(_CALIBRATION).latency(), num_replicas)
    outcome = cluster.run(items).outcome()
    seconds = time.perf_counter() - started
    return ClusterFigure(
        num_replicas=num_replicas,
        rate=rate,
        num_requests=outcome.num_requests,
        seconds=seconds,
        # Linux counts in KiB.
        peak_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        num_steps=cluster.num_steps,
        span_s=outcome.span_s,
        tokens_per_second=outcome.num_tokens / seconds,
        ttft_p99_s=outcome.ttft_s["p99"],
        itl_p99_s=outcome.itl_s["p99"],
    )


def cluster_line(figure: ClusterFigure) -> str:
    return (
        f"{figure.num_replicas:,} replicas, {figure.num_requests:,} requests at {figure.rate:,g} a "
        f"second: {figure.span_s:.1f} s simulated in {figure.seconds:.1f} s with "
        f"{figure.peak_gib:.1f} GiB, {figure.num_steps:,} steps, "
        f"{figure.tokens_per_second:,.0f} tokens/s simulated; at the 99th percentile "
        f"{figure.ttft_p99_s * 1e3:.0f} ms to the first token and {figure.itl_p99_s * 1e3:.1f} ms "
        "between tokens"
    )


def sharegpt() -> Traversable:
    """1,000 lengths of ShareGPT's."""
    return resources.files("octavo.bench") / "data" / "sharegpt_lengths_1000.csv"


def run(rows: tuple[int, ...] = ROWS, num_requests: int = 1000) -> dict[str, object]:
    """All figures, ready for JSON: ``tokens_per_second`` of work that decodes and
    ``requests_per_minute`` of ShareGPT's lengths, then what the policy costs by rows.
    ``share_of_goal`` is the step at 256 rows over 256 µs."""
    decoding = measure_work(
        "decode-heavy", [WorkItem(0.0, _PROMPT_TOKENS, 1024)] * num_requests, GOAL_ROWS
    )
    mixed = measure_work("sharegpt", load_trace(str(sharegpt()))[:num_requests], 1024)
    figures = [measure(count) for count in rows]
    by_rows = {figure.rows: figure for figure in figures}
    report: dict[str, object] = {
        "tokens_per_second": decoding.tokens_per_second,
        "requests_per_minute": mixed.requests_per_minute,
        "goal_tokens_per_second": GOAL_TOKENS_PER_SECOND,
        "goal_requests_per_minute": GOAL_REQUESTS_PER_MINUTE,
        "works": [asdict(decoding), asdict(mixed)],
        "rows": [asdict(figure) for figure in figures],
    }
    if GOAL_ROWS in by_rows:
        report["goal_step_us"] = GOAL_STEP_US
        report["share_of_goal"] = by_rows[GOAL_ROWS].step_us / GOAL_STEP_US
    return report
