"""4- and 8-bit products against plain arithmetic on the same quantized values."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location

import numpy as np
import pytest
import torch
from llvmlite import binding
from numba import njit
from numpy.typing import NDArray

from octavo.execution.kernels import compile as compile_module
from octavo.execution.kernels.cpu_linear import HAS_PAIRS
from octavo.execution.models import quantized
from octavo.execution.models.quantized import (
    QuantizedInputs,
    is_supported,
    merge,
    pack,
    quantize_rows,
)
from octavo.execution.models.weights import QuantizedRows

pytestmark = pytest.mark.skipif(not is_supported(), reason="needs a CPU with AVX512-VNNI")


def product(
    inputs: QuantizedInputs, rows: QuantizedRows, has_pairs: bool = HAS_PAIRS
) -> NDArray[np.float64]:
    """Where the CPU multiplies bfloat16 pairs, minima and what they are multiplied by are rounded
    to bfloat16."""
    plain = QuantizedRows(rows.bits, rows.values, rows.scales, np.zeros_like(rows.minima))
    sums = input_floats(inputs).reshape(inputs.num_rows, rows.scales.shape[1], 32).sum(-1)
    minima = rows.minima.astype(np.float64)
    if has_pairs:
        sums, minima = (
            torch.from_numpy(x).float().bfloat16().double().numpy() for x in (sums, minima)
        )
    return input_floats(inputs) @ floats(plain).T + sums @ minima.T


def floats(rows: QuantizedRows) -> NDArray[np.float64]:
    scales, minima = (np.repeat(x.astype(np.float64), 32, 1) for x in (rows.scales, rows.minima))
    if rows.bits == 8:
        return scales * (rows.values.astype(np.float64) - 128)
    return scales * rows.values + minima


def input_floats(inputs: QuantizedInputs) -> NDArray[np.float64]:
    return inputs.values() * np.repeat(inputs.scales().astype(np.float64), 32, 1)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (48, 96), (80, 288)])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 33])
def test_a_product_is_that_of_the_quantized_values(
    bits: int, outputs: int, inputs: int, num_rows: int
) -> None:
    torch.manual_seed(outputs + num_rows)
    rows = quantize_rows(torch.randn(outputs, inputs), bits)
    x = QuantizedInputs.of(torch.randn(num_rows, inputs))
    out = np.full((num_rows, outputs + 16), np.nan, dtype=np.float32)
    pack(rows).multiply(x, out[:, :outputs])
    expected = product(x, rows)
    np.testing.assert_allclose(out[:, :outputs], expected, atol=1e-4, rtol=1e-4)
    assert np.isnan(out[:, outputs:]).all(), "nothing is written beside the output"


@pytest.mark.parametrize("num_rows", [128, 133])
def test_many_rows_whose_outputs_lie_multiples_of_2_kb_apart(num_rows: int) -> None:
    torch.manual_seed(0)
    rows = quantize_rows(torch.randn(512, 32), 4)
    x = QuantizedInputs.of(torch.randn(num_rows, 32))
    out = np.full((num_rows, 512), np.nan, dtype=np.float32)
    pack(rows).multiply(x, out)
    np.testing.assert_allclose(out, product(x, rows), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("inputs", [64, 96])
def test_cpus_without_bfloat16_products_add_minima_in_fp32(
    inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels' file once more, as on such a CPU, and without numba's cache on disk."""
    monkeypatch.setattr(compile_module, "compiled", lambda **flags: njit(**flags))
    monkeypatch.setattr(binding, "get_host_cpu_features", dict)
    specification = spec_from_file_location("without_pairs", quantized.kernels.__file__)
    assert specification is not None
    assert specification.loader is not None
    module = module_from_spec(specification)
    specification.loader.exec_module(module)
    assert not module.HAS_PAIRS
    monkeypatch.setattr(quantized, "kernels", module)
    torch.manual_seed(0)
    rows = quantize_rows(torch.randn(32, inputs), 4)
    x = QuantizedInputs.of(torch.randn(5, inputs))
    out = np.empty((5, 32), dtype=np.float32)
    pack(rows).multiply(x, out)
    np.testing.assert_allclose(out, product(x, rows, has_pairs=False), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_extreme_values_do_not_overflow(bits: int) -> None:
    """All weights and inputs at their limits, of either sign, over a long row."""
    values = np.full((16, 4096), 15 if bits == 4 else 255, dtype=np.uint8)
    values[1::2] = 0
    ones = np.ones((16, 128), dtype=np.float16)
    rows = QuantizedRows(bits, values, ones, ones * (-8 if bits == 4 else 0))
    for sign in (1.0, -1.0):
        x = QuantizedInputs.of(torch.full((3, 4096), sign * 1000))
        out = np.empty((3, 16), dtype=np.float32)
        pack(rows).multiply(x, out)
        np.testing.assert_allclose(out, product(x, rows), rtol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_rows_result_does_not_depend_on_the_other_rows(bits: int) -> None:
    torch.manual_seed(3)
    weight = pack(quantize_rows(torch.randn(32, 64), bits))
    x = torch.randn(9, 64)
    whole = np.empty((9, 32), dtype=np.float32)
    weight.multiply(QuantizedInputs.of(x), whole)
    for i in range(9):
        alone = np.empty((1, 32), dtype=np.float32)
        weight.multiply(QuantizedInputs.of(x[i : i + 1]), alone)
        assert np.array_equal(alone[0], whole[i])


def test_neighbours_of_the_same_width_are_merged() -> None:
    torch.manual_seed(0)
    x = QuantizedInputs.of(torch.randn(3, 32))
    parts = [pack(quantize_rows(torch.randn(16, 32), bits)) for bits in (4, 4, 8)]
    expected = np.empty((3, 48), dtype=np.float32)
    for i, part in enumerate(parts):
        part.multiply(x, expected[:, 16 * i : 16 * i + 16])
    merged = merge(parts)
    assert [(part.bits, part.num_outputs) for part in merged] == [(4, 32), (8, 16)]
    got = np.empty((3, 48), dtype=np.float32)
    merged[0].multiply(x, got[:, :32])
    merged[1].multiply(x, got[:, 32:])
    assert np.array_equal(got, expected)


@pytest.mark.parametrize(("bits", "error"), [(4, 1 / 15), (8, 1 / 127)])
def test_rounding_a_weight_errs_by_half_a_step(bits: int, error: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 64)
    weight[0] = 0.0
    weight[1] = 2.5
    rows = quantize_rows(weight, bits)
    groups = weight.reshape(16, 2, 32)
    spread = groups.amax(-1) - groups.amin(-1) if bits == 4 else groups.abs().amax(-1)
    # Half a step, and float16's rounding of scale and minimum.
    bound = (spread * error * 0.51 + groups.abs().amax(-1) * 0.002).repeat_interleave(32, 1)
    assert (torch.from_numpy(floats(rows)) - weight).abs().le(bound + 1e-6).all()


def test_inputs_are_rounded_to_the_nearest_of_255_steps() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64)
    x[0, :32] = 0.0
    inputs = QuantizedInputs.of(x)
    step = np.repeat(inputs.scales(), 32, 1)
    assert (np.abs(input_floats(inputs) - x.numpy()) <= step * 0.5001).all()
    assert not input_floats(inputs)[0, :32].any()


def test_fused_norm_and_activation_equal_their_references() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 96) * 3, torch.rand(96)
    normed = torch.nn.functional.rms_norm(x, (96,), weight, 1e-5)
    got = input_floats(QuantizedInputs.of_rms_norm(x, weight, 1e-5))
    np.testing.assert_allclose(got, normed.numpy(), atol=float(normed.abs().max()) / 200)
    gate_up = torch.cat([torch.linspace(-120, 120, 96).repeat(2, 1), torch.randn(2, 96)], 1)
    activated = torch.nn.functional.silu(gate_up[:, :96]) * gate_up[:, 96:]
    inputs = QuantizedInputs.of_silu_and_mul(gate_up)
    step = np.repeat(inputs.scales(), 32, 1)
    assert (np.abs(input_floats(inputs) - activated.numpy()) <= step * 0.51 + 1e-5).all()


def test_bfloat16_inputs_are_widened_first() -> None:
    x = torch.randn(2, 32).bfloat16()
    assert np.array_equal(QuantizedInputs.of(x).values(), QuantizedInputs.of(x.float()).values())
