"""Engines without a model: the scheduler that serves, a manager, the simulated executor's clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from octavo.bench.paper.engines import SHARED, STATIC, Engine
from octavo.bench.paper.managers import MAX_BATCHED_TOKENS, Pool, build_manager
from octavo.bench.sharing import made_up_tops
from octavo.core.plan import IntArray, KVCapacity
from octavo.core.request import Request
from octavo.engine.core import EngineCore
from octavo.scheduling.preemption import RECOMPUTE, PreemptionPolicy
from octavo.scheduling.scheduler import Scheduler, SchedulerConfig
from octavo.simulate.executor import Latency, SimulatedExecutor

_MAX_QUEUED = 1_000_000
_VOCAB = 30_000


class SimulatedEngine:
    """Implements `octavo.bench.paper.engines.Engine`."""

    vocab_size = _VOCAB

    def __init__(self, scheduler: Scheduler, executor: SimulatedExecutor, pool: Pool) -> None:
        self.core = EngineCore(scheduler, executor, depth=1)
        self.pool = pool
        self._executor = executor

    @property
    def now_s(self) -> float:
        return self._executor.now_s

    def start(self) -> None:
        self._executor.restart()
        self.core.scheduler.reset_prefix_cache()

    def wait_until(self, time_s: float) -> None:
        self._executor.now_s = max(self._executor.now_s, time_s)

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Nothing is done only once."""

    def prompt(self, number: int, num_tokens: int) -> IntArray:
        """What a prompt says matters to a cache only."""
        return np.zeros(num_tokens, dtype=np.int32)


class SimulatedEngines:
    """Implements `octavo.bench.paper.engines.Engines`. Without ``latency`` steps take what
    `FixedLatency` says; ``scale`` is the pool's name. Only ``paged`` and ``virtual`` are preempted
    as ``preemption`` says, with ``num_host_blocks`` to swap to."""

    length_scale = 1.0
    device = "cpu"
    block_sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)

    def __init__(
        self,
        pool: Pool,
        latency: Latency | None = None,
        *,
        scale: str = "opt-13b",
        preemption: PreemptionPolicy = RECOMPUTE,
        num_host_blocks: int = 0,
    ) -> None:
        self.pool = pool
        self._latency = latency
        self._scale = scale
        self._preemption = preemption
        self._num_host_blocks = num_host_blocks

    @property
    def conditions(self) -> str:
        return (
            f"{self.pool.num_blocks} blocks of {self.pool.block_size} tokens ({self._scale}). The "
            "scheduler and the managers over the simulated executor."
        )

    @contextmanager
    def open(self, name: str) -> Iterator[Engine]:
        pool, base = self.pool, name.removesuffix(SHARED)
        manager = build_manager(
            "orca-max" if base == STATIC else base,
            pool,
            prefix_caching=name.endswith(SHARED),
            num_host_blocks=self._num_host_blocks,
        )
        config = SchedulerConfig(
            max_num_seqs=pool.max_num_seqs,
            max_num_batched_tokens=max(MAX_BATCHED_TOKENS, pool.max_num_seqs),
            max_model_len=pool.max_model_len,
            max_queued_requests=_MAX_QUEUED,
            preemption=self._preemption,
            is_static=base == STATIC,
        )
        random = np.random.default_rng(0)
        executor = SimulatedExecutor(
            KVCapacity(pool.num_blocks + 1, pool.block_size, 1, self._num_host_blocks),
            self._latency,
            # How beams diverge.
            tops=lambda plan, rows, k: made_up_tops(random, rows, k),
        )
        engine = SimulatedEngine(Scheduler(config, manager), executor, pool)
        yield engine
        engine.core.close()
