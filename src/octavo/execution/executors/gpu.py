"""Runs plans on a GPU of this process: launching only queues work, so steps are pipelined without a
thread."""

from __future__ import annotations

import logging
from collections import deque

from octavo.core.plan import KVCapacity, StepPlan, StepResult
from octavo.core.protocols import StepError
from octavo.execution.gpu_runner import GPURunner, PendingStep

logger = logging.getLogger(__name__)


class GPUExecutor:
    """Implements `octavo.core.protocols.Executor`."""

    def __init__(self, runner: GPURunner, capacity: KVCapacity) -> None:
        self.capacity = capacity
        self.runner: GPURunner | None = runner
        self._pending: deque[PendingStep | StepError] = deque()
        self._num_obeyed: dict[int, int] = {}

    def launch(self, plan: StepPlan) -> None:
        if self.runner is None:
            raise RuntimeError("the executor is closed")
        try:
            self._pending.append(self.runner.launch(plan))
        except Exception as error:
            # Whatever went wrong in the mechanism concerns the requests of this step only. Its
            # error knows this frame, so no name here may be its own: a ring that only a collection
            # finds would keep the runner, and its memory, behind `close`.
            self._pending.append(_failure(plan.step_id, error))
            self._num_obeyed[id(self._pending[-1])] = self.runner.arena.num_obeyed

    def collect(self) -> StepResult:
        assert self.runner is not None
        pending = self._pending.popleft()
        if isinstance(pending, StepError):
            self.runner.arena.collected(self._num_obeyed.pop(id(pending)))
            try:
                raise pending
            finally:
                del pending
        try:
            return self.runner.collect(pending)
        except StepError:
            raise
        except Exception as error:
            raise _failure(pending.step_id, error) from error

    @property
    def is_idle(self) -> bool:
        """Whether the device has done all that was launched; failed steps have nothing to do."""
        return all(
            pending.event.query() for pending in self._pending if isinstance(pending, PendingStep)
        )

    @property
    def captured_bytes(self) -> int:
        """The device's memory that captured steps have taken so far."""
        return 0 if self.runner is None else self.runner.graphs.captured_bytes

    def close(self) -> None:
        self.runner = None


def _failure(step_id: int, error: Exception) -> StepError:
    logger.error("step %d failed", step_id, exc_info=error)
    failure = StepError(f"step {step_id} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
