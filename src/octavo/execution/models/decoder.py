"""A decoder on one rank, whatever its family: tokens to the residual, layers, logits. Attention
and rotation are a backend's (``StepAttention``); the model knows nothing of the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from octavo.core.model_config import ModelConfig
from octavo.execution.attention.interface import StepAttention
from octavo.execution.models.decoder_layer import DecoderLayer
from octavo.execution.models.fp8 import Fp8Quantization
from octavo.execution.models.layers import Embedding, LearnedPositions, Linear, Quantization
from octavo.execution.models.norms import Norm
from octavo.execution.models.parallel import TensorParallel
from octavo.execution.models.rope import RopeTable, rope_table
from octavo.execution.models.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blueprint:
    """A family's parts, in the order in which tokens pass them; no weight is read yet.

    ``layers`` is an iterator: a broken file may claim billions of them, and the first that has no
    weights ends the loading. A tied ``head`` takes the embedding's weights.
    """

    embedding: Embedding
    project_in: Linear | None = None
    positions: LearnedPositions | None = None
    layers: Iterator[DecoderLayer]
    norm: Norm | None
    project_out: Linear | None = None
    head: Linear


Family = Callable[[ModelConfig, TensorParallel], Blueprint]


class Decoder:
    """A model that is ready to run.

    ``num_heads`` and ``num_kv_heads`` count this rank's; ``rope`` is the rotary table, of zero
    columns where the family does not rotate. ``kv_scales`` are what a checkpoint has for keys and
    values in fp8, float32 ``[layer, K|V, kv_head]``: given for all heads, kept for this rank's.

    Raises:
        ModelLoadError: the weights are not those of ``config``.
        ValueError: heads, features or vocabulary cannot be split over the ranks.
    """

    def __init__(
        self,
        family: Family,
        config: ModelConfig,
        weights: Weights,
        *,
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel,
        max_positions: int,
        quantization: Quantization | Fp8Quantization | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> None:
        self.config = config
        self.quantization = quantization
        self.dtype = dtype
        self.device = device
        self.parallel = parallel
        self.num_heads = parallel.share(config.num_attention_heads, "the attention heads")
        self.num_kv_heads = parallel.share(config.num_kv_heads, "the key-value heads")
        self.head_dim = config.head_dim
        self.kv_scales: torch.Tensor | None = None
        if kv_scales is not None:
            own = kv_scales.narrow(2, parallel.rank * self.num_kv_heads, self.num_kv_heads)
            self.kv_scales = own.contiguous().to(device)
        blueprint = family(config, parallel)
        self.embedding = blueprint.embedding
        self.project_in = blueprint.project_in
        self.positions = blueprint.positions
        self.layers: list[DecoderLayer] = []
        self.norm = blueprint.norm
        self.project_out = blueprint.project_out
        self.head = blueprint.head
        with torch.inference_mode():
            self._load(weights, blueprint.layers)
            self.rope: RopeTable = rope_table(config, max_positions, device)

    def _load(self, weights: Weights, layers: Iterator[DecoderLayer]) -> None:
        """Load and prepare each part in turn, so that only one plain copy exists at a time."""
        self.embedding.load(weights, self.dtype, self.device)
        if self.positions is not None:
            self.positions.load(weights, self.dtype, self.device)
        for layer in layers:
            layer.load(weights, self.dtype, self.device, self.quantization)
            self.layers.append(layer)
        if self.norm is not None:
            self.norm.load(weights, self.dtype, self.device)
            self.norm.prepare()
        for projection in (self.project_in, self.project_out):
            if projection is not None:
                projection.load(weights, self.dtype, self.device, self.quantization)
                projection.prepare()
        if self.config.tie_word_embeddings:
            self._tie_head(weights)
        else:
            quantization = self.quantization
            if isinstance(quantization, Fp8Quantization):
                quantization = quantization.of_head(f"{self.head.parts[0][0]}.weight")
            self.head.load(weights, self.dtype, self.device, quantization)
        self.head.prepare()
        # Quantized layers compute in fp32 between their products, so the residual stays in it.
        self._is_wide = any(
            linear.is_quantized for layer in self.layers for linear in layer.linears()
        )
        weights.check_all_used(self._unread_names())

    def _tie_head(self, weights: Weights) -> None:
        """The head shares the embedding's table, or packs the same tensor for itself."""
        assert self.embedding.weight is not None
        self.head.parts = ((self.embedding.name, self.config.vocab_size),)
        quantization = self.quantization
        if quantization is not None and not isinstance(quantization, Fp8Quantization):
            self.head.load(weights, self.dtype, self.device, quantization)
        if not self.head.is_quantized:
            self.head.share_weight(self.embedding.weight)

    @property
    def is_quantized(self) -> bool:
        """Whether a product's weights are kept in fewer bits than floats have."""
        return self._is_wide or self.head.is_quantized

    def weight_bytes(self) -> int:
        """Memory that this rank's weights take."""
        parts = [part for layer in self.layers for part in (*layer.norms(), *layer.linears())]
        ends = (
            self.embedding,
            self.project_in,
            self.positions,
            self.norm,
            self.project_out,
            self.head,
        )
        return sum(part.num_bytes for part in (*ends, *parts) if part is not None)

    def weight_kinds(self) -> str:
        """How the weights of the products are kept, for people: ``int4+int8``, ``bfloat16``."""
        linears = [linear for layer in self.layers for linear in layer.linears()]
        ends = [linear for linear in (self.project_in, self.project_out) if linear is not None]
        kinds = {kind for linear in (*linears, *ends, self.head) for kind in linear.kinds()}
        return "+".join(sorted(kinds)) or str(self.dtype).removeprefix("torch.")

    def _unread_names(self) -> frozenset[str]:
        """Tensors that a checkpoint may hold and this rank rightly did not read."""
        names = {"lm_head.weight"} if self.config.tie_word_embeddings else set()
        for layer in self.layers:
            for linear in layer.linears():
                if linear.skips_bias:
                    names.update(f"{name}.bias" for name, _ in linear.parts)
        return frozenset(names)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``token_ids``: int64 ``[num_tokens]``; ``positions``: each token's place in its
        sequence, int32 or int64 ``[num_tokens]``. Returns final-normed ``[num_tokens, hidden]``, or
        only the states of ``wanted``, integer indices of tokens: the last layer then computes keys
        and values of the others, and no more.
        """
        residual = self.embedding(token_ids)
        if self.project_in is not None:
            residual = self.project_in(residual)
        if self.positions is not None:
            residual = residual + self.positions(positions)
        if self._is_wide:
            residual = residual.float()
        for layer in self.layers[:-1]:
            residual = layer(residual, attention)
        residual = self.layers[-1](residual, attention, wanted)
        if not len(residual):
            return residual
        if self.norm is not None:
            residual = self.norm(residual)
        return residual if self.project_out is None else self.project_out(residual)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden``: ``[rows, hidden]`` of ``forward``. Returns float32 ``[rows, vocab]``."""
        local = self.head(hidden)
        whole = self.parallel.all_gather(local) if self.parallel.size > 1 else local
        return whole.float()
