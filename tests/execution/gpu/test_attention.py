"""Attention over block tables against PyTorch in float32, outputs and unused memory poisoned."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from execution.gpu.attention_runs import (
    GRID,
    SMALL,
    SMALL_TILES,
    run_cuts,
    run_decode,
    run_prefill,
    run_shared,
)
from execution.gpu.references import assert_attends, attend, ints, make_pool
from octavo.execution import prefill_tiles
from octavo.execution.attention.dense import (
    PIECE,
    DenseChunk,
    dense_attention,
    dense_count,
    is_supported,
    pieces,
)
from octavo.execution.kernels.decode_attention import DecodeWorkspace, decode_attention
from octavo.execution.kernels.decode_parts import (
    HELD,
    DecodeParts,
    DecodeTiling,
    decode_parts,
    decode_tiling,
)
from octavo.execution.kernels.merge import gather_keys, merge_attention

ON_GPU = torch.cuda.is_available()
NAN = float("nan")
E4M3 = torch.float8_e4m3fn
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Shape, what is computed in, and what is stored (None: the same).
GRID_KINDS = [(shape, BF16, kv_dtype) for shape in GRID for kv_dtype in (None, E4M3)] + [
    (shape, FP16, kv_dtype) for shape in (GRID[2], GRID[17]) for kv_dtype in (None, E4M3)
]
# How many layers a pool has, and which is read: all strides differ.
LAYERS = [(1, 0), (5, 4)]


@pytest.mark.parametrize(
    ("max_tokens", "heads", "kv_heads", "head_dim", "expected"),
    [
        (32, 32, 8, 128, 1), (127, 32, 8, 128, 1), (128, 32, 8, 128, 2), (1024, 32, 8, 128, 2),
        (128, 32, 8, 64, 2), (256, 32, 8, 64, 4), (1024, 40, 8, 128, 2), (1024, 64, 4, 128, 1),
        (1024, 12, 3, 64, 1), (1024, 32, 32, 64, 4), (1024, 8, 4, 256, 1),
    ],
)  # fmt: skip
def test_kv_heads_that_a_program_reads(
    max_tokens: int, heads: int, kv_heads: int, head_dim: int, expected: int
) -> None:
    """As many as have the query heads of a tile, while their programs fill the GPU."""
    found = decode_tiling(max_tokens, heads, kv_heads, head_dim, 1000, BF16, BF16)
    assert found.kv_heads == expected
    assert found.block_n * found.kv_heads * head_dim <= 16384


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize(("programs", "whole_keys"), [(1, 0), (64, 0), (4000, 0), (64, 128)])
def test_parts_of_decoding_rows(
    device: torch.device, programs: int, whole_keys: int, window: int
) -> None:
    """They cover every key once, in order; none is much longer than an even share, or than what is
    not cut."""
    lengths, heads, min_keys, block_n = [1, 700, 64, 9000, 65, 128], 2, 32, 16
    rows = [3, 1, 5, 0, 2, 4]
    max_tokens = 8
    filler = [0] * (max_tokens - len(rows))
    parts = decode_parts(
        ints([*rows, *filler], device), ints([*(n - 1 for n in lengths), *filler], device),
        ints([len(rows)], device), max_tokens=max_tokens, num_kv_heads=heads, programs=programs,
        tiling=DecodeTiling(block_n, min_keys=min_keys, whole_keys=whole_keys), window=window,
    )  # fmt: skip
    count = int(parts.count)
    assert count <= DecodeParts.bound(len(rows), heads, programs) <= len(parts.table)
    found = parts.table[:count, :6].tolist()
    firsts = [max(length - window, 0) if window else 0 for length in lengths]
    total = sum(length - first for length, first in zip(lengths, firsts, strict=True))
    longest = max(total * heads / programs + block_n, min_keys, whole_keys)
    for token, (row, length, first) in enumerate(zip(rows, lengths, firsts, strict=True)):
        own = [part for part in found if part[0] == token]
        assert [part[1] for part in own] == [row] * len(own)
        assert [part[4] for part in own] == list(range(len(own)))
        assert [part[5] for part in own] == [len(own)] * len(own)
        assert [own[0][2], *(part[3] for part in own)] == [*(part[2] for part in own), length]
        assert own[0][2] == first
        assert len(own) == 1 or length - first > whole_keys
        assert all(0 < part[3] - part[2] <= longest for part in own)
        places = [index for index, part in enumerate(found) if part[0] == token]
        assert places == list(range(places[0], places[0] + len(own)))


@pytest.mark.parametrize(
    ("num_rows", "shortest", "longest"),
    [(HELD // 2 - 1, 500, 600), (HELD // 2, 500, 600), (HELD // 2, 40, 1440), (HELD, 40, 1440)],
)
def test_parts_of_many_rows(
    device: torch.device, num_rows: int, shortest: int, longest: int
) -> None:
    """Of rows that fill the GPU those of like lengths are not cut, nor, where they fill it twice,
    those hardly longer than the mean; the longest come first."""
    columns, block_n, min_keys, programs = 2, 32, 64, 100
    drawn = torch.randint(shortest, longest + 1, (num_rows,))
    drawn[0] = longest
    lengths = drawn.tolist()
    rows = ints(list(range(num_rows)), device)
    parts = decode_parts(
        rows, ints([length - 1 for length in lengths], device), ints([num_rows], device),
        max_tokens=num_rows, num_kv_heads=2 * columns, programs=programs,
        tiling=DecodeTiling(block_n, min_keys=min_keys, whole_keys=0, kv_heads=2),
    )  # fmt: skip
    count = int(parts.count)
    assert count <= DecodeParts.bound(num_rows, columns, programs) == len(parts.table)
    found = parts.table[:count, :6].tolist()
    mean = -(-sum(lengths) // num_rows)
    is_twice = num_rows * columns >= 2 * HELD
    is_alike = num_rows * columns >= HELD and longest <= mean * 5 // 4
    uncut = mean * 5 // 4 if is_twice or is_alike else 0
    span = mean if is_twice else min(-(-sum(lengths) * columns // programs), -(-2 * mean // 3))
    assert is_alike == (count == num_rows)
    own: list[list[list[int]]] = [[] for _ in lengths]
    for part in found:
        own[part[0]].append(part)
    for length, cut in zip(lengths, own, strict=True):
        assert [cut[0][2], *(part[3] for part in cut)] == [*(part[2] for part in cut), length]
        assert [part[4:] for part in cut] == [[index, len(cut)] for index in range(len(cut))]
        assert (len(cut) == 1) == (length <= max(uncut, -(-span // block_n) * block_n))
        assert all(0 < part[3] - part[2] <= max(uncut, span + block_n) for part in cut)
    classes = [
        sum(lengths[part[0]] > bound for bound in (mean // 2, mean, 2 * mean)) for part in found
    ]
    assert classes == sorted(classes, reverse=True)


def test_what_pads_a_step_is_no_row(device: torch.device) -> None:
    """Rows of one length fill the GPU twice, a quarter of the step pads them: none is cut."""
    num_rows, size = 3 * HELD // 4, HELD
    positions = [999] * num_rows + [0] * (size - num_rows)
    parts = decode_parts(
        ints([*range(num_rows), *[num_rows] * (size - num_rows)], device), ints(positions, device),
        ints([size], device), max_tokens=size, num_kv_heads=4, programs=396,
        tiling=DecodeTiling(64, whole_keys=0),
    )  # fmt: skip
    assert int(parts.count) == size


def test_parts_of_padded_rows_are_no_more_than_of_the_rows(device: torch.device) -> None:
    """Lengths that are cut into the most parts: a key more than two thirds of the mean, or twice as
    many. Rows that pad the step make the mean no less."""
    num_rows, size, span = 273, 288, 512
    lengths = [2 * span + 1] * 158 + [span + 1] * (num_rows - 158) + [1] * (size - num_rows)
    parts = decode_parts(
        ints(list(range(size)), device), ints([length - 1 for length in lengths], device),
        ints([size], device), max_tokens=size, num_kv_heads=8, programs=396,
        tiling=DecodeTiling(32, kv_heads=4),
    )  # fmt: skip
    count = int(parts.count)
    assert count - (size - num_rows) <= DecodeParts.bound(num_rows, 2, 396)
    assert parts.table[: count - (size - num_rows), 0].max() < num_rows, "padding comes last"


@pytest.mark.skipif(ON_GPU, reason="a kernel for so many rows is compiled for half a minute")
def test_parts_of_more_rows_than_are_ordered(device: torch.device) -> None:
    """More of a class than its 16 bits count."""
    num_rows = 40_000
    lengths = torch.where(torch.arange(num_rows) % 10 == 0, 1000, 10).int()
    rows = torch.arange(num_rows, dtype=torch.int32)
    parts = decode_parts(
        rows, lengths - 1, ints([num_rows], device), max_tokens=num_rows, num_kv_heads=1,
        programs=396, tiling=DecodeTiling(),
    )  # fmt: skip
    count = int(parts.count)
    assert num_rows < count <= DecodeParts.bound(num_rows, 1, 396)
    found = parts.table[:count].long()
    assert torch.equal(found[:, 0].unique(), rows.long())
    keys = torch.zeros(num_rows, dtype=torch.long)
    keys.index_add_(0, found[:, 0], found[:, 3] - found[:, 2])
    assert torch.equal(keys, lengths.long())


@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.parametrize(("programs", "window"), [(4, 0), (100, 0), (100, 7)])
def test_decode(
    device: torch.device, shape: tuple[int, int, int, int], programs: int, window: int
) -> None:
    run_decode(device, shape, [1, 31, 100], programs=programs, window=window)


@pytest.mark.parametrize(("shape", "kv_heads"), [(SMALL[0], 2), (SMALL[1], 2), (SMALL[1], 4)])
@pytest.mark.parametrize(("programs", "window", "kv_dtype"), [(4, 0, None), (100, 7, E4M3)])
def test_decode_of_more_kv_heads_at_once(
    device: torch.device,
    shape: tuple[int, int, int, int],
    kv_heads: int,
    programs: int,
    window: int,
    kv_dtype: torch.dtype | None,
) -> None:
    run_decode(
        device, shape, [1, 31, 100], programs=programs, window=window, kv_dtype=kv_dtype,
        tiling=DecodeTiling(16, stages=3, min_keys=32, whole_keys=0, kv_heads=kv_heads),
    )  # fmt: skip


def test_decode_where_places_are_not_looked_up_ahead(device: torch.device) -> None:
    tiling = DecodeTiling(16, min_keys=32, whole_keys=0, is_ahead=False)
    run_decode(device, SMALL[0], [1, 31, 100], programs=100, tiling=tiling)


def test_decode_in_more_parts_than_are_added_at_a_time(device: torch.device) -> None:
    run_decode(device, SMALL[0], [1, 300], programs=400)


def test_decode_in_half_precision(device: torch.device) -> None:
    run_decode(device, SMALL[2], [1, 31, 100], programs=100, dtype=FP16)


@pytest.mark.parametrize("layers", LAYERS)
def test_decode_in_one_of_more_or_fewer_layers(
    device: torch.device, layers: tuple[int, int]
) -> None:
    run_decode(device, SMALL[0], [9, 1, 33], programs=100, layers=layers)


@pytest.mark.parametrize(("shape", "window"), [(SMALL[0], 0), (SMALL[1], 7)])
def test_decode_of_fp8(device: torch.device, shape: tuple[int, int, int, int], window: int) -> None:
    run_decode(device, shape, [1, 31, 100], programs=100, window=window, kv_dtype=E4M3)


def test_decode_of_fp8_in_bfloat16(device: torch.device) -> None:
    """Also interpreted: it is computed in float16."""
    run_decode(device, SMALL[0], [1, 31, 100], programs=100, dtype=BF16, kv_dtype=E4M3)


def test_queries_beyond_float16_over_keys_of_fp8(device: torch.device) -> None:
    """One place of them decides, and more than 65,504 is not infinite."""
    pool = make_pool([31], num_kv_heads=1, head_dim=16, block_size=4, dtype=E4M3, device=device)
    queries = torch.zeros(1, 2, 16, device=device, dtype=BF16)
    queries[0, :, 0] = torch.tensor([1e9, -1e5])
    count = ints([1], device)
    parts = decode_parts(
        0 * count, 30 * count, count, max_tokens=1, num_kv_heads=1, programs=1,
        tiling=DecodeTiling(16),
    )  # fmt: skip
    out = torch.full_like(queries, NAN)
    workspace = DecodeWorkspace(len(parts.table), 1, 1, 16, 2, device)
    decode_attention(
        queries, pool.kv_layer, parts, pool.tables, out, workspace, DecodeTiling(16),
        kv_scales=pool.scales,
    )  # fmt: skip
    assert_attends(out, attend(queries, pool, 0, 30), BF16)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize(("shape", "dtype", "kv_dtype"), GRID_KINDS)
def test_decode_over_a_grid(
    device: torch.device,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
) -> None:
    size = shape[3]
    edges = sorted({1, size - 1, size, size + 1, 63, 64, 65, 127, 128, 129, 255, 257, 511, 1000})
    for num_tokens, max_length, programs, window in (
        (1, 1000, 1, 0), (1, 1000, 100, 0), (1, 10**5, 100, 0), (33, 1000, 100, 0),
        (512, 1000, 100, 100), (32, 1000, 100, 0),
    ):  # fmt: skip
        run_decode(
            device, shape, edges, programs=programs, window=window, dtype=dtype,
            kv_dtype=kv_dtype,
            tiling=decode_tiling(num_tokens, *shape[:3], max_length, dtype, kv_dtype or dtype),
        )  # fmt: skip
    run_decode(
        device, shape, [1, 1500], programs=1000, dtype=dtype, kv_dtype=kv_dtype,
        tiling=DecodeTiling(min_keys=64),
    )  # fmt: skip


@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.parametrize("window", [0, 7])
def test_prefill(device: torch.device, shape: tuple[int, int, int, int], window: int) -> None:
    run_prefill(device, shape, [(0, 45), (33, 3)], window=window)


def test_prefill_in_half_precision(device: torch.device) -> None:
    run_prefill(device, SMALL[2], [(0, 21), (33, 3)], dtype=FP16)


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
@pytest.mark.parametrize("shape", [(8, 2, 64, 16), (8, 2, 128, 16), (6, 2, 80, 8)])
def test_a_tokens_bits_are_the_same_in_any_tile(
    device: torch.device, shape: tuple[int, int, int, int], kv_dtype: torch.dtype | None
) -> None:
    """A key is masked in one tile and, for the same token, in another not, where the tile begins
    later: by one token here, by three, and with a token. Interpreted, products are NumPy's, whose
    sums depend on a token's place."""
    length, options = (700, {"dtype": BF16, "block_n": None}) if ON_GPU else (130, {"dtype": FP32})
    cuts = [[length - 75, length], [length - 74, length - 71, length]]
    cuts.append(list(range(length - 74, length + 1)))
    whole, late, single = run_cuts(device, shape, cuts, kv_dtype=kv_dtype, **options)
    for other in (late, single):
        if ON_GPU:
            assert torch.equal(other[1:], whole[1:])
        torch.testing.assert_close(other[1:], whole[1:])


