"""The rotary table: cosines and sines of every position. Rotation itself is attention's work.

RoPE is from RoFormer (arXiv 2104.09864); ``llama3`` scaling from Llama 3.1's reference code.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from octavo.core.model_config import ModelConfig, RopeScaling


class RopeTable(NamedTuple):
    """``cos`` and ``sin``: float32 ``[max_positions, head_dim // 2]``, or of zero columns
    where nothing is rotated."""

    cos: torch.Tensor
    sin: torch.Tensor


def rope_table(
    config: ModelConfig, max_positions: int, device: torch.device | str = "cpu"
) -> RopeTable:
    """Angles of positions 0 to ``max_positions - 1``, in float32 like transformers'."""
    frequencies = _inverse_frequencies(config)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return RopeTable(angles.cos().to(device), angles.sin().to(device))


def _inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Float32 ``[head_dim // 2]``, scaled."""
    if not config.has_rotation:
        return torch.empty(0)
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_freq_factors is not None:
        frequencies = frequencies / torch.tensor(config.rope_freq_factors, dtype=torch.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    raise ValueError(f"rope scaling {scaling.kind!r} is not supported; use linear or llama3")


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Divide low frequencies by ``factor``, keep high ones, and blend those between."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies
