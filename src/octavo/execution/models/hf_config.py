"""config.json of a Hugging Face directory to a ModelConfig. Reads no weights."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.core.model_config import ModelConfig, ModelLoadError, RopeScaling
from octavo.execution.models.fields import MAX_POSITIONS, Fields, check_heads
from octavo.execution.models.fp8_config import fp8_scheme
from octavo.execution.models.unsupported import refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class _Silent:
    """What transformers assumes where config.json is silent. None: nothing, or derived."""

    max_position_embeddings: int
    kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = None


_QWEN = _Silent(max_position_embeddings=32768, kv_heads=32, window=4096)
_GATED = {
    "LlamaForCausalLM": _Silent(max_position_embeddings=2048),
    "MistralForCausalLM": _Silent(max_position_embeddings=131072, kv_heads=8, window=4096),
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": replace(_QWEN, head_dim=128),
}
_OPT = "OPTForCausalLM"
HF_ARCHITECTURES = (*_GATED, _OPT)
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
    fp8 = fp8_scheme(fields)
    config = _opt(fields) if architecture == _OPT else _gated(fields, architecture)
    return replace(config, fp8=fp8)


def _gated(fields: Fields, architecture: str) -> ModelConfig:
    """Llama, Mistral, Qwen2 and Qwen3."""
    silent = _GATED[architecture]
    _check_activation(fields, "hidden_act", "silu", ("silu", "swish"))
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers")
    assumed_kv_heads = None if fields.has("num_key_value_heads") else silent.kv_heads
    num_kv_heads = fields.integer("num_key_value_heads", assumed_kv_heads or num_heads)
    head_dim = silent.head_dim
    if fields.get("head_dim") is not None:
        head_dim = fields.integer("head_dim")
    max_positions = fields.integer(
        "max_position_embeddings", silent.max_position_embeddings, high=MAX_POSITIONS
    )
    window = fields.get("sliding_window") if fields.has("sliding_window") else silent.window
    sliding_window = None if window is None else fields.integer("sliding_window", window)
    is_qwen = architecture.startswith("Qwen")
    if is_qwen:
        sliding_window = _qwen_window(fields, sliding_window, num_layers, max_positions)
    theta, scaling = _rope(fields)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_attention_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=check_heads(fields, hidden_size, num_heads, num_kv_heads, head_dim),
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        sliding_window=sliding_window,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
        dtype=_dtype(fields),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=_eos_token_ids(fields),
    )


def _qwen_window(
    fields: Fields, window: int | None, num_layers: int, max_positions: int
) -> int | None:
    """The window of all layers; one of only some layers is refused where it could matter."""
    if window is None or not fields.boolean("use_sliding_window", False):
        return None
    kinds = fields.get("layer_types")
    if isinstance(kinds, list):
        num_windowed = sum(kind == "sliding_attention" for kind in kinds[:num_layers])
    else:
        num_windowed = max(num_layers - fields.integer("max_window_layers", 28, low=0), 0)
    if num_windowed == 0 or window >= max_positions:
        return None
    if num_windowed < num_layers:
        raise fields.error(
            "use_sliding_window",
            f"gives {num_windowed} of {num_layers} layers a window of {window} tokens: only the "
            f"same window in every layer is supported; contexts of up to {window} tokens are "
            f'exact with "use_sliding_window": false and "max_position_embeddings": {window}',
        )
    return window


def _opt(fields: Fields) -> ModelConfig:
    _check_activation(fields, "activation_function", "relu", ("relu",))
    if not fields.boolean("layer_norm_elementwise_affine", True):
        raise fields.error("layer_norm_elementwise_affine", "false is not supported")
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    is_norm_before = fields.boolean("do_layer_norm_before", True)
    has_bias = fields.boolean("enable_bias", True)
    return ModelConfig(
        architecture=_OPT,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("ffn_dim"),
        num_layers=fields.integer("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=check_heads(fields, hidden_size, num_heads, num_heads, None),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048, high=MAX_POSITIONS),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", True),
        attention_bias=has_bias,
        mlp_bias=has_bias,
        embedding_size=fields.integer("word_embed_proj_dim", hidden_size),
        norm_after=not is_norm_before,
        final_norm=is_norm_before and not fields.boolean("_remove_final_layer_norm", False),
        has_rotation=False,
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
    given = fields.get("architectures")
    names = [name for name in given if isinstance(name, str)] if isinstance(given, list) else []
    for name in names:
        if name in HF_ARCHITECTURES:
            return name
    if not names:
        raise fields.error("architectures", f"must name a model's class, got {given!r:.80}")
    raise fields.error("architectures", refusal(names[0], HF_ARCHITECTURES))


def _check_activation(fields: Fields, name: str, default: str, supported: tuple[str, ...]) -> None:
    if (activation := fields.string(name, default)) not in supported:
        raise fields.error(name, f"{activation!r} is not supported; supported: {supported[0]}")


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
