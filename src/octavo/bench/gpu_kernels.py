"""The GPU's kernels one by one, on an 8B's shapes: time, bytes or operations, share of the ceiling.

Each is captured over as many layers as keep its data out of the L2 cache, and replayed. Attention
of libraries that are installed is timed beside ours, over the same tables. Run it as ``octavo bench
kernels`` or, with PyTorch alone, ``python -m octavo.bench.gpu_kernels``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from octavo.bench.ceilings import Ceilings, gpu_seconds
from octavo.bench.gpu_row_kernels import row_kernels
from octavo.bench.kernel_figures import BYTES, OPERATIONS, figure
from octavo.bench.other_attention import decoders, prefills
from octavo.bench.works import versions
from octavo.execution.attention.dense import DenseChunk, dense_attention, dense_count
from octavo.execution.attention.paged import SHARES
from octavo.execution.kernels.block_copy import copy_blocks
from octavo.execution.kernels.decode_attention import DecodeWorkspace, decode_attention
from octavo.execution.kernels.decode_parts import decode_parts, decode_tiling
from octavo.execution.kernels.fp8 import scaled_linear
from octavo.execution.kernels.linear import linear, tiling
from octavo.execution.kernels.logit_edits import (
    SETTINGS_WIDTH,
    EditedRows,
    EditState,
    edit_logits,
)
from octavo.execution.kernels.prefill_attention import (
    PrefillTiles,
    PrefillWorkspace,
    prefill_attention,
    tile_tokens,
)
from octavo.execution.prefill_tiles import TileCutter

_DEVICE, _DTYPE = "cuda", torch.bfloat16
_HEADS, _KV_HEADS, _DIM, _BLOCK = 32, 8, 128, 16
_DECODE = (
    *((rows, 256) for rows in (1, 8, 32)),
    *((1, 4096), (16, 1024), (64, 1024), (64, 8192), (256, 512), (256, 2048), (8, 65536)),
)
# Rows of unlike lengths: what the longest of them take beside the others.
_MIXED = {
    "63 x 200, 1 x 8192": [200] * 63 + [8192],
    "250 x 256, 6 x 4096": [256] * 250 + [4096] * 6,
}
_PREFILL = ((8192, 8192), (32768, 32768), (2048, 65536), (22, 8192), (256, 65536))
_PROJECTIONS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
_ROWS = (1, 8, 32, 64, 128)


def run() -> dict[str, Any]:
    """All figures, ready for JSON; times in µs, amounts in bytes or operations, rates in TB/s or
    TFLOP/s."""
    ceilings = Ceilings.measure()
    with torch.inference_mode():
        figures = [
            *_products(ceilings),
            *_decodes(ceilings),
            *_prefills(ceilings),
            *_copies(ceilings),
            *_edits(ceilings),
            *row_kernels(ceilings, _captured),
        ]
    return {
        "read_tb_per_s": ceilings.read_bytes / 1e12,
        "matmul_tflop_per_s": ceilings.matmul_flops / 1e12,
        "gpu": torch.cuda.get_device_name(),
        "versions": versions(),
        "figures": figures,
    }


def table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['gpu']}: reads {report['read_tb_per_s']:.2f} TB/s, multiplies "
        f"{report['matmul_tflop_per_s']:.0f} TFLOP/s",
        f"{'kernel':<30} {'µs':>9} {'amount':>14} {'rate':>8} {'share':>6}  beside it",
    ]
    lines += [
        f"{f['kernel']:<30} {f['us']:>9.1f} {_amount(f):>14} {f['rate']:>8.2f} {f['share']:>6.2f}  "
        f"{f['beside']}"
        for f in report["figures"]
    ]
    lines.append(f"Versions: {', '.join(' '.join(pair) for pair in report['versions'].items())}")
    return "\n".join(lines)


def _captured(work: Callable[[], object], count: int) -> float:
    """Seconds of one of ``count`` launches that ``work`` makes."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        work()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=torch.cuda.graph_pool_handle())
        work()
        graph.capture_end()
        return gpu_seconds(graph.replay) / count


