"""Formats, dtypes and dummy weights."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference_attention import logits_of
from tiny_models import PROMPT, tiny_llama, write_gguf

from octavo.core.model_config import ModelLoadError
from octavo.execution.models.dummy_weights import DummyWeights
from octavo.execution.models.loading import load_config, load_model, resolve_dtype


def test_dummy_needs_only_a_config(tmp_path: Path) -> None:
    tiny_llama(attention_bias=True).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    models = [
        load_model(source, load_format="dummy", dtype="bfloat16")
        for source in (tmp_path, tmp_path / "config.json")
    ]
    logits = [logits_of(model, PROMPT) for model in models]
    assert torch.equal(logits[0], logits[1])
    assert logits[0].isfinite().all()
    assert logits[0].std() > 0


def test_dummy_takes_a_gguf_for_its_shape(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_llama())
    assert load_model(path, load_format="dummy").config.hidden_size == 64


def test_dummy_shards_are_slices_of_the_whole() -> None:
    weights, shape = DummyWeights(), (8, 6)
    whole = torch.empty(shape)
    weights.copy("w", shape, whole, 0, 0)
    other = torch.empty(shape)
    weights.copy("v", shape, other, 0, 0)
    assert not torch.equal(whole, other)
    for axis in (0, 1):
        part = torch.empty(4, 6) if axis == 0 else torch.empty(8, 3)
        start = part.shape[axis]
        weights.copy("w", shape, part, axis, start)
        assert torch.equal(part, whole.narrow(axis, start, start))


def test_dummy_rows_of_a_large_tensor_differ() -> None:
    weight = torch.empty(3000, 1000, dtype=torch.bfloat16)
    DummyWeights().copy("w", (3000, 1000), weight, 0, 0)
    assert abs(weight.float().std() - 0.02) < 1e-3
    assert len(torch.unique(weight.view(torch.int16), dim=0)) == 3000


def test_resolve_dtype(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    config = load_config(tmp_path)
    half = dataclasses.replace(config, dtype="float16")
    assert resolve_dtype(config, "auto", "cpu") == torch.float32
    assert resolve_dtype(config, "bfloat16", "cpu") == torch.bfloat16
    assert resolve_dtype(half, "auto", "cuda") == torch.float16
    assert resolve_dtype(half, "auto", "cpu") == torch.bfloat16
    assert resolve_dtype(half, "float16", "cpu") == torch.float16
    with pytest.raises(ValueError, match="dtype must be auto, bfloat16, float16, float32"):
        resolve_dtype(config, "int8", "cpu")


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("Q4_0", "bfloat16")]
)
def test_a_gguf_has_a_dtype(tmp_path: Path, kind: str, dtype: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_llama(), kind)
    assert load_config(path).dtype == dtype


def test_max_positions(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    assert load_model(tmp_path).rope.cos.shape == (128, 8)
    assert load_model(tmp_path, max_positions=40).rope.sin.shape == (40, 8)
    with pytest.raises(ValueError, match="max_positions must be at least 1"):
        load_model(tmp_path, max_positions=0)


def test_wrong_sources(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such file or directory"):
        load_model(tmp_path / "nothing")
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="neither a directory nor"):
        load_model(tmp_path / "x.bin")
    with pytest.raises(ModelLoadError, match=r"name the \.gguf file"):
        load_model(tmp_path, load_format="gguf")
    with pytest.raises(ValueError, match="load_format must be one of"):
        load_model(tmp_path, load_format="pickle")


def test_loading_imports_neither_transformers_nor_gguf() -> None:
    code = (
        "import sys, octavo.execution.models.loading\n"
        "assert not {'transformers', 'gguf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
