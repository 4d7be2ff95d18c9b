"""Attention kernels over rows of any shape, held to PyTorch in float32; outputs and unused memory
are poisoned."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import torch

from execution.gpu.references import LAYERS, assert_attends, attend, ints, make_pool
from octavo.execution.kernels.decode_attention import DecodeWorkspace, decode_attention
from octavo.execution.kernels.decode_parts import DecodeTiling, decode_parts
from octavo.execution.kernels.prefill_attention import (
    PrefillTiles,
    PrefillWorkspace,
    prefill_attention,
    tile_tokens,
)
from octavo.execution.kernels.prefix_attention import PrefixTiles, prefix_attention
from octavo.execution.prefill_tiles import TileCutter

NAN = float("nan")
# heads, KV heads, head dim, block size
SMALL = [(6, 2, 16, 4), (4, 4, 24, 8), (3, 1, 80, 16)]
# Every head dim with every grouping, block sizes in turn.
GRID = [
    (num_kv_heads * group, num_kv_heads, head_dim, (8, 16, 32, 128)[index % 4])
    for index, (head_dim, (num_kv_heads, group)) in enumerate(
        product((64, 80, 96, 128, 256), ((1, 16), (2, 1), (8, 4), (3, 3), (2, 8)))
    )
] + [(8, 2, 64, 64), (32, 8, 128, 64)]

SMALL_TILES = DecodeTiling(32, stages=3, min_keys=32, whole_keys=0)


def run_decode(
    device: torch.device,
    shape: tuple[int, int, int, int],
    lengths: list[int],
    *,
    programs: int,
    window: int = 0,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    tiling: DecodeTiling = SMALL_TILES,
    layers: tuple[int, int] = LAYERS,
) -> None:
    """``layers`` are how many the pool has, and which of them is read."""
    num_heads, num_kv_heads, head_dim, block_size = shape
    pool = make_pool(
        lengths, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size,
        dtype=kv_dtype or dtype, device=device, layers=layers,
    )  # fmt: skip
    count = len(lengths)
    queries = torch.randn(count + 1, num_heads, head_dim, device=device).to(dtype)
    order = torch.randperm(count).tolist()
    rows = ints([*order, 0], device)
    positions = ints([*(lengths[row] - 1 for row in order), 0], device)
    out = torch.full_like(queries, NAN)
    group = num_heads // num_kv_heads
    parts = decode_parts(
        rows, positions, ints([count], device), max_tokens=count + 1, num_kv_heads=num_kv_heads,
        programs=programs, tiling=tiling, window=window,
    )  # fmt: skip
    workspace = DecodeWorkspace(
        len(parts.table), count + 1, num_kv_heads, head_dim, group, device
    )  # fmt: skip
    again = torch.full_like(queries, NAN)
    # The counters are as they were. Memory that PyTorch fills lies between the parts and whoever
    # takes them for written.
    for result, is_planned in ((out, False), (again, True)):
        decode_attention(
            queries, pool.kv_layer, parts, pool.tables, result, workspace, tiling,
            kv_scales=pool.scales, is_planned=is_planned,
        )  # fmt: skip
    assert torch.equal(again[:count], out[:count]), "the same bits at every run"
    assert out[count].isnan().all(), "a token beyond the last was touched"
    for token, row in enumerate(order):
        expected = attend(queries[token : token + 1], pool, row, lengths[row] - 1, window)
        assert_attends(out[token : token + 1], expected, dtype)
    in_slots = torch.full_like(queries, NAN)
    decode_attention(
        queries, pool.slots(lengths), parts, None, in_slots, workspace, tiling,
        kv_scales=pool.scales,
    )  # fmt: skip
    assert torch.equal(in_slots[:count], out[:count]), "the same kernel reads the same in slots"


def run_prefill(
    device: torch.device,
    shape: tuple[int, int, int, int],
    chunks: list[tuple[int, int]],
    *,
    window: int = 0,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    block_n: int | None = 32,
    layers: tuple[int, int] = LAYERS,
) -> None:
    """``chunks`` are (start, count); ``layers`` as in `run_decode`."""
    num_heads, num_kv_heads, head_dim, block_size = shape
    pool = make_pool(
        [start + count for start, count in chunks], num_kv_heads=num_kv_heads, head_dim=head_dim,
        block_size=block_size, dtype=kv_dtype or dtype, device=device, layers=layers,
    )  # fmt: skip
    cutter = TileCutter(tile_tokens(num_heads, num_kv_heads, dtype), num_kv_heads, cuts=not window)
    starts, counts = (np.array(column, dtype=np.int32) for column in zip(*chunks, strict=True))
    found = cutter.tiles(np.arange(len(chunks), dtype=np.int32), counts, starts, 0 * counts, 0)
    found[0] += 1  # the first token belongs to nobody
    nobody = [[0], [1], [0], [0], [0], [1], [-1], [0], [1]]
    tiles = PrefillTiles(
        ints(np.hstack([found, nobody]).tolist(), device), ints([found.shape[1]], device)
    )
    workspace = PrefillWorkspace(cutter.max_parts, num_kv_heads, head_dim, device)
    options = {"window": window, "block_n": block_n, "kv_scales": pool.scales}
    queries = torch.randn(1 + int(counts.sum()), num_heads, head_dim, device=device).to(dtype)
    out = torch.full_like(queries, NAN)
    for _ in range(2):  # the counters are as they were
        prefill_attention(queries, pool.kv_layer, tiles, pool.tables, out, workspace, **options)
    assert out[0].isnan().all(), "a token of no tile was touched"
    first = 1
    for row, (start, count) in enumerate(chunks):
        own = slice(first, first + count)
        expected = attend(queries[own], pool, row, start, window)
        assert_attends(out[own], expected, dtype)
        first += count
    in_slots = torch.full_like(queries, NAN)
    slots = pool.slots([start + count for start, count in chunks])
    prefill_attention(queries, slots, tiles, None, in_slots, workspace, **options)
    assert torch.equal(in_slots[1:], out[1:]), "the same kernel reads the same in slots"


def run_cuts(
    device: torch.device,
    shape: tuple[int, int, int, int],
    cuts: list[list[int]],
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    block_n: int | None = 32,
) -> list[torch.Tensor]:
    """A row's tokens from ``cut[0]`` to ``cut[-1]`` in chunks that begin at ``cut``, whole tiles
    each. What comes out of each of ``cuts``, ``[tokens, num_heads, head_dim]``."""
    num_heads, num_kv_heads, head_dim, block_size = shape
    length = cuts[0][-1]
    pool = make_pool(
        [length], num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size,
        dtype=kv_dtype or dtype, device=device,
    )  # fmt: skip
    cutter = TileCutter(tile_tokens(num_heads, num_kv_heads, dtype), num_kv_heads, cuts=False)
    workspace = PrefillWorkspace(cutter.max_parts, num_kv_heads, head_dim, device)
    queries = torch.randn(length, num_heads, head_dim, device=device).to(dtype)
    outs = []
    for cut in cuts:
        out = torch.full_like(queries, NAN)
        for start, end in pairwise(cut):
            found = cutter.tiles(
                *(np.array([[x]], np.int32)[0] for x in (0, end - start, start, 0)), 0
            )
            found[0] += start
            tiles = PrefillTiles(ints(found.tolist(), device), ints([found.shape[1]], device))
            prefill_attention(
                queries, pool.kv_layer, tiles, pool.tables, out, workspace,
                block_n=block_n, kv_scales=pool.scales,
            )  # fmt: skip
        expected = attend(queries[cut[0] :], pool, 0, cut[0])
        assert_attends(out[cut[0] :], expected, dtype)
        outs.append(out[cuts[0][0] :])
    return outs


def run_shared(
    device: torch.device,
    shape: tuple[int, int, int, int],
    *,
    prefixes: list[int],
    own: list[list[int]],
    programs: int,
    prefix_splits: int,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    block_n: int | None = 32,
    tiling: DecodeTiling = SMALL_TILES,
) -> None:
    """Group i shares ``prefixes[i]`` tokens, and its rows have ``own[i]`` more; the last group
    shares nothing."""
    num_heads, num_kv_heads, head_dim, block_size = shape
    lengths = [prefix + n for prefix, ns in zip(prefixes, own, strict=True) for n in ns]
    pool = make_pool(
        lengths, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size,
        dtype=kv_dtype or dtype, device=device,
    )  # fmt: skip
    per_tile = tile_tokens(num_heads, num_kv_heads, dtype)
    tokens, rows, tile_lengths, covered, first = [], [], [], [], 0
    for prefix, ns in zip(prefixes, own, strict=True):
        members = list(range(first, first + len(ns)))
        blocks = prefix // block_size
        pool.tables[members, :blocks] = pool.tables[first, :blocks].clone()
        covered += [prefix] * len(ns)
        for start in range(0, len(members) if prefix else 0, per_tile):
            part = members[start : start + per_tile]
            tokens.append(part + [-1] * (per_tile - len(part)))
            rows.append(first)
            tile_lengths.append(prefix)
        first += len(ns)
    tiles = PrefixTiles(
        ints([*tokens, [0] * per_tile], device),
        ints([*rows, 0], device),
        ints([*tile_lengths, 5], device),
        ints([len(rows)], device),
        ints(covered, device),
    )
    queries = torch.randn(len(lengths), num_heads, head_dim, device=device).to(dtype)
    parts = prefix_attention(
        queries, pool.kv_layer, tiles, pool.tables, splits=prefix_splits, block_n=block_n,
        kv_scales=pool.scales,
    )  # fmt: skip
    out = torch.full_like(queries, NAN)
    row_ids = ints(list(range(len(lengths))), device)
    positions = ints([length - 1 for length in lengths], device)
    own_parts = decode_parts(
        row_ids, positions, ints([len(lengths)], device), max_tokens=len(lengths),
        num_kv_heads=num_kv_heads, programs=programs, tiling=tiling,
        prefix_lengths=parts.lengths,
    )  # fmt: skip
    group = num_heads // num_kv_heads
    workspace = DecodeWorkspace(
        len(own_parts.table), len(lengths), num_kv_heads, head_dim, group, device
    )  # fmt: skip
    decode_attention(
        queries, pool.kv_layer, own_parts, pool.tables, out, workspace, tiling, prefix=parts,
        kv_scales=pool.scales,
    )  # fmt: skip
    for row, length in enumerate(lengths):
        expected = attend(queries[row : row + 1], pool, row, length - 1)
        assert_attends(out[row : row + 1], expected, dtype)
