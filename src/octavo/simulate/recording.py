"""Records what an engine is asked, plans and answers, and replays it under the simulator.

A recording holds requests and aborts between the steps where they came. Replaying feeds the same
to another scheduler, over an executor that knows no model and answers with the recorded tokens:
the plans must come out the same, field by field (`difference`).
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from octavo.core.plan import FloatArray, IntArray, KVCapacity, StepPlan, StepResult
from octavo.core.protocols import Executor, StepError
from octavo.core.request import Request, StepOutputs
from octavo.engine.core import EngineCore
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.executor import SimulatedExecutor
from octavo.simulate.load import LoadMeter, StepLoad


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step's load, and its seconds from the end of the step before. The host took ``host_s`` to
    plan and launch it; ``hidden_s`` are the seconds of the step that ran meanwhile, 0 if none
    did."""

    load: StepLoad
    seconds: float
    host_s: float = 0.0
    hidden_s: float = 0.0

    @property
    def device_s(self) -> float:
        """Its seconds without those that it waited for the host."""
        return max(self.seconds - max(self.host_s - self.hidden_s, 0.0), 0.0)


class StepClock(Protocol):
    """Tells when steps end, by marks of its own."""

    def now(self) -> Any: ...

    def launched(self) -> Any:
        """Called right after a launch; `ended` gets what it returns."""

    def ended(self, mark: Any) -> Any:
        """Called right after the step's results are there: the mark of its end."""

    def seconds(self, first: Any, last: Any) -> float: ...


class HostClock:
    """A step ends when its results are collected."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def now(self) -> float:
        return self._clock()

    def launched(self) -> None:
        return None

    def ended(self, mark: None) -> float:
        return self._clock()

    def seconds(self, first: float, last: float) -> float:
        return last - first


class TimingExecutor:
    """Passes plans on and notes how long each step took, from the end of the one before: planning
    and digesting are part of it. After a rest call `resume` before the engine works again.

    With a ``clock`` that is the device's own ``host_clock`` times the host's work for a step: from
    the last result, or launch, to the end of its launch."""

    def __init__(
        self,
        executor: Executor,
        clock: StepClock | None = None,
        host_clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._executor = executor
        self._clock: StepClock = clock or HostClock()
        self._host_clock = host_clock
        self._meter = LoadMeter()
        self._launched: deque[tuple[StepLoad, Any, float, bool]] = deque()
        self._began = self._clock.now()
        self._host_began = host_clock()
        self.steps: list[TimedStep] = []

    @property
    def capacity(self) -> KVCapacity:
        return self._executor.capacity

    def resume(self) -> None:
        """The next step begins now."""
        self._began = self._clock.now()
        self._host_began = self._host_clock()

    def launch(self, plan: StepPlan) -> None:
        load, is_behind = self._meter.measure(plan), bool(self._launched)
        self._executor.launch(plan)
        mark, now = self._clock.launched(), self._host_clock()
        self._launched.append((load, mark, now - self._host_began, is_behind))
        self._host_began = now

    def collect(self) -> StepResult:
        load, mark, host_s, is_behind = self._launched.popleft()
        try:
            result = self._executor.collect()
        finally:
            ended = self._clock.ended(mark)
            seconds, self._began = self._clock.seconds(self._began, ended), ended
            self._host_began = self._host_clock()
        hidden_s = self.steps[-1].device_s if is_behind and self.steps else 0.0
        self.steps.append(TimedStep(load, seconds, host_s, hidden_s))
        return result

    def close(self) -> None:
        self._executor.close()


@dataclass(frozen=True, slots=True)
class Step:
    """The engine makes a step."""


@dataclass(frozen=True, slots=True)
class Abort:
    number: int


Event: TypeAlias = Request | Abort | Step


@dataclass(slots=True)
class Recording:
    """``events`` in order; ``plans`` in the order of launch; ``results`` by step id. A step that
    failed has its message there."""

    depth: int
    capacity: KVCapacity
    events: list[Event] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    results: dict[int, StepResult | str] = field(default_factory=dict)


class Recorder:
    """Drives an engine and records it. It takes the place of the engine's executor."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.recording = Recording(core.depth, core.executor.capacity)
        core.executor = _RecordingExecutor(core.executor, self.recording)

    @property
    def has_work(self) -> bool:
        return self._core.has_work

    def add(self, request: Request) -> None:
        self._core.scheduler.add(request)
        self.recording.events.append(request)

    def abort(self, number: int) -> bool:
        self.recording.events.append(Abort(number))
        return self._core.scheduler.abort(number)

    def step(self) -> StepOutputs:
        self.recording.events.append(Step())
        return self._core.step()


