"""The Qwen2 family (Qwen1.5 to Qwen2.5): Llama with biases on queries, keys and values alone."""

from __future__ import annotations

from octavo.core.model_config import ModelConfig
from octavo.execution.models.decoder import Blueprint
from octavo.execution.models.gated import gated_decoder, gated_layer
from octavo.execution.models.parallel import TensorParallel


def qwen2(config: ModelConfig, parallel: TensorParallel) -> Blueprint:
    return gated_decoder(
        config, parallel, lambda index: gated_layer(config, index, parallel, qkv_bias=True)
    )