def _products(ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    for name, (outputs, inputs) in _PROJECTIONS.items():
        count = max(2, min(12, int(4e8 / (outputs * inputs * 2))))
        weights = [
            torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(count)
        ]
        for rows in _ROWS:
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            own = _captured(partial(_each, linear, x, weights), count)
            library = _captured(partial(_each, F.linear, x, weights), count)
            num_bytes = outputs * inputs * 2
            chosen = tiling(rows, outputs, inputs)
            kind = "library" if chosen is None else f"split {chosen.splits}"
            yield figure(
                f"product {name} {rows} ({kind})", own, num_bytes, ceilings.read_bytes,
                f"library {library * 1e6:.1f} µs",
            )  # fmt: skip
        if name == "head" or not ceilings.fp8_flops:
            continue
        scales = torch.rand(outputs, device="cuda")
        # Twice as many, to be as many bytes.
        narrow = [weight.to(torch.float8_e4m3fn) for weight in 2 * weights]
        del weights
        for rows in (*_ROWS, 2048, 8192):
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            own = _captured(partial(_each_fp8, linear, x, narrow, scales), len(narrow))
            library = _captured(partial(_each_fp8, _scaled, x, narrow, scales), len(narrow))
            amount, ceiling, of = outputs * inputs, ceilings.read_bytes, BYTES
            if rows > 128:
                amount, ceiling, of = 2 * rows * amount, ceilings.fp8_flops, OPERATIONS
            yield figure(
                f"fp8 product {name} {rows}", own, amount, ceiling,
                f"rounded and by the library {library * 1e6:.1f} µs", of,
            )  # fmt: skip


def _each(
    product: Callable[..., object], x: torch.Tensor, weights: list[torch.Tensor]
) -> list[object]:
    """The products' outputs, alive together as those of a model's layers are not reused at once."""
    return [product(x, weight, None) for weight in weights]


def _each_fp8(
    product: Callable[..., object],
    x: torch.Tensor,
    weights: list[torch.Tensor],
    scales: torch.Tensor,
) -> list[object]:
    return [product(x, weight, None, scales=scales) for weight in weights]


def _scaled(
    x: torch.Tensor, weight: torch.Tensor, bias: None, *, scales: torch.Tensor
) -> torch.Tensor:
    return scaled_linear(x, weight, scales, bias)


def _pool(
    rows: int, context: int, block_size: int = _BLOCK, *, is_scattered: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[layer, block, token, K|V, kv_head, head_dim]`` and tables over its blocks, random ones or
    one block after the other."""
    per_row = -(-context // block_size)
    num_blocks = rows * per_row + 1
    num_layers = 8 if num_blocks * block_size < 640_000 else 1
    shape = (num_blocks, block_size, num_layers, 2, _KV_HEADS, _DIM)
    kv = torch.randn(shape, device=_DEVICE, dtype=_DTYPE)
    ordered = torch.randperm if is_scattered else torch.arange
    order = ordered(num_blocks - 1, device=_DEVICE).to(torch.int32) + 1
    return kv.permute(2, 0, 1, 3, 4, 5), order.view(rows, per_row).contiguous()


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=_DEVICE)


def _decodes(ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    for rows, context in _DECODE:
        yield from _decode(ceilings, f"{rows} x {context}", [context] * rows)
    for name, lengths in _MIXED.items():
        yield from _decode(ceilings, name, lengths)


def decode_seconds(rows: int, context: int, block_size: int, *, is_scattered: bool) -> float:
    """One layer's attention for ``rows`` of ``context`` tokens over blocks of ``block_size``, in
    random places or one after the other."""
    with torch.inference_mode():
        layers, tables = _pool(rows, context, block_size, is_scattered=is_scattered)
        work, _ = _decode_work([context] * rows, layers, tables)
        return _captured(partial(work, layers, None), len(layers))


def _decode_work(
    lengths: list[int], layers: torch.Tensor, tables: torch.Tensor
) -> tuple[Callable[..., None], int]:
    """What attends for one token of each row over given layers with given scales, and in how many
    parts."""
    rows = len(lengths)
    queries = torch.randn(rows, _HEADS, _DIM, device=_DEVICE, dtype=_DTYPE)
    out = torch.empty_like(queries)
    row_ids, last = _ints(list(range(rows))), _ints([length - 1 for length in lengths])
    tiling = decode_tiling(rows, _HEADS, _KV_HEADS, _DIM, max(lengths), _DTYPE, layers.dtype)
    parts = decode_parts(
        row_ids, last, _ints([rows]), max_tokens=rows, num_kv_heads=_KV_HEADS, programs=SHARES,
        tiling=tiling,
    )  # fmt: skip
    workspace = DecodeWorkspace(
        len(parts.table), rows, _KV_HEADS, _DIM, _HEADS // _KV_HEADS, out.device
    )
    arguments = (parts, tables, out, workspace, tiling)
    return partial(_decode_layers, queries, arguments), int(parts.count)


def _decode(ceilings: Ceilings, name: str, lengths: list[int]) -> Iterator[dict[str, Any]]:
    layers, tables = _pool(len(lengths), max(lengths))
    num_bytes = sum(lengths) * _KV_HEADS * _DIM * 4
    for kind in ("", "fp8 ") if ceilings.fp8_flops else ("",):
        scales = None
        if kind:
            layers, num_bytes = layers.to(torch.float8_e4m3fn), num_bytes // 2
            scales = torch.ones(2, _KV_HEADS, device="cuda")
        work, num_parts = _decode_work(lengths, layers, tables)
        seconds = _captured(partial(work, layers, scales), len(layers))
        # Others are told one length of all rows.
        queries = torch.randn(len(lengths), _HEADS, _DIM, device="cuda", dtype=torch.bfloat16)
        others = {} if kind or len(set(lengths)) > 1 else decoders(queries, layers, tables)
        beside = [
            f"{other} {_captured(run, len(layers)) * 1e6:.1f} µs" for other, run in others.items()
        ]
        yield figure(
            f"{kind}decode {name}", seconds, num_bytes, ceilings.read_bytes,
            ", ".join([f"{num_parts} parts", *beside]),
        )  # fmt: skip


def _decode_layers(
    queries: torch.Tensor,
    arguments: tuple[Any, ...],
    layers: torch.Tensor,
    scales: torch.Tensor | None,
) -> None:
    for layer in layers:
        decode_attention(queries, layer, *arguments, kv_scales=scales, is_planned=True)


def _prefills(ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    for count, context in _PREFILL:
        layers, tables = _pool(1, context)
        layer = layers[0]
        queries = torch.randn(count, _HEADS, _DIM, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(queries)
        start = context - count
        cutter = TileCutter(tile_tokens(_HEADS, _KV_HEADS, _DTYPE), _KV_HEADS)
        row = np.zeros(1, dtype=np.int32)
        found = cutter.tiles(row, row + count, row + start, row, 0)
        tiles = PrefillTiles(torch.from_numpy(found).cuda().contiguous(), _ints([found.shape[1]]))
        workspace = PrefillWorkspace(cutter.max_parts, _KV_HEADS, _DIM, out.device)
        chunk = DenseChunk(0, 0, count, start)
        flops = 4 * _HEADS * _DIM * (count * start + count * count / 2)
        works = {
            "blocks": partial(prefill_attention, queries, layer, tiles, tables, out, workspace)
        }
        if dense_count(count, start) == count:
            works["dense"] = partial(dense_attention, queries, layer, tables, chunk, out)
        works |= prefills(queries, layer, tables, chunk, out)
        for name, work in works.items():
            seconds = gpu_seconds(work)
            yield figure(
                f"prefill {count} of {context}, {name}", seconds, flops, ceilings.matmul_flops,
                "", OPERATIONS,
            )  # fmt: skip


def _copies(ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    """Whole blocks of 2 MiB, read and written, beside an indexed assignment."""
    kv = torch.empty(1025, 1 << 20, device="cuda", dtype=torch.bfloat16)
    order = torch.randperm(1024, device="cuda").to(torch.int32) + 1
    for count in (1, 16, 256):
        sources, destinations = order[:count].clone(), order[512 : 512 + count].clone()
        seconds = gpu_seconds(partial(copy_blocks, kv, sources, destinations))
        library = gpu_seconds(partial(_assign, kv, sources.long(), destinations.long()))
        yield figure(
            f"block copy {count}", seconds, 2 * count * kv[0].nbytes, ceilings.read_bytes,
            f"indexed {library * 1e6:.1f} µs",
        )  # fmt: skip


def _assign(kv: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    kv[destinations] = kv[sources]


def _edits(ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    """Penalties of rows of 128,256 logits: logits and words read, float32 logits written."""
    vocab = 128256
    for rows in (1, 64):
        logits = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16)
        order = torch.arange(rows, device="cuda", dtype=torch.int32)
        words = torch.zeros(rows, vocab, device="cuda", dtype=torch.int32)
        settings = torch.zeros(rows, SETTINGS_WIDTH, device="cuda", dtype=torch.int32)
        settings[:, 0] = 0x3F800000  # a repetition penalty of 1
        state = EditState(words, settings, None)
        out = torch.empty(rows, vocab, device="cuda")
        edited = EditedRows(order, order, order)
        work = partial(edit_logits, logits, edited, state, out, has_biases=False, has_phrases=False)
        num_bytes = logits.nbytes + words.nbytes + out.nbytes
        yield figure(f"penalties {rows}", gpu_seconds(work), num_bytes, ceilings.read_bytes, "")


def _amount(told: dict[str, Any]) -> str:
    if told["of"] == BYTES:
        return f"{told['amount'] / 1e6:,.1f} MB"
    return f"{told['amount'] / 1e9:,.1f} GFLOP"


if __name__ == "__main__":
    found = run()
    print(json.dumps(found) if "--json" in sys.argv else table(found))
