from __future__ import annotations

import math
from typing import Any

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
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field.split("_")[0]):
        SamplingParams(**{field: value})


def test_sequences_become_tuples() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[1, 2])  # type: ignore[arg-type]
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)


def test_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=0.1).is_greedy
