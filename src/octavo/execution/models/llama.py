"""The Llama family: RMSNorm, grouped-query attention, SwiGLU. Attention and rotation are a
backend's (``StepAttention``); the model knows nothing of the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from octavo.core.model_config import ModelConfig
from octavo.execution.attention.interface import StepAttention
from octavo.execution.models.layers import (
    Embedding,
    Linear,
    Quantization,
    RMSNorm,
    silu_and_mul,
)
from octavo.execution.models.parallel import TensorParallel
from octavo.execution.models.rope import RopeTable, rope_table
from octavo.execution.models.weights import Weights

if TYPE_CHECKING:
    from octavo.execution.models.quantized import QuantizedInputs


class LlamaLayer:
    """One decoder layer; ``index`` is its number."""

    def __init__(self, config: ModelConfig, index: int, parallel: TensorParallel) -> None:
        name = f"model.layers.{index}"
        self.activate: Callable[[torch.Tensor], torch.Tensor | QuantizedInputs] = silu_and_mul
        hidden, dim = config.hidden_size, config.head_dim
        num_q, num_kv = config.num_attention_heads * dim, config.num_kv_heads * dim
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        self.index = index
        self.attention_norm = RMSNorm(f"{name}.input_layernorm", hidden, config.rms_norm_eps)
        self.qkv = Linear(
            [
                (f"{attention}.q_proj", num_q),
                (f"{attention}.k_proj", num_kv),
                (f"{attention}.v_proj", num_kv),
            ],
            hidden,
            split="column",
            bias=config.attention_bias,
            parallel=parallel,
        )
        self.output = Linear(
            [(f"{attention}.o_proj", hidden)],
            num_q,
            split="row",
            bias=config.attention_bias,
            parallel=parallel,
        )
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", hidden, config.rms_norm_eps)
        self.gate_up = Linear(
            [
                (f"{mlp}.gate_proj", config.intermediate_size),
                (f"{mlp}.up_proj", config.intermediate_size),
            ],
            hidden,
            split="column",
            bias=config.mlp_bias,
            parallel=parallel,
        )
        self.down = Linear(
            [(f"{mlp}.down_proj", hidden)],
            config.intermediate_size,
            split="row",
            bias=config.mlp_bias,
            parallel=parallel,
        )

    def load(
        self,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None,
    ) -> None:
        """Load and prepare each part in turn, so that only one plain copy exists at a time."""
        for norm in (self.attention_norm, self.mlp_norm):
            norm.load(weights, dtype, device)
            norm.prepare()
        for linear in (self.qkv, self.output, self.gate_up, self.down):
            linear.load(weights, dtype, device, quantization)
            linear.prepare()
        self.attention_norm.quantization = quantization if self.qkv.is_quantized else None
        self.mlp_norm.quantization = quantization if self.gate_up.is_quantized else None
        if quantization is not None and self.down.is_quantized:
            self.activate = quantization.silu_and_mul

    def parts(self) -> tuple[RMSNorm | Linear, ...]:
        return (
            self.attention_norm,
            self.qkv,
            self.output,
            self.mlp_norm,
            self.gate_up,
            self.down,
        )

    def __call__(self, residual: torch.Tensor, attention: StepAttention) -> None:
        """Add this layer's work to ``residual`` ``[num_tokens, hidden]`` in place."""
        attended = attention(self.index, self.qkv(self.attention_norm(residual)))
        residual.add_(self.output(attended))
        residual.add_(self.down(self.activate(self.gate_up(self.mlp_norm(residual)))))


class LlamaModel:
    """A decoder of the Llama family on one rank.

    ``num_heads`` and ``num_kv_heads`` count this rank's; ``rope`` is the rotary table.

    Raises:
        ValueError: heads, features or vocabulary cannot be split over the ranks.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel,
        max_positions: int,
        quantization: Quantization | None = None,
    ) -> None:
        self.config = config
        self.quantization = quantization
        self.dtype = dtype
        self.device = device
        self.parallel = parallel
        self.num_heads = parallel.share(config.num_attention_heads, "the attention heads")
        self.num_kv_heads = parallel.share(config.num_kv_heads, "the key-value heads")
        self.head_dim = config.head_dim
        self.embedding = Embedding(
            "model.embed_tokens", config.vocab_size, config.hidden_size, parallel=parallel
        )
        self.layers: list[LlamaLayer] = []
        self.norm = RMSNorm("model.norm", config.hidden_size, config.rms_norm_eps)
        self.head = Linear(
            [("lm_head", config.vocab_size)],
            config.hidden_size,
            split="column",
            bias=False,
            parallel=parallel,
        )
        with torch.inference_mode():
            self._load(weights)
            self.rope: RopeTable = rope_table(config, max_positions, device)

    def _load(self, weights: Weights) -> None:
        self.embedding.load(weights, self.dtype, self.device)
        for index in range(self.config.num_layers):
            layer = LlamaLayer(self.config, index, self.parallel)
            layer.load(weights, self.dtype, self.device, self.quantization)
            self.layers.append(layer)
        self.norm.load(weights, self.dtype, self.device)
        self.norm.prepare()
        if self.config.tie_word_embeddings:
            self._tie_head(weights)
        else:
            self.head.load(weights, self.dtype, self.device, self.quantization)
        self.head.prepare()
        # Quantized layers compute in fp32 between their products, so the residual stays in it.
        self._is_wide = any(
            part.is_quantized
            for layer in self.layers
            for part in layer.parts()
            if isinstance(part, Linear)
        )
        weights.check_all_used(self._unread_names())

    def _tie_head(self, weights: Weights) -> None:
        """The head shares the embedding's table, or packs the same tensor for itself."""
        assert self.embedding.weight is not None
        self.head.parts = ((self.embedding.name, self.config.vocab_size),)
        if self.quantization is not None:
            self.head.load(weights, self.dtype, self.device, self.quantization)
        if not self.head.is_quantized:
            self.head.share_weight(self.embedding.weight)

    def weight_bytes(self) -> int:
        """Memory that this rank's weights take."""
        parts = [part for layer in self.layers for part in layer.parts()]
        return sum(part.num_bytes for part in (self.embedding, self.norm, self.head, *parts))

    def weight_kinds(self) -> str:
        """How the weights of the products are kept, for people: ``int4+int8``, ``bfloat16``."""
        linears = [part for layer in self.layers for part in layer.parts()] + [self.head]
        kinds = {kind for part in linears if isinstance(part, Linear) for kind in part.kinds()}
        return "+".join(sorted(kinds)) or str(self.dtype).removeprefix("torch.")

    def _unread_names(self) -> frozenset[str]:
        """Tensors that a checkpoint may hold and this rank rightly did not read."""
        names = {"lm_head.weight"} if self.config.tie_word_embeddings else set()
        for layer in self.layers:
            for part in (layer.output, layer.down):
                if part.skips_bias:
                    names.update(f"{name}.bias" for name, _ in part.parts)
        return frozenset(names)

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, attention: StepAttention) -> torch.Tensor:
        """``token_ids``: int64 ``[num_tokens]``. Returns final-normed ``[num_tokens, hidden]``."""
        residual = self.embedding(token_ids)
        if self._is_wide:
            residual = residual.float()
        for layer in self.layers:
            layer(residual, attention)
        hidden = self.norm(residual)
        assert isinstance(hidden, torch.Tensor)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden``: ``[rows, hidden]`` of ``forward``. Returns float32 ``[rows, vocab]``."""
        local = self.head(hidden)
        whole = self.parallel.all_gather(local) if self.parallel.size > 1 else local
        return whole.float()
