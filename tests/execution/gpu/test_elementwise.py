"""Products, norms, activations and rotation against their references."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from execution.gpu.references import ints, make_pool, rotate, tolerance
from octavo.execution.kernels.activation import silu_and_mul
from octavo.execution.kernels.gpu import SplitSum
from octavo.execution.kernels.linear import gated_linear, linear, tiling, whole
from octavo.execution.kernels.norm import add_rms_norm
from octavo.execution.kernels.rope import rope_and_write
from octavo.execution.kernels.skinny_linear import Tiling, skinny_linear

ON_GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 192, 100), (3, 200, 70), (17, 64, 64)])
@pytest.mark.parametrize("splits", [1, 3])
def test_a_skinny_product(
    device: torch.device, dtype: torch.dtype, rows: int, inputs: int, outputs: int, splits: int
) -> None:
    x = torch.randn(rows, inputs, device=device, dtype=dtype)
    weight = (torch.randn(outputs, inputs, device=device) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype)
    y = skinny_linear(x, weight, bias, Tiling(block_k=64, splits=splits))
    assert isinstance(y, SplitSum) == (splits > 1)
    expected = F.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(whole(y, dtype).float(), expected, **tolerance(dtype))


def test_a_gated_product(device: torch.device) -> None:
    x = torch.randn(3, 192, device=device)
    weight = torch.randn(140, 192, device=device) / 14
    y = skinny_linear(x, weight, None, Tiling(block_k=64), gated=True)
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    torch.testing.assert_close(y, F.silu(gate) * up, atol=1e-5, rtol=1e-5)


def test_parts_have_inputs_enough() -> None:
    """Every tiling that is chosen has parts that are not empty, and covers the inner dimension."""
    for rows in (1, 8, 16, 32, 64, 100, 128):
        for outputs, inputs in ((64, 64), (960, 576), (6144, 4096), (128256, 2048), (4096, 14336)):
            chosen = tiling(rows, outputs, inputs)
            if chosen is not None:
                per_split = -(-inputs // chosen.splits // chosen.block_k) * chosen.block_k
                assert per_split * (chosen.splits - 1) < inputs
    assert tiling(129, 4096, 4096) is None


@pytest.mark.parametrize("rows", [2, 130] if ON_GPU else [2])
def test_the_chosen_products(device: torch.device, rows: int) -> None:
    x = torch.randn(rows, 256, device=device)
    weight = torch.randn(128, 256, device=device) / 16
    expected = F.linear(x, weight)
    close = {"atol": 2e-3, "rtol": 2e-3}  # the library may use TF32
    torch.testing.assert_close(whole(linear(x, weight, None), x.dtype), expected, **close)
    gate, up = expected.chunk(2, dim=-1)
    torch.testing.assert_close(gated_linear(x, weight, None), F.silu(gate) * up, **close)


@pytest.mark.parametrize("splits", [0, 1, 3])
def test_a_residual_is_added_and_normed(device: torch.device, splits: int) -> None:
    residual = torch.randn(3, 200, device=device)
    parts = torch.randn(max(splits, 1), 3, 200, device=device)
    weight = torch.rand(200, device=device)
    delta = (None, parts[0])[min(splits, 1)] if splits < 2 else SplitSum(parts)
    expected = residual + (parts[: max(splits, 0)].sum(0) if splits else 0)
    y = add_rms_norm(residual, delta, weight, 1e-5)
    torch.testing.assert_close(residual, expected)
    torch.testing.assert_close(y, F.rms_norm(expected, (200,), weight, 1e-5))


def test_a_gate_of_parts(device: torch.device) -> None:
    parts = torch.randn(2, 3, 600, device=device)
    gate, up = parts.sum(0).chunk(2, dim=-1)
    y = silu_and_mul(SplitSum(parts), torch.float32)
    torch.testing.assert_close(y, F.silu(gate) * up)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "has_norm", "has_rope"),
    [(6, 2, 16, 4, True, True), (4, 4, 24, 8, False, True), (3, 1, 80, 16, False, False)],
)
def test_rotation_and_writing(
    device: torch.device,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    has_norm: bool,
    has_rope: bool,
) -> None:
    shape = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    pool = make_pool([40, 18], **shape, dtype=torch.float32, device=device)
    before = pool.kv_layer.clone()
    rows, positions = ints([1, 0, 0], device), ints([17, 38, 39], device)
    parts = torch.randn(2, 3, (num_heads + 2 * num_kv_heads) * head_dim, device=device)
    half = head_dim // 2 if has_rope else 0
    cos, sin = torch.randn(2, 64, half, device=device)
    norms = torch.rand(num_heads + num_kv_heads, head_dim, device=device) if has_norm else None
    queries = rope_and_write(
        SplitSum(parts), pool.kv_layer, rows, positions, pool.tables, cos, sin, num_heads,
        head_norms=norms, eps=1e-5, dtype=torch.float32,
    )  # fmt: skip
    heads = parts.sum(0).view(3, -1, head_dim)
    turned, values = heads.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        turned = F.rms_norm(turned, (head_dim,), eps=1e-5) * norms
    if has_rope:
        turned = rotate(turned, cos[positions.long()], sin[positions.long()])
    torch.testing.assert_close(queries, turned[:, :num_heads])
    for token, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        block = int(pool.tables[row, position // block_size])
        written = pool.kv_layer[block, position % block_size]
        torch.testing.assert_close(written[0], turned[token, num_heads:])
        torch.testing.assert_close(written[1], values[token])
        before[block, position % block_size] = written
    torch.testing.assert_close(pool.kv_layer, before, equal_nan=True)  # and nothing else
