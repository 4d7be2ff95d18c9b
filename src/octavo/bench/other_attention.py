"""Attention of the libraries that are installed, over the pool and the tables that ours reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from octavo.core.plan import int_array
from octavo.execution.attention.dense import DenseChunk, dense_attention
from octavo.execution.attention.flash3 import find_flash3
from octavo.execution.attention.flashinfer import FlashInferKernels, find_flashinfer
from octavo.execution.device import CUDADevice

Work = Callable[[], object]


def decoders(queries: torch.Tensor, layers: torch.Tensor, tables: torch.Tensor) -> dict[str, Work]:
    """By name, what attends over all ``layers [layer, block, token, K|V, kv_head, head_dim]`` for a
    token of each row of ``tables``, whose blocks are full; it can be captured."""
    kernels = _flashinfer(layers[0], tables, queries.shape[1])
    if kernels is None:
        return {}
    return {"FlashInfer": partial(_decode_layers, kernels, queries, layers)}


def prefills(
    queries: torch.Tensor,
    layer: torch.Tensor,
    tables: torch.Tensor,
    chunk: DenseChunk,
    out: torch.Tensor,
) -> dict[str, Work]:
    """By name, what attends for a chunk of the only row of ``tables``, over one layer."""
    found: dict[str, Work] = {}
    if (flash3 := find_flash3()) is not None:
        # Keys are brought together first, as they are in an engine.
        found["FlashAttention-3"] = partial(
            dense_attention, queries, layer, tables, chunk, out, flash3=flash3
        )
    kernels = _flashinfer(layer, tables, queries.shape[1])
    if kernels is not None:
        kernels.plan_chunks(int_array([chunk.count]), int_array([chunk.start + chunk.count]))
        found["FlashInfer"] = partial(kernels.attend_chunks, queries, layer)
    return found


def _flashinfer(
    layer: torch.Tensor, tables: torch.Tensor, num_heads: int
) -> FlashInferKernels | None:
    """FlashInfer's over this pool, planned for a token of each row; None: it is not installed."""
    library = find_flashinfer()
    if library is None:
        return None
    rows, width = tables.shape
    kernels = FlashInferKernels(
        library, layer, num_heads, CUDADevice(), max_rows=rows, max_row_pages=width
    )
    kernels.compile()
    kernels.plan_decode(int_array([width * layer.shape[1]] * rows))
    kernels.list_pages(tables, torch.arange(rows, dtype=torch.int32, device=tables.device))
    return kernels


def _decode_layers(kernels: FlashInferKernels, queries: torch.Tensor, layers: torch.Tensor) -> None:
    for layer in layers:
        kernels.decode(queries, layer)
