"""Slots in driver pages on a real GPU: every kernel that reads them, with nothing mapped behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from execution.gpu.references import assert_attends, attend_in_order, ints
from octavo.core.layout import KVLayout
from octavo.core.plan import MapBlocks, int_array
from octavo.execution.attention.dense import PIECE, DenseChunk, dense_attention
from octavo.execution.attention.flash3 import find_flash3
from octavo.execution.attention.paged import PagedAttention, PagedStep, RowSpans
from octavo.execution.attention.stock import StockSlotAttention
from octavo.execution.device import CUDADevice
from octavo.execution.kernels.prefill_attention import PrefillTiles, tile_tokens
from octavo.execution.models.rope import RopeTable
from octavo.execution.pages.cuda import CudaPages
from octavo.execution.virtual_device_arena import VirtualDeviceArena

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
HEADS, KV_HEADS, DIM, LAYERS = 32, 8, 128, 8
DTYPE = torch.bfloat16
# 32 KiB a token: 64 tokens in a block of one driver page.
SIZE = 64
NEEDS_FLASH3 = pytest.mark.skipif(
    not torch.cuda.is_available() or find_flash3() is None, reason="needs FlashAttention-3"
)


def make(num_blocks: int, num_slots: int, max_model_len: int) -> VirtualDeviceArena:
    layout = KVLayout(LAYERS, KV_HEADS, DIM, DTYPE.itemsize, SIZE)
    device = CUDADevice()
    pages = CudaPages(layout.block_bytes)
    arena = VirtualDeviceArena(
        layout, num_blocks, DTYPE, device, num_slots=num_slots, max_model_len=max_model_len,
        pages=pages,
    )  # fmt: skip
    arena.kv.normal_()
    return arena


def show(arena: VirtualDeviceArena, slot: int, count: int, first_block: int) -> list[int]:
    """``count`` blocks, the last first, at the start of a slot; nothing behind them."""
    blocks = list(range(first_block + count - 1, first_block - 1, -1))
    places = int_array(range(count))
    arena.slots.order(MapBlocks(0 * places + slot, places, int_array(blocks)))
    arena.slots.mapper.wait()
    return blocks


def expected(queries: torch.Tensor, keys: torch.Tensor, start: int) -> torch.Tensor:
    """``queries [count, heads, dim]`` from position ``start``; ``keys [n, 2, kv_heads, dim]``."""
    q = queries.float().transpose(0, 1)
    k, v = (
        part.float().repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1)
        for part in (keys[:, 0], keys[:, 1])
    )
    place = torch.arange(len(keys), device=q.device)
    seen = place[None, :] <= place[start : start + q.shape[1], None]
    scores = (q @ k.transpose(1, 2) * DIM**-0.5).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def flash3_attention(*args: Any, **options: Any) -> PagedAttention:
    return PagedAttention(*args, **options, flash3=find_flash3())


@pytest.mark.parametrize(
    "kind", [PagedAttention, StockSlotAttention, pytest.param(flash3_attention, marks=NEEDS_FLASH3)]
)
def test_no_kernel_reads_behind_what_is_mapped(kind: Callable[..., PagedAttention]) -> None:
    """Rows of one token, chunks, and a long one for cuDNN or FlashAttention-3, in one slot each;
    every row's last block is full, so that the very next address is unmapped."""
    device = torch.device("cuda")
    max_len = 8 * PIECE
    arena = make(200, 6, max_len)
    rope = RopeTable(torch.zeros(max_len, 0, device=device), torch.zeros(max_len, 0, device=device))
    backend = kind(arena, HEADS, rope, DTYPE, max_decode=8, max_length=max_len)
    # row, tokens before, tokens now
    chunks = [(4, 127, 1), (0, 6 * SIZE - 1, 1), (2, SIZE, 2 * SIZE), (1, PIECE, 2 * PIECE)]
    tables = torch.zeros(7, max_len // SIZE, dtype=torch.int32, device=device)
    first_block = 1
    for row, start, count in chunks:
        blocks = show(arena, row, (start + count) // SIZE, first_block)
        tables[row, : len(blocks)] = ints(blocks, device)
        first_block += len(blocks)
    counts = [count for _, _, count in chunks]
    rows = torch.repeat_interleave(
        ints([row for row, _, _ in chunks], device), ints(counts, device)
    )
    positions = torch.cat(
        [torch.arange(s, s + c, dtype=torch.int32, device=device) for _, s, c in chunks]
    )
    per_tile = tile_tokens(HEADS, KV_HEADS, DTYPE)
    offset = 2 + 0
    tiles = [
        (offset + within, count, 2, SIZE + within, 0, SIZE + within + count, -1, 0, 1)
        for within in range(0, 2 * SIZE, per_tile)
        for count in (min(per_tile, 2 * SIZE - within),)
    ]
    on_host = np.array(
        [[4, 0, 2, 0], [128, 6 * SIZE, 3 * SIZE, 0], [0, 1, 2, 2 + 2 * SIZE]], dtype=np.int32
    )
    spans = RowSpans(
        *torch.from_numpy(on_host).to(device), max_count=2 * SIZE, on_host=on_host,
        tokens=torch.arange(2 + 2 * SIZE, device=device),
    )  # fmt: skip
    step = PagedStep(
        rows, positions, tables, num_decode=ints([2], device), max_decode=2,
        tiles=PrefillTiles(
            ints([list(column) for column in zip(*tiles, strict=True)], device),
            ints([len(tiles)], device),
        ),
        dense=(DenseChunk(1, 2 + 2 * SIZE, 2 * PIECE, PIECE),),
        in_slots=True, max_length=3 * PIECE, spans=spans,
    )  # fmt: skip
    layer = 5
    qkv = torch.randn(len(rows), (HEADS + 2 * KV_HEADS) * DIM, device=device).to(DTYPE)
    out = attend_in_order(backend, step, layer, qkv).view(len(rows), HEADS, DIM)
    torch.cuda.synchronize()
    queries = qkv.view(len(rows), -1, DIM)[:, :HEADS]
    first = 0
    for row, start, count in chunks:
        own = slice(first, first + count)
        keys = arena.slots.tensor[row, : start + count, layer]
        assert_attends(out[own], expected(queries[own], keys, start), DTYPE)
        first += count


@NEEDS_FLASH3
@pytest.mark.parametrize(
    ("start", "count"),
    [
        (0, 32 * SIZE),
        (SIZE, 32 * SIZE),
        (3 * SIZE, 32 * SIZE),  # 2240 keys: whole tiles of neither 128 nor 176
        (5, 34 * SIZE - 5),
        (7, 34 * SIZE),  # 7 tokens of a last block, and nothing behind that
    ],
)
def test_flash3_ends_at_the_last_mapped_page(start: int, count: int) -> None:
    """It loads keys in tiles, of which the last would reach into the page behind."""
    length, flash3 = start + count, find_flash3()
    num_places = -(-length // SIZE)
    arena = make(2 * num_places + 1, 2, 2 * num_places * SIZE)
    queries = torch.randn(count + 3, HEADS, DIM, device="cuda").to(DTYPE)
    for row in (0, 1):
        show(arena, row, num_places, 1 + row * num_places)
        assert arena.slots.mapper.num_shown(row) == num_places < arena.slots.num_places
        kv_layer = arena.slots.tensor[:, :, LAYERS - 1]
        out = torch.full_like(queries, float("nan"))
        chunk = DenseChunk(row=row, offset=3, count=count, start=start)
        dense_attention(queries, kv_layer, None, chunk, out, flash3=flash3)
        torch.cuda.synchronize()
        assert_attends(out[3:], expected(queries[3:], kv_layer[row, :length], start), DTYPE)
        assert out[:3].isnan().all()


@pytest.mark.parametrize("kind", [PagedAttention, StockSlotAttention])
def test_decode_alone_in_a_captured_graph_follows_what_is_remapped(
    kind: type[PagedAttention],
) -> None:
    device = torch.device("cuda")
    arena = make(40, 4, 4 * SIZE)
    empty = torch.zeros(4 * SIZE, 0, device=device)
    backend = kind(arena, HEADS, RopeTable(empty, empty), DTYPE, max_decode=4, max_length=4 * SIZE)
    tables = torch.zeros(5, 4, dtype=torch.int32, device=device)
    rows, positions = ints([3, 1], device), ints([2 * SIZE - 1, SIZE - 1], device)
    qkv = torch.randn(2, (HEADS + 2 * KV_HEADS) * DIM, device=device).to(DTYPE)
    step = PagedStep(
        rows, positions, tables, num_decode=ints([2], device), max_decode=2, in_slots=True,
        max_length=2 * SIZE,
    )  # fmt: skip

    def fill(first_block: int) -> None:
        for row, count in ((3, 2), (1, 1)):
            blocks = show(arena, row, count, first_block)
            tables[row, :count] = ints(blocks, device)
            first_block += count

    fill(1)
    found = []
    attend_in_order(backend, step, 2, qkv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = attend_in_order(backend, step, 2, qkv)
    for first_block in (1, 20):
        fill(first_block)
        graph.replay()
        torch.cuda.synchronize()
        found.append(out.clone())
        queries = qkv.view(2, -1, DIM)[:, :HEADS]
        for token, (row, length) in enumerate(((3, 2 * SIZE), (1, SIZE))):
            keys = arena.slots.tensor[row, :length, 2]
            own = slice(token, token + 1)
            found_own = out.view(2, HEADS, DIM)[own]
            assert_attends(found_own, expected(queries[own], keys, length - 1), DTYPE)
    assert not torch.equal(*found)


def test_a_pool_gives_its_memory_back() -> None:
    """Five pools of 40 GB, one after the other, fit no GPU together."""
    for _ in range(5):
        arena = make(20_000, 4, 100 * SIZE)
        show(arena, 2, 50, 7)
        torch.cuda.synchronize()
        pages = arena.pages
        assert pages.num_handles == 20_000
        del arena
        assert pages.num_handles == 0
