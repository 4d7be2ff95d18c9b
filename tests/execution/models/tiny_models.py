"""Tiny random checkpoints: Hugging Face directories by transformers, GGUF files by gguf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from octavo.execution.models.gguf_weights import gguf_name

PROMPT = [3, 17, 42, 5, 90, 11, 64, 28, 7]
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}

NOT_OPT = ("intermediate_size", "num_key_value_heads", "initializer_range")
OPT_350M: dict[str, Any] = {"do_layer_norm_before": False, "word_embed_proj_dim": 32}


def tiny_llama(**changes: Any) -> PreTrainedModel:
    return _randomized(LlamaForCausalLM, LlamaConfig(**{**SHAPE, **changes}))


def tiny_mistral(**changes: Any) -> PreTrainedModel:
    return _randomized(MistralForCausalLM, MistralConfig(**{**SHAPE, **changes}))


def tiny_qwen2(**changes: Any) -> PreTrainedModel:
    return _randomized(Qwen2ForCausalLM, Qwen2Config(**{**SHAPE, **changes}))


def tiny_qwen3(**changes: Any) -> PreTrainedModel:
    """Its heads are wider than a share of the hidden size."""
    return _randomized(Qwen3ForCausalLM, Qwen3Config(**{**SHAPE, "head_dim": 32, **changes}))


def tiny_opt(**changes: Any) -> PreTrainedModel:
    """Of OPT-125m's kind, unless ``OPT_350M`` is among the changes."""
    shape = {key: value for key, value in SHAPE.items() if key not in NOT_OPT}
    shape |= {"ffn_dim": 128, "init_std": 0.3}
    return _randomized(OPTForCausalLM, OPTConfig(**{**shape, **changes}))


def _randomized(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """Norms and biases too, so that none of them can be left out unnoticed."""
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
    return model


def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0]


def permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q and k."""
    shape = rows.shape
    split = rows.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:])
    return split.swapaxes(1, 2).reshape(shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: str = "F32",
    *,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """Write ``model`` as llama.cpp's converter would, matrices quantized to ``kind``.

    ``metadata`` adds or replaces keys (``None`` leaves one out).
    """
    config = model.config
    name = {"mistral": "llama"}.get(config.model_type, config.model_type)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": head_dim,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
    }
    keys = {f"{name}.{key}": value for key, value in keys.items()}
    keys |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    writer = gguf.GGUFWriter(path, name)
    for key, value in {**keys, **(metadata or {})}.items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    quantized = gguf.GGMLQuantizationType[kind]
    for tensor_name, tensor in model.state_dict().items():
        stored = gguf_name(tensor_name)
        if stored in without or (tensor_name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = tensor.float().numpy()
        if name == "llama" and ".q_proj." in tensor_name:
            values = permuted(values, config.num_attention_heads)
        elif name == "llama" and ".k_proj." in tensor_name:
            values = permuted(values, config.num_key_value_heads)
        if values.ndim == 1 or kind == "F32":
            writer.add_tensor(stored, values)
        else:
            data = gguf.quantize(np.ascontiguousarray(values), quantized)
            writer.add_tensor(stored, data, raw_dtype=quantized)
    for stored, values in (tensors or {}).items():
        writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dequantized(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """``model`` with every matrix rounded as ``kind`` stores it (row permutations commute)."""
    quantized = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                data = gguf.quantize(parameter.detach().numpy(), quantized)
                parameter.copy_(torch.from_numpy(np.array(gguf.dequantize(data, quantized))))
    return model
