"""Weights of 4 and 8 bits in groups of 32 inputs, packed for `kernels.cpu_linear`.

Knows formats and packing; knows no files and no models. Importing it needs numba.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from llvmlite import binding
from numpy.typing import NDArray

from octavo.execution.kernels import cpu_linear as kernels
from octavo.execution.models.weights import QuantizedRows

GROUP, LANES = kernels.GROUP, kernels.LANES


def is_supported() -> bool:
    """Whether this CPU has the 8-bit dot products that the kernels are made of."""
    return bool(binding.get_host_cpu_features().get("avx512vnni", False))


def can_quantize(num_outputs: int, num_inputs: int) -> bool:
    """Whether a ``[num_outputs, num_inputs]`` weight divides into the kernels' tiles."""
    return num_outputs % LANES == 0 and num_inputs % GROUP == 0


class QuantizedInputs:
    """``num_rows`` rows quantized to 8 bits in groups of 32, packed for the kernels: ``packed``
    int32 ``[panels of 4 rows, G, words]`` (see `kernels.cpu_linear`)."""

    __slots__ = ("num_rows", "packed")

    def __init__(self, num_rows: int, num_inputs: int) -> None:
        self.num_rows = num_rows
        panels = -(-num_rows // kernels.PANEL)
        num_groups = num_inputs // GROUP
        # A last group without a partner is paired with zeros.
        create = np.zeros if num_groups % 2 else np.empty
        self.packed = create((panels, num_groups, kernels.WORDS), dtype=np.int32)

    @classmethod
    def of(cls, x: torch.Tensor) -> QuantizedInputs:
        """``x``: ``[n, K]`` of any float dtype."""
        inputs = cls(*x.shape)
        kernels.quantize(_numpy(x), inputs.packed)
        return inputs

    @classmethod
    def of_rms_norm(cls, x: torch.Tensor, weight: torch.Tensor, eps: float) -> QuantizedInputs:
        """RMSNorm of ``x [n, K]``, computed and quantized in one pass."""
        inputs = cls(*x.shape)
        kernels.rms_norm_quantize(_numpy(x), weight.numpy(), np.float32(eps), inputs.packed)
        return inputs

    @classmethod
    def of_silu_and_mul(cls, gate_up: torch.Tensor) -> QuantizedInputs:
        """``silu(gate) * up`` of ``[n, 2 K]``, computed and quantized in one pass."""
        inputs = cls(gate_up.shape[0], gate_up.shape[1] // 2)
        kernels.silu_mul_quantize(_numpy(gate_up), inputs.packed)
        return inputs

    def values(self) -> NDArray[np.int8]:
        """``[n, K]``: the rounded numbers."""
        panels, groups, _ = self.packed.shape
        words = self.packed[:, :, :32].reshape(panels, groups, kernels.PANEL, GROUP // 4)
        rows = np.ascontiguousarray(words.transpose(0, 2, 1, 3)).view(np.int8)
        return rows.reshape(-1, groups * GROUP)[: self.num_rows]

    def scales(self) -> NDArray[np.float32]:
        """``[n, G]``: what a group's numbers are multiplied by."""
        groups = self.packed.shape[1]
        scales = self.packed[:, :, 32:36].view(np.float32).transpose(0, 2, 1)
        return scales.reshape(-1, groups)[: self.num_rows]


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """``num_outputs`` rows in the kernels' tiles: ``weights`` bytes and float16 bits ``scales``."""

    bits: int
    num_outputs: int
    weights: NDArray[np.uint8]
    scales: NDArray[np.uint16]

    @property
    def num_bytes(self) -> int:
        return self.weights.nbytes + self.scales.nbytes

    def multiply(self, inputs: QuantizedInputs, out: NDArray[np.float32]) -> None:
        """``out [n, num_outputs]``, whose rows may stand in a wider array."""
        linear = kernels.int4_linear if self.bits == 4 else kernels.int8_linear
        linear(self.weights, self.scales, inputs.packed, out)


def pack(rows: QuantizedRows) -> PackedWeight:
    """Lay rows out in tiles (see `kernels.cpu_linear`)."""
    num_outputs, num_inputs = rows.values.shape
    num_groups = num_inputs // GROUP
    tiles = rows.values.reshape(num_outputs // LANES, LANES, num_groups, GROUP // 4, 4)
    tiles = tiles.transpose(0, 2, 3, 1, 4)
    if rows.bits == 4:
        tiles = tiles[:, :, 0::2] | (tiles[:, :, 1::2] << np.uint8(4))
    return PackedWeight(
        bits=rows.bits,
        num_outputs=num_outputs,
        weights=np.ascontiguousarray(tiles).reshape(-1),
        scales=_pack_scales(rows),
    )


def _pack_scales(rows: QuantizedRows) -> NDArray[np.uint16]:
    """16-bit scales and minima as `kernels.cpu_linear` describes them."""
    num_outputs, num_groups = rows.scales.shape
    num_pairs = num_groups if rows.bits == 8 else -(-num_groups // 2)
    each = 1 if rows.bits == 8 else 2
    scales, minima = (
        np.zeros((num_outputs // LANES, num_pairs * each, LANES), np.float16) for _ in range(2)
    )
    for target, part in ((scales, rows.scales), (minima, rows.minima)):
        tiles = part.reshape(num_outputs // LANES, LANES, num_groups)
        target[:, :num_groups] = tiles.transpose(0, 2, 1)
    if rows.bits == 8:
        return scales.reshape(-1).view(np.uint16)
    shape = (num_outputs // LANES, num_pairs, 2, LANES)
    if kernels.HAS_PAIRS:
        narrow = torch.from_numpy(minima).bfloat16().view(torch.uint16).numpy()
        bits = narrow.reshape(shape).transpose(0, 1, 3, 2).reshape(shape)
    else:
        bits = minima.view(np.uint16).reshape(shape)
    return np.stack([scales.view(np.uint16).reshape(shape), bits], axis=2).reshape(-1)


def quantize_rows(weight: torch.Tensor, bits: int) -> QuantizedRows:
    """Round an fp32 ``[N, K]`` weight: 4 bits between a group's least and greatest value, 8 bits
    symmetrically."""
    groups = weight.numpy().reshape(len(weight), -1, GROUP)
    if bits == 4:
        low, high = groups.min(-1), groups.max(-1)
        minima = low.astype(np.float16)
        scales = ((high - minima) / 15).astype(np.float16)
        levels, lowest, highest = groups - minima[..., None], 0, 15
    else:
        scales = (np.abs(groups).max(-1) / 127).astype(np.float16)
        minima = np.zeros_like(scales)
        levels, lowest, highest = groups, -127, 127
    step = np.where(scales > 0, scales, 1).astype(np.float32)
    values = np.rint(levels / step[..., None]).clip(lowest, highest)
    values = (values + (128 if bits == 8 else 0)).astype(np.uint8)
    return QuantizedRows(bits, values.reshape(weight.shape), scales, minima)


def merge(parts: Sequence[PackedWeight]) -> list[PackedWeight]:
    """Neighbours of the same width become one, since tiles of 16 outputs stand alone."""
    merged: list[PackedWeight] = []
    for part in parts:
        if merged and merged[-1].bits == part.bits:
            last = merged.pop()
            part = PackedWeight(
                part.bits,
                last.num_outputs + part.num_outputs,
                np.concatenate([last.weights, part.weights]),
                np.concatenate([last.scales, part.scales]),
            )
        merged.append(part)
    return merged


def _numpy(x: torch.Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = x.float().contiguous().numpy()
    return array
