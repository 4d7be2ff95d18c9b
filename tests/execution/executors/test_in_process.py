"""The in-process executor over a scripted runner."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import pytest

from octavo.core.plan import Batch, KVCapacity, StepPlan, StepResult, int_array
from octavo.core.protocols import StepError
from octavo.execution.executors import in_process
from octavo.execution.executors.in_process import InProcessExecutor

CAPACITY = KVCapacity(num_blocks=9, block_size=4, block_bytes=64)
NAME = "octavo-executor"


class ScriptedRunner:
    """Answers with the step's number; fails the steps it is told to."""

    def __init__(self, *failing: int) -> None:
        self.failing = failing
        self.ran: list[int] = []
        self.threads: set[str] = set()

    def run(self, plan: StepPlan) -> StepResult:
        self.ran.append(plan.step_id)
        self.threads.add(threading.current_thread().name)
        if plan.step_id in self.failing:
            raise ValueError(f"no luck with {plan.step_id}")
        return StepResult(plan.step_id, int_array([plan.step_id * 10]))


def plan(step_id: int) -> StepPlan:
    return StepPlan(step_id, Batch.decode(int_array([0])))


def num_threads() -> int:
    return sum(thread.name == NAME for thread in threading.enumerate())


@pytest.fixture(params=[False, True], ids=["inline", "threaded"])
def threaded(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_results_come_in_the_order_of_launch(threaded: bool) -> None:
    runner = ScriptedRunner()
    executor = InProcessExecutor(runner, CAPACITY, threaded=threaded)
    assert executor.capacity is CAPACITY
    results = []
    for step_id in range(1, 50, 2):  # two in flight
        executor.launch(plan(step_id))
        executor.launch(plan(step_id + 1))
        results += [executor.collect(), executor.collect()]
    executor.close()
    assert [result.step_id for result in results] == list(range(1, 51)) == runner.ran
    assert [result.token_ids.tolist() for result in results] == [[i * 10] for i in range(1, 51)]
    assert runner.threads == {NAME if threaded else threading.current_thread().name}


def test_a_step_that_fails_is_an_error_at_collect_and_the_rest_goes_on(
    threaded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    executor = InProcessExecutor(ScriptedRunner(1, 3, 4), CAPACITY, threaded=threaded)
    found = []
    for step_id in range(1, 6):
        executor.launch(plan(step_id))
    for step_id in range(1, 6):
        if step_id not in (1, 3, 4):
            found.append(executor.collect().step_id)
            continue
        with pytest.raises(StepError, match=f"step {step_id} failed: ValueError: no luck") as error:
            executor.collect()
        assert isinstance(error.value.__cause__, ValueError)
    assert found == [2, 5]
    assert caplog.text.count("no luck with 3") == 1, "the traceback is logged once"
    executor.close()


def test_close_is_idempotent_and_leaves_no_thread(threaded: bool) -> None:
    before = num_threads()
    executor = InProcessExecutor(ScriptedRunner(), CAPACITY, threaded=threaded)
    assert num_threads() == before + threaded
    executor.launch(plan(1))  # never collected
    executor.close()
    executor.close()
    assert num_threads() == before
    with pytest.raises(RuntimeError, match="closed"):
        executor.launch(plan(2))


@pytest.mark.parametrize("fails", [False, True])
def test_close_lets_go_of_the_runner(
    threaded: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and KV cache are the runner's: closing must free them, at once."""
    # Records of the log, which tests keep, know the error.
    monkeypatch.setattr(in_process.logger, "disabled", True)
    runner = ScriptedRunner(1 if fails else 0)
    executor = InProcessExecutor(runner, CAPACITY, threaded=threaded)
    gc.disable()
    try:
        executor.launch(plan(1))
        with contextlib.suppress(StepError):
            executor.collect()
        assert runner.ran == [1]
        reference = weakref.ref(runner)
        del runner
        executor.close()
        assert reference() is None
    finally:
        gc.enable()


def test_an_interrupt_is_not_a_failed_step() -> None:
    class Interrupted:
        def run(self, plan: StepPlan) -> StepResult:
            raise KeyboardInterrupt

    executor = InProcessExecutor(Interrupted(), CAPACITY, threaded=False)
    with pytest.raises(KeyboardInterrupt):
        executor.launch(plan(1))
