"""What config.json says of fp8 weights: which checkpoints run, and why others do not. Reads no
weights.

Written by llm-compressor (``compressed-tensors``), and by AutoFP8, vLLM or Transformers (``fp8``).
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo.core.model_config import Fp8Scheme
from octavo.execution.models.fields import Fields

_FORMATS = ("float-quantized", "naive-quantized")


def fp8_scheme(fields: Fields) -> Fp8Scheme | None:
    """What config.json says of quantization; None: nothing.

    Raises:
        ModelLoadError: it is no fp8 with a scale for each tensor or output channel.
    """
    values = fields.get("quantization_config")
    if values is None:
        return None
    if not isinstance(values, dict):
        raise fields.error("quantization_config", f"must be an object, got {values!r:.40}")
    own = _inside(fields, "quantization_config", values)
    method = own.string("quant_method", "none")
    if method == "fp8":
        return _plain_scheme(own)
    if method == "compressed-tensors":
        return _compressed_scheme(own)
    raise own.error(
        "quant_method",
        f"{method!r:.40} is not supported; supported: fp8 and compressed-tensors with fp8 weights; "
        "use such a checkpoint, the unquantized one, or a GGUF file",
    )


def _plain_scheme(fields: Fields) -> Fp8Scheme:
    if (size := fields.get("weight_block_size")) is not None:
        raise fields.error(
            "weight_block_size",
            f"{size!r:.40} is not supported: scales are one for a tensor or one for an output "
            "channel, not one for a block; use a checkpoint of that kind, or the unquantized one",
        )
    if (form := fields.string("fmt", "e4m3")) != "e4m3":
        raise fields.error("fmt", f"{form!r:.40} is not supported; supported: e4m3")
    activations = fields.string("activation_scheme", "dynamic")
    if activations not in ("static", "dynamic"):
        raise fields.error("activation_scheme", f"must be static or dynamic, got {activations!r}")
    return Fp8Scheme(inputs="tensor" if activations == "static" else "token", kv=_kv(fields))


def _compressed_scheme(fields: Fields) -> Fp8Scheme:
    groups = fields.get("config_groups")
    if not isinstance(groups, dict):
        raise fields.error("config_groups", f"must be an object, got {groups!r:.40}")
    inputs = "token"
    for name, group in groups.items():
        where = f"config_groups.{name}"
        if not isinstance(group, dict):
            raise fields.error(where, f"must be an object, got {group!r:.40}")
        form = group.get("format") or fields.get("format")
        if form not in _FORMATS:
            raise fields.error(
                f"{where}.format", f"{form!r:.40} is not supported; supported: {_FORMATS[0]}"
            )
        weights = group.get("weights")
        kind = _float8(fields, f"{where}.weights", weights)
        if kind not in ("channel", "tensor"):
            raise fields.error(
                f"{where}.weights.strategy",
                f"{kind!r:.40} is not supported; supported: channel, tensor",
            )
        activations = group.get("input_activations")
        if activations is None:
            inputs = "none"
            continue
        _float8(fields, f"{where}.input_activations", activations)
        if not activations.get("dynamic"):
            inputs = "tensor"
    return Fp8Scheme(inputs=inputs, kv=_kv(fields))


def _kv(fields: Fields) -> bool:
    scheme = fields.get("kv_cache_scheme")
    if scheme is None:
        return False
    _float8(fields, "kv_cache_scheme", scheme)
    return True


def _float8(fields: Fields, where: str, values: object) -> object:
    """The strategy of a quantization that must be of 8-bit floats."""
    if not isinstance(values, Mapping):
        raise fields.error(where, f"must be an object, got {values!r:.40}")
    found = (values.get("num_bits"), values.get("type"))
    if found != (8, "float"):
        raise fields.error(
            where, f"is {found[0]!r:.20} bits of {found[1]!r:.20}: only 8-bit floats are supported"
        )
    return values.get("strategy")


def _inside(fields: Fields, name: str, values: Mapping[str, object]) -> Fields:
    return Fields(
        fields.path, {f"{name}.{key}": value for key, value in values.items()}, f"{name}."
    )
