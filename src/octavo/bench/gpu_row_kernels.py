"""Kernels whose work is in proportion to rows: norms, activations, rotation, sampling, and shared
prefixes. Part of `octavo.bench.gpu_kernels`.

Each is launched on the same data again and again, so that what fits in the L2 cache comes from
there, as in a step, where the kernel before has just written it. Small ones are bound by their
launch: their share of the memory's rate tells how far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from octavo.bench.ceilings import Ceilings
from octavo.bench.kernel_figures import BYTES, OPERATIONS, figure
from octavo.execution.kernels.activation import silu_and_mul
from octavo.execution.kernels.gpu import Product, Unnormed
from octavo.execution.kernels.linear import gated_linear
from octavo.execution.kernels.norm import add_rms_norm
from octavo.execution.kernels.prefill_attention import tile_tokens
from octavo.execution.kernels.prefix_attention import PrefixTiles, prefix_attention
from octavo.execution.kernels.rope import rope_and_write
from octavo.execution.kernels.sampling import (
    SampledRows,
    SamplingState,
    SamplingWorkspace,
    argmax_tokens,
    sample_tokens,
)

_LAUNCHES = 20
Timed = Callable[[Callable[[], object], int], float]
"""Seconds of one of the given number of launches that a work makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the model and the batches; the default is an 8B's."""

    hidden: int = 4096
    features: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256
    prefix: int = 2048
    block: int = 16
    rows: tuple[int, ...] = (1, 64, 256)
    unnormed_rows: tuple[int, ...] = (256, 512, 2048)
    gated_rows: tuple[int, ...] = (1, 64, 128, 256)
    prefix_rows: tuple[int, ...] = (64, 512)


