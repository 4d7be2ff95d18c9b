from __future__ import annotations

import pytest

from octavo.memory.block_pool import BlockPool


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert sorted(pool.try_allocate(3) or []) == [1, 2, 3]
    assert pool.try_allocate(1) is None
    pool.check()


def test_a_failed_allocation_changes_nothing() -> None:
    pool = BlockPool(4)
    assert pool.try_allocate(4) is None
    assert pool.num_free == 3
    assert pool.try_allocate(0) == []
    pool.check()


def test_a_shared_block_is_free_after_its_last_release() -> None:
    pool = BlockPool(3)
    block_ids = pool.try_allocate(1) or []
    pool.share(block_ids)
    pool.release(block_ids)
    assert pool.num_free == 1
    pool.release(block_ids)
    assert pool.num_free == 2
    pool.check()


def test_the_block_released_last_is_reused_first() -> None:
    pool = BlockPool(8)
    block_ids = pool.try_allocate(3) or []
    pool.release(block_ids)
    assert pool.try_allocate(3) == block_ids


def test_releasing_too_often_is_an_error() -> None:
    pool = BlockPool(3)
    block_ids = pool.try_allocate(1) or []
    pool.release(block_ids)
    with pytest.raises(AssertionError, match="released too often"):
        pool.release(block_ids)


def test_a_pool_needs_two_blocks() -> None:
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(1)


@pytest.mark.parametrize("oldest_first", [False, True])
def test_a_wanted_block_is_taken_where_it_is_free(oldest_first: bool) -> None:
    pool = BlockPool(7, oldest_first=oldest_first)
    assert pool.try_allocate(3, [5, 0, 5]) == [5, 1, 2]
    assert pool.try_allocate(2, [5, 6, 3]) == [3, 6]
    pool.check()
    assert pool.try_allocate(2) is None
    assert pool.try_allocate(1) == [4]


def test_nothing_cached_is_evicted_because_it_is_wanted() -> None:
    pool = BlockPool(4)
    (block_id,) = pool.try_allocate(1, [2]) or []
    pool.publish(block_id, b"key")
    pool.release([block_id])
    assert not pool.is_free(block_id)
    assert pool.try_allocate(2, [block_id, block_id]) == [1, 3]
    assert pool.is_cached(block_id)
    assert pool.try_allocate(1, [block_id]) == [block_id]
    pool.check()


def test_which_free_block_comes_next() -> None:
    newest, oldest = BlockPool(6), BlockPool(6, oldest_first=True)
    for pool in (newest, oldest):
        block_ids = pool.try_allocate(3) or []
        assert block_ids == [1, 2, 3]
        pool.release(block_ids)
        pool.check()
    assert newest.try_allocate(5) == [1, 2, 3, 4, 5]
    assert oldest.try_allocate(5) == [4, 5, 3, 2, 1]
