"""Hugging Face directories: whole, sharded, broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from reference_attention import logits_of
from safetensors.torch import load_file, save_file
from tiny_models import PROMPT, reference_logits, tiny_llama

from octavo.core.model_config import ModelLoadError
from octavo.execution.models.loading import load_model

INDEX = "model.safetensors.index.json"


def test_sharded_equals_transformers(tmp_path: Path) -> None:
    reference = tiny_llama()
    reference.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert (tmp_path / INDEX).exists()
    torch.testing.assert_close(
        logits_of(load_model(tmp_path, dtype="float32"), PROMPT),
        reference_logits(reference, PROMPT),
        atol=1e-4,
        rtol=1e-4,
    )


def test_a_single_file_of_another_name_is_found(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    load_model(tmp_path)


def test_broken_index(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path, max_shard_size="60KB")
    index = json.loads((tmp_path / INDEX).read_text())
    names = sorted(index["weight_map"])

    def expect(message: str) -> None:
        with pytest.raises(ModelLoadError, match=message):
            load_model(tmp_path)

    changed = {**index["weight_map"], names[0]: "model-00099-of-00099.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": changed}))
    expect(rf"{INDEX}: names model-00099-of-00099.safetensors, which does not exist")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "../model.safetensors"}}))
    expect("not a plain file name")
    (tmp_path / INDEX).write_text("{}")
    expect(rf"{INDEX}: weight_map is missing")
    ghost = {**index["weight_map"], "model.ghost": index["weight_map"][names[0]]}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": ghost}))
    expect("tensor model.ghost is missing")


def test_broken_and_absent_files(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for data in (whole[:-1], whole[:100], b"", b"\xff" * 8 + whole[8:], whole[:8] + b"x" * 400):
        path.write_bytes(data)
        with pytest.raises(ModelLoadError, match=r"model\.safetensors: broken safetensors file"):
            load_model(tmp_path)
    path.unlink()
    with pytest.raises(ModelLoadError, match=r"no safetensors files$"):
        load_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelLoadError, match="never read"):
        load_model(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(whole)
    (tmp_path / "b.safetensors").write_bytes(whole)
    with pytest.raises(ModelLoadError, match="2 safetensors files, but no"):
        load_model(tmp_path)


def test_wrong_tensors(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    # Copies: the file that these are mapped from is written over below.
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    name = "model.layers.1.mlp.up_proj.weight"

    def expect(changes: dict[str, torch.Tensor | None], message: str) -> None:
        changed = {k: v for k, v in {**tensors, **changes}.items() if v is not None}
        save_file(changed, path)
        with pytest.raises(ModelLoadError, match=message):
            load_model(tmp_path)

    expect({name: None}, f"tensor {name} is missing")
    expect({name: torch.zeros(128, 32)}, r"has shape \[128, 32\], expected \[128, 64\]")
    expect({name: torch.zeros(128, 64, dtype=torch.int8)}, f"{name} is I8; supported")
    expect({"lm_head.weight": None}, "tensor lm_head.weight is missing")
    bias = "model.layers.0.self_attn.q_proj.bias"
    expect({bias: torch.zeros(64)}, f"no place for: {bias}")
    save_file({**tensors, "model.rotary_emb.inv_freq": torch.zeros(8)}, path)
    load_model(tmp_path)


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "vocab_size", "head_dim"])
def test_an_absurd_configuration_is_an_error_not_an_allocation(tmp_path: Path, key: str) -> None:
    tiny_llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, key: 2**30, "num_hidden_layers": 2**30})
    )
    with pytest.raises(ModelLoadError, match="has shape"):
        load_model(tmp_path)
