"""Rows that begin with the same blocks, against a plain search."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.plan import int_array
from octavo.memory import prefix_groups as module
from octavo.memory.prefix_groups import prefix_groups

BLOCK_SIZE = 4


@pytest.fixture(autouse=True)
def _low_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_SAVED_TOKENS", 2 * BLOCK_SIZE)


def groups_of(tables: list[list[int]], full: list[int]) -> list[tuple[list[int], int]]:
    rows = int_array(range(len(tables)))
    found = prefix_groups(tables, rows, int_array(full), BLOCK_SIZE)
    return [(group.places.tolist(), group.num_tokens) for group in found]


def test_the_subset_that_saves_most() -> None:
    tables = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6], [1, 9], [7, 8], [7, 8]]
    assert groups_of(tables, [4, 4, 4, 2, 2, 2]) == [([0, 1, 2], 12), ([4, 5], 8)]


def test_only_full_blocks_count() -> None:
    tables = [[1, 2, 3], [1, 2, 3], [1, 2, 4]]
    assert groups_of(tables, [3, 2, 2]) == [([0, 1, 2], 8)]
    assert groups_of(tables, [0, 0, 0]) == []


def test_small_savings_are_not_worth_it() -> None:
    assert groups_of([[1, 2], [1, 3]], [2, 2]) == []
    assert groups_of([[1], [2]], [1, 1]) == []


@given(
    st.lists(
        st.lists(st.integers(1, 3), min_size=1, max_size=6).flatmap(
            lambda table: st.tuples(st.just(table), st.integers(0, len(table)))
        ),
        min_size=1,
        max_size=8,
    )
)
def test_groups_share_what_they_say(case: list[tuple[list[int], int]]) -> None:
    tables, full = [table for table, _ in case], [count for _, count in case]
    taken: set[int] = set()
    for places, num_tokens in groups_of(tables, full):
        num_blocks = num_tokens // BLOCK_SIZE
        assert num_tokens % BLOCK_SIZE == 0
        assert (len(places) - 1) * num_blocks >= 2
        assert len({tuple(tables[place][:num_blocks]) for place in places}) == 1
        assert all(full[place] >= num_blocks for place in places)
        assert not taken.intersection(places)
        taken.update(places)
