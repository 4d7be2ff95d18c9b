"""Times an engine's steps one by one, by the wall clock and by CPU time, of the threads apart.

It steps in for the engine's own calls while it looks, and knows nothing of what is run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.execution.slots import THREAD_NAME as MAPPING_THREAD

if TYPE_CHECKING:
    from octavo.engine.llm import LLM


@dataclass(slots=True)
class Step:
    """One turn of the engine: how long it took, and how much of that the host waited; CPU time of
    the process and of its mapping threads since the turn before, and of this thread's waiting."""

    num_rows: int = 0
    has_chunks: bool = False
    seconds: float = 0.0
    waited_s: float = 0.0
    cpu_s: float = 0.0
    waiting_cpu_s: float = 0.0
    mapping_cpu_s: float = 0.0


def mapping_cpu_s() -> float:
    """CPU time of all mapping threads of this process so far."""
    clocks = [
        time.pthread_getcpuclockid(thread.ident)
        for thread in threading.enumerate()
        if thread.name == MAPPING_THREAD and thread.ident is not None
    ]
    return sum(map(time.clock_gettime, clocks))


@contextmanager
def timed_steps(llm: LLM) -> Iterator[list[Step]]:
    """The engine's turns while inside. With steps in flight a turn takes as long as a step does,
    once the pipeline is full."""
    core = llm._core
    step, plan, collect = core.step, core.scheduler.plan, core.executor.collect
    found: list[Step] = []
    cpu_s, own_cpu_s = time.process_time(), mapping_cpu_s()

    def stepping() -> Any:
        nonlocal cpu_s, own_cpu_s
        found.append(Step())
        started = time.perf_counter()
        outputs = step()
        found[-1].seconds = time.perf_counter() - started
        # What is done between two turns belongs to the later one.
        before, own_before = cpu_s, own_cpu_s
        cpu_s, own_cpu_s = time.process_time(), mapping_cpu_s()
        found[-1].cpu_s, found[-1].mapping_cpu_s = cpu_s - before, own_cpu_s - own_before
        return outputs

    def planning() -> Any:
        made = plan()
        if made is not None:
            found[-1].num_rows = len(made.batch.rows)
            found[-1].has_chunks = made.batch.num_tokens > len(made.batch.rows)
        return made

    def collecting() -> Any:
        started, cpu_started = time.perf_counter(), time.thread_time()
        result = collect()
        found[-1].waited_s += time.perf_counter() - started
        found[-1].waiting_cpu_s += time.thread_time() - cpu_started
        return result

    core.step, core.scheduler.plan = stepping, planning  # type: ignore[method-assign]
    core.executor.collect = collecting  # type: ignore[method-assign]
    try:
        yield found
    finally:
        core.step, core.scheduler.plan = step, plan  # type: ignore[method-assign]
        core.executor.collect = collect  # type: ignore[method-assign]
