"""What the policy itself costs: the real scheduler and manager under an executor that does nothing.

Every row decodes without end, so the figure is that of the steady state: crossing blocks, advancing
columns, digesting tokens, publishing full blocks to the prefix cache.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np

from octavo.core.plan import KVCapacity
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.memory.paged import PagedManager
from octavo.scheduling.scheduler import Scheduler, SchedulerConfig
from octavo.simulate.executor import SimulatedExecutor

ROWS = (1, 64, 256, 1024)
GOAL_ROWS = 256
GOAL_STEP_US = 256.0
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


def run(rows: tuple[int, ...] = ROWS) -> dict[str, object]:
    """All figures, ready for JSON. ``share_of_goal`` is the step at 256 rows over 256 µs."""
    figures = [measure(count) for count in rows]
    by_rows = {figure.rows: figure for figure in figures}
    report: dict[str, object] = {
        "tokens_per_second": max(figure.tokens_per_second for figure in figures),
        "rows": [asdict(figure) for figure in figures],
    }
    if GOAL_ROWS in by_rows:
        report["goal_step_us"] = GOAL_STEP_US
        report["share_of_goal"] = by_rows[GOAL_ROWS].step_us / GOAL_STEP_US
    return report
