"""Attention through slots against the gathering reference: the same bytes, the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from execution.attention.test_cpu import TOLERANCE, make_rope, make_step
from octavo.core.layout import KVLayout, smallest_mappable_block_size
from octavo.core.plan import MapBlocks
from octavo.execution.arena import Arena
from octavo.execution.attention.contiguous import ContiguousAttention, RunAttention
from octavo.execution.attention.gather import GatherAttention
from octavo.execution.attention.interface import StepRows
from octavo.execution.pages.interface import host_page_bytes
from octavo.execution.virtual_arena import VirtualArena
from toy_executor import as_ids

SPANS = [(0, 1), (1, 1), (31, 1), (200, 1), (0, 300), (5, 3), (40, 9), (130, 129), (16, 16)]


def map_tables(arena: VirtualArena, step: StepRows) -> None:
    """Each row's slot shows exactly its blocks; what is behind them may not be touched."""
    slots, places = np.nonzero(step.tables)
    block_ids = step.tables[slots, places]
    arena.obey((MapBlocks(as_ids(slots), as_ids(places), as_ids(block_ids)),))
    arena.settle()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 80)])
@pytest.mark.parametrize("window", [0, 7])
def test_equals_the_reference(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int
) -> None:
    torch.manual_seed(0)
    layers, layer = 4, 1
    layout = KVLayout(layers, kv_heads, dim, dtype.itemsize, 1)
    size = smallest_mappable_block_size(layout, host_page_bytes())
    layout = KVLayout(layers, kv_heads, dim, dtype.itemsize, size)
    num_blocks = sum(-(-(s + c) // size) for s, c in SPANS) + 3
    step = make_step(SPANS, size, num_blocks)
    rope = make_rope(dim)
    slow = Arena(layout, num_blocks, dtype)
    fast = VirtualArena(
        layout, num_blocks, dtype, num_slots=len(step.tables), max_model_len=300 + size
    )
    fast.kv.normal_()
    slow.kv.copy_(fast.kv)
    map_tables(fast, step)
    qkv = torch.randn(step.num_tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    expected = GatherAttention(slow, heads, rope, window).plan(step)(layer, qkv.clone())
    got = ContiguousAttention(fast, heads, rope, window).plan(step)(layer, qkv.clone())
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(fast.kv, slow.kv, atol=tolerance, rtol=tolerance)
    untouched = [other for other in range(layers) if other != layer]
    assert torch.equal(fast.kv[:, :, untouched], slow.kv[:, :, untouched])
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [0, 7])
def test_runs_of_the_pool_equal_the_reference(window: int) -> None:
    torch.manual_seed(0)
    heads, kv_heads, dim, size = 6, 2, 24, 4
    layout = KVLayout(3, kv_heads, dim, 4, size)
    counts = [-(-(start + count) // size) for start, count in SPANS]
    step = make_step(SPANS, size, sum(counts) + 3)
    first = 3
    for row, count in zip(step.rows.tolist(), counts, strict=True):
        step.tables[row, :count] = np.arange(first, first + count)
        first += count
    rope = make_rope(dim)
    slow, fast = (Arena(layout, sum(counts) + 3, torch.float32) for _ in range(2))
    slow.kv.normal_()
    fast.kv.copy_(slow.kv)
    qkv = torch.randn(step.num_tokens, (heads + 2 * kv_heads) * dim)
    expected = GatherAttention(slow, heads, rope, window).plan(step)(1, qkv.clone())
    got = RunAttention(fast, heads, rope, window).plan(step)(1, qkv.clone())
    assert torch.equal(fast.kv, slow.kv)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


def test_reads_in_place() -> None:
    """No gather: keys and values given to the kernel are views of the slot."""
    layout = KVLayout(2, 2, 16, 4, 32)
    arena = VirtualArena(layout, 4, torch.float32, num_slots=2, max_model_len=128)
    keys = arena.slots[1, :50, 1, 0]
    assert keys.shape == (50, 2, 16)
    assert keys.stride() == (layout.token_elements, 16, 1)
    assert (
        keys.data_ptr() == arena.slots.data_ptr() + 4 * (128 + 0) * layout.token_elements + 4 * 64
    )
