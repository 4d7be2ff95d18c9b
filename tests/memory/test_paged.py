"""The paged manager: named scenarios of the paper. Any order of calls: `test_any_calls`."""

from __future__ import annotations

import pytest

from octavo.core.layout import num_blocks_for
from octavo.core.plan import CopyBlocks, SwapIn, SwapOut
from octavo.memory.paged import PagedManager
from toy_executor import as_ids

SIZE = 4


def manager(num_blocks: int = 9, rows: int = 4) -> PagedManager:
    return PagedManager(num_blocks, SIZE, rows)


def commit(paged: PagedManager, row: int, count: int) -> None:
    paged.commit(as_ids([row]), as_ids([count]))


def test_blocks_are_taken_lazily() -> None:
    paged = manager()
    assert paged.admit(0, as_ids(range(5))) is not None
    assert paged.num_free_blocks == 8 - 2
    assert paged.writable[0] == 8
    assert paged.grow(0, 8)
    assert paged.num_free_blocks == 6, "the second block has room still"
    assert paged.grow(0, 9)
    assert paged.num_free_blocks == 5
    deltas = paged.drain().table_deltas
    assert deltas.rows.tolist() == [0]
    assert deltas.indices.tolist() == [2]
    assert deltas.block_ids.tolist() == paged.block_ids(0)[2:].tolist()
    paged.check()


def test_a_call_that_fails_changes_nothing() -> None:
    paged = manager(num_blocks=4)
    assert paged.admit(0, as_ids(range(8))) is not None
    assert paged.admit(1, as_ids(range(8))) is None
    assert paged.admit(1, as_ids(range(4)), reserve=1) is None
    assert not paged.grow(0, 8 + 2 * SIZE)
    assert paged.num_free_blocks == 1
    assert paged.writable[0] == 8
    assert not len(paged.drain().table_deltas)
    paged.check()


def test_never_is_not_the_same_as_not_now() -> None:
    paged = manager(num_blocks=4)
    assert not paged.can_never_fit(3)
    assert paged.can_never_fit(4)


def test_the_first_writer_copies_and_the_last_writes_in_place() -> None:
    """Two samples share a half-full last block (Kwon et al., figure 8)."""
    paged = manager()
    paged.admit(0, as_ids(range(6)))
    shared = paged.block_ids(0)
    paged.fork(0, 1, 6)
    assert paged.block_ids(1).tolist() == shared.tolist()
    assert paged.writable[:2].tolist() == [6, 6]
    assert paged.grow(0, 7)
    (copy,) = paged.drain().commands
    assert isinstance(copy, CopyBlocks)
    assert copy.sources.tolist() == [shared[1]]
    assert copy.destinations.tolist() == [paged.block_ids(0)[1]]
    assert paged.grow(1, 7)
    assert paged.drain().commands == ()
    assert paged.block_ids(1).tolist() == shared.tolist()
    paged.check()
    paged.retire((copy,))
    paged.check()


def test_a_full_last_block_is_shared_without_a_copy() -> None:
    paged = manager()
    paged.admit(0, as_ids(range(8)))
    paged.fork(0, 1, 8)
    assert paged.grow(0, 9)
    assert paged.grow(1, 9)
    drained = paged.drain()
    assert drained.commands == ()
    assert drained.table_deltas.indices.tolist() == [2, 2]
    paged.check()


def test_a_copy_source_lives_until_its_step_is_processed() -> None:
    paged = manager()
    paged.admit(0, as_ids(range(6)))
    paged.fork(0, 1, 6)
    paged.grow(0, 7)
    commands = paged.drain().commands
    source = int(commands[0].sources[0])
    paged.free(1)
    assert paged.pool.references[source] == 1
    paged.check()
    paged.retire(commands)
    assert paged.pool.references[source] == 0
    paged.check()


def test_a_row_freed_before_its_copy_runs_cancels_the_copy() -> None:
    paged = manager()
    paged.admit(0, as_ids(range(6)))
    paged.fork(0, 1, 6)
    paged.grow(0, 7)
    paged.free(0)
    drained = paged.drain()
    assert drained.commands == ()
    assert not len(drained.table_deltas)
    paged.free(1)
    assert paged.num_free_blocks == 8
    paged.check()


def test_usage_counts_a_shared_block_once() -> None:
    paged = manager()
    paged.admit(0, as_ids(range(6)))
    usage = paged.usage()
    assert (usage.live, usage.reserved, usage.internal_waste, usage.free) == (0, 6, 2, 24)
    commit(paged, 0, 5)
    usage = paged.usage()
    assert (usage.live, usage.reserved, usage.internal_waste) == (5, 1, 2)
    commit(paged, 0, 1)
    paged.fork(0, 1, 6)
    usage = paged.usage()
    assert (usage.live, usage.reserved, usage.internal_waste) == (6, 0, 2)
    paged.check()


