"""What Llama, Qwen2 and Qwen3 share: RMSNorm, grouped-query attention, SwiGLU. Families differ in
biases and in norms of queries and keys."""

from __future__ import annotations

from collections.abc import Callable

from octavo.core.model_config import ModelConfig
from octavo.execution.models.activations import SiluAndMul
from octavo.execution.models.decoder import Blueprint
from octavo.execution.models.decoder_layer import DecoderLayer
from octavo.execution.models.layers import Embedding, Linear
from octavo.execution.models.norms import QueryKeyNorm, RMSNorm
from octavo.execution.models.parallel import TensorParallel


def gated_decoder(
    config: ModelConfig, parallel: TensorParallel, layer: Callable[[int], DecoderLayer]
) -> Blueprint:
    """``layer`` makes the layer of an index."""
    return Blueprint(
        embedding=Embedding(
            "model.embed_tokens", config.vocab_size, config.hidden_size, parallel=parallel
        ),
        layers=(layer(index) for index in range(config.num_layers)),
        norm=RMSNorm("model.norm", config.hidden_size, config.rms_norm_eps),
        head=Linear(
            [("lm_head", config.vocab_size)],
            config.hidden_size,
            split="column",
            bias=False,
            parallel=parallel,
        ),
    )


def gated_layer(
    config: ModelConfig,
    index: int,
    parallel: TensorParallel,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    query_key_norm: QueryKeyNorm | None = None,
) -> DecoderLayer:
    hidden, features = config.hidden_size, config.intermediate_size
    num_q = config.num_attention_heads * config.head_dim
    num_kv = config.num_kv_heads * config.head_dim
    name = layer_name(index)
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    return DecoderLayer(
        index=index,
        attention_norm=RMSNorm(f"{name}.input_layernorm", hidden, config.rms_norm_eps),
        qkv=Linear(
            [
                (f"{attention}.q_proj", num_q),
                (f"{attention}.k_proj", num_kv),
                (f"{attention}.v_proj", num_kv),
            ],
            hidden,
            split="column",
            bias=qkv_bias,
            parallel=parallel,
        ),
        query_key_norm=query_key_norm,
        output=Linear(
            [(f"{attention}.o_proj", hidden)],
            num_q,
            split="row",
            bias=output_bias,
            parallel=parallel,
        ),
        mlp_norm=RMSNorm(f"{name}.post_attention_layernorm", hidden, config.rms_norm_eps),
        up=Linear(
            [(f"{mlp}.gate_proj", features), (f"{mlp}.up_proj", features)],
            hidden,
            split="column",
            bias=mlp_bias,
            parallel=parallel,
        ),
        activate=SiluAndMul(),
        down=Linear(
            [(f"{mlp}.down_proj", hidden)],
            features,
            split="row",
            bias=mlp_bias,
            parallel=parallel,
        ),
    )


def layer_name(index: int) -> str:
    return f"model.layers.{index}"