@pytest.mark.parametrize("layers", LAYERS)
def test_prefill_in_one_of_more_or_fewer_layers(
    device: torch.device, layers: tuple[int, int]
) -> None:
    run_prefill(device, SMALL[0], [(0, 11), (33, 3)], layers=layers)


def test_prefill_of_a_tile_in_parts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens behind long prefixes; of the last part of one its first query sees no key."""
    monkeypatch.setattr(prefill_tiles, "MIN_KEYS", 32)
    monkeypatch.setattr(prefill_tiles, "KEY_TILE", 32)
    run_prefill(device, SMALL[0], [(125, 7), (0, 20), (60, 3), (96, 1)])


@pytest.mark.parametrize(("shape", "window"), [(SMALL[0], 0), (SMALL[1], 7)])
def test_prefill_of_fp8(
    device: torch.device, shape: tuple[int, int, int, int], window: int
) -> None:
    run_prefill(device, shape, [(0, 45), (33, 3)], window=window, kv_dtype=E4M3)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize(("shape", "dtype", "kv_dtype"), GRID_KINDS)
def test_prefill_over_a_grid(
    device: torch.device,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
) -> None:
    chunks = [(0, 1), (0, 200), (127, 1), (128, 130), (300, 33), (1, 64), (2500, 9), (1535, 2)]
    for window in (0, 100):
        run_prefill(
            device, shape, chunks, window=window, dtype=dtype, kv_dtype=kv_dtype,
            block_n=None,
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("kv_dtype", [None, E4M3])
@pytest.mark.parametrize("shape", [(8, 4, 128, 16), (4, 2, 256, 32)])
def test_float32_at_the_tiles_that_are_used(
    device: torch.device, shape: tuple[int, int, int, int], kv_dtype: torch.dtype | None
) -> None:
    for num_tokens, max_length in ((1, 1000), (1, 10**5), (33, 1000)):
        run_decode(
            device, shape, [1, 63, 129, 1000], programs=100, kv_dtype=kv_dtype,
            tiling=decode_tiling(num_tokens, *shape[:3], max_length, FP32, kv_dtype or FP32),
        )  # fmt: skip
    run_prefill(device, shape, [(0, 200), (127, 1), (300, 33)], kv_dtype=kv_dtype, block_n=None)
    run_shared(
        device, shape, prefixes=[1024, 0], own=[[1, 130, *range(1, 40)], [65]], programs=300,
        prefix_splits=4, kv_dtype=kv_dtype, block_n=None,
    )  # fmt: skip


def test_shared_memory_holds_the_tiles_of_wide_heads() -> None:
    """Compiled for a Hopper GPU by Triton's own compiler; loading would fail otherwise."""
    program = Path(__file__).with_name("attention_without_gpu.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(program)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = Counter(tuple(line.split(maxsplit=2)[::2]) for line in done.stdout.splitlines())
    assert found == {
        ("_decode",): 7,
        ("_decode_parts",): 7,
        ("_prefill", "alike"): 3,
        ("_prefix", "alike"): 2,
    }


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_key_of_a_thousand_is_missed(device: torch.device, dtype: torch.dtype) -> None:
    """What is allowed covers the roundings of kernels, and not more."""
    count = 1000
    pool = make_pool(
        [count], num_kv_heads=8, head_dim=128, block_size=16, dtype=dtype, device=device
    )
    queries = torch.randn(1, 32, 128, device=device).to(dtype)
    expected = attend(queries, pool, 0, count - 1)
    keys, values = pool.keys_and_values(0, count).repeat_interleave(4, dim=2).unbind(dim=1)
    scores = torch.einsum("qhd,khd->hqk", queries.float(), keys) * 128**-0.5
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    for missing in (None, 0, 500, count - 1):
        if missing is not None:
            weights = weights.index_fill(2, torch.tensor([missing], device=device), 0.0)
        rounded = weights.to(dtype).float()
        found = torch.einsum("hqk,khd->qhd", rounded, values) / weights.sum(-1).T[:, :, None]
        if missing is None:
            assert_attends(found.to(dtype), expected, dtype)
            continue
        with pytest.raises(AssertionError, match="not close"):
            assert_attends(found.to(dtype), expected, dtype)
        expected = found  # The next is missed by itself.


def test_pieces_of_a_prefix() -> None:
    assert pieces(0) == []
    assert pieces(7 * PIECE) == [(0, 4 * PIECE), (4 * PIECE, 2 * PIECE), (6 * PIECE, PIECE)]
    assert dense_count(2 * PIECE + 5, 3 * PIECE) == 2 * PIECE
    assert dense_count(2 * PIECE, 3) == dense_count(2 * PIECE - 1, 0) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, E4M3])
