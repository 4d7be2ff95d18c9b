"""The paged manager: named scenarios of the paper, and a state machine against Python lists."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.core.layout import num_blocks_for
from octavo.core.plan import (
    CopyBlocks,
    IntArray,
    KVCommand,
    MapBlocks,
    ReleaseBlocks,
    SwapIn,
    SwapOut,
)
from octavo.memory import prefix_cache
from octavo.memory.paged import PagedManager
from octavo.memory.swap import SwappedTable
from octavo.memory.virtual import VirtualManager
from toy_executor import ToyMMU, as_ids

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


def caching(num_blocks: int = 9, rows: int = 4) -> PagedManager:
    return PagedManager(num_blocks, SIZE, rows, prefix_caching=True)


def run(paged: PagedManager, row: int, tokens: list[int], salt: bytes = b"") -> int:
    """Admit, publish and free; the number of cached tokens."""
    admission = paged.admit(row, as_ids(tokens), salt=salt)
    assert admission is not None
    paged.publish(row, as_ids(tokens))
    commit(paged, row, len(tokens) - admission.num_cached_tokens)
    paged.check()
    paged.free(row)
    return admission.num_cached_tokens


def test_a_prefix_is_hit_in_whole_blocks_and_never_wholly() -> None:
    paged = caching()
    tokens = list(range(10))
    assert run(paged, 0, tokens) == 0
    assert paged.usage().cached == 8
    assert run(paged, 0, tokens) == 8
    assert run(paged, 0, tokens[:8]) == 4, "at least one token is computed"
    assert run(paged, 0, [*tokens[:6], 99, 98, 97]) == 4
    assert run(paged, 0, [99, *tokens]) == 0


def test_tenants_do_not_see_each_others_blocks() -> None:
    paged = caching()
    tokens = list(range(9))
    assert run(paged, 0, tokens, b"a") == 0
    assert run(paged, 0, tokens, b"b") == 0
    assert run(paged, 0, tokens, b"a") == 8


def test_a_running_sequence_shares_its_published_blocks() -> None:
    paged = caching()
    tokens = list(range(9))
    paged.admit(0, as_ids(tokens))
    paged.publish(0, as_ids(tokens))
    assert paged.admit(1, as_ids(tokens)) is not None
    assert paged.block_ids(0)[:2].tolist() == paged.block_ids(1)[:2].tolist()
    assert paged.pool.references[paged.block_ids(0)[0]] == 2
    assert paged.block_ids(0)[2] != paged.block_ids(1)[2]
    paged.check()


def test_the_tail_of_the_oldest_chain_is_evicted_first() -> None:
    paged = caching(num_blocks=7)
    old, new = list(range(12)), list(range(100, 108))
    run(paged, 0, old)
    run(paged, 0, new)
    paged.admit(1, as_ids(range(200, 208)))
    assert run(paged, 0, [*old, 1]) == 8, "one of the old chain's three blocks went, its last"
    paged.free(1)


def test_a_hit_makes_a_chain_young_again() -> None:
    paged = caching(num_blocks=5)
    first, second = list(range(8)), list(range(100, 108))
    run(paged, 0, first)
    run(paged, 0, second)
    run(paged, 0, first)
    paged.admit(1, as_ids([7]))
    paged.free(1)
    paged.admit(1, as_ids(range(200, 204)))
    paged.free(1)
    assert paged.pool.num_cached == 3
    assert run(paged, 0, [*first, 1]) == 8


def test_cached_blocks_count_as_free_until_they_are_shared() -> None:
    paged = caching(num_blocks=5)
    run(paged, 0, list(range(8)))
    assert paged.num_free_blocks == 4
    assert paged.admit(0, as_ids(range(12)), reserve=2) is None
    assert paged.pool.num_cached == 2, "a call that fails changes nothing"
    admission = paged.admit(0, as_ids(range(12)), reserve=1)
    assert admission is not None
    assert admission.num_cached_tokens == 8


def test_what_was_never_computed_is_taken_back() -> None:
    paged = caching()
    tokens = list(range(9))
    paged.admit(0, as_ids(tokens))
    published = paged.publish(0, as_ids(tokens))
    assert published == paged.block_ids(0)[:2].tolist()
    paged.unpublish(published)
    paged.free(0)
    assert run(paged, 0, tokens) == 0
    paged.check()


def test_generated_blocks_are_published_as_they_fill() -> None:
    paged = caching()
    tokens = list(range(10))
    paged.admit(0, as_ids(tokens[:5]))
    assert len(paged.publish(0, as_ids(tokens[:5]))) == 1
    assert paged.grow(0, 10)
    assert len(paged.publish(0, as_ids(tokens[:7]))) == 0
    assert len(paged.publish(0, as_ids(tokens))) == 1
    paged.free(0)
    assert run(paged, 1, tokens) == 8


def test_a_fork_publishes_its_own_continuation() -> None:
    paged = caching()
    tokens = list(range(6))
    paged.admit(0, as_ids(tokens))
    paged.publish(0, as_ids(tokens))
    paged.fork(0, 1, 6)
    for row, tail in ((0, [50, 51]), (1, [60, 61])):
        assert paged.grow(row, 8)
        assert len(paged.publish(row, as_ids(tokens + tail))) == 1
    paged.retire(paged.drain().commands)
    paged.free(0)
    paged.free(1)
    assert run(paged, 0, [*tokens, 50, 51, 1]) == 8
    assert run(paged, 0, [*tokens, 60, 61, 1]) == 8


def test_resetting_forgets_everything_that_is_cached() -> None:
    paged = caching()
    tokens = list(range(9))
    paged.admit(0, as_ids(tokens))
    paged.publish(0, as_ids(tokens))
    paged.reset_prefix_cache()
    paged.check()
    paged.free(0)
    assert paged.usage().cached == 0
    assert run(paged, 0, tokens) == 0


def test_pinned_blocks_outlive_pressure_and_resets() -> None:
    paged = caching(num_blocks=7)
    tokens = list(range(10))
    assert paged.pin(as_ids(tokens)) is None, "nothing is cached yet"
    run(paged, 0, tokens)
    assert paged.num_to_pin(as_ids(tokens)) == 2
    pinned = paged.pin(as_ids(tokens))
    assert pinned is not None
    assert len(pinned) == paged.num_pinned_blocks == 2
    assert paged.num_to_pin(as_ids(tokens)) == 0
    usage = paged.usage()
    assert (usage.live, usage.cached, usage.free) == (0, 8, 16)
    assert not paged.can_never_fit(4)
    assert paged.can_never_fit(5)
    assert paged.admit(1, as_ids(range(100, 120))) is None
    assert paged.admit(1, as_ids(range(100, 116))) is not None, "all that is left"
    paged.check()
    paged.free(1)
    paged.reset_prefix_cache()
    assert run(paged, 0, tokens) == 8
    paged.unpin(pinned)
    assert paged.num_free_blocks == 6
    assert run(paged, 0, tokens) == 8, "cached like any other"
    paged.admit(1, as_ids(range(100, 124)))
    paged.free(1)
    assert run(paged, 0, tokens) == 0, "and evicted like any other"


def test_prefixes_that_begin_alike_share_pinned_blocks() -> None:
    paged = caching()
    story, other = list(range(8)), [*range(4), 90, 91, 92, 93]
    run(paged, 0, story)
    run(paged, 0, other)
    first, second = paged.pin(as_ids(story)), paged.pin(as_ids(other))
    assert first is not None
    assert second is not None
    assert first[0] == second[0]
    assert paged.num_pinned_blocks == 3
    assert paged.usage().cached == 12
    paged.unpin(first)
    assert paged.num_pinned_blocks == 2
    paged.check()
    paged.unpin(second)
    assert paged.num_pinned_blocks == 0
    paged.check()


def test_pins_keep_tenants_apart_and_need_a_cache() -> None:
    paged = caching()
    run(paged, 0, list(range(9)), b"a")
    assert paged.pin(as_ids(range(9)), salt=b"b") is None
    assert paged.pin(as_ids(range(9)), salt=b"a") is not None
    plain = manager()
    plain.admit(0, as_ids(range(9)))
    plain.publish(0, as_ids(range(9)))
    assert plain.pin(as_ids(range(9))) is None
    assert plain.pin(as_ids([1])) is None


def test_without_use_cache_nothing_is_hit_or_published() -> None:
    paged = caching()
    tokens = list(range(9))
    run(paged, 0, tokens)
    admission = paged.admit(1, as_ids(tokens), use_cache=False)
    assert admission is not None
    assert admission.num_cached_tokens == 0
    assert paged.publish(1, as_ids(tokens)) == []
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


def test_who_waits_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that finds no room is asked for at every step."""
    made: list[int] = []
    block_key = prefix_cache.block_key

    def counted(parent: bytes, token_ids: IntArray) -> bytes:
        made.append(len(token_ids))
        return block_key(parent, token_ids)

    monkeypatch.setattr(prefix_cache, "block_key", counted)
    paged = PagedManager(9, SIZE, 4, prefix_caching=True)
    assert paged.admit(0, as_ids(range(5 * SIZE)))
    made.clear()
    waiting = as_ids(range(100, 100 + 4 * SIZE))
    for _ in range(5):
        assert paged.admit(1, waiting) is None
    assert len(made) == 4
    paged.free(0)
    assert paged.admit(1, waiting)
    assert len(paged.publish(1, waiting)) == 4
    assert len(made) == 4
    # Others, of equal tokens or another tenant, have keys of their own.
    equal = as_ids(waiting.tolist())
    for row, salt, cached in ((2, b"tenant", 0), (3, b"", 3 * SIZE)):
        admission = paged.admit(row, equal, salt=salt)
        assert admission is not None
        assert admission.num_cached_tokens == cached
        paged.free(row)
    paged.check()


