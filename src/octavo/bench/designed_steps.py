"""Runs designed batches through the real engine and times their steps, for a calibration.

Decoding at several numbers of rows and contexts, prompts of several lengths alone and beside
decoding rows. Of several rounds the least disturbed counts, since machines are shared. Which
numbers and lengths is `calibration_designs`' affair.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from octavo.bench.calibration_designs import Designs
from octavo.bench.recorded_steps import RecordedStep
from octavo.core.plan import int_array
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.simulate.recording import TimedStep, TimingExecutor

if TYPE_CHECKING:
    from octavo.core.protocols import Executor
    from octavo.engine.core import EngineCore
    from octavo.engine.report import EngineReport


class _Bench:
    """Requests of random tokens through an engine whose steps are timed."""

    def __init__(self, core: EngineCore, report: EngineReport) -> None:
        self.core = core
        self.timing = timed(core.executor)
        core.executor = self.timing
        self._vocab_size = report.vocab_size
        self._random = np.random.default_rng(0)
        self._number = 0

    def add(self, num_prompt: int, num_output: int) -> None:
        prompt = int_array(self._random.integers(0, self._vocab_size, num_prompt))
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        self.core.scheduler.add(Request(self._number, prompt, params, num_output, 0))
        self._number += 1

    def steps(self, count: int | None = None) -> list[TimedStep]:
        """The next ``count`` steps, or all until nothing is left to do."""
        first = len(self.timing.steps)
        gc.disable()
        try:
            while self.core.has_work and (count is None or len(self.timing.steps) - first < count):
                outputs = self.core.step()
                for finished in outputs.finished:
                    if finished.error is not None:
                        raise RuntimeError(f"a step of the calibration failed: {finished.error}")
        finally:
            gc.enable()
        return self.timing.steps[first:]

    def run(self, lengths: Sequence[tuple[int, int]]) -> list[TimedStep]:
        for num_prompt, num_output in lengths:
            self.add(num_prompt, num_output)
        self.timing.resume()
        return self.steps()


def timed(executor: Executor) -> TimingExecutor:
    """By a GPU's own clock where there is one, and then by the host's too."""
    device = getattr(getattr(executor, "runner", None), "device", None)
    if getattr(device, "stream", None) is None:
        return TimingExecutor(executor)
    from octavo.bench.device_clock import DeviceClock

    return TimingExecutor(executor, DeviceClock(device), time.perf_counter)


def measure_steps(
    core: EngineCore,
    report: EngineReport,
    designs: Designs,
    tell: Callable[[str], None],
    shape: int = 0,
) -> list[RecordedStep]:
    """Times of designed batches on an engine without prefix caching, of the ``shape``-th model.
    Rounds lie apart in time, so that what else a machine does rarely disturbs all of them."""
    bench = _Bench(core, report)
    designs = designs.scaled(report.max_num_seqs, report.max_model_len)
    works: list[Callable[[], list[TimedStep]]] = []
    for rows in designs.rows:
        for context in designs.contexts:
            if rows * context <= designs.max_tokens:
                # The first rows still decode when the last prompt has been computed.
                budget = max(report.max_num_batched_tokens - rows, 1)
                num_output = designs.decode_steps + rows * context // budget
                num_output = min(num_output, report.max_model_len - context)
                works.append(partial(bench.run, [(context, num_output)] * rows))
    works += [partial(bench.run, [(prompt, 1)]) for prompt in designs.prompts]
    works += [partial(_beside, bench, designs, prompt) for prompt in designs.beside]
    found: list[RecordedStep] = []
    for turn in range(-designs.warm_rounds, designs.rounds):
        for number, work in enumerate(works):
            steps = work()
            if turn >= 0:
                found += [
                    RecordedStep(shape, turn, number, index, step)
                    for index, step in enumerate(steps)
                ]
        done = turn + designs.warm_rounds + 1
        tell(f"{report.model}: round {done} of {designs.warm_rounds + designs.rounds}")
    return found


def _beside(bench: _Bench, designs: Designs, prompt: int) -> list[TimedStep]:
    """Prompts that come one by one while others decode."""
    for _ in range(designs.beside_rows):
        bench.add(32, 3 * designs.decode_steps)
    bench.timing.resume()
    found = bench.steps(4)
    for _ in range(2):
        bench.add(prompt, 2)
        found += bench.steps(6)
    return found + bench.steps()
