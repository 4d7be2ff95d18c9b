"""What copying, swapping and mapping blocks takes, by plans that do nothing else.

Each is timed at two sizes. What grows with the blocks is the slope between them; what is there
however few they are (launching, sending their ids, waking the mapping thread) is a figure of its
own, so that a rate does not depend on how many blocks were moved to find it. The least of several
rounds counts: what disturbs a machine makes them longer, never shorter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from octavo.config import ConfigError
from octavo.core.plan import (
    NULL_BLOCK,
    Batch,
    CopyBlocks,
    IntArray,
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

_MOST_BLOCKS = 128
_FEWER = 8
# Stands for a rate where more blocks took no longer than few.
_SHORTEST_S = 1e-9


def measure_moves(executor: Executor, *, rounds: int = 9) -> dict[str, float]:
    """Of copying blocks ``copy_rate``, bytes a second, and ``copy_step_s``, what a plan that copies
    takes beside that; with host memory ``swap_rate``. What a swap takes however small is left out:
    it does not keep a step waiting on a GPU, and on a CPU there is next to none. Nothing may run.

    Raises:
        ConfigError: the pool is too small.
    """
    capacity = executor.capacity
    step_id = 1 << 30

    def run(commands: Sequence[KVCommand]) -> tuple[int, ...]:
        nonlocal step_id
        step_id += 1
        executor.launch(StepPlan(step_id, Batch.empty(), commands=tuple(commands)))
        return executor.collect().finished_transfers

    def seconds(*commands: KVCommand) -> float:
        """Of plans with a command each, and until every swap has arrived."""

        def once() -> None:
            waits = {c.transfer_id for c in commands if isinstance(c, SwapIn)}
            for command in commands:
                waits -= set(run([command]))
            if not commands:
                run([])
            while waits:
                waits -= set(run([]))

        return _least(once, rounds)

    def copied(count: int) -> float:
        ids = int_array(range(1, count + 1))
        return seconds(CopyBlocks(ids, ids + count))

    def swapped(count: int) -> float:
        """Out and in again, so that both are waited for."""
        ids = int_array(range(1, count + 1))
        return seconds(SwapOut(ids, ids - 1), SwapIn(1 << 20, ids - 1, ids))

    each_s, step_s = _slope(copied, _sizes((capacity.num_blocks - 1) // 2))
    rates = {
        "copy_rate": capacity.block_bytes / max(each_s, _SHORTEST_S),
        "copy_step_s": max(step_s - seconds(), 0.0),
    }
    if capacity.num_host_blocks:
        most = min(capacity.num_blocks - 1, capacity.num_host_blocks)
        both_s, _ = _slope(swapped, _sizes(most))
        rates["swap_rate"] = 2 * capacity.block_bytes / max(both_s, _SHORTEST_S)
    return rates


def measure_mapping(executor: Executor, max_model_len: int, *, rounds: int = 9) -> dict[str, float]:
    """Of mapping blocks that a step reads ``map_s`` a block and ``map_step_s``, what such a step
    takes beside that: steps that read blocks mapped for them, less steps that find them mapped.
    What unmaps them in between has ended before either. Nothing may run.

    Raises:
        ConfigError: the pool, or the longest sequence, is too small.
    """
    capacity = executor.capacity
    # The first place stays mapped: whoever reads it waits until the others are not.
    sizes = _sizes(min(capacity.num_blocks - 1, max_model_len // capacity.block_size) - 1)
    places = int_array(range(sizes[1] + 1))
    slots, ids = 0 * places, places + 1
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    step_id = 1 << 30

    def read(num_blocks: int, *commands: KVCommand) -> None:
        """A step of one token that reads the first blocks."""
        nonlocal step_id
        step_id += 1
        tokens = int_array([1] * (num_blocks * capacity.block_size))
        init = RowInit(0, tokens, len(tokens) - 1, ids[:num_blocks], params, 0)
        batch = Batch.decode(int_array([0]))
        executor.launch(StepPlan(step_id, batch, row_inits=(init,), commands=commands))
        executor.collect()

    def hide() -> None:
        order = int_array([*places[1:], 0])
        shown: IntArray = (order == 0) * ids[0] + (order > 0) * NULL_BLOCK
        read(1, MapBlocks(slots, order, shown.astype(ids.dtype)))

    def mapped(count: int) -> float:
        show = MapBlocks(slots[1 : count + 1], places[1 : count + 1], ids[1 : count + 1])
        mapping_s = _least(lambda: read(count + 1, show), rounds, before=hide)
        return mapping_s - _least(lambda: read(count + 1), rounds)

    each_s, step_s = _slope(mapped, sizes)
    return {"map_s": max(each_s, 0.0), "map_step_s": max(step_s, 0.0)}


def _sizes(most: int) -> tuple[int, int]:
    """Few blocks and many, of ``most`` that there are."""
    many = min(_MOST_BLOCKS, most)
    if many < 2:
        raise ConfigError(
            f"blocks are moved to calibrate, and {max(most, 0)} at a time are too few; give more "
            "--kv-memory, or a larger --max-model-len"
        )
    return max(many // _FEWER, 1), many


def _least(once: Callable[[], None], rounds: int, before: Callable[[], object] = int) -> float:
    """Seconds of the fastest of ``rounds``, behind one that does not count; ``before`` each."""
    taken = []
    for _ in range(rounds + 1):
        before()
        started = time.perf_counter()
        once()
        taken.append(time.perf_counter() - started)
    return min(taken[1:])


def _slope(seconds: Callable[[int], float], sizes: tuple[int, int]) -> tuple[float, float]:
    """Seconds of each of so many blocks, and of none: the line through both sizes."""
    few, many = sizes
    few_s, many_s = seconds(few), seconds(many)
    each_s = (many_s - few_s) / (many - few)
    return each_s, few_s - few * each_s
