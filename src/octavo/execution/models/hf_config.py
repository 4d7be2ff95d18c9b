"""config.json of a Hugging Face directory to a ModelConfig. Reads no weights."""

from __future__ import annotations

import json
import os
from pathlib import Path

from octavo.core.model_config import ModelConfig, ModelLoadError, RopeScaling
from octavo.execution.models.fields import MAX_POSITIONS, Fields, check_heads

# Architecture -> what transformers assumes where config.json is silent.
HF_ARCHITECTURES: dict[str, dict[str, int | None]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048, "kv_heads": None, "window": None},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "kv_heads": 8, "window": 4096},
}
DTYPES = ("bfloat16", "float16", "float32")
MAX_JSON_BYTES = 64 << 20


def load_hf_config(source: str | os.PathLike[str]) -> ModelConfig:
    """Read ``config.json`` (``source`` is it or its directory), and eos ids from
    ``generation_config.json`` beside it.

    Raises:
        ModelLoadError: a file is absent or broken, or asks for what Octavo does not have.
    """
    path = Path(source)
    if path.suffix != ".json":
        path = path / "config.json"
    fields = Fields(path, read_json(path))
    architecture = _architecture(fields)
    assumed = HF_ARCHITECTURES[architecture]
    _refuse_unsupported(fields)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    assumed_kv_heads = None if fields.has("num_key_value_heads") else assumed["kv_heads"]
    num_kv_heads = fields.integer("num_key_value_heads", assumed_kv_heads or num_heads)
    head_dim = None if fields.get("head_dim") is None else fields.integer("head_dim")
    window = fields.get("sliding_window") if fields.has("sliding_window") else assumed["window"]
    theta, scaling = _rope(fields)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=check_heads(fields, hidden_size, num_heads, num_kv_heads, head_dim),
        max_position_embeddings=fields.integer(
            "max_position_embeddings", assumed["max_position_embeddings"], high=MAX_POSITIONS
        ),
        rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        sliding_window=None if window is None else fields.integer("sliding_window", window),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
        dtype=_dtype(fields),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=_eos_token_ids(fields),
    )


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from ``path``; anything else is a ``ModelLoadError`` that names it."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelLoadError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and name in HF_ARCHITECTURES:
            return name
    raise fields.error(
        "architectures", f"{names!r} is not supported; supported: {', '.join(HF_ARCHITECTURES)}"
    )


def _refuse_unsupported(fields: Fields) -> None:
    if (activation := fields.string("hidden_act", "silu")) not in ("silu", "swish"):
        raise fields.error("hidden_act", f"{activation!r} is not supported; supported: silu")
    if fields.get("quantization_config") is not None:
        raise fields.error(
            "quantization_config",
            "is set: quantized Hugging Face checkpoints are not supported; use the "
            "unquantized checkpoint or a GGUF file",
        )


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from ``rope_parameters`` (transformers 5) or ``rope_scaling``."""
    name = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    values = fields.get(name)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise fields.error(name, f"must be an object, got {values!r}")
    rope = Fields(
        fields.path, {f"{name}.{key}": value for key, value in values.items()}, f"{name}."
    )
    theta = rope.positive("rope_theta", fields.positive("rope_theta", 10000.0))
    for where in (rope, fields):
        if where.positive("partial_rotary_factor", 1.0) != 1.0:
            raise where.error("partial_rotary_factor", "other than 1 is not supported")
    kind = rope.string("rope_type", rope.string("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=rope.positive("factor"))
    if kind == "llama3":
        scaling = RopeScaling(
            kind="llama3",
            factor=rope.positive("factor"),
            low_freq_factor=rope.positive("low_freq_factor"),
            high_freq_factor=rope.positive("high_freq_factor"),
            original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        )
        if scaling.low_freq_factor >= scaling.high_freq_factor:
            raise rope.error("low_freq_factor", "must be less than high_freq_factor")
        return theta, scaling
    raise rope.error("rope_type", f"{kind!r} is not supported; supported: default, linear, llama3")


def _dtype(fields: Fields) -> str:
    # transformers 5 writes "dtype", older ones "torch_dtype"; without either they mean float32.
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    dtype = fields.string(name, "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise fields.error(name, f"{dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    return dtype


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    ids = fields.token_ids("eos_token_id")
    generation = fields.path.with_name("generation_config.json")
    if generation.exists():
        ids += Fields(generation, read_json(generation)).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))
