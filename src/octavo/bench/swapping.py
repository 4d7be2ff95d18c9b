"""Swaps on a GPU: how fast blocks go to host memory and come back, and what decode steps notice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from octavo.bench import works
from octavo.bench.works import Figure
from octavo.core.plan import Batch, StepPlan, SwapIn, SwapOut, int_array

if TYPE_CHECKING:
    from octavo.bench.ceilings import Ceilings
    from octavo.engine.llm import LLM

_PROMPT = 128


def alone(llm: LLM, ceilings: Ceilings) -> list[Figure]:
    """All host blocks out and in again; needs ``swap_memory``."""
    import torch

    runner = llm._core.executor.runner  # type: ignore[attr-defined]
    arena = runner.arena
    count = len(arena.host) - 1
    blocks = int_array(np.random.default_rng(0).permutation(arena.num_blocks - 1)[:count] + 1)
    host = int_array(np.arange(1, count + 1))
    figures = []
    commands = {"out": SwapOut(blocks, host), "in": SwapIn(-1, host, blocks)}
    for way, ceiling in (("out", ceilings.to_host_bytes), ("in", ceilings.from_host_bytes)):
        best = float("inf")
        for _ in range(3):
            torch.cuda.synchronize()
            started = time.perf_counter()
            plan = StepPlan(step_id=0, batch=Batch.empty(), commands=(commands[way],))
            runner.collect(runner.launch(plan))
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - started)
        rate = count * arena.layout.block_bytes / best
        notes = f"{count} blocks of {arena.layout.block_bytes / 2**20:.2f} MiB"
        figures.append(
            Figure(
                work=f"swap {way}",
                unit="GB/s",
                figure=rate / 1e9,
                floor=ceiling / 1e9,
                share=rate / ceiling,
                notes=notes,
            )
        )
    return figures


def beside_decode(llm: LLM, ceilings: Ceilings, rows: int = 64, steps: int = 128) -> Figure:
    """Milliseconds of decode steps beside which blocks go to host memory, half of the time; the
    floor are the same steps with nothing beside them. Needs ``swap_memory``."""
    lengths = [(_PROMPT, steps + 1)] * rows
    works.generate(llm, lengths, 1)
    plain_ms = _step_ms(llm, lengths, 2)
    capacity = llm.report.capacity
    wanted = 0.5 * plain_ms / 1e3 * ceilings.to_host_bytes / capacity.block_bytes
    count = max(min(int(wanted), capacity.num_host_blocks - 1), 1)
    # The pool's last blocks: whatever they hold, nothing is written into them for it.
    blocks = int_array(range(capacity.num_blocks - count, capacity.num_blocks))
    command = SwapOut(blocks, int_array(range(1, count + 1)))
    with _ordered_with(llm, command, rows):
        beside_ms = _step_ms(llm, lengths, 3)
    rate = count * capacity.block_bytes / beside_ms * 1e3
    return Figure(
        work=f"decode {rows} beside swaps",
        unit="ms a step",
        figure=beside_ms,
        floor=plain_ms,
        share=plain_ms / beside_ms,
        notes=f"{count} blocks out a step, {rate / 1e9:.1f} GB/s",
    )


def _step_ms(llm: LLM, lengths: list[tuple[int, int]], seed: int) -> float:
    """The median of the steps in which every row decodes."""
    from octavo.bench.timed_steps import timed_steps

    rows = len(lengths)
    with timed_steps(llm) as found:
        works.generate(llm, lengths, seed)
    full = [step for step in found if step.num_rows == rows and not step.has_chunks][4:]
    return float(np.median([step.seconds for step in full])) * 1e3


@contextmanager
def _ordered_with(llm: LLM, command: SwapOut, rows: int) -> Iterator[None]:
    """Order ``command`` with every step in which ``rows`` decode."""
    executor = llm._core.executor
    launch = executor.launch

    def ordering(plan: StepPlan) -> None:
        if len(plan.batch.rows) == plan.batch.num_tokens == rows:
            plan = replace(plan, commands=(*plan.commands, command))
        launch(plan)

    executor.launch = ordering  # type: ignore[method-assign]
    try:
        yield
    finally:
        executor.launch = launch  # type: ignore[method-assign]
