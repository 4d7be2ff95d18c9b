"""Weights in fp8 (e4m3), a scale for each output channel: rounded at loading, or as stored.

::

    weight [out, in] e4m3      scales [out] float32      together: weight * scales[:, None]

Embeddings, norms and the head are left as they are unless a checkpoint stores them so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from octavo.execution.models.weights import Weights

if TYPE_CHECKING:
    from octavo.execution.models.fp8_checkpoint import Fp8Checkpoint
    from octavo.execution.models.layers import Linear

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
# What `torch._scaled_mm` divides matrices into.
_MULTIPLE = 16
# Values in float32 at once: 64 MB.
_CHUNK_VALUES = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Quantization:
    """``checkpoint`` stores weights in fp8 and decides which; None: every projection's weights are
    rounded where ``rounds``."""

    checkpoint: Fp8Checkpoint | None
    rounds: bool

    def load(
        self, layer: Linear, weights: Weights, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """This rank's weight and scales; None where the layer stays in ``dtype``."""
        shards, checkpoint = layer.shards(), self.checkpoint
        num_rows = sum(shard.num_rows for shard in shards)
        if num_rows % _MULTIPLE or layer.local_in % _MULTIPLE:
            return None
        if checkpoint is None:
            if not self.rounds:
                return None
        elif not all(checkpoint.is_stored(shard.name) for shard in shards):
            return None
        weight = torch.empty(num_rows, layer.local_in, dtype=E4M3, device=device)
        scales = torch.empty(num_rows, device=device)
        first = 0
        for shard in shards:
            rows = slice(first, first + shard.num_rows)
            if checkpoint is not None:
                checkpoint.copy_stored(shard, weight[rows], scales[rows])
            else:
                shape = (shard.num_rows, shard.num_columns)
                plain = torch.empty(shape, dtype=dtype, device=device)
                weights.copy(shard.name, shard.shape, plain, shard.axis, shard.start)
                quantize_channels(plain, weight[rows], scales[rows])
            first += shard.num_rows
        return weight, scales

    def of_head(self, name: str) -> Fp8Quantization | None:
        """For the head whose weight is ``name``."""
        is_stored = self.checkpoint is not None and self.checkpoint.is_stored(name)
        return self if is_stored else None


def quantize_channels(plain: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> None:
    """Round ``plain [out, in]`` into ``weight`` (e4m3) and ``scales [out]``: the largest value of a
    channel becomes the largest of e4m3."""
    step = max(_CHUNK_VALUES // plain.shape[1], 1)
    for first in range(0, len(plain), step):
        rows = slice(first, first + step)
        values = plain[rows].float()
        largest = values.abs().amax(dim=1)
        scales[rows] = torch.where(largest > 0, largest / LARGEST, 1.0)
        # Rounding of the quotient may pass the largest by a bit.
        values /= scales[rows, None]
        weight[rows] = values.clamp_(-LARGEST, LARGEST).to(E4M3)


def dequantize(weight: torch.Tensor, scales: torch.Tensor, into: torch.Tensor) -> None:
    """``weight [out, in]`` of e4m3 times ``scales [out]``, in the dtype of ``into``."""
    step = max(_CHUNK_VALUES // weight.shape[1], 1)
    for first in range(0, len(weight), step):
        rows = slice(first, first + step)
        into[rows] = weight[rows].float() * scales[rows, None]
