"""An executor without a model: fixed latencies on a virtual clock. The policy's test bed.

It obeys the same plans as the real one and answers with made-up tokens. It does not compute,
sleep or read a clock; `now_s` says how much simulated time has passed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octavo.core.plan import IntArray, KVCapacity, StepPlan, StepResult, SwapIn

TokenSource = Callable[[StepPlan, IntArray], IntArray]


@dataclass(frozen=True, slots=True)
class FixedLatency:
    """A step takes ``step_s`` and ``token_s`` for each of its tokens, in seconds."""

    step_s: float = 0.005
    token_s: float = 0.00002

    def step_seconds(self, plan: StepPlan) -> float:
        return self.step_s + self.token_s * plan.batch.num_tokens


class SimulatedExecutor:
    """Implements `octavo.core.protocols.Executor`.

    ``tokens(plan, sampled_rows)`` makes the tokens of a step; without it every token is 0.
    """

    def __init__(
        self,
        capacity: KVCapacity,
        latency: FixedLatency | None = None,
        tokens: TokenSource | None = None,
    ) -> None:
        self.capacity = capacity
        self.now_s = 0.0
        self._latency = latency or FixedLatency()
        self._tokens = tokens
        self._launched: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)

    def collect(self) -> StepResult:
        plan = self._launched.popleft()
        self.now_s += self._latency.step_seconds(plan)
        rows = plan.sampled_rows()
        arrived = tuple(c.transfer_id for c in plan.commands if isinstance(c, SwapIn))
        if self._tokens is None:
            return StepResult(plan.step_id, np.zeros(len(rows), dtype=np.int32), arrived)
        return StepResult(plan.step_id, self._tokens(plan, rows), arrived)

    def close(self) -> None:
        self._launched.clear()
