"""Norms: of the residual, and of each head's query and key. Computed in float32, rounded once;
replicated over tensor-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from octavo.execution.models.layers import Quantization
from octavo.execution.models.weights import Weights

if TYPE_CHECKING:
    from octavo.execution.models.quantized import QuantizedInputs


class Norm(Protocol):
    """A norm of the residual. Call ``load`` and then ``prepare`` before use."""

    num_bytes: int

    def load(self, weights: Weights, dtype: torch.dtype, device: torch.device) -> None: ...

    def prepare(self) -> None: ...

    def fuse(self, quantization: Quantization) -> None:
        """The next product quantizes its inputs: hand them over quantized, where that is one pass
        with the norm."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor | QuantizedInputs:
        """``x``: ``[rows, hidden]``; returns the same shape and dtype, or what ``fuse`` asked."""
        ...


class RMSNorm:
    """Root mean square norm."""

    def __init__(self, name: str, hidden_size: int, eps: float) -> None:
        self.name = name
        self.hidden_size = hidden_size
        self.eps = eps
        self.weight: torch.Tensor | None = None
        self.num_bytes = 0
        self.quantization: Quantization | None = None

    def load(self, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = _vector(weights, f"{self.name}.weight", self.hidden_size, dtype, device)
        self.num_bytes = self.weight.nbytes

    def prepare(self) -> None:
        """Choose the faster way for the device (see ``rms_norm_cpu``)."""
        assert self.weight is not None, f"{self.name} was not loaded"
        self._is_cpu = self.weight.device.type == "cpu"
        if self._is_cpu:
            self.weight = self.weight.float()
            self._eps = torch.tensor(self.eps)

    def fuse(self, quantization: Quantization) -> None:
        self.quantization = quantization

    def __call__(self, x: torch.Tensor) -> torch.Tensor | QuantizedInputs:
        assert self.weight is not None
        if self.quantization is not None:
            return self.quantization.rms_norm(x, self.weight, self.eps)
        if self._is_cpu:
            return rms_norm_cpu(x, self.weight, self._eps)
        return F.rms_norm(x, (self.hidden_size,), self.weight, self.eps)


def rms_norm_cpu(x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) * weight``; ``weight`` and the scalar ``eps`` are float32.

    Seven small operations, the norm first: 9.3 µs a row of 576 in bfloat16 against 12.2 µs for
    ``F.rms_norm`` on a CPU (7.2 against 10.9 in float32), with the same bits but for the last.
    """
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, 2, -1, True)
    scale = torch.addcmul(eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    return wide.mul(scale).mul_(weight).to(x.dtype)


class LayerNorm:
    """Mean and variance norm with weight and bias."""

    def __init__(self, name: str, hidden_size: int, eps: float) -> None:
        self.name = name
        self.hidden_size = hidden_size
        self.eps = eps
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.num_bytes = 0

    def load(self, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = _vector(weights, f"{self.name}.weight", self.hidden_size, dtype, device)
        self.bias = _vector(weights, f"{self.name}.bias", self.hidden_size, dtype, device)
        self.num_bytes = self.weight.nbytes + self.bias.nbytes

    def prepare(self) -> None:
        """Widen on a CPU, whose kernel takes float32 parameters with inputs of any dtype."""
        assert self.weight is not None, f"{self.name} was not loaded"
        assert self.bias is not None
        if self.weight.device.type == "cpu":
            self.weight, self.bias = self.weight.float(), self.bias.float()

    def fuse(self, quantization: Quantization) -> None:
        """Nothing to fuse: the product quantizes its inputs itself."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (self.hidden_size,), self.weight, self.bias, self.eps)


class QueryKeyNorm:
    """Root mean square norm of each head's query and of each head's key, with a weight for either.

    ``num_heads`` and ``num_kv_heads`` count this rank's.
    """

    def __init__(
        self, prefix: str, num_heads: int, num_kv_heads: int, head_dim: int, eps: float
    ) -> None:
        self.names = (f"{prefix}.q_norm", f"{prefix}.k_norm")
        self.counts = (num_heads, num_kv_heads)
        self.head_dim = head_dim
        self.eps = eps
        self.num_bytes = 0

    def load(self, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        rows = [
            _vector(weights, f"{name}.weight", self.head_dim, dtype, device).expand(count, -1)
            for name, count in zip(self.names, self.counts, strict=True)
        ]
        # One row a head, so that queries and keys are normed at once.
        self.weight = torch.cat(rows).float()
        self.num_bytes = self.weight.nbytes

    def prepare(self) -> None:
        self._eps = torch.tensor(self.eps, device=self.weight.device)

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """``qkv``: ``[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]``, changed in place
        and returned."""
        heads = qkv.view(len(qkv), -1, self.head_dim)[:, : sum(self.counts)]
        wide = heads.float()
        norm = torch.linalg.vector_norm(wide, 2, -1, True)
        scale = torch.addcmul(self._eps, norm, norm, value=1.0 / self.head_dim).rsqrt_()
        heads.copy_(wide.mul_(scale).mul_(self.weight))
        return qkv


def _vector(
    weights: Weights, name: str, size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    weights.check(name, (size,))
    vector = torch.empty(size, dtype=dtype, device=device)
    weights.copy(name, (size,), vector, 0, 0)
    return vector
