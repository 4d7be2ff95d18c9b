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
