"""What the kernels compute, in plain PyTorch and float32, and arenas to compute it on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """One layer of an arena whose other layers, and unused blocks, are poisoned. In fp8 it has
    ``scales [K|V, kv_head]``."""

    kv_layer: torch.Tensor
    tables: torch.Tensor
    scales: torch.Tensor | None = None

    def keys_and_values(self, row: int, length: int) -> torch.Tensor:
        """Float32 ``[length, K|V, kv_head, head_dim]`` in the row's order."""
        size = self.kv_layer.shape[1]
        blocks = self.tables[row, : -(-length // size)].long()
        values = self.kv_layer.float()[blocks].flatten(0, 1)[:length]
        return values if self.scales is None else values * self.scales[:, :, None]

    def slots(self, lengths: list[int]) -> torch.Tensor:
        """One layer of slots that show the same, ``[1 + row, token, K|V, kv_head, head_dim]``;
        what lies behind a row's tokens is NaN."""
        stored = Pool(self.kv_layer, self.tables)
        shape = (1 + len(lengths), max(lengths) + 5, 3, *self.kv_layer.shape[2:])
        slots = torch.full(shape, float("nan"), device=self.kv_layer.device)
        for row, length in enumerate(lengths):
            slots[1 + row, :length, 1] = stored.keys_and_values(row, length)
        return slots.to(self.kv_layer.dtype)[:, :, 1]


def make_pool(
    lengths: list[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    num_layers: int = 3,
    layer: int = 1,
) -> Pool:
    """Rows of these lengths over random blocks in random order; the rest is NaN."""
    scales = None
    if dtype == torch.float8_e4m3fn:
        scales = torch.rand(2, num_kv_heads, device=device) / 50 + 0.005
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 3
    shape = (num_blocks, block_size, num_layers, 2, num_kv_heads, head_dim)
    kv = torch.full(shape, float("nan"), device=device)
    order = torch.randperm(num_blocks - 1, device=device)[: sum(counts)] + 1
    tables = torch.zeros(len(lengths), max(counts) + 2, dtype=torch.int32, device=device)
    first = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = order[first : first + count]
        tables[row, :count] = blocks.int()
        values = torch.randn(count * block_size, 2, num_kv_heads, head_dim, device=device)
        values[length:] = float("nan")
        if scales is not None:
            values = (values / scales[:, :, None]).clamp(-448, 448)
        kv[blocks, :, layer] = values.view(count, block_size, 2, num_kv_heads, head_dim)
        first += count
    return Pool(kv.to(dtype)[:, :, layer], tables, scales)


def attend(
    queries: torch.Tensor, pool: Pool, row: int, start: int, window: int = 0
) -> torch.Tensor:
    """Causal attention of ``queries [count, num_heads, head_dim]`` at positions from ``start``."""
    count, num_heads, head_dim = queries.shape
    kv = pool.keys_and_values(row, start + count)
    group = num_heads // kv.shape[2]
    keys, values = (kv[:, part].repeat_interleave(group, dim=1) for part in (0, 1))
    scores = torch.einsum("qhd,khd->hqk", queries.float(), keys) * head_dim**-0.5
    place = torch.arange(start + count, device=queries.device)
    query = place[start:, None]
    seen = place[None, :] <= query
    if window:
        seen &= place[None, :] > query - window
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``heads [tokens, head, dim]`` by ``[tokens, dim / 2]``, Hugging Face's way."""
    low, high = heads.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def ints(values: object, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """For results of order one: rounding of the dtype, a few times."""
    return {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
