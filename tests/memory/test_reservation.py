"""What Orca's three ways reserve, by hand, and that what is called the longest is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.memory.reservation import RESERVES, Reservation


@pytest.mark.parametrize(
    ("reserve", "num_tokens", "num_blocks"),
    [("max", 2048, 128), ("pow2", 161 + 512, 64), ("oracle", 161 + 338 - 1, 32)],
)
def test_the_papers_mean_request(reserve: str, num_tokens: int, num_blocks: int) -> None:
    reservation = Reservation(reserve, 2048)
    assert reservation.num_tokens(161, 161 + 338) == num_tokens
    assert reservation.num_blocks(161, 161 + 338, 16) == num_blocks


def test_no_reservation_is_longer_than_the_model() -> None:
    assert Reservation("pow2", 2048).num_tokens(1000, 2048) == 2048


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match="reserve must be one of max, pow2, oracle"):
        Reservation("all", 10)


@given(
    reserve=st.sampled_from(RESERVES),
    max_model_len=st.integers(2, 90),
    num_prompt=st.integers(1, 60),
    num_blocks=st.integers(0, 30),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_the_longest_fits_and_one_more_does_not(
    reserve: str, max_model_len: int, num_prompt: int, num_blocks: int, block_size: int
) -> None:
    reservation = Reservation(reserve, max_model_len)
    fitting = [
        length
        for length in range(num_prompt + 1, max_model_len + 1)
        if reservation.num_blocks(num_prompt, length, block_size) <= num_blocks
    ]
    longest = reservation.longest(num_prompt, num_blocks, block_size)
    if fitting:
        assert longest == max(fitting)
        assert fitting == list(range(num_prompt + 1, longest + 1)), "shorter ones fit, too"
    else:
        assert min(longest, max_model_len) <= num_prompt
