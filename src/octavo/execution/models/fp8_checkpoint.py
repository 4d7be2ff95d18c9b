"""Tensors of Hugging Face checkpoints with fp8 weights: ``X.weight`` is float8_e4m3fn and
``X.weight_scale`` one number, or one for each output channel. What else config.json may say of them
is in `fp8_config`.
"""

from __future__ import annotations

import torch

from octavo.core.model_config import ModelLoadError
from octavo.execution.models.fp8 import E4M3, dequantize
from octavo.execution.models.layers import Shard
from octavo.execution.models.safetensors_weights import SafetensorsWeights

STORED = "F8_E4M3"
# Scales of activations, which are rounded by scales of their own here, and of keys and values.
_KEY_SCALES = ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale")
_VALUE_SCALES = ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale")
_UNUSED_SUFFIXES = (
    ".input_scale",
    *(f".{name}" for name in (*_KEY_SCALES, *_VALUE_SCALES)),
    ".q_scale",
    ".prob_scale",
)


class Fp8Checkpoint:
    """Implements `weights.Weights` over ``tensors``, some of them fp8 with their scales: `copy`
    gives what they stand for, `copy_stored` what is there."""

    def __init__(self, tensors: SafetensorsWeights) -> None:
        self._tensors = tensors

    def is_stored(self, name: str) -> bool:
        """Whether ``name`` is there in fp8."""
        return self._tensors.dtype_name(name) == STORED

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        is_stored = self.is_stored(name)
        self._tensors.check(name, shape, dtypes=(STORED,) if is_stored else ())
        if is_stored:
            self._scales(name, shape[0])

    def copy(
        self, name: str, shape: tuple[int, ...], into: torch.Tensor, axis: int, start: int
    ) -> None:
        if not self.is_stored(name):
            self._tensors.copy(name, shape, into, axis, start)
            return
        values = torch.empty(into.shape, dtype=E4M3, device=into.device)
        scales = torch.empty(len(into), device=into.device)
        self._copy_stored(name, shape, values, scales, axis, start)
        dequantize(values, scales, into)

    def copy_stored(self, shard: Shard, weight: torch.Tensor, scales: torch.Tensor) -> None:
        """Fill a shard's ``weight`` (e4m3) and the ``scales [num_rows]`` of its channels. `check`
        came before."""
        self._copy_stored(shard.name, shard.shape, weight, scales, shard.axis, shard.start)

    def _copy_stored(
        self,
        name: str,
        shape: tuple[int, ...],
        weight: torch.Tensor,
        scales: torch.Tensor,
        axis: int,
        start: int,
    ) -> None:
        self._tensors.copy(name, shape, weight, axis, start)
        # A split of the inputs leaves every channel a part, whose scale is the whole's.
        first = start if axis == 0 else 0
        scales.copy_(self._scales(name, shape[0])[first : first + len(scales)])

    def _scales(self, name: str, num_outputs: int) -> torch.Tensor:
        """Float32 ``[num_outputs]``: a scale of the whole tensor is one for each channel."""
        return self._numbers(f"{name}_scale", num_outputs)

    def _numbers(self, name: str, count: int) -> torch.Tensor:
        found = self._tensors.read(name)
        numbers = found.float().flatten()
        if len(numbers) not in (1, count):
            raise ModelLoadError(
                f"{self._tensors.path}: tensor {name} has shape {list(found.shape)}, expected one "
                f"number or {count}"
            )
        if not bool((numbers.isfinite() & (numbers > 0)).all()):
            raise ModelLoadError(
                f"{self._tensors.path}: tensor {name} must hold positive and finite scales"
            )
        return numbers.expand(count)

    def kv_scales(self, num_layers: int, num_kv_heads: int) -> torch.Tensor:
        """Float32 ``[layer, K|V, kv_head]``, 1 where there is none: what keys and values are
        divided by before they are rounded to fp8."""
        scales = torch.ones(num_layers, 2, num_kv_heads)
        for layer in range(num_layers):
            for part, names in enumerate((_KEY_SCALES, _VALUE_SCALES)):
                for name in (f"model.layers.{layer}.self_attn.{name}" for name in names):
                    if self._tensors.dtype_name(name) is not None:
                        scales[layer, part] = self._numbers(name, num_kv_heads)
                        break
        return scales

    def stored_rows(
        self, name: str, shape: tuple[int, ...], axis: int, start: int, size: int
    ) -> None:
        return None

    def is_quantized(self, name: str) -> bool:
        """Never: fp8 weights are floats, which no CPU's choice rounds unasked."""
        return False

    def check_all_used(self, ignored: frozenset[str]) -> None:
        scales = {name for name in self._tensors.names() if name.endswith(_UNUSED_SUFFIXES)}
        scales |= {f"{name}_scale" for name in ignored}
        self._tensors.check_all_used(ignored | scales)
