"""The shortest that a step can take, and what steps cost the host.

A step's floor is what its arithmetic and its memory traffic take at the rates of `ceilings`: the
longer of reading the weights and multiplying with them, then reading the keys and values.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.bench.ceilings import Ceilings
    from octavo.core.plan import StepPlan, StepResult
    from octavo.engine.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Bytes of what a step reads: the layers' weights, the head's, a token's keys and values. A
    weight, of ``layer_element`` or ``head_element`` bytes, is multiplied once for each token
    (layers) or sampled row (head)."""

    layer_bytes: int
    head_bytes: int
    token_bytes: int
    layer_element: int = 2
    head_element: int = 2
    attention_width: int = 0

    @classmethod
    def of(cls, llm: LLM) -> Cost:
        model = llm._core.executor.runner.model.model  # type: ignore[attr-defined]
        config, capacity = model.config, llm.report.capacity
        head_bytes = model.head.weight.nbytes
        embedding = 0 if config.tie_word_embeddings else model.embedding.num_bytes
        return cls(
            layer_bytes=llm.report.weight_bytes - embedding - head_bytes,
            head_bytes=head_bytes,
            token_bytes=capacity.block_bytes // capacity.block_size,
            layer_element=model.layers[0].down.weight.element_size(),
            head_element=model.head.weight.element_size(),
            attention_width=config.num_layers * config.num_attention_heads * config.head_dim,
        )

    def step_s(self, num_tokens: int, num_sampled: int, num_keys: float, at: Ceilings) -> float:
        """The floor of a step that reads ``num_keys`` tokens' keys and values."""
        total = 0.0
        for num_bytes, element, rows in (
            (self.layer_bytes, self.layer_element, num_tokens),
            (self.head_bytes, self.head_element, num_sampled),
        ):
            flops = 2 * num_bytes / element * rows
            rate = at.fp8_flops if element == 1 else at.matmul_flops
            total += max(bool(rows) * num_bytes / at.read_bytes, flops / rate)
        return total + num_keys * self.token_bytes / at.read_bytes


class Floors:
    """Adds up the floors of the steps that an engine plans, and what they cost the host: how long
    it waited, and of its own work what no step of the device hid."""

    def __init__(self, llm: LLM, ceilings: Ceilings) -> None:
        self._core = llm._core
        self._ceilings = ceilings
        self._cost = Cost.of(llm)
        self.seconds = 0.0
        self.waited_s = 0.0
        self.exposed_s = 0.0
        self.num_steps = 0

    def host(self, seconds: float) -> str:
        """What a step cost the host, of ``seconds`` in all. Its work is hidden while the device has
        steps to run; where the device was found idle, all of the work since then counts as not."""
        steps = max(self.num_steps, 1)
        parts = (seconds - self.waited_s, self.exposed_s, self.waited_s)
        work_ms, exposed_ms, waited_ms = (part / steps * 1e3 for part in parts)
        return f"host {work_ms:.2f} ms a step ({exposed_ms:.2f} not hidden), waits {waited_ms:.2f}"

    @contextmanager
    def counted(self) -> Iterator[Floors]:
        scheduler = self._core.scheduler
        plan = scheduler.plan

        def counting() -> StepPlan | None:
            found = plan()
            if found is not None:
                batch = found.batch
                # Read by each row for itself, as if nothing were shared.
                keys = float(scheduler.rows.num_computed[batch.rows].sum())
                self.seconds += self._cost.step_s(
                    batch.num_tokens, len(found.sampled_rows()), keys, self._ceilings
                )
                self.num_steps += 1
            return found

        executor: Any = self._core.executor
        collect = executor.collect
        resumed = time.perf_counter()

        def waiting() -> StepResult:
            nonlocal resumed
            started = time.perf_counter()
            if executor.is_idle:
                self.exposed_s += started - resumed
            result: StepResult = collect()
            resumed = time.perf_counter()
            self.waited_s += resumed - started
            return result

        scheduler.plan = counting  # type: ignore[method-assign]
        executor.collect = waiting
        try:
            yield self
        finally:
            scheduler.plan = plan  # type: ignore[method-assign]
            executor.collect = collect
