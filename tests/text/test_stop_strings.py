from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.text.stop_strings import StopStrings

PROPERTY = settings(max_examples=300, deadline=None, derandomize=True, database=None)


def oracle(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Start and stop of the match that completes first, the longest at that character."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return end - len(stop), stop
    return None


def pieces_of(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    pieces = []
    while text:
        size = rng.randint(0, 4)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@PROPERTY
@given(
    text=st.text("abc", max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    seed=st.integers(0, 1000),
    include_stop=st.booleans(),
)
def test_equals_the_whole_string_however_it_is_cut(
    text: str, stops: list[str], seed: int, include_stop: bool
) -> None:
    watcher = StopStrings(stops, include_stop)
    emitted, seen, match = "", "", None
    for piece in pieces_of(text, seed):
        safe, match = watcher.add(piece)
        emitted += safe
        if match is not None:
            break
        seen += piece
        held = seen[len(emitted) :]
        assert seen == emitted + held
        longest = max(
            (
                n
                for n in range(len(seen) + 1)
                if n == 0 or any(len(s) > n and s.startswith(seen[-n:]) for s in stops)
            ),
        )
        assert len(held) == longest
    expected = oracle(text, stops)
    if expected is None:
        assert match is None
        assert emitted + watcher.flush() == text
    else:
        start, stop = expected
        assert match == stop == watcher.matched
        assert emitted == text[: start + (len(stop) if include_stop else 0)]
        assert watcher.add("more") == ("", stop)
        assert watcher.flush() == ""


def test_the_match_that_completes_first_wins() -> None:
    assert StopStrings(["abcd", "bc"]).add("abcd") == ("a", "bc")
    assert StopStrings(["bc", "abc"]).add("xabc") == ("x", "abc")


def test_text_flows_without_stops() -> None:
    watcher = StopStrings([])
    assert watcher.add("anything") == ("anything", None)
    assert watcher.flush() == ""


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopStrings(["a", ""])
