"""The compiled backend against its PyTorch reference, on odd shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.core.layout import KVLayout
from octavo.core.plan import CopyBlocks
from octavo.execution.arena import Arena
from octavo.execution.attention.cpu import CPUAttention
from octavo.execution.attention.gather import GatherAttention
from octavo.execution.attention.interface import StepRows
from octavo.execution.models.rope import RopeTable
from toy_executor import as_ids

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def make_rope(rotary_dim: int, positions: int = 2048) -> RopeTable:
    angles = torch.outer(
        torch.arange(positions).float(), 0.3 ** torch.arange(rotary_dim // 2).float()
    )
    return RopeTable(angles.cos(), angles.sin())


def make_step(spans: list[tuple[int, int]], block_size: int, num_blocks: int) -> StepRows:
    """``spans`` are (start, count) a row; blocks are dealt out in random order."""
    ids = np.random.default_rng(0).permutation(np.arange(1, num_blocks)).astype(np.int32)
    width = max(-(-(s + c) // block_size) for s, c in spans) + 1
    tables = np.zeros((len(spans) + 2, width), dtype=np.int32)
    rows, used = np.arange(len(spans))[::-1] + 1, 0
    for row, (start, count) in zip(rows, spans, strict=True):
        need = -(-(start + count) // block_size)
        tables[row, :need] = ids[used : used + need]
        used += need
    counts = as_ids([c for _, c in spans])
    positions = np.concatenate([np.arange(s, s + c) for s, c in spans]).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int32)
    starts = as_ids([s for s, _ in spans])
    return StepRows(rows.astype(np.int32), counts, offsets, starts, positions, tables)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [(9, 3, 64, 16), (4, 4, 16, 1), (8, 1, 80, 5), (6, 2, 24, 32)],
)
@pytest.mark.parametrize("window", [0, 7])
def test_equals_the_reference(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block_size: int, window: int
) -> None:
    torch.manual_seed(0)
    layers, layer = 3, 1
    spans = [(0, 1), (1, 1), (31, 1), (200, 1), (0, 300), (5, 3), (40, 9), (130, 129), (16, 16)]
    num_blocks = sum(-(-(s + c) // block_size) for s, c in spans) + 3
    step = make_step(spans, block_size, num_blocks)
    layout = KVLayout(layers, kv_heads, dim, dtype.itemsize, block_size)
    rope = make_rope(dim)
    fast, slow = Arena(layout, num_blocks, dtype), Arena(layout, num_blocks, dtype)
    fast.kv.normal_()
    slow.kv.copy_(fast.kv)
    qkv = torch.randn(step.num_tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    expected = GatherAttention(slow, heads, rope, window).plan(step)(layer, qkv.clone())
    got = CPUAttention(fast, heads, rope, window).plan(step)(layer, qkv.clone())
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(fast.kv, slow.kv, atol=tolerance, rtol=tolerance)
    untouched = [other for other in range(layers) if other != layer]
    assert torch.equal(fast.kv[:, :, untouched], slow.kv[:, :, untouched])
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("way", ["plain", "fp32 products", "as this CPU"])
def test_chunks_of_long_contexts_equal_the_reference(
    dtype: torch.dtype, window: int, way: str
) -> None:
    """Several blocks of keys; and what CPUs without AVX512, or without its bfloat16, do."""
    torch.manual_seed(2)
    heads, kv_heads, dim, block_size = 5, 1, 40, 16
    step = make_step([(700, 33), (0, 8), (1000, 70)], block_size, 130)
    layout = KVLayout(1, kv_heads, dim, dtype.itemsize, block_size)
    rope = make_rope(dim)
    fast, slow = Arena(layout, 130, dtype), Arena(layout, 130, dtype)
    fast.kv.normal_()
    slow.kv.copy_(fast.kv)
    qkv = torch.randn(step.num_tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    expected = GatherAttention(slow, heads, rope, window).plan(step)(0, qkv.clone())
    backend = CPUAttention(fast, heads, rope, window)
    if way == "plain":
        backend.has_chunk_kernel = False
    elif way == "fp32 products":
        backend.chunk_dtype = torch.float32
    got = backend.plan(step)(0, qkv.clone())
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def test_a_chunk_equals_its_tokens_one_by_one() -> None:
    """Where a prompt is cut into chunks must not matter."""
    torch.manual_seed(1)
    layout = KVLayout(1, 2, 16, 4, 4)
    rope = make_rope(16)
    qkv = torch.randn(40, 8 * 16)
    outs = []
    for cuts in ([40], [7, 7, 7, 7, 7, 5], [1] * 40, [33, 7]):
        arena = Arena(layout, 12, torch.float32)
        backend = CPUAttention(arena, 4, rope)
        parts, start = [], 0
        for count in cuts:
            step = make_step([(start, count)], 4, 12)
            table = make_step([(0, 40)], 4, 12).tables
            step = StepRows(
                step.rows, step.counts, step.offsets, step.starts, step.positions, table
            )
            parts.append(backend.plan(step)(0, qkv[start : start + count].clone()))
            start += count
        outs.append(torch.cat(parts))
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], atol=1e-5, rtol=1e-5)


def test_partial_rotation_leaves_the_rest_of_a_head_alone() -> None:
    layout = KVLayout(1, 1, 16, 4, 4)
    step = make_step([(3, 1)], 4, 4)
    fast, slow = Arena(layout, 4, torch.float32), Arena(layout, 4, torch.float32)
    qkv = torch.randn(1, 3 * 16)
    rope = make_rope(8)
    CPUAttention(fast, 1, rope).plan(step)(0, qkv.clone())
    GatherAttention(slow, 1, rope).plan(step)(0, qkv.clone())
    torch.testing.assert_close(fast.kv, slow.kv, atol=1e-6, rtol=1e-6)
    block_id, offset = step.tables[1, 0], 3
    assert torch.equal(fast.kv[block_id, offset, 0, 0, 0, 8:], qkv[0, 24:32])


def test_copy_blocks_copies_whole_blocks() -> None:
    layout = KVLayout(2, 1, 4, 4, 2)
    arena = Arena(layout, 5, torch.float32)
    arena.kv.normal_()
    before = arena.kv.clone()
    arena.obey((CopyBlocks(as_ids([1, 1, 2]), as_ids([3, 4, 0])),))
    assert torch.equal(arena.kv[3], before[1])
    assert torch.equal(arena.kv[4], before[1])
    assert torch.equal(arena.kv[1], before[1])
