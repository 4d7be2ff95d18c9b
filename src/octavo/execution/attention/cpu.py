"""Attention on CPUs: compiled kernels for decode and, where the CPU has AVX512, for chunks; blocked
matrix products of PyTorch for chunks elsewhere.

What each of them gains over gathering + PyTorch's attention: docs/decisions/0001-cpu-attention.md
and 0004-cpu-prefill.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from llvmlite import binding
from numpy.typing import NDArray

from octavo.core.plan import IntArray
from octavo.execution.arena import Arena
from octavo.execution.attention.interface import StepAttention, StepRows
from octavo.execution.kernels import cpu_attention as kernels
from octavo.execution.kernels.cpu_chunk_attention import chunk_attention
from octavo.execution.models.rope import RopeTable

# A row of fewer tokens runs them as single queries: gathering its context would cost more.
_MIN_CHUNK = 8
# Our chunk kernel runs on one thread, 2.4 times as fast as PyTorch's products on one; these share
# the threads they are given.
_MAX_CHUNK_KERNEL_THREADS = 2
# Queries of a chunk that share one product of PyTorch: their fp32 scores stay in the second cache,
# and little work is wasted above the diagonal (512 queries on 512 keys: 4.9 ms a layer at 32, 5.3
# at 64, 8.9 at 128).
_QUERY_BLOCK = 32

_BITS = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.uint16,
    torch.float16: torch.int16,
}


@dataclass(frozen=True, slots=True)
class _Chunk:
    row: int
    offset: int
    count: int
    start: int


class CPUAttention:
    """Implements `AttentionBackend`. ``sliding_window`` 0 means none."""

    def __init__(
        self, arena: Arena, num_heads: int, rope: RopeTable, sliding_window: int = 0
    ) -> None:
        self.layout = arena.layout
        self.num_heads = num_heads
        self.sliding_window = sliding_window
        self.scale = np.float32(arena.layout.head_dim**-0.5)
        self.dtype = arena.kv.dtype
        self.pool = _bits(arena.kv.view(-1))
        self.cos, self.sin = rope.cos.numpy(), rope.sin.numpy()
        features = binding.get_host_cpu_features()
        self.has_chunk_kernel = bool(features.get("avx512f", False))
        # What the chunk kernel multiplies: bfloat16 where pool and CPU have it, else fp32.
        has_pairs = features.get("avx512bf16", False) and arena.layout.head_dim % 2 == 0
        is_bfloat16 = self.dtype == torch.bfloat16 and has_pairs
        self.chunk_dtype = torch.bfloat16 if is_bfloat16 else torch.float32
        above = torch.ones(_QUERY_BLOCK, _QUERY_BLOCK, dtype=torch.bool).triu(1)
        self._causal = torch.zeros(_QUERY_BLOCK, 1, _QUERY_BLOCK)
        self._causal.masked_fill_(above[:, None, :], float("-inf"))

    def plan(self, step: StepRows) -> StepAttention:
        layout = self.layout
        shape = (layout.num_layers, self.num_heads, layout.num_kv_heads, layout.head_dim)
        kv_offsets = step.kv_offsets(layout.block_size)
        singles, chunks = _split(step)
        tokens, rows, lengths = singles
        attend_chunk = self._attend_chunk_plain
        if self.has_chunk_kernel and torch.get_num_threads() <= _MAX_CHUNK_KERNEL_THREADS:
            attend_chunk = self._attend_chunk

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            bits = _bits(qkv)
            kernels.rotate_and_write(
                bits, step.positions, kv_offsets, self.cos, self.sin, self.pool, layer, *shape
            )
            out = torch.empty(len(qkv), self.num_heads * layout.head_dim, dtype=qkv.dtype)
            if len(tokens):
                kernels.decode_attention(
                    bits,
                    tokens,
                    step.tables,
                    rows,
                    lengths,
                    self.sliding_window,
                    self.scale,
                    self.pool,
                    layer,
                    *shape,
                    layout.block_size,
                    _bits(out),
                )
            for chunk in chunks:
                attend_chunk(layer, chunk, step.tables[chunk.row], qkv, out)
            return out

        return attend

    def _attend_chunk(
        self, layer: int, chunk: _Chunk, table: IntArray, qkv: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Queries of one row against its whole context, by the compiled kernel."""
        begin, keys, values = self._gather(layer, chunk, table, self.chunk_dtype, self.chunk_dtype)
        span = slice(chunk.offset, chunk.offset + chunk.count)
        is_wide = qkv.dtype == torch.float32
        wide = out[span] if is_wide else torch.empty(chunk.count, out.shape[1])
        chunk_attention(
            qkv[span].float().numpy(),
            _bits(keys),
            _bits(values),
            chunk.start - begin,
            self.sliding_window,
            self.scale,
            self.num_heads,
            wide.numpy(),
        )
        if not is_wide:
            out[span] = wide

    def _gather(
        self,
        layer: int,
        chunk: _Chunk,
        table: IntArray,
        key_dtype: torch.dtype,
        value_dtype: torch.dtype,
    ) -> tuple[int, torch.Tensor, torch.Tensor]:
        """The first position that any query of the chunk sees, and keys and values from there on:
        ``[num_kv_heads, positions, head_dim]``."""
        layout, window = self.layout, self.sliding_window
        begin = max(chunk.start + 1 - window, 0) if window else 0
        end = chunk.start + chunk.count
        shape = (layout.num_kv_heads, end - begin, layout.head_dim)
        keys = torch.empty(shape, dtype=key_dtype)
        values = torch.empty(shape, dtype=value_dtype)
        kernels.gather_keys_values(
            table,
            begin,
            end,
            self.pool,
            layer,
            layout.num_layers,
            layout.num_kv_heads,
            layout.head_dim,
            layout.block_size,
            _bits(keys),
            _bits(values),
        )
        return begin, keys, values

    def _attend_chunk_plain(
        self, layer: int, chunk: _Chunk, table: IntArray, qkv: torch.Tensor, out: torch.Tensor
    ) -> None:
        """The same by PyTorch's products, ``_QUERY_BLOCK`` queries at a time."""
        num_kv_heads, dim, window = (
            self.layout.num_kv_heads,
            self.layout.head_dim,
            self.sliding_window,
        )
        group = self.num_heads // num_kv_heads
        start, count = chunk.start, chunk.count
        # Scores are computed in fp32: rounded to bfloat16 they would be off by several percent.
        begin, keys, values = self._gather(layer, chunk, table, torch.float32, self.dtype)
        keys = keys.transpose(1, 2)
        queries = qkv[chunk.offset : chunk.offset + count, : self.num_heads * dim]
        # [kv_head, token, group, dim]: one product a KV head serves its whole group.
        queries = queries.float().view(count, num_kv_heads, group, dim).transpose(0, 1)
        queries = queries * float(self.scale)
        queries = queries.reshape(num_kv_heads, count * group, dim)
        target = out[chunk.offset : chunk.offset + count].view(count, num_kv_heads, group, dim)
        for first in range(0, count, _QUERY_BLOCK):
            last = min(first + _QUERY_BLOCK, count)
            size = last - first
            low = max(start + first + 1 - window - begin, 0) if window else 0
            high = start + last - begin
            scores = torch.bmm(queries[:, first * group : last * group], keys[:, :, low:high])
            grouped = scores.view(num_kv_heads, size, group, high - low)
            grouped[..., -size:].add_(self._causal[:size, :, :size])
            if window:
                grouped.add_(_window_bias(start + first, size, low + begin, window))
            weights = torch.softmax(scores, dim=-1).to(self.dtype)
            rows = torch.bmm(weights, values[:, low:high]).view(num_kv_heads, size, group, dim)
            target[first:last].copy_(rows.transpose(0, 1))