def test_keys_are_brought_together(device: torch.device, dtype: torch.dtype) -> None:
    shape = {"num_kv_heads": 3, "head_dim": 24, "block_size": 4}
    pool = make_pool([50, 30], **shape, dtype=dtype, device=device)
    kv = gather_keys(pool.kv_layer, pool.tables, 1, 29, dtype=torch.float32, kv_scales=pool.scales)
    torch.testing.assert_close(kv, pool.keys_and_values(1, 29))


def test_attention_in_pieces(device: torch.device) -> None:
    shape = {"num_kv_heads": 2, "head_dim": 16, "block_size": 4}
    pool = make_pool([50, 30], **shape, dtype=torch.float32, device=device)
    kv = gather_keys(pool.kv_layer, pool.tables, 1, 29, dtype=torch.float32)
    queries = torch.randn(5, 6, 16, device=device)

    def over(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (part[:, i].repeat_interleave(3, dim=1) for i in (0, 1))
        scores = torch.einsum("qhd,khd->hqk", queries, keys)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values)
        return attended.contiguous(), scores.logsumexp(dim=-1).contiguous()

    (out, lse), (expected, expected_lse) = over(kv[:11]), over(kv)
    merge_attention(out, lse, *over(kv[11:]))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("start", [0, 3 * PIECE])
