"""Long chunks of a prompt by cuDNN's attention, which knows no blocks: unmodified, on keys that are
brought together first.

On an H200 it attends at 565 to 597 TFLOP/s where our kernel over block tables reaches 388; bringing
8K tokens of keys together takes 2 % of what that saves. A plan is made once for each shape, so
shapes are few: a chunk's whole multiples of ``PIECE`` tokens attend to themselves, causally, and to
the prefix in pieces of powers of two. The rest of the chunk runs like any other row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.execution.attention.flash3 import Flash3
from octavo.execution.kernels.merge import gather_keys, merge_attention

PIECE = 1024
MIN_TOKENS = 2048
"""Chunks shorter than this gain nothing."""


@dataclass(frozen=True, slots=True)
class DenseChunk:
    """``count`` tokens of ``row``, from ``offset`` on among the step's and from ``start`` on in
    their sequence."""

    row: int
    offset: int
    count: int
    start: int


def dense_count(count: int, start: int) -> int:
    """How many of a chunk's first tokens run densely."""
    return count // PIECE * PIECE if count >= MIN_TOKENS and start % PIECE == 0 else 0


def is_supported(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Whether cuDNN attends at this dtype and head size on this device."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim in (64, 96, 128)
        and torch.backends.cudnn.is_available()
        and torch.cuda.get_device_capability(device)[0] >= 9
    )


def dense_attention(
    queries: torch.Tensor,
    kv_layer: torch.Tensor,
    tables: torch.Tensor | None,
    chunk: DenseChunk,
    out: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
    flash3: Flash3 | None = None,
) -> None:
    """Attend for a chunk, whose keys are written already, into its part of ``out``.

    ``queries`` and ``out`` are ``[tokens, num_heads, head_dim]`` of the whole step. Keys are
    brought together in their dtype, multiplied by ``kv_scales`` where there are such. Without
    ``tables`` ``kv_layer`` is a layer of slots, whose keys are together already: what is handed on
    is a slice that is wholly mapped, since these kernels load tiles by a tensor's shape.
    ``flash3`` attends instead of cuDNN.
    """
    length = chunk.start + chunk.count
    if tables is None:
        kv = kv_layer[chunk.row, :length]
    else:
        kv = gather_keys(
            kv_layer, tables, chunk.row, length, dtype=queries.dtype, kv_scales=kv_scales
        )
    attend_together(queries, kv, chunk, out, flash3)


def attend_together(
    queries: torch.Tensor,
    kv: torch.Tensor,
    chunk: DenseChunk,
    out: torch.Tensor,
    flash3: Flash3 | None = None,
) -> None:
    """As `dense_attention`, over the keys themselves: ``kv [start + count, K|V, kv_head,
    head_dim]`` of the chunk's row, in any strides, all of it memory that may be read."""
    own = slice(chunk.offset, chunk.offset + chunk.count)
    q, target = queries[own], out[own]
    if flash3 is not None:
        target.copy_(flash3(q, kv))
        return
    attended, lse = _attend(q, kv[chunk.start :], is_causal=True)
    target.copy_(attended)
    if not chunk.start:
        return
    lse = lse.contiguous()
    for first, size in pieces(chunk.start):
        other, other_lse = _attend(q, kv[first : first + size], is_causal=False)
        merge_attention(target, lse, other, other_lse.contiguous())


def pieces(length: int) -> list[tuple[int, int]]:
    """A prefix in powers of two: each one's first token and length, the longest first."""
    found, first = [], 0
    for bit in reversed(range(length.bit_length())):
        if length & (1 << bit):
            found.append((first, 1 << bit))
            first += 1 << bit
    return found


def _attend(
    q: torch.Tensor, kv: torch.Tensor, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[tokens, num_heads, head_dim]`` and the log-sum-exp, float32 ``[num_heads, tokens]``."""
    heads = (part.transpose(0, 1).unsqueeze(0) for part in (q, kv[:, 0], kv[:, 1]))
    attended, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads, None, True, 0.0, is_causal, False
    )
    return attended[0].transpose(0, 1), lse.view(q.shape[1], q.shape[0])
