from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from octavo.core.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", 2**64),
        ("seed", 0.5),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**40),
        ("stop", ("",)),
        ("stop", ("a",) * 17),
        ("stop", ("a" * 1025,)),
        ("stop", (3,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple(range(65))),
        ("stop", None),
        ("stop_token_ids", 7),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", "0"),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 101.0),
        ("min_tokens", -1),
        ("min_tokens", 1.5),
        ("min_tokens", 17),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", "yes"),
        ("bad_words", ("",)),
        ("bad_words", (3,)),
        ("bad_words", ("a",) * 257),
        ("bad_words", ("a" * 257,)),
        ("bad_words_token_ids", ((),)),
        ("bad_words_token_ids", ((-1,),)),
        ("bad_words_token_ids", (3,)),
        ("bad_words_token_ids", (tuple(range(65)),)),
        ("bad_words_token_ids", ((1,),) * 513),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (-1,)),
        ("allowed_token_ids", (True,)),
        ("allowed_token_ids", "12"),
        ("allowed_token_ids", range(65_537)),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", 1.0),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"\b{field}\b"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_beam_search", 1),
        ("beam_width", 0),
        ("beam_width", 33),
        ("beam_width", 2.0),
        ("length_penalty", 5.1),
        ("length_penalty", float("nan")),
        ("early_stopping", "always"),
        ("early_stopping", None),
        ("early_stopping", 1),
        ("temperature", 0.5),
        ("top_k", 3),
        ("top_p", 0.5),
        ("min_p", 0.5),
        ("stop", "x"),
        ("logit_bias", {1: 1.0}),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -0.1),
        ("repetition_penalty", 1.1),
        ("bad_words", ["x"]),
        ("bad_words_token_ids", [[1]]),
        ("allowed_token_ids", [1]),
    ],
)
def test_what_a_beam_search_does_not_take_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**({"use_beam_search": True} | {field: value}))


@pytest.mark.parametrize(
    ("field", "value"), [("beam_width", 2), ("length_penalty", 0.5), ("early_stopping", "never")]
)
def test_what_belongs_to_a_beam_search_needs_one(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} needs use_beam_search"):
        SamplingParams(**{field: value})
    params = SamplingParams(use_beam_search=True, **{field: value})
    assert params.without_beams() == SamplingParams()


def test_what_goes_with_a_beam_search() -> None:
    for temperature in (0, 1):
        SamplingParams(
            use_beam_search=True,
            temperature=temperature,
            top_k=-1,
            seed=5,
            stop_token_ids=(3,),
            ignore_eos=True,
            min_tokens=2,
            logprobs=5,
            prompt_logprobs=0,
        )


def test_sequences_become_tuples() -> None:
    params = SamplingParams(
        stop="end",  # type: ignore[arg-type]
        stop_token_ids=[1, 2],  # type: ignore[arg-type]
        bad_words="word",  # type: ignore[arg-type]
        bad_words_token_ids=[[1], [2, 3]],  # type: ignore[arg-type]
        allowed_token_ids=[5, 4, 5],  # type: ignore[arg-type]
    )
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert params.bad_words == ("word",)
    assert params.bad_words_token_ids == ((1,), (2, 3))
    assert params.allowed_token_ids == (5, 4)
    hash(params)


def test_as_many_tokens_as_may_be() -> None:
    assert SamplingParams(min_tokens=16).min_tokens == 16
    assert SamplingParams(min_tokens=999, max_tokens=None).min_tokens == 999


def test_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=0.1).is_greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 10**400),
        ("top_k", 10**4000),
        ("logit_bias", {1: 10**400}),
        ("logit_bias", 5),
        ("logit_bias", [1, 2]),
        ("temperature", "x" * 10**6),
    ],
)
def test_absurd_values_are_value_errors_of_one_line(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field) as caught:
        SamplingParams(**{field: value})
    assert len(str(caught.value)) < 300


def test_other_numbers_are_read_or_refused_by_name() -> None:
    params = SamplingParams(temperature=Fraction(1, 2))  # type: ignore[arg-type]
    assert type(params.temperature) is float
    assert params.temperature == 0.5
    wrong = {"max_tokens": Fraction(1, 2), "temperature": Fraction(10**400), "stop": Fraction(1)}
    for name in ("stop", "bad_words", "stop_token_ids", "allowed_token_ids", "bad_words_token_ids"):
        wrong[name] = np.array(1)
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: value})


def test_numpys_scalars_are_welcome() -> None:
    params = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(5))  # type: ignore[arg-type]
    assert (params.temperature, params.max_tokens) == (0.5, 5)
    assert type(params.max_tokens) is int
