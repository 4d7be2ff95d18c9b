"""A pool under more requests than it can hold: where its bytes are, and how many run, at each step.

All requests are there from the start and outputs have the trace's lengths. What is counted are the
steps between two moments, each step alike: a tenth of the requests have ended, so that those which
run did not all begin together; and nobody waits any more. Each is looked at when its plan has been
made: who could be admitted is in, and what the step is about to compute counts as reserved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from octavo.bench.paper.engines import Engine, Engines, check_ended, plain_request
from octavo.core.plan import KVUsage
from octavo.memory.usage import check_usage
from octavo.scheduling.scheduler import Scheduler
from octavo.workload.items import WorkItem, WorkloadError

WARM_UP_SHARE = 0.1
CONDITIONS = (
    "All requests at once; mean over the steps from when a tenth of the requests have ended until "
    "nobody waits."
)
_PARTS = tuple(field.name for field in fields(KVUsage) if field.name != "capacity")


@dataclass(frozen=True, slots=True)
class Saturation:
    """Means over ``num_steps`` counted steps: ``mean_bytes`` of each part of the pool, which has
    ``pool_bytes``, and ``mean_running`` sequences. ``total_steps`` is the whole run."""

    mean_bytes: dict[str, float]
    pool_bytes: int
    mean_running: float
    num_steps: int
    total_steps: int
    num_preemptions: int

    @property
    def shares(self) -> dict[str, float]:
        """Of the pool; they sum to 1."""
        return {name: value / self.pool_bytes for name, value in self.mean_bytes.items()}


class _Meter:
    """Looks at every plan before it runs."""

    def __init__(self, scheduler: Scheduler, token_bytes: int) -> None:
        self._scheduler = scheduler
        self._token_bytes = token_bytes
        self.is_counting = False
        self.sums = dict.fromkeys(_PARTS, 0)
        self.num_running = 0
        self.num_steps = 0

    def look(self) -> None:
        # A request that waits is what makes the moment one of saturation.
        if not self.is_counting or not self._scheduler.num_waiting:
            return
        usage = self._scheduler.usage().in_bytes(self._token_bytes)
        check_usage(usage)
        for name in _PARTS:
            self.sums[name] += getattr(usage, name)
        self.num_running += self._scheduler.num_running
        self.num_steps += 1


def saturate(engines: Engines, name: str, items: Sequence[WorkItem]) -> Saturation:
    """Run the items through the manager ``name``.

    Raises:
        WorkloadError: they do not fill the pool.
        RuntimeError: a request failed.
    """
    with engines.open(name) as engine:
        found = _run(engine, items)
        pool = engine.pool
    if found is None:
        raise WorkloadError(
            f"{len(items)} requests do not saturate {pool.num_blocks} blocks under {name}: nobody "
            "waits; give more requests, or fewer blocks"
        )
    return found


def _run(engine: Engine, items: Sequence[WorkItem]) -> Saturation | None:
    """None: at no counted step did anybody wait."""
    core, scheduler = engine.core, engine.core.scheduler
    meter = _Meter(scheduler, engine.pool.token_bytes)
    core.on_plan = meter.look
    for number, item in enumerate(items):
        scheduler.add(plain_request(engine, number, item))
    num_ended = total_steps = 0
    while core.has_work:
        meter.is_counting = num_ended >= WARM_UP_SHARE * len(items)
        finished = core.step().finished
        check_ended(finished)
        num_ended += len(finished)
        total_steps += 1
    core.on_plan = None
    if not meter.num_steps:
        return None
    return Saturation(
        mean_bytes={key: value / meter.num_steps for key, value in meter.sums.items()},
        pool_bytes=engine.pool.num_bytes,
        mean_running=meter.num_running / meter.num_steps,
        num_steps=meter.num_steps,
        total_steps=total_steps,
        num_preemptions=scheduler.num_preemptions,
    )