def test_dense_chunks(device: torch.device, start: int, kv_dtype: torch.dtype) -> None:
    assert is_supported(torch.bfloat16, 128, device)
    count = 2 * PIECE
    shape = {"num_kv_heads": 2, "head_dim": 128, "block_size": 16}
    pool = make_pool([9, start + count], **shape, dtype=kv_dtype, device=device)
    queries = torch.randn(count + 7, 8, 128, device=device).to(torch.bfloat16)
    out = torch.full_like(queries, NAN)
    chunk = DenseChunk(row=1, offset=7, count=count, start=start)
    dense_attention(queries, pool.kv_layer, pool.tables, chunk, out, pool.scales)
    assert out[:7].isnan().all()
    expected = attend(queries[7:], pool, 1, start)
    assert_attends(out[7:], expected, torch.bfloat16)


@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.parametrize(("programs", "prefix_splits"), [(1, 1), (100, 3)])
def test_a_shared_prefix(
    device: torch.device, shape: tuple[int, int, int, int], programs: int, prefix_splits: int
) -> None:
    run_shared(
        device, shape, prefixes=[48, 0], own=[[1, 40], [9]], programs=programs,
        prefix_splits=prefix_splits,
    )  # fmt: skip


@pytest.mark.parametrize("shape", SMALL[:2])
def test_a_shared_prefix_of_fp8(device: torch.device, shape: tuple[int, int, int, int]) -> None:
    run_shared(
        device, shape, prefixes=[48, 0], own=[[1, 40], [9]], programs=100, prefix_splits=3,
        kv_dtype=E4M3,
    )  # fmt: skip


