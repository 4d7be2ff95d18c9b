"""What a model's steps read and compute, as a few sums of its configuration. Knows no machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.core.model_config import ModelConfig

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Of one rank: every step multiplies its tokens with ``layer_weights`` and its sampled rows
    with ``head_weights`` weights of ``weight_bytes`` bytes each (which may be a fraction).

    ``token_bytes`` are a token's keys and values over all layers, ``attention_width`` the layers
    times query heads times head dimension, ``other_bytes`` what is kept and not read by a step
    (token embeddings that are not the head's). ``num_ranks`` have split the model between them.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    layer_weights: float
    head_weights: float
    weight_bytes: float
    token_bytes: float
    attention_width: float
    max_position_embeddings: int
    other_bytes: float = 0.0
    num_ranks: int = 1

    @classmethod
    def of(
        cls,
        name: str,
        config: ModelConfig,
        *,
        weight_bytes: float | None = None,
        kv_bytes: int | None = None,
    ) -> ModelShape:
        """``weight_bytes`` and ``kv_bytes`` are those of one weight and of one element of keys and
        values; left out, of the checkpoint's dtype."""
        element = _BYTES[config.dtype]
        if weight_bytes is None:
            weight_bytes = 1.0 if config.fp8 is not None else float(element)
        heads = config.num_attention_heads * config.head_dim
        kv_heads = config.num_kv_heads * config.head_dim
        num_products = 2 if config.architecture.startswith("OPT") else 3
        attention = config.hidden_size * (2 * heads + 2 * kv_heads)
        mlp = num_products * config.hidden_size * config.intermediate_size
        head = config.vocab_size * (config.embedding_size or config.hidden_size)
        return cls(
            name=name,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_kv_heads=config.num_kv_heads,
            layer_weights=float(config.num_layers * (attention + mlp)),
            head_weights=float(head),
            weight_bytes=weight_bytes,
            token_bytes=float(config.num_layers * 2 * kv_heads * (kv_bytes or element)),
            attention_width=float(config.num_layers * heads),
            max_position_embeddings=config.max_position_embeddings,
            other_bytes=0.0 if config.tie_word_embeddings else float(head * element),
        )

    @property
    def memory_bytes(self) -> float:
        """What its weights take on a rank."""
        return (self.layer_weights + self.head_weights) * self.weight_bytes + self.other_bytes

    def split(self, num_ranks: int) -> ModelShape:
        """One rank of ``num_ranks``.

        Raises:
            ValueError: the key-value heads cannot be split so.
        """
        if num_ranks < 1 or self.num_kv_heads % num_ranks:
            raise ValueError(
                f"{self.name} has {self.num_kv_heads} key-value heads, which {num_ranks} ranks "
                "cannot share; tensor parallelism must divide them"
            )
        return replace(
            self,
            num_kv_heads=self.num_kv_heads // num_ranks,
            layer_weights=self.layer_weights / num_ranks,
            head_weights=self.head_weights / num_ranks,
            token_bytes=self.token_bytes / num_ranks,
            attention_width=self.attention_width / num_ranks,
            other_bytes=self.other_bytes / num_ranks,
            num_ranks=self.num_ranks * num_ranks,
        )
