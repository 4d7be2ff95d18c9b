"""One layer of a decoder: attention and an MLP, each added to the residual."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from octavo.execution.attention.interface import StepAttention
from octavo.execution.models.activations import Activation
from octavo.execution.models.fp8 import Fp8Quantization
from octavo.execution.models.layers import Linear, Quantization
from octavo.execution.models.norms import Norm, QueryKeyNorm
from octavo.execution.models.weights import Weights

if TYPE_CHECKING:
    from octavo.execution.models.quantized import QuantizedInputs


@dataclass(slots=True, kw_only=True, eq=False)
class DecoderLayer:
    """Norms come before what they serve, as in every family but one (see `opt.PostNormLayer`)::

        residual += output(attention(qkv(attention_norm(residual))))
        residual += down(activate(up(mlp_norm(residual))))

    ``index`` is the layer's number, ``query_key_norm`` changes queries and keys before they are
    rotated, and ``up`` holds the gate too where the activation has one.
    """

    index: int
    attention_norm: Norm
    qkv: Linear
    query_key_norm: QueryKeyNorm | None = None
    output: Linear
    mlp_norm: Norm
    up: Linear
    activate: Activation
    down: Linear

    def load(
        self,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | Fp8Quantization | None,
    ) -> None:
        """Load and prepare each part in turn, so that only one plain copy exists at a time."""
        for norm in self.norms():
            norm.load(weights, dtype, device)
            norm.prepare()
        for linear in self.linears():
            linear.load(weights, dtype, device, quantization)
            linear.prepare()
        if quantization is not None and not isinstance(quantization, Fp8Quantization):
            self._fuse(quantization)

    def _fuse(self, quantization: Quantization) -> None:
        """What comes before a quantized product quantizes its inputs in the same pass."""
        if self.qkv.is_quantized:
            self.attention_norm.fuse(quantization)
        if self.up.is_quantized:
            self.mlp_norm.fuse(quantization)
        if self.down.is_quantized:
            self.activate.fuse(quantization)

    def norms(self) -> Iterator[Norm | QueryKeyNorm]:
        yield self.attention_norm
        if self.query_key_norm is not None:
            yield self.query_key_norm
        yield self.mlp_norm

    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output, self.up, self.down

    def __call__(
        self,
        residual: torch.Tensor,
        attention: StepAttention,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``residual``: ``[num_tokens, hidden]``, changed in place and returned. In the last layer
        only ``wanted`` tokens (int64 indices) may be read afterwards: they alone are returned, and
        of the others only keys and values are computed."""
        residual, heads = self.attend(residual, self.attention_norm(residual), attention, wanted)
        if len(residual):
            residual.add_(self.output(heads))
            residual.add_(self.down(self.activate(self.up(self.mlp_norm(residual)))))
        return residual

    def attend(
        self,
        residual: torch.Tensor,
        x: torch.Tensor | QuantizedInputs,
        attention: StepAttention,
        wanted: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual of the ``wanted`` tokens (None: all) and the heads' attention of ``x`` for
        them."""
        qkv = self.qkv(x)
        if self.query_key_norm is not None:
            qkv = self.query_key_norm(qkv)
        heads = attention(self.index, qkv)
        if wanted is None:
            return residual, heads
        return residual.index_select(0, wanted), heads.index_select(0, wanted)