def _window_bias(first_query: int, num_queries: int, first_key: int, window: int) -> torch.Tensor:
    """``[query, 1, key]``: -inf where a key has fallen out of the query's window."""
    queries = torch.arange(first_query, first_query + num_queries)[:, None]
    keys = torch.arange(first_key, first_query + num_queries)[None, :]
    bias = torch.zeros(num_queries, keys.shape[1])
    return bias.masked_fill_(keys <= queries - window, float("-inf"))[:, None, :]


def _split(
    step: StepRows,
) -> tuple[tuple[NDArray[np.int64], IntArray, IntArray], list[_Chunk]]:
    """Tokens that run as single queries (index, row, visible length), and larger chunks."""
    is_chunk = step.counts >= _MIN_CHUNK
    chunks = [
        _Chunk(int(step.rows[i]), int(step.offsets[i]), int(step.counts[i]), int(step.starts[i]))
        for i in np.flatnonzero(is_chunk)
    ]
    tokens = np.flatnonzero(np.repeat(~is_chunk, step.counts))
    rows = np.repeat(step.rows[~is_chunk], step.counts[~is_chunk])
    return (tokens, rows, step.positions[tokens] + np.int32(1)), chunks


def _bits(tensor: torch.Tensor) -> NDArray[np.generic]:
    """The tensor's memory as a numpy array of a type that the kernels know."""
    return tensor.view(_BITS[tensor.dtype]).numpy()
