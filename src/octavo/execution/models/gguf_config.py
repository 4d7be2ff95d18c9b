"""GGUF metadata to a ModelConfig. Reads no weights but the rope factors."""

from __future__ import annotations

import numpy as np

from octavo.core.gguf_file import GGUFFile
from octavo.core.model_config import ModelConfig, ModelLoadError, RopeScaling
from octavo.execution.models.fields import MAX_POSITIONS, Fields, check_heads
from octavo.execution.models.unsupported import refusal

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"
# The type that fills the matrices -> the dtype it is best served in; quantized ones: bfloat16.
_TYPE_DTYPES = {"F32": "float32", "F16": "float16"}


def gguf_config(file: GGUFFile) -> ModelConfig:
    """The model's shape from ``file``'s metadata.

    Raises:
        ModelLoadError: a key is missing or asks for what Octavo does not have.
    """
    general = Fields(file.path, file.metadata)
    architecture = general.string("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise general.error(
            "general.architecture",
            refusal(architecture, GGUF_ARCHITECTURES),
        )
    fields = Fields(file.path, file.metadata, f"{architecture}.")
    if fields.integer("expert_count", 0, low=0):
        raise fields.error("expert_count", "is set: mixtures of experts are not supported")
    hidden_size = fields.integer("embedding_length")
    num_heads = _per_layer(fields, "attention.head_count", None)
    num_kv_heads = _per_layer(fields, "attention.head_count_kv", num_heads)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_embedding_rows(file),
        hidden_size=hidden_size,
        intermediate_size=_per_layer(fields, "feed_forward_length", None),
        num_layers=fields.integer("block_count"),
        num_attention_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=(head_dim := _head_dim(fields, hidden_size, num_heads, num_kv_heads)),
        max_position_embeddings=fields.integer("context_length", high=MAX_POSITIONS),
        rms_norm_eps=fields.positive("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.positive("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(fields),
        rope_freq_factors=_rope_freq_factors(file, head_dim),
        sliding_window=fields.integer("attention.sliding_window", 0, low=0) or None,
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        dtype=_dtype(file),
        bos_token_id=next(iter(general.token_ids("tokenizer.ggml.bos_token_id")), None),
        eos_token_ids=tuple(
            dict.fromkeys(
                general.token_ids("tokenizer.ggml.eos_token_id")
                + general.token_ids("tokenizer.ggml.eot_token_id")
            )
        ),
    )


def _per_layer(fields: Fields, name: str, default: int | None) -> int:
    """A count that GGUF may give once or once a layer; layers that differ are refused."""
    value = fields.get(name)
    if isinstance(value, np.ndarray):
        if value.size == 0 or value.min() != value.max() or value[0] < 1:
            raise fields.error(name, f"must be the same in every layer, got {value[:8].tolist()}")
        return int(value[0])
    return fields.integer(name) if default is None else fields.integer(name, default)


def _head_dim(fields: Fields, hidden_size: int, num_heads: int, num_kv_heads: int) -> int:
    given = fields.get("attention.key_length")
    head_dim = check_heads(
        fields,
        hidden_size,
        num_heads,
        num_kv_heads,
        None if given is None else fields.integer("attention.key_length"),
    )
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(name, head_dim) != head_dim:
            raise fields.error(
                name, f"is {fields.get(name)}, but only the head dimension {head_dim} is supported"
            )
    return head_dim


def _embedding_rows(file: GGUFFile) -> int:
    info = file.tensors.get("token_embd.weight")
    if info is None:
        raise ModelLoadError(f"{file.path}: tensor token_embd.weight is missing")
    return info.shape[0]


def _rope_scaling(fields: Fields) -> RopeScaling | None:
    kind = fields.string("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise fields.error("rope.scaling.type", f"{kind!r} is not supported; supported: linear")
    legacy = fields.positive("rope.scale_linear", 1.0)
    factor = fields.positive("rope.scaling.factor", legacy) if kind == "linear" else legacy
    return None if factor == 1.0 else RopeScaling(kind="linear", factor=factor)


def _rope_freq_factors(file: GGUFFile, head_dim: int) -> tuple[float, ...] | None:
    """llama.cpp stores Llama 3's rope scaling as one divisor a frequency."""
    info = file.tensors.get(ROPE_FACTORS)
    if info is None:
        return None
    if info.type_name != "F32" or info.shape != (head_dim // 2,):
        raise ModelLoadError(
            f"{file.path}: tensor {ROPE_FACTORS} is {info.type_name} {list(info.shape)}, "
            f"expected F32 [{head_dim // 2}]"
        )
    factors = file.raw(ROPE_FACTORS).view(np.float32)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelLoadError(f"{file.path}: tensor {ROPE_FACTORS} must be positive and finite")
    return tuple(factors.tolist())


def _dtype(file: GGUFFile) -> str:
    types = {info.type_name for info in file.tensors.values() if len(info.shape) > 1}
    return _TYPE_DTYPES.get(types.pop(), "bfloat16") if len(types) == 1 else "bfloat16"
