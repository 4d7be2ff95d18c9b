"""Tiny checkpoints with fp8 weights, written as llm-compressor and AutoFP8 write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

E4M3 = torch.float8_e4m3fn


def compressed(strategy: str = "channel", **changes: Any) -> dict[str, Any]:
    """``quantization_config`` of llm-compressor; ``changes`` are of its one group."""
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**numbers, "strategy": strategy, "dynamic": False},
        "input_activations": {**numbers, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {**group, **changes}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def save_fp8(
    folder: Path,
    model: PreTrainedModel,
    quantization: dict[str, Any],
    *,
    is_tensor: bool = False,
    ignored: tuple[str, ...] = (),
    extra: dict[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Write ``model`` with its projections in fp8: a scale for each (``is_tensor``) or one a
    channel. Those whose names hold one of ``ignored`` stay as they are. ``extra`` is added.

    Returns what the tensors stand for, by their names.
    """
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    stored, plain = {}, load_file(path)
    for name, tensor in list(plain.items()):
        if "_proj.weight" not in name or any(part in name for part in ignored):
            stored[name] = tensor
            continue
        largest = tensor.abs().amax() if is_tensor else tensor.abs().amax(1, keepdim=True)
        scale = largest / 448
        narrow = (tensor / scale).clamp(-448, 448).to(E4M3)
        stored[name], stored[f"{name}_scale"] = narrow, scale
        plain[name] = narrow.float() * scale
    save_file(stored | (extra or {}), path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return plain


def dequantized(model: PreTrainedModel, plain: dict[str, torch.Tensor]) -> PreTrainedModel:
    """``model`` with the weights of ``save_fp8``."""
    model.load_state_dict(plain, strict=False)
    return model