@pytest.mark.parametrize(("shape", "kv_heads"), [(SMALL[0], 2), (SMALL[1], 4)])
@pytest.mark.parametrize(("programs", "kv_dtype"), [(1, None), (100, None), (100, E4M3)])
def test_a_shared_prefix_before_more_kv_heads_at_once(
    device: torch.device,
    shape: tuple[int, int, int, int],
    kv_heads: int,
    programs: int,
    kv_dtype: torch.dtype | None,
) -> None:
    run_shared(
        device, shape, prefixes=[48, 0], own=[[1, 40], [9, 70]], programs=programs,
        prefix_splits=3, kv_dtype=kv_dtype,
        tiling=DecodeTiling(16, min_keys=32, whole_keys=0, kv_heads=kv_heads),
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize(("shape", "dtype", "kv_dtype"), GRID_KINDS)
def test_shared_prefixes_over_a_grid(
    device: torch.device,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
) -> None:
    own = [[1, 7, 130, 64, *range(1, 70)], [65, 3], [300, 1]]
    many = decode_tiling(512, *shape[:3], 1000, dtype, kv_dtype or dtype)
    for programs, prefix_splits, tiling in ((1, 1, SMALL_TILES), (300, 4, many)):
        run_shared(
            device, shape, prefixes=[1024, 128, 0], own=own, programs=programs,
            prefix_splits=prefix_splits, dtype=dtype, kv_dtype=kv_dtype, block_n=None,
            tiling=tiling,
        )  # fmt: skip
