"""Stock kernels over runs of blocks in the pool itself (`--kv contiguous --attention stock`): the
kernels on a GPU; elsewhere stand-ins, in float32, to which an engine must say the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.tiny_engine import build, run
from execution.gpu.fake_stock import Calls, standing_in
from execution.gpu.references import Pool, assert_attends, attend, attend_in_order, ints
from execution.gpu.test_gpu_engine import BLOCK_SIZE, MAX_NUM_SEQS, ON_GPU, gpu_engine, requests
from execution.models.tiny_models import tiny_mistral, tiny_qwen3
from octavo.core.layout import KVLayout
from octavo.core.plan import NO_DELTAS, RowForks, RowInit, TableDeltas, int_array
from octavo.core.request import BeamResult
from octavo.core.sampling_params import SamplingParams
from octavo.execution import graphs
from octavo.execution.attention import dense, paged
from octavo.execution.attention.dense import DenseChunk
from octavo.execution.attention.paged import PagedStep, RowSpans
from octavo.execution.attention.stock import StockRunAttention
from octavo.execution.device import CUDADevice, PlainDevice
from octavo.execution.device_arena import DeviceArena
from octavo.execution.kernels.prefill_attention import PrefillTiles
from octavo.execution.models.rope import RopeTable

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
only_on_cpu = pytest.mark.skipif(ON_GPU, reason="FlashAttention-2 does not run in float32")
NUM_ROWS, LAYERS, LAYER = 6, 3, 1
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
HEADS, KV_HEADS, DIM, SIZE = (32, 8, 128, 16) if ON_GPU else (4, 2, 16, 4)
# Tokens before a chunk for cuDNN, and its own: any numbers will do for the stand-in.
DENSE = (dense.PIECE, 2 * dense.PIECE) if ON_GPU else (5, 6)
MAX_LEN = 4 * dense.PIECE if ON_GPU else 64
NO_FORKS = RowForks(int_array([]), int_array([]), int_array([]))


@pytest.fixture
def kernels() -> Iterator[Calls | None]:
    """Calls of the stand-ins; None on a GPU."""
    with nullcontext() if ON_GPU else standing_in() as calls:
        yield calls


@dataclass(slots=True)
class Runs:
    """A backend whose pool is NaN wherever no row has a token."""

    arena: DeviceArena
    backend: StockRunAttention
    tables: torch.Tensor

    def place(self, row: int, first_block: int, start: int, count: int) -> None:
        """The row's run begins at ``first_block``; ``start`` tokens are there, more will be."""
        num_blocks = -(-(start + count) // SIZE)
        place = self.tables.device
        self.tables[row, :num_blocks] = torch.arange(num_blocks, device=place) + first_block
        tokens = self.arena.kv.view(-1, *self.arena.kv.shape[2:])[first_block * SIZE :]
        tokens[: num_blocks * SIZE] = float("nan")
        tokens[:start] = torch.randn(start, *tokens.shape[1:], device=place).to(DTYPE)

    def expected(self, qkv: torch.Tensor, row: int, start: int, window: int) -> torch.Tensor:
        """Float32, of the row's tokens ``qkv`` from ``start`` on, which have been written."""
        queries = qkv.view(len(qkv), -1, DIM)[:, :HEADS]
        return attend(queries, Pool(self.arena.kv[:, :, LAYER], self.tables), row, start, window)


def make(device: torch.device, window: int = 0) -> Runs:
    layout = KVLayout(LAYERS, KV_HEADS, DIM, DTYPE.itemsize, SIZE)
    kind = CUDADevice() if ON_GPU else PlainDevice()
    arena = DeviceArena(layout, NUM_ROWS * MAX_LEN // SIZE, DTYPE, kind)
    arena.kv[1:] = float("nan")
    empty = torch.zeros(MAX_LEN, 0, device=device)
    backend = StockRunAttention(
        arena, HEADS, RopeTable(empty, empty), DTYPE, max_decode=NUM_ROWS, max_length=MAX_LEN,
        sliding_window=window,
    )  # fmt: skip
    tables = torch.zeros(NUM_ROWS + 1, MAX_LEN // SIZE, dtype=torch.int32, device=device)
    return Runs(arena, backend, tables)


def random_qkv(count: int, device: torch.device) -> torch.Tensor:
    return torch.randn(count, (HEADS + 2 * KV_HEADS) * DIM, device=device).to(DTYPE)


def init(row: int, first_block: int) -> RowInit:
    ids = int_array([first_block, first_block + 1])
    return RowInit(row, int_array([7]), 0, ids, SamplingParams(), seed=0)


@pytest.mark.parametrize(("window", "is_dense"), [(0, False), (0, True), (SIZE + 1, False)])
def test_chunks_beside_rows_that_decode(
    device: torch.device, kernels: Calls | None, window: int, is_dense: bool
) -> None:
    """Rows lie in the pool in another order than in the step; a long chunk has a prefix."""
    runs = make(device, window)
    # row, first block, tokens before, tokens now
    chunks = [(4, 9, 2 * SIZE, 1), (0, 1, 6 * SIZE - 1, 1), (2, 30, SIZE, SIZE + 3), (5, 20, 0, 3)]
    spans, num_in_spans = len(chunks), sum(count for *_, count in chunks)
    if is_dense:
        chunks.append((1, 40, *DENSE))
    for chunk in chunks:
        runs.place(*chunk)
    host_tables = {row: first_block for row, first_block, *_ in chunks}
    runs.backend.follow(tuple(init(*pair) for pair in host_tables.items()), NO_FORKS, NO_DELTAS)
    rows, _, starts, counts = zip(*chunks, strict=True)
    first = [0, *np.cumsum(counts[:spans]).tolist()]
    ends = [start + count for _, _, start, count in chunks[:spans]]
    on_host = int_array([[*rows[:spans], 0], [*ends, 0], first])
    step = PagedStep(
        torch.repeat_interleave(ints(rows, device), ints(counts, device)),
        torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        .int()
        .to(device),
        runs.tables,
        num_decode=ints([2], device),
        max_decode=2,
        tiles=PrefillTiles(torch.zeros(9, 1, dtype=torch.int32, device=device), ints([1], device)),
        dense=(DenseChunk(1, num_in_spans, DENSE[1], DENSE[0]),) if is_dense else (),
        max_length=MAX_LEN,
        spans=RowSpans(
            *torch.from_numpy(on_host).to(device), max_count=SIZE + 3, on_host=on_host,
            tokens=torch.arange(num_in_spans, device=device) if is_dense else None,
        ),
    )  # fmt: skip
    qkv = random_qkv(sum(counts), device)
    out = attend_in_order(runs.backend, step, LAYER, qkv).view(-1, HEADS, DIM)
    begin = 0
    for row, _, start, count in chunks:
        own = slice(begin, begin + count)
        expected = runs.expected(qkv[own], row, start, window)
        assert_attends(out[own], expected, DTYPE)
        begin += count
    if kernels is not None:
        # The chunk itself, and 5 tokens of a prefix in powers of two.
        assert (kernels.flash, kernels.cudnn) == (1, 3 if is_dense else 0)


def test_decode_alone_goes_by_the_devices_tables(
    device: torch.device, kernels: Calls | None
) -> None:
    """In a captured graph on a GPU: replayed when the same rows have got other runs. Nobody tells
    the host of them. The last row is padding."""
    runs = make(device)
    rows, positions = ints([3, 1, NUM_ROWS], device), ints([0, 0, 0], device)
    step = PagedStep(
        rows, positions, runs.tables, num_decode=ints([3], device), max_decode=3,
        max_length=3 * SIZE,
    )  # fmt: skip
    qkv = random_qkv(3, device)

    def work() -> torch.Tensor:
        return attend_in_order(runs.backend, step, LAYER, qkv)

    work()
    graph, out = None, torch.empty(0)
    if ON_GPU:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = work()
    for lengths in ({3: (1, 2 * SIZE), 1: (9, SIZE + 1)}, {1: (2, 1), 3: (30, 3 * SIZE)}):
        runs.arena.kv[1:] = float("nan")
        for token, row in enumerate((3, 1)):
            first_block, length = lengths[row]
            runs.place(row, first_block, length - 1, 1)
            positions[token] = length - 1
        if graph is None:
            out = work()
        else:
            graph.replay()
        for token, row in enumerate((3, 1)):
            own = slice(token, token + 1)
            expected = runs.expected(qkv[own], row, lengths[row][1] - 1, 0)
            assert_attends(out.view(3, HEADS, DIM)[own], expected, DTYPE)


def test_the_host_follows_where_rows_begin(device: torch.device, kernels: Calls | None) -> None:
    """Rows that start, forks as the rows were before any of them, then single entries."""
    runs = make(device)
    start, count = DENSE
    length = start + count
    firsts = (11, 11 + -(-length // SIZE))
    follow = runs.backend.follow
    follow((init(0, 5), init(1, firsts[0])), NO_FORKS, NO_DELTAS)
    crossed = RowForks(int_array([0, 1]), int_array([1, 0]), int_array([3, 3]))
    # The second entry of row 0 is not where it begins.
    changes = ([0, 1], [1, 0], [40, firsts[1]])
    follow((), crossed, TableDeltas(*map(int_array, changes)))
    queries = torch.randn(2 * count, HEADS, DIM, device=device).to(DTYPE)
    out = torch.empty_like(queries)
    chunks = tuple(DenseChunk(row, row * count, count, start) for row in (0, 1))
    for row, first_block in enumerate(firsts):
        runs.place(row, first_block, length, 0)
    step = PagedStep(
        ints([], device), ints([], device), runs.tables, ints([0], device), 0, dense=chunks
    )
    runs.backend.attend_densely(step, LAYER, queries, out)
    for chunk in chunks:
        own = slice(chunk.offset, chunk.offset + count)
        pool = Pool(runs.arena.kv[:, :, LAYER], runs.tables)
        expected = attend(queries[own], pool, chunk.row, start)
        assert_attends(out[own], expected, DTYPE)


class Replaying(PlainDevice):
    """Steps are padded and looked up as captured ones are."""

    def capture(self, work: Any, pool: Any) -> Any:
        return work


@only_on_cpu
@pytest.mark.parametrize(
    ("depth", "chunk", "is_captured", "is_dense"),
    [(1, 5, False, False), (2, 32, True, False), (2, 8, True, True)],
)
def test_tokens_are_those_of_paging(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernels: Calls,
    depth: int,
    chunk: int,
    is_captured: bool,
    is_dense: bool,
) -> None:
    """Samples, beams and penalties; long chunks with prefixes, where four tokens are long."""
    tiny_qwen3(head_dim=16).save_pretrained(tmp_path)
    plain, _ = build(tmp_path, max_num_seqs=MAX_NUM_SEQS, block_size=BLOCK_SIZE)
    expected = run(plain, requests(), beams={})
    plain.close()
    if is_dense:
        monkeypatch.setattr(paged, "is_supported", lambda *_: True)
        monkeypatch.setattr(dense, "PIECE", 4)
        for room in (dense, graphs):
            monkeypatch.setattr(room, "MIN_TOKENS", 4)
    core = gpu_engine(
        tmp_path, num_blocks=33, depth=depth, chunk=chunk, kv="contiguous", attention="stock"
    )
    step_graphs = core.executor.runner.graphs  # type: ignore[attr-defined]
    if is_captured:
        step_graphs._device, step_graphs._captures = Replaying(), True
    beams: dict[int, BeamResult] = {}
    assert run(core, requests(), beams=beams) == expected
    assert beams
    assert core.scheduler.manager.num_free_blocks == 32
    assert kernels.flash
    assert bool(kernels.cudnn) == is_dense
    assert bool(step_graphs.num_captured) == is_captured
    core.close()


@only_on_cpu
def test_a_window_is_kept(tmp_path: Path, kernels: Calls) -> None:
    tiny_mistral(sliding_window=8).save_pretrained(tmp_path)
    plain, _ = build(tmp_path, max_num_seqs=MAX_NUM_SEQS, block_size=BLOCK_SIZE)
    asked = requests()[:1]
    expected = run(plain, asked)
    plain.close()
    core = gpu_engine(
        tmp_path, num_blocks=33, depth=2, chunk=32, kv="contiguous", attention="stock"
    )
    assert run(core, asked) == expected
    assert kernels.flash
    core.close()
