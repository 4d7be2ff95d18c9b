"""What stands between an MLP's products. Elementwise, so any split of the features is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from octavo.execution.models.layers import Quantization

if TYPE_CHECKING:
    from octavo.execution.models.quantized import QuantizedInputs


class Activation(Protocol):
    def fuse(self, quantization: Quantization) -> None:
        """The next product quantizes its inputs: hand them over quantized, where that is one pass
        with the activation."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor | QuantizedInputs: ...


class SiluAndMul:
    """``silu(gate) * up`` of ``[rows, 2 * features]``."""

    def __init__(self) -> None:
        self.quantization: Quantization | None = None

    def fuse(self, quantization: Quantization) -> None:
        self.quantization = quantization

    def __call__(self, x: torch.Tensor) -> torch.Tensor | QuantizedInputs:
        if self.quantization is not None:
            return self.quantization.silu_and_mul(x)
        return silu_and_mul(x)


class Relu:
    """``max(x, 0)``, in place."""

    def fuse(self, quantization: Quantization) -> None:
        """Nothing to fuse: the product quantizes its inputs itself."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu_()


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``[rows, 2 * features]``: gate in the first half, up in the second."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
