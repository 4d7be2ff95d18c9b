"""What the kernels compute, in plain PyTorch and float32, and arenas to compute it on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.execution.attention.paged import PagedAttention, PagedStep

LAYERS = (3, 1)
"""How many layers an arena has, and which of them is tested."""


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
        """The same layer of slots that show the same, ``[1 + row, token, K|V, kv_head, head_dim]``;
        what lies behind a row's tokens is NaN."""
        stored = Pool(self.kv_layer, self.tables)
        layer_size = self.kv_layer[0, 0].numel()
        num_layers = self.kv_layer.stride(1) // layer_size
        layer = self.kv_layer.storage_offset() // layer_size
        shape = (1 + len(lengths), max(lengths) + 5, num_layers, *self.kv_layer.shape[2:])
        slots = torch.full(shape, float("nan"), device=self.kv_layer.device)
        for row, length in enumerate(lengths):
            slots[1 + row, :length, layer] = stored.keys_and_values(row, length)
        return slots.to(self.kv_layer.dtype)[:, :, layer]


def make_pool(
    lengths: list[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    layers: tuple[int, int] = LAYERS,
) -> Pool:
    """Rows of these lengths over random blocks in random order; the rest is NaN. ``layers`` are how
    many the arena has, and which one it is."""
    num_layers, layer = layers
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


def attend_in_order(
    backend: PagedAttention, step: PagedStep, layer: int, qkv: torch.Tensor
) -> torch.Tensor:
    """A layer's attention behind a kernel that overlaps with none, as an embedding's is: attention
    reads what ``plan`` has written before the kernel in front of it has ended."""
    attention = backend.plan(step)
    return attention(layer, qkv.clone())


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


def assert_attends(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Whether ``found [tokens, head, dim]``, computed in ``dtype``, is the float32 ``expected``.

    Attention over more keys is smaller (random ones: 1.6 / sqrt(keys)), so what is allowed follows
    the largest value of each token's head. Queries, keys and values are the reference's to the bit
    and sums are float32, so two roundings are left, each of at most u, half an epsilon of the dtype
    (2**-8 for bfloat16). That of the result is ``rtol``. Those of the weights, rounded to the dtype
    for the product with values, have either sign: together they are some 0.4 u of a head's root
    mean square, of which the largest of 64 to 256 values is 2.5 times or more. In PyTorch, rounding
    where kernels do, the worst of ten million results over 1 to 2500 keys is 0.9 u of the head's
    largest beyond ``rtol``; of chunks that are merged from three pieces in the dtype 1.5 u, and 2.3
    u where their keys came from fp8 and were rounded once more. 4 u is allowed. One of 1000 random
    keys left out changes some of eight heads by more than that, 19 times of 20.
    """
    if dtype == torch.float32:
        torch.testing.assert_close(found.float(), expected, **tolerance(dtype))
        return
    unit = torch.finfo(dtype).eps / 2
    largest = expected.abs().amax(dim=-1, keepdim=True)
    torch.testing.assert_close(
        found.float() / largest, expected / largest, atol=4 * unit, rtol=unit
    )
