"""The OPT family (arXiv 2205.01068): learned positions, LayerNorm, ReLU, no rotation.

The 350m model norms after each addition instead of before each part, has no final norm, and its
embeddings are narrower than its layers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from octavo.core.model_config import ModelConfig
from octavo.execution.attention.interface import StepAttention
from octavo.execution.models.activations import Relu
from octavo.execution.models.decoder import Blueprint
from octavo.execution.models.decoder_layer import DecoderLayer
from octavo.execution.models.layers import (
    Embedding,
    LearnedPositions,
    Linear,
    Quantization,
    Split,
)
from octavo.execution.models.norms import LayerNorm
from octavo.execution.models.parallel import TensorParallel

# fairseq's position table begins with two rows for padding.
_POSITION_OFFSET = 2
_EPS = 1e-5


class PostNormLayer(DecoderLayer):
    """A layer that norms the sum after each part::

    residual = attention_norm(residual + output(attention(qkv(residual))))
    residual = mlp_norm(residual + down(activate(up(residual))))
    """

    def _fuse(self, quantization: Quantization) -> None:
        """Norms stand before no product here: products quantize their inputs themselves."""

    def __call__(
        self,
        residual: torch.Tensor,
        attention: StepAttention,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        residual, heads = self.attend(residual, residual, attention, wanted)
        if not len(residual):
            return residual
        residual = self.attention_norm(residual + self.output(heads))
        return self.mlp_norm(residual + self.down(self.activate(self.up(residual))))


def opt(config: ModelConfig, parallel: TensorParallel) -> Blueprint:
    hidden, width = config.hidden_size, config.embedding_size or config.hidden_size
    name = "model.decoder"

    def projection(part: str, num_inputs: int, num_outputs: int) -> Linear | None:
        if width == hidden:
            return None
        parts = [(f"{name}.{part}", num_outputs)]
        return Linear(parts, num_inputs, split="replicated", bias=False, parallel=parallel)

    return Blueprint(
        embedding=Embedding(f"{name}.embed_tokens", config.vocab_size, width, parallel=parallel),
        project_in=projection("project_in", width, hidden),
        positions=LearnedPositions(
            f"{name}.embed_positions",
            config.max_position_embeddings,
            hidden,
            offset=_POSITION_OFFSET,
        ),
        layers=_layers(config, parallel, f"{name}.layers"),
        norm=LayerNorm(f"{name}.final_layer_norm", hidden, _EPS) if config.final_norm else None,
        project_out=projection("project_out", hidden, width),
        head=Linear(
            [("lm_head", config.vocab_size)], width, split="column", bias=False, parallel=parallel
        ),
    )


def _layers(config: ModelConfig, parallel: TensorParallel, name: str) -> Iterator[DecoderLayer]:
    hidden, features = config.hidden_size, config.intermediate_size
    kind = PostNormLayer if config.norm_after else DecoderLayer

    def linear(parts: list[str], num_inputs: int, num_outputs: int, split: Split) -> Linear:
        named = [(part, num_outputs) for part in parts]
        return Linear(named, num_inputs, split=split, bias=config.attention_bias, parallel=parallel)

    for index in range(config.num_layers):
        layer = f"{name}.{index}"
        qkv = [f"{layer}.self_attn.{part}_proj" for part in "qkv"]
        yield kind(
            index=index,
            attention_norm=LayerNorm(f"{layer}.self_attn_layer_norm", hidden, _EPS),
            qkv=linear(qkv, hidden, hidden, "column"),
            output=linear([f"{layer}.self_attn.out_proj"], hidden, hidden, "row"),
            mlp_norm=LayerNorm(f"{layer}.final_layer_norm", hidden, _EPS),
            up=linear([f"{layer}.fc1"], hidden, features, "column"),
            activate=Relu(),
            down=linear([f"{layer}.fc2"], features, hidden, "row"),
        )
