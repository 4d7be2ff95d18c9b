"""What copying, swapping and mapping blocks takes, by plans that do nothing else."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.core.plan import (
    Batch,
    CopyBlocks,
    KVCommand,
    MapBlocks,
    RowInit,
    StepPlan,
    SwapIn,
    SwapOut,
    int_array,
)
from octavo.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.core.protocols import Executor

_MOVED_BLOCKS = 32


def measure_moves(executor: Executor, *, rounds: int = 5) -> dict[str, float]:
    """Rates of copying and swapping blocks, bytes a second, by plans that do nothing else. Nothing
    may run."""
    capacity = executor.capacity
    count = min(_MOVED_BLOCKS, capacity.num_blocks // 2 - 1, capacity.num_host_blocks or 1 << 30)
    ids = int_array(range(1, count + 1))
    moved_bytes = count * capacity.block_bytes
    step_id = 1 << 30

    def run(commands: Sequence[KVCommand]) -> tuple[int, ...]:
        nonlocal step_id
        step_id += 1
        executor.launch(StepPlan(step_id, Batch.empty(), commands=tuple(commands)))
        return executor.collect().finished_transfers

    def seconds(*commands: KVCommand) -> float:
        """Of plans with a command each, and until every swap has arrived."""
        times = []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            waits = {c.transfer_id for c in commands if isinstance(c, SwapIn)}
            for command in commands:
                waits -= set(run([command]))
            if not commands:
                run([])
            while waits:
                waits -= set(run([]))
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    nothing = seconds()
    copied = seconds(CopyBlocks(ids, ids + count)) - nothing
    rates = {"copy_rate": moved_bytes / max(copied, 1e-9)}
    if capacity.num_host_blocks:
        host = ids - 1
        # Out and in again, so that both are waited for.
        both = seconds(SwapOut(ids, host), SwapIn(1 << 20, host, ids)) - 2 * nothing
        rates["swap_rate"] = 2 * moved_bytes / max(both, 1e-9)
    return rates


def measure_mapping(executor: Executor, max_model_len: int, *, rounds: int = 9) -> float:
    """Seconds of mapping a block: a step that reads blocks mapped for it, less one that finds them
    mapped. Nothing may run."""
    capacity = executor.capacity
    longest = max_model_len // capacity.block_size
    count = min(_MOVED_BLOCKS, capacity.num_blocks - 1, longest)
    ids = int_array(range(1, count + 1))
    slots, places = 0 * ids, int_array(range(count))
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    tokens = int_array([1] * (count * capacity.block_size))
    init = RowInit(0, tokens, len(tokens) - 1, ids, params, 0)
    batch = Batch.decode(int_array([0]))
    taken: dict[bool, list[float]] = {True: [], False: []}
    step_id = 1 << 30
    for index in range(2 * rounds + 2):
        is_mapping = index % 2 == 0
        step_id += 2
        if is_mapping and index:
            hide = MapBlocks(slots, places, 0 * ids)
            executor.launch(StepPlan(step_id - 1, Batch.empty(), commands=(hide,)))
            executor.collect()
        commands = (MapBlocks(slots, places, ids),) if is_mapping else ()
        started = time.perf_counter()
        executor.launch(StepPlan(step_id, batch, row_inits=(init,), commands=commands))
        executor.collect()
        if index > 1:
            taken[is_mapping].append(time.perf_counter() - started)
    difference = statistics.median(taken[True]) - statistics.median(taken[False])
    return max(difference, 0.0) / count