class _RecordingExecutor:
    def __init__(self, executor: Executor, recording: Recording) -> None:
        self._executor = executor
        self._recording = recording
        self._in_flight: deque[int] = deque()

    @property
    def capacity(self) -> KVCapacity:
        return self._executor.capacity

    def launch(self, plan: StepPlan) -> None:
        # A copy: what a plan refers to may change once it has been obeyed.
        self._recording.plans.append(copy.deepcopy(plan))
        self._in_flight.append(plan.step_id)
        self._executor.launch(plan)

    def collect(self) -> StepResult:
        step_id = self._in_flight.popleft()
        try:
            result = self._executor.collect()
        except StepError as error:
            self._recording.results[step_id] = str(error)
            raise
        self._recording.results[step_id] = copy.deepcopy(result)
        return result

    def close(self) -> None:
        self._executor.close()


class _ReplayingExecutor(SimulatedExecutor):
    """Fails where the recorded engine failed."""

    def __init__(self, recording: Recording) -> None:
        self._results = recording.results
        super().__init__(recording.capacity, tokens=self._recorded_tokens, tops=self._recorded_tops)

    def collect(self) -> StepResult:
        step_id = self._launched[0].step_id
        error = self._results.get(step_id)
        if isinstance(error, str):
            self._ended()
            raise StepError(error)
        return super().collect()

    def _result(self, plan: StepPlan) -> StepResult:
        result = self._results.get(plan.step_id)
        assert isinstance(result, StepResult), f"step {plan.step_id} was not recorded"
        return result

    def _recorded_tokens(self, plan: StepPlan, rows: IntArray) -> IntArray:
        tokens = self._result(plan).token_ids
        assert len(tokens) == len(rows), f"step {plan.step_id} samples other rows than recorded"
        return tokens

    def _recorded_tops(
        self, plan: StepPlan, rows: IntArray, width: int
    ) -> tuple[IntArray, FloatArray]:
        logprobs = self._result(plan).logprobs
        assert logprobs is not None
        assert len(logprobs.places) == len(rows)
        return logprobs.scores.top_ids[:, :width], logprobs.scores.top_logprobs[:, :width]


def replay(recording: Recording, scheduler: Scheduler) -> list[StepPlan]:
    """The plans that ``scheduler``, fresh and of the same options, makes of the same events."""
    replayed = Recording(recording.depth, recording.capacity)
    executor = _RecordingExecutor(_ReplayingExecutor(recording), replayed)
    core = EngineCore(scheduler, executor, recording.depth)
    for event in recording.events:
        if isinstance(event, Request):
            scheduler.add(event)
        elif isinstance(event, Abort):
            scheduler.abort(event.number)
        else:
            core.step()
    return replayed.plans


def difference(first: Any, second: Any, where: str = "plan") -> str | None:
    """Where two plans, or parts of them, first differ, and how; None when nowhere. Dtypes count."""
    if type(first) is not type(second):
        return f"{where}: {type(first).__name__} against {type(second).__name__}"
    if is_dataclass(first):
        for each in fields(first):
            pair = getattr(first, each.name), getattr(second, each.name)
            if found := difference(*pair, f"{where}.{each.name}"):
                return found
        return None
    if isinstance(first, np.ndarray):
        is_equal = first.dtype == second.dtype and np.array_equal(first, second)
        return None if is_equal else f"{where}: {first} against {second}"
    if isinstance(first, tuple | list):
        if len(first) != len(second):
            return f"{where}: {len(first)} against {len(second)} of them"
        for index, pair in enumerate(zip(first, second, strict=True)):
            if found := difference(*pair, f"{where}[{index}]"):
                return found
        return None
    return None if first == second else f"{where}: {first!r} against {second!r}"
