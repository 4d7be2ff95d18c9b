"""Products, norms, activations and rotation against their references."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from execution.gpu.attention_runs import GRID
from execution.gpu.references import ints, make_pool, rotate, tolerance
from octavo.execution.kernels.activation import silu_and_mul
from octavo.execution.kernels.fp8 import quantize_rows
from octavo.execution.kernels.gpu import SplitSum
from octavo.execution.kernels.linear import gated_linear, linear, tiling, whole
from octavo.execution.kernels.norm import add_rms_norm
from octavo.execution.kernels.rope import rope_and_write
from octavo.execution.kernels.skinny_linear import Tiling, skinny_linear
from octavo.execution.kernels.wide_linear import gated_wide_linear, suits
from octavo.execution.models.fp8 import quantize_channels

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


# In the interpreter a product of bfloat16 is wrong.
WIDE_DTYPES = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16]


@pytest.mark.parametrize("dtype", WIDE_DTYPES)
@pytest.mark.parametrize(("rows", "inputs", "features"), [(65, 200, 100), (130, 64, 129)])
def test_a_wide_gated_product(
    device: torch.device, dtype: torch.dtype, rows: int, inputs: int, features: int
) -> None:
    x = torch.randn(rows, inputs, device=device).to(dtype)
    weight = (torch.randn(2 * features, inputs, device=device) / inputs**0.5).to(dtype)
    gate, up = F.linear(x.float(), weight.float()).chunk(2, dim=-1)
    y = gated_wide_linear(x, weight)
    torch.testing.assert_close(y.float(), F.silu(gate) * up, **tolerance(dtype))


def test_which_gated_products_are_wide(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = (torch.randn(2 * 96 * 128, 64, device=device) / 8).to(torch.float16)
    x = torch.randn(257, 64, device=device).to(torch.float16)
    asked = []
    monkeypatch.setattr(
        "octavo.execution.kernels.linear.gated_wide_linear",
        lambda x, weight: asked.append(len(x)) or gated_wide_linear(x, weight),
    )
    gate, up = F.linear(x.float(), weight.float()).chunk(2, dim=-1)
    y = gated_linear(x[:65], weight, None)
    torch.testing.assert_close(y.float(), (F.silu(gate) * up)[:65], **tolerance(torch.float16))
    assert asked == [65]
    fast = [rows for rows in range(1, 258) if suits(x[:rows], weight)]
    assert fast == [*range(65, 129), *range(225, 257)], "tiles of 128 rows that are not half empty"
    assert not suits(x[:65, :60], weight[:, :60]), "not contiguous"
    assert not suits(x[:65].float(), weight.float())
    assert not suits(x[:65], weight[: 2 * 95 * 128]), "tiles for too few multiprocessors"
    gated_linear(x[:65], weight, None, is_invariant=True)
    gated_linear(x[:65], weight, torch.zeros_like(weight[:, 0]))
    assert asked == [65]


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


def test_rows_in_fp8(device: torch.device) -> None:
    x = torch.randn(5, 200, device=device) * torch.tensor([[1.0], [1e-3], [50], [0], [1]]).to(
        device
    )
    x[4, 7] = float("nan")
    values, scales = quantize_rows(x[:, :100])
    expected = x[:4, :100].abs().amax(dim=1, keepdim=True) / 448
    torch.testing.assert_close(scales[:3], expected[:3])
    assert scales[3] == 1
    assert not values[3].float().any()
    assert values[4].float().isnan().any()
    exact = x[:3, :100] / expected[:3]
    rounded = exact.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert bool((values[:3].float() == rounded).float().mean() > 0.99)
    assert bool(((values[:3].float() - exact).abs() <= exact.abs().clamp(min=2**-6) / 15).all())


def fp8_weight(device: torch.device, outputs: int, inputs: int) -> tuple[torch.Tensor, ...]:
    """A weight, its scales, and in float32 what both stand for."""
    weight = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(outputs, device=device)
    plain = torch.randn(outputs, inputs, device=device) / inputs**0.5
    quantize_channels(plain * torch.rand(outputs, 1, device=device), weight, scales)
    return weight, scales, weight.float() * scales[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 192, 100), (17, 200, 70)])
@pytest.mark.parametrize("splits", [1, 3])
def test_a_skinny_product_of_fp8(
    device: torch.device, dtype: torch.dtype, rows: int, inputs: int, outputs: int, splits: int
) -> None:
    """Of the weights alone: rows stay as they are."""
    x = torch.randn(rows, inputs, device=device, dtype=dtype)
    weight, scales, plain = fp8_weight(device, outputs, inputs)
    bias = torch.randn(outputs, device=device).to(dtype)
    y = skinny_linear(x, weight, bias, Tiling(block_k=64, splits=splits), scales=scales)
    expected = F.linear(x.float(), plain, bias.float())
    torch.testing.assert_close(whole(y, dtype).float(), expected, **tolerance(dtype))
    if splits == 1:
        y = skinny_linear(x, weight, bias, Tiling(block_k=64), gated=True, scales=scales)
        gate, up = expected.chunk(2, dim=-1)
        torch.testing.assert_close(whole(y, dtype).float(), F.silu(gate) * up, **tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_rows_in_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """Rows are rounded too, so that the reference is the product of what both were rounded to."""
    x = torch.randn(150, 192, device=device).to(dtype)
    weight, scales, plain = fp8_weight(device, 96, 192)
    bias = torch.randn(96, device=device).to(dtype)
    y = linear(x, weight, bias, scales=scales)
    assert isinstance(y, torch.Tensor)
    assert y.dtype == dtype
    values, row_scales = quantize_rows(x)
    expected = F.linear(values.float() * row_scales, plain, bias.float())
    torch.testing.assert_close(y.float(), expected, atol=2e-2, rtol=2e-2)
    gated = gated_linear(x, weight, None, scales=scales)
    gate, up = (expected - bias.float()).chunk(2, dim=-1)
    torch.testing.assert_close(gated.float(), F.silu(gate) * up, atol=2e-2, rtol=2e-2)
    exact = F.linear(x.float(), plain)
    assert float((expected - bias.float() - exact).norm() / exact.norm()) < 0.04


@pytest.mark.parametrize("is_invariant", [False, True])
def test_the_chosen_products_of_fp8(device: torch.device, is_invariant: bool) -> None:
    x = torch.randn(20, 256, device=device).to(torch.bfloat16 if ON_GPU else torch.float32)
    weight, scales, plain = fp8_weight(device, 128, 256)
    largest = x.float().abs().amax(dim=1, keepdim=True) / 448
    rounded = (x.float() / largest).to(torch.float8_e4m3fn).float() * largest
    for rows in (2, 20):
        y = linear(x[:rows], weight, None, scales=scales, is_invariant=is_invariant)
        # Of many rows the inputs are rounded too.
        inputs = rounded if rows > 16 and not is_invariant else x.float()
        expected = F.linear(inputs[:rows], plain)
        torch.testing.assert_close(whole(y, x.dtype).float(), expected, atol=2e-2, rtol=2e-2)
    if is_invariant:
        first = linear(x[:2], weight, None, scales=scales, is_invariant=True)
        assert isinstance(first, torch.Tensor)
        assert isinstance(y, torch.Tensor)
        assert torch.equal(first, y[:2])


FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def rounded_close(dtype: torch.dtype) -> dict[str, float]:
    """For what is computed in float32 and rounded once: twice that rounding."""
    return {"atol": 1e-5, "rtol": max(torch.finfo(dtype).eps, 1e-5)}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("hidden", [200, 2048, 4096, 14336] if ON_GPU else [200])
@pytest.mark.parametrize(("rows", "splits"), [(3, 0), (3, 1), (3, 3), (65, 3)])
def test_a_residual_is_added_and_normed(
    device: torch.device, rows: int, splits: int, hidden: int, dtype: torch.dtype
) -> None:
    """The norm is of the sum as it was rounded. Parts are float32, a whole product is not."""
    residual = torch.randn(rows, hidden, device=device).to(dtype)
    parts = torch.randn(max(splits, 1), rows, hidden, device=device)
    delta: torch.Tensor | SplitSum | None = None
    if splits == 1:
        parts = parts.to(dtype)
        delta = parts[0]
    elif splits:
        delta = SplitSum(parts)
    weight = torch.rand(hidden, device=device).to(dtype)
    added = residual.double() + (parts.double().sum(0) if splits else 0)
    before = residual.clone()
    alone, apart = (
        add_rms_norm(
            before[:count].clone(), SplitSum(parts[:, :count].contiguous()) if splits > 1 else None,
            weight, 1e-5, is_invariant=True,
        )
        for count in (1, rows)
    )  # fmt: skip
    assert torch.equal(alone, apart[:1]), "a row's bits are the same beside any others"
    y = add_rms_norm(residual, delta, weight, 1e-5)
    assert y.dtype == residual.dtype == dtype
    torch.testing.assert_close(residual.double(), added, **rounded_close(dtype))
    assert splits or torch.equal(residual, before)
    x = residual.double()
    expected = x * (x.square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    torch.testing.assert_close(y.double(), expected, **rounded_close(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("features", [300, 2048, 4096, 14336] if ON_GPU else [300])
@pytest.mark.parametrize(("rows", "splits"), [(3, 2), (3, 1), (65, 1)])
def test_a_gate_of_parts(
    device: torch.device, rows: int, splits: int, features: int, dtype: torch.dtype
) -> None:
    """Of parts in float32, or of a product in the dtype itself; many rows are cut otherwise."""
    parts = torch.randn(splits, rows, 2 * features, device=device)
    if splits == 1:
        parts = parts.to(dtype)
    gate, up = parts.double().sum(0).chunk(2, dim=-1)
    y = silu_and_mul(SplitSum(parts) if splits > 1 else parts[0], dtype)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), F.silu(gate) * up, **rounded_close(dtype))


def run_rotation(
    device: torch.device,
    sizes: tuple[int, int, int, int],
    *,
    has_norm: bool,
    has_rope: bool,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype = torch.float32,
) -> None:
    num_heads, num_kv_heads, head_dim, block_size = sizes
    shape = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    pool = make_pool([40, 18], **shape, dtype=kv_dtype, device=device)
    before = pool.kv_layer.float()
    rows, positions = ints([1, 0, 0], device), ints([17, 38, 39], device)
    parts = torch.randn(2, 3, (num_heads + 2 * num_kv_heads) * head_dim, device=device)
    parts[0, :, -1] = 1e3  # a value that fp8 cuts off
    half = head_dim // 2 if has_rope else 0
    cos, sin = torch.randn(2, 64, half, device=device)
    norms = torch.rand(num_heads + num_kv_heads, head_dim, device=device) if has_norm else None
    queries = rope_and_write(
        SplitSum(parts), pool.kv_layer, rows, positions, pool.tables, cos, sin, num_heads,
        head_norms=norms, eps=1e-5, dtype=dtype, kv_scales=pool.scales,
    )  # fmt: skip
    heads = parts.sum(0).view(3, -1, head_dim)
    turned, values = heads.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        turned = F.rms_norm(turned, (head_dim,), eps=1e-5) * norms
    if has_rope:
        turned = rotate(turned, cos[positions.long()], sin[positions.long()])
    assert queries.dtype == dtype
    torch.testing.assert_close(queries.float(), turned[:, :num_heads], **tolerance(dtype))
    for token, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        block = int(pool.tables[row, position // block_size])
        written = pool.kv_layer.float()[block, position % block_size]
        expected = torch.stack([turned[token, num_heads:], values[token]])
        if pool.scales is None:
            torch.testing.assert_close(written, expected, **tolerance(kv_dtype))
        else:
            # What is beyond the largest value is cut off; the quotient's last bit may differ.
            exact = (expected / pool.scales[:, :, None]).clamp(-448, 448)
            error = (written - exact).abs()
            assert bool((error <= exact.abs().clamp(min=2**-6) / 15).all())
            assert bool((written == exact.to(kv_dtype).float()).float().mean() > 0.99)
        before[block, position % block_size] = written
    torch.testing.assert_close(pool.kv_layer.float(), before, equal_nan=True)  # and nothing else


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("sizes", "has_norm", "has_rope"),
    [((6, 2, 16, 4), True, True), ((4, 4, 24, 8), False, True), ((3, 1, 80, 16), False, False)],
)
def test_rotation_and_writing(
    device: torch.device,
    sizes: tuple[int, int, int, int],
    has_norm: bool,
    has_rope: bool,
    kv_dtype: torch.dtype,
) -> None:
    run_rotation(device, sizes, has_norm=has_norm, has_rope=has_rope, kv_dtype=kv_dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("sizes", GRID)
def test_rotation_and_writing_over_a_grid(
    device: torch.device, sizes: tuple[int, int, int, int], kv_dtype: torch.dtype
) -> None:
    for has_norm in (False, True):
        run_rotation(
            device, sizes, has_norm=has_norm, has_rope=True, dtype=torch.bfloat16, kv_dtype=kv_dtype
        )


# Around every edge of the tiles and of what is chosen by the number of rows.
EDGES = (1, 2, 15, 16, 17, 32, 33, 63, 64, 65, 127, 128, 129, 192, 224, 225, 256, 257)


def run_products(device: torch.device, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = (torch.randn(outputs, inputs, device=device) / inputs**0.5).to(dtype)
    x = torch.randn(max(EDGES), inputs, device=device).to(dtype)
    expected = x.double() @ weight.double().T
    gate, up = expected.chunk(2, dim=-1)
    gated = F.silu(gate) * up
    for rows in EDGES:
        y = whole(linear(x[:rows], weight, None), dtype)
        torch.testing.assert_close(y.double(), expected[:rows], **tolerance(dtype))
        y = gated_linear(x[:rows], weight, None)
        torch.testing.assert_close(y.double(), gated[:rows], **tolerance(dtype))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (3072, 2048), (16384, 2048)],
)
def test_products_of_an_8b_and_a_1b(
    device: torch.device, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    run_products(device, outputs, inputs, dtype)
