"""Captured steps of a whole engine: what they take, and what becomes of those that fail."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from engine.tiny_engine import run
from execution.gpu.test_gpu_engine import ON_GPU, gpu_engine, requests
from octavo.execution.device import PlainDevice

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


def test_what_captured_steps_take_is_counted(model: Path) -> None:
    """Once each, the first replay included; what others give back meanwhile is nobody's."""
    core = gpu_engine(model, num_blocks=9, depth=1, chunk=16)
    step_graphs = core.executor.runner.graphs  # type: ignore[attr-defined]
    free, ran = iter([1000, 900, 900, 950]), []

    class Captures(PlainDevice):
        def free_bytes(self) -> int:
            return next(free)

        def capture(self, work: Any, pool: Any) -> Any:
            return work

    step_graphs._device, step_graphs._captures = Captures(), True
    for _ in range(4):
        for key in ("a", "b"):
            step_graphs._run(key, lambda key=key: ran.append(key))
    assert ran == ["a", "b"] * 4
    assert (step_graphs.num_captured, core.captured_bytes) == (2, 100)
    core.close()
    assert core.captured_bytes == 0


def test_a_step_that_failed_is_captured_once_it_has_run(model: Path) -> None:
    """A capture may load no kernel, so it begins only when everything has run. Of steps whose
    capture failed none is captured again."""
    core = gpu_engine(model, num_blocks=9, depth=1, chunk=16)
    step_graphs = core.executor.runner.graphs  # type: ignore[attr-defined]
    captured: list[str] = []
    fails = {"a": iter([True, False, False]), "b": iter([False, True, False, False])}
    ran = {"a": 0, "b": 0}

    class Captures(PlainDevice):
        def capture(self, work: Any, pool: Any) -> Any:
            captured.append(work())
            return work

    def work(key: str) -> str:
        if next(fails[key], False):
            raise ZeroDivisionError
        ran[key] += 1
        return key

    step_graphs._device, step_graphs._captures = Captures(), True
    for key, outcomes in (("a", (True, False, False, False)), ("b", (False, True, False, False))):
        for has_failed in outcomes:
            expected = pytest.raises(ZeroDivisionError) if has_failed else nullcontext()
            with expected:
                step_graphs._run(key, lambda key=key: work(key))
    # Failed; ran; was captured and replayed; replayed.
    assert ran["a"] == 4
    # Ran; its capture failed; ran; ran.
    assert ran["b"] == 3
    assert captured == ["a"]
    assert step_graphs.num_captured == 1
    core.close()


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("fault", ["raises", "waits"])
def test_a_capture_that_fails_leaves_room_for_others(model: Path, fault: str) -> None:
    """Whether something else in it is at fault, or CUDA refuses what it was asked for: waiting for
    the device. In a process of its own, whose allocators nobody needs if they are left in a bad
    state."""
    program = Path(__file__).with_name("failing_capture.py")
    done = subprocess.run(
        [sys.executable, str(program), str(model), fault], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_captured_steps_take_some_of_the_gpus_memory(model: Path) -> None:
    core = gpu_engine(model, num_blocks=60, depth=2, chunk=32)
    step_graphs = core.executor.runner.graphs  # type: ignore[attr-defined]
    for _ in range(3):
        run(core, requests(), beams={})
    assert step_graphs.num_captured > 3
    assert 0 < core.captured_bytes < 2**30
    core.close()
