"""Models with 4- and 8-bit weights: what is kept as stored, and how close it stays to floats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from reference_attention import logits_of
from tiny_models import PROMPT, tiny_llama, write_gguf

from octavo.execution.models.fp8 import Fp8Quantization
from octavo.execution.models.gguf_blocks import STORED_TYPES, stored_rows
from octavo.execution.models.loading import load_model
from octavo.execution.models.quantization import WeightQuantization, resolve_quantization
from octavo.execution.models.quantized import is_supported

CPU = torch.device("cpu")
needs_vnni = pytest.mark.skipif(not is_supported(), reason="needs a CPU with AVX512-VNNI")


@pytest.mark.parametrize("type_name", STORED_TYPES)
def test_stored_blocks_are_taken_without_loss(type_name: str) -> None:
    values = np.random.default_rng(0).standard_normal((48, 96)).astype(np.float32)
    values[0] = 0
    raw = quantize(values, GGMLQuantizationType[type_name])
    rows = stored_rows(raw, type_name)
    scales, minima = (np.repeat(x.astype(np.float32), 32, 1) for x in (rows.scales, rows.minima))
    offset = 128.0 if rows.bits == 8 else 0.0
    got = scales * (rows.values.astype(np.float32) - offset) + minima
    assert np.array_equal(got, dequantize(raw, GGMLQuantizationType[type_name]))


@needs_vnni
def test_auto_quantizes_nothing_that_is_asked_to_be_exact() -> None:
    assert resolve_quantization("auto", torch.float32, CPU) is None
    assert resolve_quantization("bf16", torch.bfloat16, CPU) is None
    assert resolve_quantization("auto", torch.bfloat16, CPU) == WeightQuantization(bits=None)
    assert resolve_quantization("int4", torch.float32, CPU) == WeightQuantization(bits=4)


def test_packed_weights_are_refused_where_they_cannot_run() -> None:
    with pytest.raises(ValueError, match="int8 runs on CPUs only, not on cuda"):
        resolve_quantization("int8", torch.bfloat16, torch.device("cuda"))
    with pytest.raises(ValueError, match="auto, bf16, fp8, int8, int4"):
        resolve_quantization("fp4", torch.bfloat16, CPU)


def similarity(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.cosine_similarity(found.flatten(), expected.flatten(), dim=0))


@needs_vnni
@pytest.mark.parametrize(
    ("kind", "mode", "kinds"),
    [
        ("Q4_0", "auto", "int4"),
        ("Q4_1", "auto", "int4"),
        ("Q8_0", "auto", "int8"),
        ("Q5_1", "auto", "int8"),
        ("F16", "auto", "bfloat16"),
        ("Q8_0", "int4", "int4"),
        ("Q4_1", "int8", "int8"),
        ("Q4_1", "bf16", "bfloat16"),
    ],
)
def test_a_gguf_runs_in_the_width_asked_for(
    tmp_path: Path, kind: str, mode: str, kinds: str
) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_llama(), kind)
    model = load_model(path, dtype="bfloat16", weights=mode)
    assert model.weight_kinds() == kinds
    expected = logits_of(load_model(path, dtype="float32", weights="bf16"), PROMPT)
    # Rounding a random model's weights to 4 bits once more costs most.
    bound = 0.85 if (kind, mode) == ("Q8_0", "int4") else 0.995
    assert similarity(logits_of(model, PROMPT), expected) > bound


@needs_vnni
@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}], ids=str)
def test_a_checkpoint_of_floats_is_rounded_on_request(
    tmp_path: Path, mode: str, changes: dict[str, bool]
) -> None:
    tiny_llama(tie_word_embeddings=True, **changes).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="bfloat16", weights=mode)
    assert model.weight_kinds() == mode
    expected = logits_of(load_model(tmp_path, dtype="float32"), PROMPT)
    assert similarity(logits_of(model, PROMPT), expected) > (0.998 if mode == "int8" else 0.85)
    plain = load_model(tmp_path, dtype="bfloat16").weight_bytes()
    assert model.weight_bytes() < plain, "narrow weights take less memory"


@needs_vnni
def test_a_width_that_does_not_divide_stays_in_floats(tmp_path: Path) -> None:
    tiny_llama(intermediate_size=100).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="bfloat16", weights="int8")
    expected = logits_of(load_model(tmp_path, dtype="float32"), PROMPT)
    assert model.layers[0].qkv.is_quantized
    assert not model.layers[0].down.is_quantized
    assert similarity(logits_of(model, PROMPT), expected) > 0.998


def test_where_weights_stay_in_fp8() -> None:
    """On a GPU, but for a model that is asked for in fp32; elsewhere only where it is asked for."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    found = resolve_quantization("auto", torch.bfloat16, gpu)
    assert isinstance(found, Fp8Quantization)
    assert not found.rounds
    found = resolve_quantization("fp8", torch.float32, cpu)
    assert isinstance(found, Fp8Quantization)
    assert found.rounds
    for mode, dtype, device in (
        ("auto", torch.float32, gpu),
        ("bf16", torch.bfloat16, gpu),
        ("auto", torch.bfloat16, cpu),
    ):
        assert not isinstance(resolve_quantization(mode, dtype, device), Fp8Quantization)
