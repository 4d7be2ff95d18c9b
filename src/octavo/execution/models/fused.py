"""A gated decoder on a GPU, in as few kernels as its data flow allows.

Between two products stands one kernel: it adds up the parts of the product before it, does what is
elementwise, and leaves the next one its inputs. Families with other norms or activations run as
they are (`unfused`).

Of many rows, whose products are the library's, norms are no kernels either: the product before adds
to the residual itself, the norm's weight is in the weight of the product after, and whoever reads
that divides by the root mean square.
"""

from __future__ import annotations

import copy
from typing import Protocol

import torch

from octavo.execution.kernels.activation import silu_and_mul
from octavo.execution.kernels.gpu import Product, SplitSum
from octavo.execution.kernels.linear import (
    add_linear,
    gated_linear,
    linear,
    takes_library,
    unnormed_linear,
    whole,
)
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
        qkv: Product,
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


def fold_norms(model: Decoder) -> bool:
    """Move each layer's norm's weight into the product after it, where all of them have room for
    it: False, and nothing is changed, where rows would be too large for their dtype without the
    division (float16), weights are narrow, or a bias is added before it. Again: no change.
    """
    pairs = [
        pair
        for layer in model.layers
        for pair in ((layer.attention_norm, layer.qkv), (layer.mlp_norm, layer.up))
    ]
    if model.dtype == torch.float16 or any(
        layer.bias is not None or layer.scales is not None for _, layer in pairs
    ):
        return False
    with torch.inference_mode():
        for norm, layer in pairs:
            assert isinstance(norm, RMSNorm)
            assert norm.weight is not None
            assert layer.weight is not None
            layer.weight.mul_(norm.weight)
            norm.weight.fill_(1.0)
    return True


class FusedDecoder:
    """Implements `octavo.execution.gpu_runner.GPUModel` over a loaded `Decoder`."""

    def __init__(self, model: Decoder, *, is_invariant: bool = False) -> None:
        """``is_invariant``: a token's states do not depend on which tokens are beside it."""
        self.model = model
        self.holds_norms = not is_invariant and fold_norms(model)
        self.is_invariant = is_invariant
        self.dtype = model.dtype

    def over(self, model: Decoder) -> FusedDecoder:
        """The same steps over ``model``, which has some of the layers."""
        other = copy.copy(self)
        other.model = model
        return other

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
            qkv = self._qkv(layer, residual, delta)
            heads = attention(layer.index, qkv, layer.query_key_norm)
            if wanted is not None and layer is model.layers[-1]:
                # Keys and values of all tokens are written; nobody reads the states of the others.
                residual, heads = (part.index_select(0, wanted) for part in (residual, heads))
                if not len(wanted):
                    return residual
            delta = self._added(layer.output, heads, residual)
            delta = self._added(layer.down, self._gated(layer, residual, delta), residual)
        return self._norm(model.norm, residual, delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, vocab]`` in the model's dtype."""
        local = whole(self._product(self.model.head, hidden), self.dtype)
        parallel = self.model.parallel
        return parallel.all_gather(local) if parallel.size > 1 else local

    def _qkv(
        self, layer: DecoderLayer, residual: torch.Tensor, delta: torch.Tensor | SplitSum | None
    ) -> Product:
        norm, qkv = layer.attention_norm, layer.qkv
        assert isinstance(norm, RMSNorm)
        assert qkv.weight is not None
        if delta is None and self.holds_norms and takes_library(residual, qkv.weight, qkv.scales):
            return unnormed_linear(residual, qkv.weight, norm.eps)
        return self._product(qkv, self._norm(norm, residual, delta))

    def _gated(
        self, layer: DecoderLayer, residual: torch.Tensor, delta: torch.Tensor | SplitSum | None
    ) -> torch.Tensor:
        norm, up = layer.mlp_norm, layer.up
        assert isinstance(norm, RMSNorm)
        assert up.weight is not None
        if (
            delta is None
            and self.holds_norms
            and takes_library(residual, up.weight, up.scales, is_gated=True)
        ):
            return silu_and_mul(unnormed_linear(residual, up.weight, norm.eps), self.dtype)
        x = self._norm(norm, residual, delta)
        return gated_linear(x, up.weight, up.bias, scales=up.scales, is_invariant=self.is_invariant)

    def _added(
        self, layer: Linear, x: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor | SplitSum | None:
        """What the next norm adds to the residual; None: the product has added it itself."""
        assert layer.weight is not None
        is_whole = layer.bias is None and not layer.sums and not self.is_invariant
        if is_whole and takes_library(x, layer.weight, layer.scales):
            add_linear(residual, x, layer.weight)
            return None
        return self._product(layer, x)

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
