"""Runs plans in this process: at once, or on one worker thread so that planning overlaps.

PyTorch and the compiled kernels release the interpreter's lock while they compute. Plans run in the
order of launch.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import Protocol

from octavo.core.plan import KVCapacity, StepPlan, StepResult
from octavo.core.protocols import StepError

logger = logging.getLogger(__name__)


class StepRunner(Protocol):
    """What obeys a plan (see `octavo.execution.runner`)."""

    def run(self, plan: StepPlan) -> StepResult: ...


class InProcessExecutor:
    """Implements `octavo.core.protocols.Executor`. ``threaded`` is for pipelined steps."""

    def __init__(self, runner: StepRunner, capacity: KVCapacity, *, threaded: bool) -> None:
        self.capacity = capacity
        self._runner: StepRunner | None = runner
        self._results: queue.SimpleQueue[StepResult | StepError] = queue.SimpleQueue()
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(
                target=self._work, args=(runner,), name="octavo-executor", daemon=True
            )
            self._thread.start()

    def launch(self, plan: StepPlan) -> None:
        if self._runner is None:
            raise RuntimeError("the executor is closed")
        if self._thread is None:
            self._results.put(_run(self._runner, plan))
        else:
            self._plans.put(plan)

    def collect(self) -> StepResult:
        result = self._results.get()
        if isinstance(result, StepError):
            try:
                raise result
            finally:
                del result
        return result

    def close(self) -> None:
        if self._thread is not None:
            self._plans.put(None)
            self._thread.join()
            self._thread = None
        self._runner = None

    def _work(self, runner: StepRunner) -> None:
        while (plan := self._plans.get()) is not None:
            self._results.put(_run(runner, plan))


def _run(runner: StepRunner, plan: StepPlan) -> StepResult | StepError:
    try:
        return runner.run(plan)
    except Exception as error:
        # Whatever went wrong in the mechanism concerns the requests of this step only. Its error
        # knows this frame, so no name here may be its own: a ring that only a collection finds
        # would keep the runner, and its memory, behind `close`.
        logger.exception("step %d failed", plan.step_id)
        return _failure(plan.step_id, error)


def _failure(step_id: int, error: Exception) -> StepError:
    failure = StepError(f"step {step_id} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
