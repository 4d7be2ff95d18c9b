"""The Llama family, Mistral among it: biases only where the configuration asks for them."""

from __future__ import annotations

from octavo.core.model_config import ModelConfig
from octavo.execution.models.decoder import Blueprint
from octavo.execution.models.decoder_layer import DecoderLayer
from octavo.execution.models.gated import gated_decoder, gated_layer
from octavo.execution.models.parallel import TensorParallel


def llama(config: ModelConfig, parallel: TensorParallel) -> Blueprint:
    def layer(index: int) -> DecoderLayer:
        return gated_layer(
            config,
            index,
            parallel,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            mlp_bias=config.mlp_bias,
        )

    return gated_decoder(config, parallel, layer)
