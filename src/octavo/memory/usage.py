"""Where the pool's token slots are: an exact split, worked out from the block tables when asked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.core.plan import IntArray, KVUsage, int_array
from octavo.memory.block_pool import BlockPool


def check_usage(usage: KVUsage) -> None:
    """Raise AssertionError when the parts are not those of a whole."""
    parts = (
        usage.live
        + usage.cached
        + usage.reserved
        + usage.internal_waste
        + usage.external_waste
        + usage.free
    )
    assert parts == usage.capacity, f"usage does not sum to the capacity: {usage}"
    assert min(usage.internal_waste, usage.reserved) >= 0, f"negative waste: {usage}"


def split_pool(
    pool: BlockPool,
    block_size: int,
    tables: Sequence[list[int]],
    num_known: IntArray,
    num_computed: IntArray,
    num_pinned_idle: int = 0,
) -> KVUsage:
    """``num_known`` and ``num_computed`` are tokens by row, as ``tables`` are;
    ``num_pinned_idle`` blocks are referenced but in no table: full ones that are kept."""
    size = block_size
    live = np.zeros(pool.num_blocks, dtype=np.int64)
    known = np.zeros(pool.num_blocks, dtype=np.int64)
    for row, table in enumerate(tables):
        if not table:
            continue
        block_ids = int_array(table)
        starts = np.arange(len(table), dtype=np.int64) * size
        computed = int(num_computed[row])
        filled = np.clip(computed - starts, 0, size)
        wanted = np.clip(max(int(num_known[row]), computed) - starts, 0, size)
        live[block_ids] = np.maximum(live[block_ids], filled)
        known[block_ids] = np.maximum(known[block_ids], wanted)
    capacity = pool.num_usable * size
    free = (pool.num_free - pool.num_cached) * size
    cached = (pool.num_cached + num_pinned_idle) * size
    num_live = int(live.sum())
    num_reserved = int(known.sum()) - num_live
    return KVUsage(
        capacity=capacity,
        live=num_live,
        cached=cached,
        reserved=num_reserved,
        internal_waste=capacity - free - cached - num_live - num_reserved,
        external_waste=0,
        free=free,
    )