class PagedMachine(RuleBasedStateMachine):
    """Any order of calls; a toy arena replays the commands and every row reads its own tokens."""

    rows = 5
    sharing = True

    def __init__(self) -> None:
        super().__init__()
        self.mmu = ToyMMU(self.rows)
        self.paged = self.make()
        self.host = np.full((8, SIZE), -1, dtype=np.int64)
        self.swapped: list[tuple[list[SwappedTable], list[list[int]], list[bytes]]] = []
        self.arena = np.full((17, SIZE), -1, dtype=np.int64)
        self.num_blocks = 12
        self.absent: set[int] = set()
        self.model: dict[int, list[int]] = {}
        self.salts: dict[int, bytes] = {}
        self.tables: dict[int, dict[int, int]] = {}
        self.outstanding: list[tuple[KVCommand, ...]] = []
        self.pins: list[tuple[list[int], bytes, tuple[int, ...]]] = []
        self.counter = 0

    def make(self) -> PagedManager:
        return PagedManager(
            13, SIZE, self.rows, prefix_caching=True, num_host_blocks=7, sharing=self.sharing
        )

    def next_row(self, tokens: list[int], salt: bytes) -> int:
        return next(r for r in range(self.rows) if r not in self.model)

    def has_places(self, count: int) -> bool:
        return True

    def fresh(self, count: int) -> list[int]:
        self.counter += count
        return list(range(self.counter - count, self.counter))

    def write(self, row: int, start: int) -> None:
        for position in range(start, len(self.model[row])):
            block_id = self.tables[row][position // SIZE]
            owners = sum(block_id in table.values() for table in self.tables.values())
            owners += sum(block_id in block_ids for _, _, block_ids in self.pins)
            assert owners == 1, "a shared block is written"
            self.arena[block_id, position % SIZE] = self.model[row][position]

    def obey(self) -> None:
        drained = self.paged.drain()
        deltas = drained.table_deltas
        for row, index, block_id in zip(deltas.rows, deltas.indices, deltas.block_ids, strict=True):
            self.tables[int(row)][int(index)] = int(block_id)
        for command in drained.commands:
            if isinstance(command, MapBlocks):
                self.mmu.obey(command)
            elif isinstance(command, CopyBlocks):
                self.arena[command.destinations] = self.arena[command.sources]
            elif isinstance(command, SwapOut):
                self.host[command.host_block_ids] = self.arena[command.block_ids]
            else:
                self.arena[command.block_ids] = self.host[command.host_block_ids]
        if drained.commands:
            self.outstanding.append(drained.commands)

    @precondition(lambda self: len(self.model) < self.rows)
    @rule(
        common=st.integers(0, 14),
        story=st.integers(0, 1),
        own=st.integers(0, 6),
        reserve=st.integers(0, 2),
        salt=st.sampled_from([b"", b"tenant"]),
    )
    def admit(self, common: int, story: int, own: int, reserve: int, salt: bytes) -> None:
        """Prompts begin with a part of one of two stories, so that prefixes are hit."""
        free = self.paged.num_free_blocks
        tokens = list(range(10**6 * (story + 1), 10**6 * (story + 1) + common))
        tokens += self.fresh(own or not common)
        needed = -(-len(tokens) // SIZE)
        if not self.has_places(needed):
            return
        row = self.next_row(tokens, salt)
        admitted = self.paged.admit(row, as_ids(tokens), reserve=reserve, salt=salt)
        if needed + reserve <= free:
            assert admitted is not None
        if admitted is not None:
            cached = admitted.num_cached_tokens
            assert cached < len(tokens)
            assert cached % SIZE == 0
            for pinned, pin_salt, _ in self.pins:
                if salt == pin_salt:
                    alike = next(
                        (i for i, (a, b) in enumerate(zip(pinned, tokens, strict=False)) if a != b),
                        min(len(pinned), len(tokens) - 1),
                    )
                    assert cached >= alike // SIZE * SIZE, "a pinned prefix is not hit"
            self.model[row] = tokens
            self.salts[row] = salt
            self.tables[row] = dict(enumerate(self.paged.block_ids(row).tolist()))
            self.obey()
            self.write(row, cached)
            self.paged.publish(row, as_ids(tokens))
            commit(self.paged, row, len(tokens) - cached)

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.model)))
        for block_id in self.paged.publish(row, as_ids(self.model[row])):
            assert block_id in self.tables[row].values()

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data())
    def unpublish(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.model)))
        # What is pinned was computed: nobody takes it back.
        pinned = {block_id for _, _, block_ids in self.pins for block_id in block_ids}
        self.paged.unpublish(set(self.tables[row].values()) - pinned)

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data(), length=st.integers(0, 16))
    def pin(self, data: st.DataObject, length: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.model)))
        tokens, salt = self.model[row][:length], self.salts[row]
        num_new = self.paged.num_to_pin(as_ids(tokens), salt=salt)
        before = self.paged.num_pinned_blocks
        block_ids = self.paged.pin(as_ids(tokens), salt=salt)
        if block_ids is None:
            assert self.paged.num_pinned_blocks == before
            return
        assert self.paged.num_pinned_blocks == before + num_new
        self.pins.append((tokens[: len(block_ids) * SIZE], salt, block_ids))
        assert len(self.pins[-1][0]) == len(tokens) // SIZE * SIZE

    @precondition(lambda self: bool(self.pins))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.pins) - 1))
        self.paged.unpin(self.pins.pop(index)[2])

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, unique=True))
        tables = self.paged.swap_out(rows, [len(self.model[row]) for row in rows])
        if tables is None:
            return
        self.obey()
        self.swapped.append(
            (tables, [self.model.pop(r) for r in rows], [self.salts[r] for r in rows])
        )
        for row in rows:
            self.paged.free(row)
            del self.tables[row]

    @precondition(lambda self: bool(self.swapped))
    @rule(reserve=st.integers(0, 1))
    def swap_in(self, reserve: int) -> None:
        tables, contents, salts = self.swapped[0]
        rows = [r for r in range(self.rows) if r not in self.model][: len(tables)]
        if len(rows) < len(tables):
            return
        if not self.has_places(sum(len(table.host_block_ids) for table in tables)):
            return
        if self.paged.swap_in(tables, rows, reserve=reserve) is None:
            return
        self.swapped.pop(0)
        self.obey()
        self.paged.drop_swapped(tables)
        for row, tokens, salt in zip(rows, contents, salts, strict=True):
            self.model[row], self.salts[row] = tokens, salt
            self.tables[row] = dict(enumerate(self.paged.block_ids(row).tolist()))

    @precondition(lambda self: bool(self.swapped))
    @rule()
    def give_up_swapped(self) -> None:
        self.paged.drop_swapped(self.swapped.pop()[0])

    @rule()
    def reset(self) -> None:
        self.paged.reset_prefix_cache()
        pinned = {block_id for _, _, block_ids in self.pins for block_id in block_ids}
        used = {block_id for table in self.tables.values() for block_id in table.values()}
        assert self.paged.usage().cached <= len(pinned) * SIZE
        assert self.paged.usage().cached >= len(pinned - used) * SIZE

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data(), count=st.integers(1, 6))
    def grow(self, data: st.DataObject, count: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.model)))
        length = len(self.model[row])
        if not self.has_places(num_blocks_for(length + count, SIZE) - len(self.tables[row])):
            return
        before = (self.paged.block_ids(row).tolist(), self.paged.num_free_blocks)
        if self.paged.grow(row, length + count):
            self.obey()
            self.model[row] += self.fresh(count)
            self.write(row, length)
            commit(self.paged, row, count)
        else:
            assert before == (self.paged.block_ids(row).tolist(), self.paged.num_free_blocks)

    @rule(count=st.integers(1, 8))
    def shrink(self, count: int) -> None:
        idle = self.paged.num_free_blocks
        cached = [b for b in range(1, self.paged.pool.num_blocks) if self.paged.pool.is_cached(b)]
        commands = self.paged.remove_idle(count)
        if not idle:
            assert not commands
            return
        *mapping, release = commands
        assert isinstance(release, ReleaseBlocks)
        gone = set(release.block_ids.tolist())
        assert len(gone) == min(count, idle)
        assert gone.isdisjoint(self.absent)
        if count <= idle - len(cached):
            assert gone.isdisjoint(cached), "cached blocks go last"
        for command in mapping:
            assert isinstance(command, MapBlocks)
            self.mmu.obey(command)
        for slot in self.mmu.slots:
            assert gone.isdisjoint(slot.values()), "a slot shows memory that goes"
        self.arena[sorted(gone)] = -99
        self.absent |= gone
        self.num_blocks -= len(gone)
        assert self.paged.num_usable_blocks == self.num_blocks

    @precondition(lambda self: self.num_blocks < 16)
    @rule(count=st.integers(1, 8))
    def widen(self, count: int) -> None:
        """Not beyond what the toy arena has."""
        new = self.paged.missing_blocks(min(count, 16 - self.num_blocks))
        self.paged.add_blocks(new)
        assert new.tolist() == sorted(set(new.tolist()))
        self.absent -= set(new.tolist())
        self.arena[new] = 0
        self.num_blocks += len(new)
        assert self.paged.num_usable_blocks == self.num_blocks

    @precondition(lambda self: 0 < len(self.model) < self.rows)
    @rule(data=st.data(), shrink=st.integers(0, 3))
    def fork(self, data: st.DataObject, shrink: int) -> None:
        parent = data.draw(st.sampled_from(sorted(self.model)))
        child = next(r for r in range(self.rows) if r not in self.model)
        length = len(self.model[parent])
        if not self.has_places(num_blocks_for(length, SIZE)):
            return
        self.paged.fork(parent, child, length)
        self.model[child] = list(self.model[parent])
        self.salts[child] = self.salts[parent]
        self.tables[child] = dict(enumerate(self.paged.block_ids(child).tolist()))
        if shrink:
            # Before the fork is told.
            self.shrink(shrink)

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data(), grow_first=st.booleans())
    def free(self, data: st.DataObject, grow_first: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.model)))
        if grow_first:
            self.paged.grow(row, len(self.model[row]) + 1)
        self.paged.free(row)
        del self.model[row], self.tables[row]
        self.obey()

    @precondition(lambda self: bool(self.outstanding))
    @rule()
    def process_a_step(self) -> None:
        self.paged.retire(self.outstanding.pop(0))

    @invariant()
    def every_row_reads_its_own_tokens(self) -> None:
        self.paged.check()
        for row, tokens in self.model.items():
            if not self.paged.is_mapped(as_ids([row])):
                continue
            read = [
                int(self.arena[self.tables[row][p // SIZE], p % SIZE]) for p in range(len(tokens))
            ]
            assert read == tokens
            assert list(self.tables[row].values()) == self.paged.block_ids(row).tolist()

    @invariant()
    def pinned_blocks_keep_their_tokens(self) -> None:
        for tokens, _, block_ids in self.pins:
            assert self.arena[list(block_ids)].ravel().tolist() == tokens

    def teardown(self) -> None:
        while self.pins:
            self.paged.unpin(self.pins.pop()[2])
        assert self.paged.num_pinned_blocks == 0
        for row in list(self.model):
            self.paged.free(row)
        self.obey()
        while self.outstanding:
            self.paged.retire(self.outstanding.pop(0))
        while self.swapped:
            self.give_up_swapped()
        assert self.paged.swap_space.num_free == 7
        self.paged.check()
        assert self.paged.num_free_blocks == self.paged.num_usable_blocks, "only cached blocks"


class VirtualMachine(PagedMachine):
    """The same through slots: every row reads its own tokens through its own addresses, however
    few places may be mapped."""

    max_mapped = 16
    options: ClassVar[dict[str, int]] = {}

    def make(self) -> PagedManager:
        self.mmu = ToyMMU(self.rows, self.max_mapped)
        self.virtual = VirtualManager(
            13,
            SIZE,
            self.rows,
            max_mapped_blocks=self.max_mapped,
            prefix_caching=True,
            num_host_blocks=7,
            sharing=self.sharing,
            **self.options,
        )
        return self.virtual

    def next_row(self, tokens: list[int], salt: bytes) -> int:
        free = [r for r in range(self.rows) if r not in self.model]
        (row,) = self.paged.choose_rows(free, 1, as_ids(tokens), salt=salt)
        assert row in free
        return row

    def has_places(self, count: int) -> bool:
        """What whoever admits sees to; one more for what `free` grows."""
        return sum(map(len, self.tables.values())) + count < self.max_mapped

    @invariant()
    def slots_show_what_tables_say(self) -> None:
        # A fork is told with the next plan.
        self.obey()
        for row, tokens in self.model.items():
            if not self.paged.is_mapped(as_ids([row])):
                continue
            read = [
                int(self.arena[self.mmu.block(row, p // SIZE), p % SIZE])
                for p in range(len(tokens))
            ]
            assert read == tokens
        for row in range(self.rows):
            shown = self.mmu.slots[row]
            assert [shown[place] for place in range(len(shown))] == self.virtual.slot(row).tolist()
        assert self.mmu.num_mapped == self.virtual.num_mapped_blocks <= self.max_mapped


class AheadMachine(VirtualMachine):
    """Places are mapped ahead, and rows that forked are read through their tables."""

    options: ClassVar[dict[str, int]] = {"num_ahead": 2, "num_places": 5, "maps_forks": False}


class UnsharedMachine(PagedMachine):
    """The same without sharing: once every row has taken a step, none has a block in common."""

    sharing = False

    @precondition(lambda self: bool(self.model))
    @rule()
    def step(self) -> None:
        for row in sorted(self.model):
            length = len(self.model[row]) + 1
            if not self.has_places(num_blocks_for(length, SIZE) - len(self.tables[row])):
                return
            if not self.paged.grow(row, len(self.model[row]) + 1):
                self.obey()
                return
            self.obey()
        owned = [block_id for table in self.tables.values() for block_id in table.values()]
        assert len(set(owned)) == len(owned)


class UnsharedVirtualMachine(VirtualMachine, UnsharedMachine):
    """Both."""


TestPagedMachine = PagedMachine.TestCase
TestVirtualMachine = VirtualMachine.TestCase
TestUnsharedVirtualMachine = UnsharedVirtualMachine.TestCase
TestAheadMachine = AheadMachine.TestCase
TestAheadMachine.settings = settings(stateful_step_count=40)
TestVirtualMachine.settings = settings(stateful_step_count=40)
TestUnsharedVirtualMachine.settings = settings(stateful_step_count=40)
TestUnsharedMachine = UnsharedMachine.TestCase
TestUnsharedMachine.settings = settings(stateful_step_count=40)
TestPagedMachine.settings = settings(stateful_step_count=40)
