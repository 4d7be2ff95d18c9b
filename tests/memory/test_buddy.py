"""The buddy allocator: splits, joins, and the same runs for the same calls, whatever the order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.memory.buddy import BuddyPool


def runs(pool: BuddyPool) -> list[tuple[int, int]]:
    return [(run.start, len(run)) for run in pool.free_runs()]


def test_a_pool_of_any_size_is_cut_into_powers_of_two() -> None:
    pool = BuddyPool(12)
    assert runs(pool) == [(1, 8), (9, 2), (11, 1)]
    pool.check()


def test_a_long_run_is_halved_and_joined_again() -> None:
    pool = BuddyPool(12)
    assert pool.try_allocate(1) == range(11, 12)
    assert pool.try_allocate(2) == range(9, 11)
    first = pool.try_allocate(2)
    assert first == range(1, 3)
    assert runs(pool) == [(3, 2), (5, 4)]
    assert pool.try_allocate(8) is None
    assert pool.num_free == 6
    assert pool.num_free_below(4) == 2
    assert pool.num_free_below(8) == 6
    pool.release(first)
    assert runs(pool) == [(1, 8)]
    pool.check()


def test_neighbours_that_are_no_buddies_are_not_joined() -> None:
    """The second and the third of four: eight are free, and no run of eight."""
    pool = BuddyPool(17)
    quarters = [pool.try_allocate(4) for _ in range(4)]
    for run in quarters[1:3]:
        assert run is not None
        pool.release(run)
    assert runs(pool) == [(5, 4), (9, 4)]
    assert pool.num_free == 8
    assert pool.try_allocate(8) is None
    pool.check()


def test_a_block_that_is_shared_stays_when_its_run_goes() -> None:
    pool = BuddyPool(9)
    run = pool.try_allocate(8)
    assert run is not None
    pool.share([3])
    pool.release(run)
    assert runs(pool) == [(1, 2), (4, 1), (5, 4)]
    pool.check()
    pool.release([3])
    assert runs(pool) == [(1, 8)]


def test_a_pool_without_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BuddyPool(1)


@given(
    num_blocks=st.integers(2, 70),
    calls=st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=60),
)
def test_any_order_of_calls(num_blocks: int, calls: list[tuple[bool, int]]) -> None:
    """Runs are disjoint, aligned and of their length; one is refused only where no free run is so
    long; what is free is joined; and a second pool does the same."""
    pool, twin = BuddyPool(num_blocks), BuddyPool(num_blocks)
    whole = runs(pool)
    owned: list[range] = []
    for takes, value in calls:
        if takes:
            longest = max((length for _, length in runs(pool)), default=0)
            run = pool.try_allocate(1 << value)
            assert run == twin.try_allocate(1 << value)
            assert (run is None) == (longest < 1 << value)
            if run is not None:
                assert len(run) == 1 << value
                assert (run.start - 1) % len(run) == 0
                assert 1 <= run.start < run.stop <= num_blocks
                assert all(set(run).isdisjoint(other) for other in owned)
                owned.append(run)
        elif owned:
            run = owned.pop(value % len(owned))
            pool.release(run)
            twin.release(run)
        pool.check()
        assert pool.num_free == pool.num_usable - sum(map(len, owned))
    for run in owned:
        pool.release(run)
    assert runs(pool) == whole
