"""A decoder on a GPU as its layers are, one operation after the other: OPT's LayerNorms, ReLUs and
learned positions, for which there are no kernels of their own."""

from __future__ import annotations

from typing import Any

import torch

from octavo.execution.models.decoder import Decoder


class UnfusedDecoder:
    """Implements `octavo.execution.gpu_runner.GPUModel` over any loaded `Decoder`."""

    def __init__(self, model: Decoder) -> None:
        self.model = model

    def over(self, model: Decoder) -> UnfusedDecoder:
        """The same steps over ``model``, which has some of the layers."""
        return UnfusedDecoder(model)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Any,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Decoder.forward`, with ``token_ids`` and ``wanted`` int32."""
        return self.model.forward(token_ids, positions, attention, wanted)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, vocab]`` in the model's dtype."""
        local = self.model.head(hidden)
        parallel = self.model.parallel
        return parallel.all_gather(local) if parallel.size > 1 else local
