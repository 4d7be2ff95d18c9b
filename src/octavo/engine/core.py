"""The step loop: plan, execute, update, pipelined ``depth`` steps deep.

Knows the scheduler and an executor through their seams; knows no text, no sockets and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from octavo.core.plan import int_array
from octavo.core.protocols import Executor, StepError
from octavo.core.request import StepOutputs
from octavo.scheduling.scheduler import Scheduler

NO_OUTPUTS = StepOutputs(np.zeros(0, dtype=np.int64), int_array([]))


class EngineCore:
    """``depth`` 1 is synchronous; 2 plans step N+1 while step N runs. Both give the same tokens."""

    def __init__(self, scheduler: Scheduler, executor: Executor, depth: int) -> None:
        if depth not in (1, 2):
            raise ValueError(f"depth must be 1 (synchronous) or 2 (pipelined), got {depth}")
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        # Called when a plan is made, before it runs: what it admits shows at once, however long
        # the step takes.
        self.on_plan: Callable[[], None] | None = None
        self._in_flight: deque[int] = deque()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def captured_bytes(self) -> int:
        """A device's memory that captured steps have taken so far; 0 under executors that capture
        none."""
        return getattr(self.executor, "captured_bytes", 0)

    def step(self) -> StepOutputs:
        """Launch what fits in the pipeline, then digest the oldest result.

        A step that fails ends its own requests with an error; the engine goes on.
        """
        while len(self._in_flight) < self.depth:
            plan = self.scheduler.plan()
            if plan is None:
                break
            # Noted before it is launched, and forgotten after it is collected: an interrupt in
            # between then leaves a step that is collected next time, never one that is lost.
            self._in_flight.append(plan.step_id)
            if self.on_plan is not None:
                self.on_plan()
            self.executor.launch(plan)
        if not self._in_flight:
            return NO_OUTPUTS
        step_id = self._in_flight[0]
        try:
            result = self.executor.collect()
        except StepError as error:
            self._in_flight.popleft()
            return self.scheduler.fail(step_id, str(error))
        self._in_flight.popleft()
        return self.scheduler.update(result)

    def close(self) -> None:
        self.executor.close()
