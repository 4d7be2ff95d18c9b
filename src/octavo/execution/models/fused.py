"""A gated decoder on a GPU, in as few kernels as its data flow allows.

Between two products stands one kernel: it adds up the parts of the product before it, does what is
elementwise, and leaves the next one its inputs. Families with other norms or activations run as
they are (`unfused`).
"""

from __future__ import annotations

from typing import Protocol

import torch

from octavo.execution.kernels.gpu import SplitSum
from octavo.execution.kernels.linear import gated_linear, linear, whole
from octavo.execution.kernels.norm import add_rms_norm
from octavo.execution.models.activations import SiluAndMul
from octavo.execution.models.decoder import Decoder
from octavo.execution.models.decoder_layer import DecoderLayer
from octavo.execution.models.layers import Linear
from octavo.execution.models.norms import QueryKeyNorm, RMSNorm


class FusedAttention(Protocol):
    def __call__(
        self,
        layer: int,
        qkv: torch.Tensor | SplitSum,
        norm: QueryKeyNorm | None = None,
    ) -> torch.Tensor: ...


def can_fuse(model: Decoder) -> bool:
    """Whether the model is made of root mean square norms and gated MLPs alone."""
    return (
        isinstance(model.norm, RMSNorm)
        and model.project_in is None
        and model.project_out is None
        and model.positions is None
        and all(
            type(layer) is DecoderLayer
            and isinstance(layer.attention_norm, RMSNorm)
            and isinstance(layer.mlp_norm, RMSNorm)
            and isinstance(layer.activate, SiluAndMul)
            for layer in model.layers
        )
    )


class FusedDecoder:
    """Implements `octavo.execution.gpu_runner.GPUModel` over a loaded `Decoder`."""

    def __init__(self, model: Decoder, *, is_invariant: bool = False) -> None:
        """``is_invariant``: a token's states do not depend on which tokens are beside it."""
        self.model = model
        self.is_invariant = is_invariant
        self.dtype = model.dtype

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: FusedAttention,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Decoder.forward`, with ``token_ids`` and ``wanted`` int32."""
        model = self.model
        assert isinstance(model.norm, RMSNorm)
        residual = model.embedding(token_ids)
        delta: torch.Tensor | SplitSum | None = None
        for layer in model.layers:
            x = self._norm(layer.attention_norm, residual, delta)
            heads = attention(layer.index, self._product(layer.qkv, x), layer.query_key_norm)
            if wanted is not None and layer is model.layers[-1]:
                # Keys and values of all tokens are written; nobody reads the states of the others.
                residual, heads = (part.index_select(0, wanted) for part in (residual, heads))
                if not len(wanted):
                    return residual
            x = self._norm(layer.mlp_norm, residual, self._product(layer.output, heads))
            up = layer.up
            assert up.weight is not None
            x = gated_linear(
                x, up.weight, up.bias, scales=up.scales, is_invariant=self.is_invariant
            )
            delta = self._product(layer.down, x)
        return self._norm(model.norm, residual, delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, vocab]`` in the model's dtype."""
        local = whole(self._product(self.model.head, hidden), self.dtype)
        parallel = self.model.parallel
        return parallel.all_gather(local) if parallel.size > 1 else local

    def _product(self, layer: Linear, x: torch.Tensor) -> torch.Tensor | SplitSum:
        assert layer.weight is not None
        y = linear(x, layer.weight, layer.bias, scales=layer.scales, is_invariant=self.is_invariant)
        return layer.parallel.all_reduce(whole(y, x.dtype)) if layer.sums else y

    def _norm(
        self, norm: object, residual: torch.Tensor, delta: torch.Tensor | SplitSum | None
    ) -> torch.Tensor:
        assert isinstance(norm, RMSNorm)
        assert norm.weight is not None
        return add_rms_norm(residual, delta, norm.weight, norm.eps, is_invariant=self.is_invariant)
