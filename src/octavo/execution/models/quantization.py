"""Which weights run in 4 or 8 bits, and from where: as the file stores them, or rounded.

Importing it loads no kernels; they are loaded with the first quantized layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from octavo.execution.models.fp8 import Fp8Quantization
from octavo.execution.models.fp8_checkpoint import Fp8Checkpoint
from octavo.execution.models.layers import Linear, Shard
from octavo.execution.models.weights import QuantizedRows, Weights

if TYPE_CHECKING:
    from octavo.execution.models.quantized import PackedWeight, QuantizedInputs

WEIGHT_MODES = ("auto", "bf16", "fp8", "int8", "int4")


@dataclass(frozen=True, slots=True)
class WeightQuantization:
    """Implements `layers.Quantization`.

    ``bits`` 4 or 8 rounds every weight to that, unless the file stores it so already. None keeps
    what the file stores: 4 bits for Q4_0 and Q4_1, 8 for Q8_0, neither rounded again (but for
    minima, see `kernels.cpu_linear`); 8 for other quantized types; and plain floats as they are.
    """

    bits: int | None

    def load(self, layer: Linear, weights: Weights) -> list[PackedWeight]:
        from octavo.execution.models import quantized

        shards = layer.shards()
        if not all(quantized.can_quantize(s.num_rows, s.num_columns) for s in shards):
            return []
        if self.bits is None and not all(weights.is_quantized(s.name) for s in shards):
            return []
        return quantized.merge([quantized.pack(self._rows(s, weights)) for s in shards])

    def quantize_inputs(self, x: torch.Tensor) -> QuantizedInputs:
        from octavo.execution.models.quantized import QuantizedInputs

        return QuantizedInputs.of(x)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> QuantizedInputs:
        from octavo.execution.models.quantized import QuantizedInputs

        return QuantizedInputs.of_rms_norm(x, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> QuantizedInputs:
        from octavo.execution.models.quantized import QuantizedInputs

        return QuantizedInputs.of_silu_and_mul(gate_up)

    def _rows(self, shard: Shard, weights: Weights) -> QuantizedRows:
        from octavo.execution.models.quantized import quantize_rows

        size = shard.num_columns if shard.axis == 1 else shard.num_rows
        stored = weights.stored_rows(shard.name, shard.shape, shard.axis, shard.start, size)
        if stored is not None and self.bits in (None, stored.bits):
            return stored
        plain = torch.empty(shard.num_rows, shard.num_columns)
        weights.copy(shard.name, shard.shape, plain, shard.axis, shard.start)
        return quantize_rows(plain, self.bits or 8)


def resolve_quantization(
    mode: str, dtype: torch.dtype, device: torch.device, weights: Weights | None = None
) -> WeightQuantization | Fp8Quantization | None:
    """What ``mode`` (one of ``WEIGHT_MODES``) means for this dtype and machine, and for
    ``weights`` that may be fp8; None: floats of ``dtype``.

    ``fp8`` takes what a checkpoint stores so, and of any other rounds the projections. ``auto``
    keeps fp8 on a GPU, and on a CPU makes ``dtype`` of it. It never quantizes a model that runs in
    fp32, which is asked for to be exact, nor weights that are not quantized already.

    Raises:
        ValueError: ``int8`` or ``int4`` where they cannot run.
    """
    if mode not in WEIGHT_MODES:
        raise ValueError(f"weights must be one of {', '.join(WEIGHT_MODES)}, got {mode!r}")
    if mode == "bf16":
        return None
    if mode == "fp8" or (mode == "auto" and device.type == "cuda" and dtype != torch.float32):
        checkpoint = weights if isinstance(weights, Fp8Checkpoint) else None
        return Fp8Quantization(checkpoint, rounds=mode == "fp8")
    obstacle = _obstacle(device)
    if mode == "auto":
        is_exact = dtype == torch.float32
        return None if is_exact or obstacle else WeightQuantization(bits=None)
    if obstacle:
        raise ValueError(f"weights={mode} {obstacle}; use weights=bf16")
    return WeightQuantization(bits=4 if mode == "int4" else 8)


def _obstacle(device: torch.device) -> str:
    """Why packed weights cannot run on this machine; empty when they can."""
    if device.type != "cpu":
        return f"runs on CPUs only, not on {device}"
    try:
        from octavo.execution.models.quantized import is_supported
    except ImportError as error:
        return f"needs numba, which cannot be imported ({error})"
    return "" if is_supported() else "needs a CPU with AVX512-VNNI"
