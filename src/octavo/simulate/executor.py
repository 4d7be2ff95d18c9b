"""An executor without a model: a latency model on a virtual clock. The policy's test bed.

It obeys the same plans as the real one and answers with made-up tokens, and with made-up log
probabilities for the rows that ask. It does not compute, sleep or read a clock; `now_s` says how
much simulated time has passed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from octavo.core.plan import (
    CreateBlocks,
    FloatArray,
    IntArray,
    KVCapacity,
    MapBlocks,
    ReleaseBlocks,
    ResizedBlocks,
    StepLogprobs,
    StepPlan,
    StepResult,
    SwapIn,
    TokenScores,
    int_array,
)

TokenSource = Callable[[StepPlan, IntArray], IntArray]
TopSource = Callable[[StepPlan, IntArray, int], tuple[IntArray, FloatArray]]


class StepTime(NamedTuple):
    """What a step takes of the device, and of the host to plan and launch it, in seconds.

    ``is_captured``: it is launched in one piece, at the end of the host's work. The kernels of
    another run while the host launches more of them, and end no sooner than it.
    """

    device_s: float
    host_s: float = 0.0
    is_captured: bool = True


class Latency(Protocol):
    """How long steps take: `FixedLatency`, `octavo.simulate.latency.LatencyModel`."""

    def stepper(self) -> Callable[[StepPlan], StepTime]:
        """Times of plans, given in the order of their launch, for one executor."""


@dataclass(frozen=True, slots=True)
class FixedLatency:
    """A step takes ``step_s`` and ``token_s`` for each of its tokens, in seconds."""

    step_s: float = 0.005
    token_s: float = 0.00002

    def step_time(self, plan: StepPlan) -> StepTime:
        return StepTime(self.step_s + self.token_s * plan.batch.num_tokens)

    def stepper(self) -> Callable[[StepPlan], StepTime]:
        return self.step_time


class SimulatedExecutor:
    """Implements `octavo.core.protocols.Executor`.

    Two clocks: ``now_s`` is the host's, which launches and waits for results; the device's says
    when it has done all that was launched.

    ``tokens(plan, sampled_rows)`` makes the tokens of a step; without it every token is 0.
    ``tops(plan, asking_rows, k)`` makes the ``k`` likeliest next tokens of each row that asks, ids
    and log probabilities ``[n, k]``, best first; without it they are made up simply.
    """

    def __init__(
        self,
        capacity: KVCapacity,
        latency: Latency | None = None,
        tokens: TokenSource | None = None,
        tops: TopSource | None = None,
    ) -> None:
        self.capacity = capacity
        self.now_s = 0.0
        # Places that plans have mapped or unmapped so far.
        self.num_mapped = 0
        self._max_id = self.capacity.num_blocks - 1
        self._step_time = (latency or FixedLatency()).stepper()
        self._tokens = tokens
        self._tops = tops
        self._launched: deque[StepPlan] = deque()
        # The moment at which each of them ends, and at which the last launched so far does.
        self._ends_s: deque[float] = deque()
        self._device_s = 0.0
        # Rows that want log probabilities, and of how many tokens.
        self._num_logprobs: dict[int, int] = {}

    def launch(self, plan: StepPlan) -> None:
        device_s, host_s, is_captured = self._step_time(plan)
        launched_s = self.now_s + host_s
        begins_s = max(launched_s if is_captured else self.now_s, self._device_s)
        self._device_s = max(begins_s + device_s, launched_s)
        self.now_s = launched_s
        self._launched.append(plan)
        self._ends_s.append(self._device_s)

    def collect(self) -> StepResult:
        plan = self._ended()
        rows = plan.sampled_rows()
        resized = None
        arrived = tuple(c.transfer_id for c in plan.commands if isinstance(c, SwapIn))
        for command in plan.commands:
            if isinstance(command, MapBlocks):
                self._check_mapping(command)
                self.num_mapped += len(command)
            elif isinstance(command, CreateBlocks | ReleaseBlocks):
                resized = ResizedBlocks(command.block_ids)
                self._max_id = max(self._max_id, int(command.block_ids.max()))
        for init in plan.row_inits:
            self._num_logprobs.pop(init.row, None)
            if init.num_logprobs is not None:
                self._num_logprobs[init.row] = init.num_logprobs
        if self._tokens is None:
            token_ids = np.zeros(len(rows), dtype=np.int32)
        else:
            token_ids = self._tokens(plan, rows)
        logprobs = self._logprobs(plan, rows, token_ids) if self._num_logprobs else None
        return StepResult(plan.step_id, token_ids, arrived, logprobs, resized=resized)

    def _ended(self) -> StepPlan:
        """The oldest step, once it has ended."""
        self.now_s = max(self.now_s, self._ends_s.popleft())
        return self._launched.popleft()

    def restart(self) -> None:
        """Both clocks, at 0; nothing is launched then."""
        assert not self._launched
        self.now_s = self._device_s = 0.0

    def _logprobs(self, plan: StepPlan, rows: IntArray, token_ids: IntArray) -> StepLogprobs | None:
        places = [i for i, row in enumerate(rows.tolist()) if row in self._num_logprobs]
        if not places:
            return None
        num_top = int_array([self._num_logprobs[row] for row in rows[places].tolist()])
        width = int(num_top.max())
        if self._tops is None:
            top_ids, top_logprobs = _simple_tops(plan, rows[places], token_ids[places], width)
        else:
            top_ids, top_logprobs = self._tops(plan, rows[places], width)
        scores = TokenScores(
            logprobs=top_logprobs[:, 0] if width else np.zeros(len(places), dtype=np.float32),
            ranks=np.ones(len(places), dtype=np.int32),
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            num_top=num_top,
        )
        return StepLogprobs(int_array(places), scores)

    def _check_mapping(self, command: MapBlocks) -> None:
        places = set(zip(command.slots.tolist(), command.places.tolist(), strict=True))
        assert len(places) == len(command.block_ids), "a place is mapped twice in a step"
        assert int(command.block_ids.max()) <= self._max_id, "no such block"

    def close(self) -> None:
        self._launched.clear()
        self._ends_s.clear()


def _simple_tops(
    plan: StepPlan, rows: IntArray, token_ids: IntArray, width: int
) -> tuple[IntArray, FloatArray]:
    """Each row's likeliest are its token and those that follow it; how likely depends on row and
    step, so that beams die and fork."""
    follow = np.arange(width, dtype=np.int32)
    first = 0.1 + 0.3 * ((7 * rows + 3 * plan.step_id) % 5)
    top_logprobs = (-first[:, None] - 0.5 * follow).astype(np.float32)
    return token_ids[:, None] + follow, top_logprobs
