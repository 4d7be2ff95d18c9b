"""The dense Qwen3 family: Llama with a norm on each head's query and key, before rotation."""

from __future__ import annotations

from octavo.core.model_config import ModelConfig
from octavo.execution.models.decoder import Blueprint
from octavo.execution.models.decoder_layer import DecoderLayer
from octavo.execution.models.gated import gated_decoder, gated_layer, layer_name
from octavo.execution.models.norms import QueryKeyNorm
from octavo.execution.models.parallel import TensorParallel


def qwen3(config: ModelConfig, parallel: TensorParallel) -> Blueprint:
    def layer(index: int) -> DecoderLayer:
        norm = QueryKeyNorm(
            f"{layer_name(index)}.self_attn",
            parallel.share(config.num_attention_heads, "the attention heads"),
            parallel.share(config.num_kv_heads, "the key-value heads"),
            config.head_dim,
            config.rms_norm_eps,
        )
        return gated_layer(
            config,
            index,
            parallel,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            query_key_norm=norm,
        )

    return gated_decoder(config, parallel, layer)
