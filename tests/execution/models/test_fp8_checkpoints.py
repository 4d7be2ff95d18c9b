"""fp8 checkpoints: as they are stored, dequantized, split over ranks, refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_checkpoints import E4M3, compressed, dequantized, save_fp8
from reference_attention import logits_of
from safetensors.torch import load_file, save_file
from test_tensor_parallel import check_two_ranks_equal_one
from tiny_models import PROMPT, reference_logits, tiny_llama, tiny_qwen2, write_gguf

from octavo.core.model_config import ModelLoadError
from octavo.execution.models.hf_config import load_hf_config
from octavo.execution.models.layers import Linear
from octavo.execution.models.loading import load_model

PLAIN = {"quant_method": "fp8", "activation_scheme": "static"}
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def input_scales(names: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name.replace(".weight", ".input_scale"): torch.tensor([0.25])
        for name in names
        if "_proj.weight" in name
    }


@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize("weights", ["auto", "bf16", "fp8"])
def test_logits_are_those_of_what_is_stored(
    tmp_path: Path, is_tensor: bool, weights: str, caplog: pytest.LogCaptureFixture
) -> None:
    reference = tiny_qwen2()
    quantization = PLAIN if is_tensor else compressed()
    extra = input_scales(reference.state_dict()) if is_tensor else None
    plain = save_fp8(tmp_path, reference, quantization, is_tensor=is_tensor, extra=extra)
    with caplog.at_level(logging.INFO):
        model = load_model(tmp_path, dtype="float32", weights=weights)
    assert ("input_scale is not used" in caplog.text) == is_tensor
    assert model.weight_kinds() == ("fp8" if weights == "fp8" else "float32")
    expected = reference_logits(dequantized(reference, plain), PROMPT)
    torch.testing.assert_close(logits_of(model, PROMPT), expected, **CLOSE)
    qkv = model.layers[0].qkv
    assert qkv.weight is not None
    if weights == "fp8":
        assert qkv.weight.dtype == E4M3
        stored = load_file(tmp_path / "model.safetensors")
        name = "model.layers.0.self_attn.{}_proj.weight"
        parts = [stored[name.format(part)].view(torch.uint8) for part in "qkv"]
        assert torch.equal(qkv.weight.view(torch.uint8), torch.cat(parts))
        half = load_model(tmp_path, dtype="bfloat16", weights="bf16").weight_bytes()
        assert model.weight_bytes() < half


def test_what_is_not_fp8_stays(tmp_path: Path) -> None:
    """Of a fused projection with one part in 32 bits, and of another that is left out."""
    reference = tiny_llama()
    ignored = ("0.self_attn.k_proj", "1.mlp.down_proj", "lm_head")
    plain = save_fp8(tmp_path, reference, compressed("tensor"), is_tensor=True, ignored=ignored)
    model = load_model(tmp_path, dtype="float32", weights="fp8")
    kinds = [[linear.kinds() == {"fp8"} for linear in layer.linears()] for layer in model.layers]
    assert kinds == [[False, True, True, True], [True, True, True, False]]
    expected = reference_logits(dequantized(reference, plain), PROMPT)
    torch.testing.assert_close(logits_of(model, PROMPT), expected, **CLOSE)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_or_an_embedding_in_fp8(tmp_path: Path, is_tied: bool) -> None:
    reference = tiny_llama(tie_word_embeddings=is_tied)
    name = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    narrow = reference.state_dict()[name].to(E4M3)
    extra = {name: narrow, f"{name}_scale": torch.tensor(2.0)}
    plain = save_fp8(tmp_path, reference, compressed(), extra=extra)
    plain[name] = 2.0 * narrow.float()
    expected = reference_logits(dequantized(reference, plain), PROMPT)
    for weights in ("auto", "fp8"):
        model = load_model(tmp_path, dtype="float32", weights=weights)
        assert (model.head.scales is None) == (is_tied or weights == "auto")
        torch.testing.assert_close(logits_of(model, PROMPT), expected, **CLOSE)


@pytest.mark.parametrize("source", ["safetensors", "gguf"])
def test_projections_are_rounded_at_loading(tmp_path: Path, source: str) -> None:
    reference = tiny_llama()
    path = tmp_path
    if source == "gguf":
        path = write_gguf(tmp_path / "tiny.gguf", reference)
    else:
        reference.save_pretrained(tmp_path)
    exact = load_model(path, dtype="float32")
    model = load_model(path, dtype="float32", weights="fp8")
    for layer, wide in zip(model.layers, exact.layers, strict=True):
        for linear, other in zip(layer.linears(), wide.linears(), strict=True):
            assert linear.weight is not None
            assert linear.scales is not None
            assert other.weight is not None
            stands_for = linear.weight.float() * linear.scales[:, None]
            largest = other.weight.abs().amax(dim=1)
            torch.testing.assert_close(stands_for.abs().amax(dim=1), largest)
            error = (stands_for - other.weight).abs()
            assert bool((error <= other.weight.abs() / 15 + largest[:, None] / 2**17).all())
    assert model.head.scales is None
    error = logits_of(model, PROMPT) - logits_of(exact, PROMPT)
    assert 0 < float(error.norm() / logits_of(exact, PROMPT).norm()) < 0.2


@pytest.mark.parametrize("is_tensor", [False, True])
def test_two_ranks_equal_one(tmp_path: Path, is_tensor: bool) -> None:
    quantization = compressed("tensor" if is_tensor else "channel")
    save_fp8(tmp_path, tiny_llama(), quantization, is_tensor=is_tensor)
    check_two_ranks_equal_one(tmp_path)
    whole = load_model(tmp_path, dtype="float32", weights="fp8").layers[0]
    halves = [
        load_model(
            tmp_path, dtype="float32", weights="fp8", rank=rank, size=2,
            all_reduce=torch.clone, all_gather=torch.clone,
        ).layers[0]
        for rank in (0, 1)
    ]  # fmt: skip

    def joined(name: str, axis: int) -> torch.Tensor:
        return torch.cat([stands_for(getattr(half, name)) for half in halves], dim=axis)

    def stands_for(linear: Linear) -> torch.Tensor:
        assert linear.weight is not None
        assert linear.scales is not None
        return linear.weight.float() * linear.scales[:, None]

    assert torch.equal(joined("down", 1), stands_for(whole.down))
    assert torch.equal(joined("output", 1), stands_for(whole.output))
    order = torch.cat([torch.arange(64) + first for first in (0, 128, 64, 192)])
    assert torch.equal(joined("up", 0)[order], stands_for(whole.up))


def test_scales_of_keys_and_values(tmp_path: Path) -> None:
    name = "model.layers.{}.self_attn.{}"
    extra = {
        name.format(0, "k_scale"): torch.tensor(0.5),
        name.format(0, "v_scale"): torch.tensor([[0.25], [0.75]]),
        name.format(1, "k_proj.output_scale"): torch.tensor([2.0]),
        name.format(0, "q_scale"): torch.tensor(1.5),
    }
    quantization = compressed() | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    save_fp8(tmp_path, tiny_llama(), quantization, extra=extra)
    scheme = load_hf_config(tmp_path).fp8
    assert scheme is not None
    assert scheme.kv
    model = load_model(tmp_path)
    assert model.kv_scales is not None
    expected = [[[0.5, 0.5], [0.25, 0.75]], [[2.0, 2.0], [1.0, 1.0]]]
    assert model.kv_scales.tolist() == expected
    other = {"all_reduce": torch.clone, "all_gather": torch.clone}
    second = load_model(tmp_path, rank=1, size=2, **other)
    assert second.kv_scales is not None
    assert second.kv_scales.tolist() == [[[0.5], [0.75]], [[2.0], [1.0]]]


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq' is not supported; supported: fp8 and"),
        ({}, "quant_method 'none' is not supported"),
        ("fp8", "quantization_config must be an object"),
        (PLAIN | {"weight_block_size": [128, 128]}, r"weight_block_size \[128, 128\] is not supp"),
        (PLAIN | {"fmt": "e5m2"}, "fmt 'e5m2' is not supported; supported: e4m3"),
        (PLAIN | {"activation_scheme": "blocks"}, "must be static or dynamic"),
        (compressed("block"), "weights.strategy 'block' is not supported"),
        (compressed(weights={"num_bits": 4, "type": "int"}), "is 4 bits of 'int'"),
        (compressed(input_activations={"num_bits": 8, "type": "int"}), "is 8 bits of 'int'"),
        (compressed(format="pack-quantized"), "'pack-quantized' is not supported"),
        (compressed() | {"config_groups": []}, "config_groups must be an object"),
        (compressed() | {"config_groups": {"a": 1}}, "config_groups.a must be an object"),
        (compressed() | {"kv_cache_scheme": {"num_bits": 4}}, "kv_cache_scheme is 4 bits"),
    ],
)
def test_what_is_refused(tmp_path: Path, quantization: Any, message: str) -> None:
    tiny_llama().config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"architectures": ["LlamaForCausalLM"]}
                   | {"quantization_config": quantization})
    )  # fmt: skip
    with pytest.raises(ModelLoadError, match=message):
        load_hf_config(tmp_path)


def test_broken_scales(tmp_path: Path) -> None:
    save_fp8(tmp_path, tiny_llama(), compressed())
    path = tmp_path / "model.safetensors"
    sound = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight_scale"
    for value, message in (
        (None, f"tensor {name} is missing"),
        (torch.ones(5), rf"tensor {name} has shape \[5\], expected one number or 128"),
        (torch.full((128, 1), float("nan")), f"tensor {name} must hold positive and finite"),
    ):
        changed = {key: tensor for key, tensor in sound.items() if key != name}
        save_file(changed if value is None else changed | {name: value}, path)
        with pytest.raises(ModelLoadError, match=message):
            load_model(tmp_path)
    save_file(sound | {"model.layers.0.mlp.gate_proj.weight_zero": torch.ones(1)}, path)
    with pytest.raises(ModelLoadError, match="no place for"):
        load_model(tmp_path)


def test_fp8_tensors_of_an_unquantized_checkpoint_are_refused(tmp_path: Path) -> None:
    save_fp8(tmp_path, tiny_llama(), compressed())
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="is F8_E4M3; supported"):
        load_model(tmp_path)
