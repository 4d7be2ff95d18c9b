"""Layers against their formulas, packed and not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.execution.models import layers
from octavo.execution.models.activations import silu_and_mul
from octavo.execution.models.dummy_weights import DummyWeights
from octavo.execution.models.layers import LearnedPositions, Linear, packs
from octavo.execution.models.norms import LayerNorm, QueryKeyNorm, RMSNorm, rms_norm_cpu
from octavo.execution.models.parallel import TensorParallel

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(
    not packs(torch.bfloat16, CPU), reason="this CPU has no bfloat16 products in oneDNN"
)


def loaded_linear(dtype: torch.dtype, bias: bool) -> Linear:
    parts = [("a", 96), ("b", 32)]
    linear = Linear(parts, 72, split="column", bias=bias, parallel=TensorParallel())
    linear.load(DummyWeights(), dtype, CPU)
    return linear


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("repeat_numel", [1, layers.REPEAT_NUMEL])
def test_packed_linear_equals_plain_at_every_row_count(
    monkeypatch: pytest.MonkeyPatch, repeat_numel: int, bias: bool
) -> None:
    monkeypatch.setattr(layers, "REPEAT_NUMEL", repeat_numel)
    linear = loaded_linear(torch.bfloat16, bias)
    weight, bias_values = linear.weight, linear.bias
    assert weight is not None
    linear.prepare()
    assert linear.weight is None, "the plain copy must be dropped"
    wide_bias = None if bias_values is None else bias_values.float()
    torch.manual_seed(0)
    for rows in [*range(34), 63, 64, 65, 127, 128, 255, 256, 257, 511, 512, 600]:
        x = torch.randn(rows, 72).bfloat16()
        expected = F.linear(x.float(), weight.float(), wide_bias)
        found = linear(x)
        assert found.shape == (rows, 128)
        torch.testing.assert_close(found.float(), expected, atol=4e-3, rtol=1e-2)


@needs_packing
def test_packed_linear_takes_views() -> None:
    linear = loaded_linear(torch.bfloat16, False)
    linear.prepare()
    x = torch.randn(9, 144).bfloat16()
    torch.testing.assert_close(linear(x[:, :72]), linear(x[:, :72].contiguous()))
    torch.testing.assert_close(linear(x[::2, 72:]), linear(x[::2, 72:].contiguous()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_stay_plain(dtype: torch.dtype) -> None:
    linear = loaded_linear(dtype, True)
    linear.prepare()
    x = torch.randn(5, 72).to(dtype)
    assert linear.weight is not None
    assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))


def test_linear_names_its_split() -> None:
    pair = {"all_reduce": lambda t: t, "all_gather": lambda t: t}
    parallel = TensorParallel(1, 2, **pair)
    shapes = {}
    for split in ("column", "row", "replicated"):
        linear = Linear([("a", 8), ("b", 4)], 6, split=split, bias=True, parallel=parallel)
        linear.load(DummyWeights(), torch.float32, CPU)
        assert linear.weight is not None
        shapes[split] = (tuple(linear.weight.shape), linear.bias is not None)
    assert shapes == {
        "column": ((6, 6), True),
        "row": ((12, 3), False),
        "replicated": ((12, 6), True),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 7, 128])
def test_rms_norm_equals_its_formula(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(rows, 72) * 3).to(dtype)
    weight = torch.rand(72) + 0.5
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    found = rms_norm_cpu(x, weight, torch.tensor(1e-3))
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected.to(dtype), atol=1e-6, rtol=1e-2)


def test_rms_norm_of_large_values_stays_finite() -> None:
    norm = RMSNorm("x.norm", 72, 1e-5)
    norm.load(DummyWeights(), torch.float16, CPU)
    norm.prepare()
    assert torch.equal(norm(torch.full((2, 72), 60000.0).half()), torch.ones(2, 72).half())


def test_silu_and_mul() -> None:
    x = torch.randn(5, 24)
    before = x.clone()
    torch.testing.assert_close(silu_and_mul(x), F.silu(x[:, :12]) * x[:, 12:])
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
def test_layer_norm(dtype: torch.dtype, wide: bool) -> None:
    """``wide``: a float32 residual beside narrower weights, as quantized layers have it."""
    norm = LayerNorm("x", 72, 1e-5)
    norm.load(DummyWeights(), dtype, CPU)
    assert norm.weight is not None
    assert norm.bias is not None
    weight, bias = norm.weight.float(), norm.bias.float()
    norm.prepare()
    x = (torch.randn(5, 72) * 3).to(torch.float32 if wide else dtype)
    found = norm(x)
    assert found.dtype == x.dtype
    expected = F.layer_norm(x.float(), (72,), weight, bias, 1e-5).to(x.dtype)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_query_key_norm_leaves_values_alone(dtype: torch.dtype) -> None:
    norm = QueryKeyNorm("x", 4, 2, 8, 1e-3)
    norm.load(DummyWeights(), dtype, CPU)
    norm.weight.uniform_(0.5, 1.5)
    norm.prepare()
    qkv = (torch.randn(5, 64) * 3).to(dtype)
    before = qkv.clone()
    assert norm(qkv) is qkv
    heads, wide = qkv.view(5, 8, 8), before.view(5, 8, 8).float()
    for head in range(6):
        expected = F.rms_norm(wide[:, head], (8,), norm.weight[head], 1e-3)
        torch.testing.assert_close(heads[:, head], expected.to(dtype), atol=1e-5, rtol=1e-2)
    assert torch.equal(heads[:, 6:], before.view(5, 8, 8)[:, 6:])


def test_learned_positions_skip_their_offset() -> None:
    table = torch.empty(12, 6)
    DummyWeights().copy("x.weight", (12, 6), table, 0, 0)
    positions = LearnedPositions("x", 10, 6, offset=2)
    positions.load(DummyWeights(), torch.float32, CPU)
    assert torch.equal(positions(torch.tensor([0, 9, 3], dtype=torch.int32)), table[[2, 11, 5]])
    with pytest.raises(IndexError):
        positions(torch.tensor([10]))
