"""The engine of every figure: the scheduler that serves, a manager, the simulated executor."""

from __future__ import annotations

import numpy as np

from octavo.bench.paper.managers import MAX_BATCHED_TOKENS, Pool, build_manager
from octavo.core.plan import KVCapacity
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.scheduling.preemption import RECOMPUTE, PreemptionPolicy
from octavo.scheduling.scheduler import Scheduler, SchedulerConfig
from octavo.simulate.executor import Latency, SimulatedExecutor
from octavo.workload.items import WorkItem

STATIC = "fastertransformer"
"""Buffers of the longest sequence and static batches."""


def build_core(
    name: str,
    pool: Pool,
    *,
    num_requests: int,
    latency: Latency | None = None,
    preemption: PreemptionPolicy = RECOMPUTE,
    num_host_blocks: int = 0,
    prefix_caching: bool = False,
) -> EngineCore:
    """An engine of one of `octavo.bench.paper.managers.MANAGERS`, or `STATIC`, that may queue
    ``num_requests``. Without ``latency`` all steps take equally long."""
    manager = build_manager(
        "orca-max" if name == STATIC else name,
        pool,
        prefix_caching=prefix_caching,
        num_host_blocks=num_host_blocks,
    )
    config = SchedulerConfig(
        max_num_seqs=pool.max_num_seqs,
        max_num_batched_tokens=max(MAX_BATCHED_TOKENS, pool.max_num_seqs),
        max_model_len=pool.max_model_len,
        max_queued_requests=num_requests,
        preemption=preemption,
        is_static=name == STATIC,
    )
    capacity = KVCapacity(pool.num_blocks + 1, pool.block_size, 1, num_host_blocks)
    return EngineCore(Scheduler(config, manager), SimulatedExecutor(capacity, latency), depth=1)


def plain_request(number: int, item: WorkItem) -> Request:
    """One greedy sequence of the item's lengths; what a prompt says matters to a cache only."""
    prompt = np.zeros(item.num_prompt_tokens, dtype=np.int32)
    params = SamplingParams(max_tokens=item.num_output_tokens, ignore_eos=True, temperature=0.0)
    return Request(number, prompt, params, item.num_output_tokens, seed=0)