def swapping(num_host_blocks: int = 8) -> PagedManager:
    return PagedManager(9, SIZE, 4, num_host_blocks=num_host_blocks)


def test_a_shared_block_is_moved_once_each_way() -> None:
    paged = swapping()
    paged.admit(0, as_ids(range(6)))
    paged.fork(0, 1, 6)
    tables = paged.swap_out([0, 1], [6, 6])
    assert tables is not None
    (out,) = paged.drain().commands
    assert isinstance(out, SwapOut)
    assert out.block_ids.tolist() == paged.block_ids(0).tolist()
    assert paged.swap_space.num_free == 6
    paged.free(0)
    paged.free(1)
    transfer = paged.swap_in(tables, [2, 3])
    (back,) = paged.drain().commands
    assert isinstance(back, SwapIn)
    assert back.transfer_id == transfer
    assert back.host_block_ids.tolist() == out.host_block_ids.tolist()
    assert paged.block_ids(2).tolist() == paged.block_ids(3).tolist()
    assert paged.writable[2:].tolist() == [6, 6], "the half-full block is shared still"
    assert paged.grow(2, 7)
    assert len(paged.drain().commands) == 1, "and copied by the first to write"
    paged.drop_swapped(tables)
    assert paged.swap_space.num_free == 8
    paged.check()


def test_only_computed_blocks_are_swapped() -> None:
    paged = swapping()
    paged.admit(0, as_ids(range(6)))
    paged.grow(0, 13)
    tables = paged.swap_out([0], [6])
    assert tables is not None
    assert len(tables[0].host_block_ids) == 2


def test_full_host_memory_refuses_and_changes_nothing() -> None:
    paged = swapping(num_host_blocks=1)
    paged.admit(0, as_ids(range(6)))
    assert paged.swap_out([0], [6]) is None
    assert paged.drain().commands == ()
    assert paged.swap_space.num_free == 1
    assert PagedManager(9, SIZE, 4).swap_out([0], [0]) is None


def test_swapping_in_needs_blocks() -> None:
    paged = swapping()
    paged.admit(0, as_ids(range(12)))
    tables = paged.swap_out([0], [12])
    assert tables is not None
    # Three blocks, and one for the next token.
    assert paged.swap_in(tables, [1], reserve=2) is None
    assert paged.swap_in(tables, [1], reserve=1) is not None
    paged.check()


@pytest.mark.parametrize(
    ("num_tokens", "sharing", "expected"),
    [(8, True, 2 + 3), (9, True, 3 + 2), (10, False, 3 + 2 * 3), (8, False, 2 + 2 * 2 + 3)],
)
def test_swapping_in_leaves_room_for_the_next_tokens(
    num_tokens: int, sharing: bool, expected: int
) -> None:
    """Three rows at a block's end take one each; of those that share a half-full block all but one
    copy it; without sharing they copy everything."""
    paged = PagedManager(20, 4, 6, num_host_blocks=8, sharing=sharing)
    paged.admit(0, as_ids(range(num_tokens)))
    for child in (1, 2):
        paged.fork(0, child, num_tokens)
    tables = paged.swap_out([0, 1, 2], [num_tokens] * 3)
    assert tables is not None
    for row in range(3):
        paged.free(row)
    assert paged.swap_in(tables, [3, 4, 5], reserve=19 - expected + 1) is None
    assert paged.swap_in(tables, [3, 4, 5], reserve=19 - expected) is not None
    for row in (3, 4, 5):
        assert paged.grow(row, num_tokens + 1)
    assert paged.num_free_blocks == 19 - expected
    paged.check()


@pytest.mark.parametrize("num_tokens", [8, 9])
def test_without_sharing_a_child_copies_everything_once(num_tokens: int) -> None:
    paged = PagedManager(20, 4, 3, prefix_caching=True, sharing=False)
    assert not paged.prefix_caching
    paged.admit(0, as_ids(range(num_tokens)))
    commit(paged, 0, num_tokens)
    paged.fork(0, 1, num_tokens)
    paged.fork(0, 2, num_tokens)
    for row in range(3):
        assert paged.grow(row, num_tokens + 1)
        paged.check()
    tables = [paged.block_ids(row).tolist() for row in range(3)]
    assert len({block_id for table in tables for block_id in table}) == 9
    (copies,) = paged.drain().commands
    assert isinstance(copies, CopyBlocks)
    assert len(copies.sources) == 2 * num_blocks_for(num_tokens, 4)
    paged.retire((copies,))
    paged.check()
