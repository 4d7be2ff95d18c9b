"""What a client may ask of sampling and stopping. Validated here, once, for every entrance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, Literal

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 100.0
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORD_TOKENS = 64
MAX_ALLOWED_TOKEN_IDS = 65_536
MAX_LOGPROBS = 20
MAX_BEAM_WIDTH = 32
# fp32 holds 2**24 tokens, the longest sequence, to this power.
MAX_LENGTH_PENALTY = 5.0
# Log probabilities that a row of a beam search is told of each step: its width and one more for
# each stop token, so that `beam_width` candidates are left that do not stop.
MAX_BEAM_TOKENS = 64
MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 switch that filter
    off; the filters apply after the temperature, in the order top-k, top-p, min-p.
    ``seed`` makes a request's tokens independent of whatever else runs beside it; without one the
    engine draws a seed. ``max_tokens`` None means as many as the model's length allows.
    ``stop`` strings end the text before the string (matched in the text front end);
    ``stop_token_ids`` end it after that token, like the model's own end-of-sequence tokens, which
    ``ignore_eos`` switches off. ``include_stop_str_in_output`` leaves what ended the text, the stop
    string or the stop token's own text, in it. Until ``min_tokens`` are generated, stop tokens
    cannot be sampled and stop strings are not looked for.

    Before the temperature a token's logit is changed in this order, for greedy rows, too:

    - ``allowed_token_ids``, when given, are the only ones that may be sampled;
    - ``bad_words`` never come out, alone or after a space. The front end writes their tokens into
      ``bad_words_token_ids``: the last id of a sequence is forbidden where the generated tokens
      end with the others;
    - stop tokens are forbidden during ``min_tokens``;
    - ``logit_bias`` pairs token ids with what is added to their logits; it may be a mapping;
    - ``repetition_penalty`` divides positive and multiplies negative logits of tokens in prompt or
      output (Keskar et al., 2019); ``frequency_penalty`` is subtracted once for each time that a
      token was generated, ``presence_penalty`` once where it was generated at all.

    ``logprobs`` asks for each generated token's log probability, its rank, and that many of the
    likeliest tokens beside it (0: none). They are of the model's raw distribution, before
    everything above and before the temperature, over the whole vocabulary ("raw_logprobs" in
    vLLM). ``prompt_logprobs`` asks for the same of the prompt's tokens, the first excepted.

    ``use_beam_search`` looks for likely sequences instead of sampling: ``beam_width`` candidates
    go on at each step (None: as many as results are wanted), and the best ``beam_width`` that ended
    compete by the sum of their tokens' log probabilities over length to the power
    ``length_penalty``. ``early_stopping`` says when to end: True as soon as ``beam_width`` have
    ended, "never" when no candidate could become better than the worst of them at any length, False
    when none is better at its present length. A beam search is not random: a seed changes nothing,
    and what shapes sampling (a temperature other than 0 or 1, filters, penalties, biases, masks,
    stop strings) is refused; stop tokens and ``min_tokens`` work.

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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        # NumPy's scalars and fractions are welcome, and become Python's numbers.
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, Real) and not isinstance(value, int | float):
                with suppress(OverflowError):  # beyond every float: refused below
                    self._become(name, int(value) if isinstance(value, Integral) else float(value))
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _number(
            "repetition_penalty",
            self.repetition_penalty,
            0.0,
            MAX_REPETITION_PENALTY,
            low_open=True,
        )
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise ValueError(
                    f"min_tokens must be at most max_tokens ({self.max_tokens}), "
                    f"got {self.min_tokens}"
                )
        for name in ("ignore_eos", "include_stop_str_in_output", "use_beam_search"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        self._become("stop", _texts("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS))
        self._become(
            "bad_words", _texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        )
        self._become(
            "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        )
        self._become("bad_words_token_ids", _id_sequences(self.bad_words_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            if not allowed:
                raise ValueError(
                    "allowed_token_ids is empty: nothing could be sampled; name at least one "
                    "token id, or leave the field out to allow all"
                )
            self._become("allowed_token_ids", tuple(dict.fromkeys(allowed)))
        self._become("logit_bias", _bias_pairs(self.logit_bias))
        self._check_beams()

    def _check_beams(self) -> None:
        if self.beam_width is not None:
            _integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        _number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(
                f'early_stopping must be true, false or "never", got {shown(self.early_stopping)}'
            )
        if not self.use_beam_search:
            for name in ("beam_width", "length_penalty", "early_stopping"):
                if getattr(self, name) != _DEFAULTS[name]:
                    raise ValueError(f"{name} needs use_beam_search: true; send it or leave it out")
            return
        if self.temperature not in (0.0, 1.0):
            raise ValueError(
                f"temperature must be 0 or 1 with use_beam_search, got {self.temperature:g}"
            )
        if self.top_k not in (-1, 0):
            raise ValueError(f"top_k {_NOT_WITH_BEAMS}")
        for name in _NEUTRAL_WITH_BEAMS:
            if getattr(self, name) != _DEFAULTS[name]:
                hint = "; use stop_token_ids" if name == "stop" else ""
                raise ValueError(f"{name} {_NOT_WITH_BEAMS}{hint}")

    def _become(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def without_beams(self) -> SamplingParams:
        """The same without a beam search."""
        beams = ("use_beam_search", "beam_width", "length_penalty", "early_stopping")
        return replace(self, **{name: _DEFAULTS[name] for name in beams})

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(SamplingParams)}
_NOT_WITH_BEAMS = "does not work with use_beam_search; leave it out"
_NEUTRAL_WITH_BEAMS = (
    "top_p",
    "min_p",
    "stop",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "bad_words",
    "bad_words_token_ids",
    "allowed_token_ids",
)


def _texts(name: str, value: object, max_count: int, max_chars: int) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else _items(name, value, "strings")
    if len(texts) > max_count:
        raise ValueError(f"{name} takes at most {max_count} strings, got {len(texts)}")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} must hold non-empty strings, got {text!r}")
        if len(text) > max_chars:
            raise ValueError(
                f"{name}: a string may have at most {max_chars} characters, got {len(text)}"
            )
    return texts


def _ids(name: str, value: object, max_count: int) -> tuple[int, ...]:
    token_ids = _items(name, value, "token ids")
    if len(token_ids) > max_count:
        raise ValueError(f"{name} takes at most {max_count} ids, got {len(token_ids)}")
    for token_id in token_ids:
        _integer(name, token_id, 0, MAX_TOKEN_ID)
    return token_ids


def _id_sequences(value: object) -> tuple[tuple[int, ...], ...]:
    name = "bad_words_token_ids"
    sequences = tuple(
        _ids(name, item, MAX_BAD_WORD_TOKENS) for item in _items(name, value, "sequences")
    )
    # Each word comes with and without a space before it.
    if len(sequences) > 2 * MAX_BAD_WORDS:
        raise ValueError(f"{name} takes at most {2 * MAX_BAD_WORDS}, got {len(sequences)}")
    if not all(sequences):
        raise ValueError(f"{name} must hold non-empty sequences")
    return sequences


def _items(name: str, value: object, what: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of {what}, got {shown(value)}")
    try:
        return tuple(value)
    except TypeError:  # an array of no dimension calls itself iterable
        raise ValueError(f"{name} must be a list of {what}, got {shown(value)}") from None


def _bias_pairs(bias: object) -> tuple[tuple[int, float], ...]:
    items = bias.items() if isinstance(bias, Mapping) else bias
    try:
        pairs = tuple((token_id, value) for token_id, value in items)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias must map token ids to numbers, got {shown(bias)}") from None
    if len(pairs) > MAX_LOGIT_BIASES:
        raise ValueError(f"logit_bias takes at most {MAX_LOGIT_BIASES} token ids, got {len(pairs)}")
    for token_id, value in pairs:
        _integer("logit_bias: a token id", token_id, 0, MAX_TOKEN_ID)
        _number("logit_bias: a value", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    if len({token_id for token_id, _ in pairs}) < len(pairs):
        raise ValueError("logit_bias names a token id twice")
    return pairs


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not _is_finite(value):
        raise ValueError(f"{name} must be a finite number, got {shown(value)}")
    number = float(value)
    if number > high or number < low or (low_open and number == low):
        bracket = "(" if low_open else "["
        raise ValueError(f"{name} must be in {bracket}{low:g}, {high:g}], got {shown(value)}")


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an integer, got {shown(value)}")
    if not low <= int(value) <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {shown(value)}")


def shown(value: object) -> str:
    """A value as an error shows it: never more than a line, whatever was sent."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "an integer of more than 256 bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
