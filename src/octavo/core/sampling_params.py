"""What a client may ask of sampling and stopping. Validated here, once, for every entrance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 switch that filter
    off; the filters apply after the temperature, in the order top-k, top-p, min-p.
    ``seed`` makes a request's tokens independent of whatever else runs beside it; without one the
    engine draws a seed. ``max_tokens`` None means as many as the model's length allows.
    ``stop`` strings end the text before the string (matched in the text front end);
    ``stop_token_ids`` end it after that token, like the model's own end-of-sequence tokens, which
    ``ignore_eos`` switches off. ``logit_bias`` pairs token ids with what is added to their logits
    before anything else; it may be given as a mapping.

    Raises:
        ValueError: a value is out of range; the message names the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold non-empty strings, got {text!r}")
            if len(text) > MAX_STOP_STRING_CHARS:
                raise ValueError(
                    f"a stop string may have at most {MAX_STOP_STRING_CHARS} characters, "
                    f"got {len(text)}"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids, "
                f"got {len(self.stop_token_ids)}"
            )
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, 0, 2**31 - 1)

        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _bias_pairs(bias: object) -> tuple[tuple[int, float], ...]:
    items = bias.items() if isinstance(bias, Mapping) else bias
    pairs = tuple((token_id, value) for token_id, value in items)  # type: ignore[attr-defined]
    if len(pairs) > MAX_LOGIT_BIASES:
        raise ValueError(f"logit_bias takes at most {MAX_LOGIT_BIASES} token ids, got {len(pairs)}")
    for token_id, value in pairs:
        _integer("logit_bias: a token id", token_id, 0, 2**31 - 1)
        _number("logit_bias: a value", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    if len({token_id for token_id, _ in pairs}) < len(pairs):
        raise ValueError("logit_bias names a token id twice")
    return pairs


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    if value > high or value < low or (low_open and value == low):
        bracket = "(" if low_open else "["
        raise ValueError(f"{name} must be in {bracket}{low:g}, {high:g}], got {value!r}")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {value}")