def row_kernels(
    ceilings: Ceilings,
    timed: Timed,
    sizes: Sizes | None = None,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[dict[str, Any]]:
    """Every kernel's figure."""
    at = sizes or Sizes()
    make = partial(torch.randn, device=device, dtype=dtype)
    for rows in at.rows:
        yield _told(f"norm {rows}", _norm(make, at, rows), ceilings, timed)
        yield _told(f"activation {rows}", _activation(make, at, rows), ceilings, timed)
        yield _told(f"rotate and write {rows}", _rotate(make, at, rows), ceilings, timed)
        for name, work in _sampling(make, at, rows).items():
            yield _told(f"{name} {rows}", work, ceilings, timed)
    for rows in at.unnormed_rows:
        works = {
            f"activation {rows}, not normed": _activation(make, at, rows, is_unnormed=True),
            f"rotate and write {rows}, not normed": _rotate(make, at, rows, is_unnormed=True),
        }
        for name, work in works.items():
            yield _told(name, work, ceilings, timed)
    weight = make(2 * at.features, at.hidden)
    for rows in at.gated_rows:
        yield _gated(make, weight, rows, ceilings, timed)
    for rows in at.prefix_rows:
        work = _prefix(make, at, rows)
        yield _told(f"prefix {rows} x {at.prefix}", work, ceilings, timed, OPERATIONS)


Work = tuple[Callable[[], object], float]
"""A launch, and the bytes or operations that it cannot do without."""


def _told(
    name: str, work: Work, ceilings: Ceilings, timed: Timed, of: str = BYTES
) -> dict[str, Any]:
    launch, amount = work
    ceiling = ceilings.read_bytes if of == BYTES else ceilings.matmul_flops
    return figure(name, timed(partial(_often, launch), _LAUNCHES), amount, ceiling, "", of)


def _often(launch: Callable[[], object]) -> list[object]:
    return [launch() for _ in range(_LAUNCHES)]


def _norm(make: Callable[..., torch.Tensor], at: Sizes, rows: int) -> Work:
    """The residual is read and written, what is added to it read, the normed rows written."""
    residual, delta, weight = make(rows, at.hidden), make(rows, at.hidden), make(at.hidden)
    launch = partial(add_rms_norm, residual, delta, weight.float(), 1e-5)
    return launch, 4 * residual.nbytes


def _activation(
    make: Callable[..., torch.Tensor], at: Sizes, rows: int, is_unnormed: bool = False
) -> Work:
    """A product is read and half as much written; the residual is read too where rows are to be
    divided by its root mean square."""
    gate_up = make(rows, 2 * at.features)
    if not is_unnormed:
        return partial(silu_and_mul, gate_up, gate_up.dtype), gate_up.nbytes * 1.5
    residual = make(rows, at.hidden)
    launch = partial(silu_and_mul, Unnormed(gate_up, residual, 1e-5), gate_up.dtype)
    return launch, gate_up.nbytes * 1.5 + residual.nbytes


def _rotate(
    make: Callable[..., torch.Tensor], at: Sizes, rows: int, is_unnormed: bool = False
) -> Work:
    """Of a layer: queries, keys and values read, all of them written; and as `_activation`."""
    qkv = make(rows, (at.heads + 2 * at.kv_heads) * at.head_dim)
    kv_layer = make(rows + 1, at.block, 2, at.kv_heads, at.head_dim)
    order = torch.arange(rows, device=qkv.device, dtype=torch.int32)
    cos, sin = make(2, at.block, at.head_dim // 2).float()
    residual = make(rows, at.hidden if is_unnormed else 0)
    source: Product = Unnormed(qkv, residual, 1e-5) if is_unnormed else qkv
    launch = partial(
        rope_and_write, source, kv_layer, order, torch.zeros_like(order), (order + 1).view(rows, 1),
        cos, sin, at.heads, dtype=qkv.dtype,
    )  # fmt: skip
    return launch, 2 * qkv.nbytes + residual.nbytes


def _sampling(make: Callable[..., torch.Tensor], at: Sizes, rows: int) -> dict[str, Work]:
    """Logits are read once for the likeliest; at random they are read again for every bit of a
    threshold, from the L2 cache, which does not count here."""
    logits = make(rows, at.vocab)
    device = logits.device
    ints = partial(torch.zeros, rows, device=device, dtype=torch.int32)
    floats = partial(torch.full, (rows,), device=device, dtype=torch.float32)
    order = torch.arange(rows, device=device, dtype=torch.int32)
    sampled = SampledRows(order, order, ints(), rows)
    workspace = SamplingWorkspace(rows, logits.device)
    out, last, position = ints(), ints(), ints()
    greedy = partial(argmax_tokens, logits, sampled, workspace, out, last, position)
    state = SamplingState(
        temperature=floats(0.8), top_k=ints() + 50, top_p=floats(0.95), min_p=floats(0.0),
        seed=order.to(torch.int64),
    )  # fmt: skip
    at_random = partial(sample_tokens, logits, sampled, state, workspace, out, last)

    def both() -> None:
        greedy()
        at_random()

    return {"likeliest": (greedy, logits.nbytes), "top-k and top-p": (both, logits.nbytes)}


def _gated(
    make: Callable[..., torch.Tensor],
    weight: torch.Tensor,
    rows: int,
    ceilings: Ceilings,
    timed: Timed,
) -> dict[str, Any]:
    x = make(rows, weight.shape[1])

    def library() -> torch.Tensor:
        return silu_and_mul(F.linear(x, weight), x.dtype)

    seconds = timed(partial(_often, partial(gated_linear, x, weight, None)), _LAUNCHES)
    beside = timed(partial(_often, library), _LAUNCHES)
    return figure(
        f"gated product {rows}", seconds, weight.nbytes, ceilings.read_bytes,
        f"library, then activation {beside * 1e6:.1f} µs",
    )  # fmt: skip


def _prefix(make: Callable[..., torch.Tensor], at: Sizes, rows: int) -> Work:
    """Rows whose tables begin with the same blocks read them once, as tiles of a product."""
    blocks = at.prefix // at.block
    kv_layer = make(blocks + 1, at.block, 2, at.kv_heads, at.head_dim)
    device = kv_layer.device
    ints = partial(torch.tensor, device=device, dtype=torch.int32)
    per_tile = tile_tokens(at.heads, at.kv_heads, kv_layer.dtype)
    members = [
        [row if row < rows else -1 for row in range(first, first + per_tile)]
        for first in range(0, rows, per_tile)
    ]
    tiles = PrefixTiles(
        tokens=ints(members),
        rows=ints([0] * len(members)),
        lengths=ints([at.prefix] * len(members)),
        num_tiles=ints([len(members)]),
        token_lengths=ints([at.prefix] * rows),
    )
    tables = ints([list(range(1, blocks + 1))])
    queries = make(rows, at.heads, at.head_dim)
    launch = partial(prefix_attention, queries, kv_layer, tiles, tables, splits=4)
    return launch, 4.0 * rows * at.prefix * at.heads * at.head_dim
