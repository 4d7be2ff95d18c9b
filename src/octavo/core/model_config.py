"""A model's shape, read from config.json or GGUF metadata elsewhere. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field


class ModelLoadError(ValueError):
    """A model cannot be loaded; the message names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Rotary scaling: ``kind`` is ``linear`` (divide positions by ``factor``) or ``llama3``."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Scheme:
    """Of a checkpoint whose weights are stored in fp8 (e4m3), with a scale each or one a channel.

    ``inputs`` says how it was made to round what weights are multiplied with: ``token``, ``tensor``
    or ``none``. ``kv``: it was made for keys and values in fp8 too.
    """

    inputs: str
    kv: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder, in the field's names. ``dtype`` is the checkpoint's own.

    ``embedding_size`` is the width of the token embeddings where it is not ``hidden_size``.
    ``norm_after`` puts a layer's norms after its additions, ``final_norm`` is the one before the
    head, ``has_rotation`` is false where positions are learned.
    ``fp8`` is None for weights in ``dtype``.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_freq_factors: tuple[float, ...] | None = field(default=None, repr=False)
    sliding_window: int | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_size: int | None = None
    norm_after: bool = False
    final_norm: bool = True
    has_rotation: bool = True
    dtype: str = "bfloat16"
    fp8: Fp8Scheme | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
