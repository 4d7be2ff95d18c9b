"""The pool seen twice: through its view and through slots, on the host's own pages."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from threading import Event, Semaphore, active_count

import pytest
import torch

from octavo.core.layout import KVLayout
from octavo.core.plan import NULL_BLOCK, CopyBlocks, KVCommand, MapBlocks, SwapIn, SwapOut
from octavo.execution import slots
from octavo.execution.arena import Arena
from octavo.execution.pages.interface import PageError, host_page_bytes
from octavo.execution.pages.memfd import MemfdPages
from octavo.execution.virtual_arena import VirtualArena
from toy_executor import as_ids

SIZE = 4
# A page a block.
LAYOUT = KVLayout(2, 1, host_page_bytes() // (SIZE * 2 * 2 * 4), 4, SIZE)


class Settled(VirtualArena):
    """Waits for the mapping thread, as no step would."""

    def obey(self, commands: tuple[KVCommand, ...]) -> tuple[int, ...]:
        finished = super().obey(commands)
        self.settle()
        return finished


def make(num_blocks: int = 8, num_slots: int = 3, max_mappings: int | None = None) -> VirtualArena:
    pages = MemfdPages(LAYOUT.block_bytes, max_mappings=max_mappings)
    return Settled(
        LAYOUT, num_blocks, torch.float32, 4, num_slots=num_slots, max_model_len=15, pages=pages
    )


def maps(*entries: tuple[int, int, int]) -> MapBlocks:
    slots, places, block_ids = zip(*entries, strict=True)
    return MapBlocks(as_ids(list(slots)), as_ids(list(places)), as_ids(list(block_ids)))


def shown(arena: VirtualArena, slot: int, count: int) -> list[float]:
    """One number of each token."""
    return arena.slots[slot, :count, 1, 1, 0, 0].tolist()


def filled() -> VirtualArena:
    """Block i is full of i."""
    arena = make()
    for block_id in range(8):
        arena.kv[block_id] = block_id
    return arena


def test_slots_show_blocks_in_order_and_share_them() -> None:
    arena = filled()
    assert arena.slots.shape == (3, 16, 2, 2, 1, LAYOUT.head_dim)
    arena.obey((maps((0, 0, 5), (0, 1, 2), (0, 2, 3), (2, 0, 5), (2, 1, 7)),))
    assert shown(arena, 0, 12) == [5] * 4 + [2] * 4 + [3] * 4
    assert shown(arena, 2, 8) == [5] * 4 + [7] * 4
    arena.slots[2, 1] = 50
    assert shown(arena, 0, 4) == [5, 50, 5, 5]
    assert arena.kv[5, 1, 0, 0, 0, 0] == 50
    assert arena.num_mapped_blocks == 5


def test_a_place_is_mapped_anew_or_unmapped() -> None:
    arena = filled()
    before = arena.pages.num_mappings
    arena.obey((maps((1, 0, 1), (1, 1, 2), (1, 2, 3)),))
    arena.obey((maps((1, 1, 6)),))
    assert shown(arena, 1, 12) == [1] * 4 + [6] * 4 + [3] * 4
    arena.obey((maps((1, 2, NULL_BLOCK), (1, 1, NULL_BLOCK), (1, 0, 4)),))
    assert shown(arena, 1, 4) == [4] * 4
    assert arena.num_mapped_blocks == 1
    arena.obey((maps((1, 0, NULL_BLOCK)),))
    assert arena.pages.num_mappings == before


def test_mapping_comes_before_copies_and_swaps_use_the_view() -> None:
    arena = filled()
    arena.obey((maps((0, 0, 1), (0, 1, 2)),))
    finished = arena.obey(
        (
            maps((0, 1, 6)),
            CopyBlocks(as_ids([2]), as_ids([6])),
            SwapOut(as_ids([1]), as_ids([3])),
            SwapIn(9, as_ids([3]), as_ids([4])),
        )
    )
    assert finished == (9,)
    arena.slots[0, 5] = 60
    assert shown(arena, 0, 8) == [1] * 4 + [2, 60, 2, 2]
    assert arena.kv[2, 1, 0, 0, 0, 0] == 2, "the source of the copy is another's"
    assert arena.kv[4, 0, 0, 0, 0, 0] == 1


def test_the_limit_allows_as_many_places_as_it_says() -> None:
    """The worst there is: no two blocks side by side, each slot with an end of its own."""
    arena = make(num_slots=3, max_mappings=2 + 3 + 7)
    assert arena.max_mapped_blocks == 7
    arena.obey((maps((0, 0, 5), (0, 1, 3), (0, 2, 1), (1, 0, 5), (1, 1, 3), (2, 0, 5), (2, 1, 3)),))
    arena.require(as_ids([0, 1, 2]), as_ids([12, 8, 8]))
    assert arena.num_mapped_blocks == arena.max_mapped_blocks == 7
    assert make().max_mapped_blocks == 3 * 4, "all places of all slots"


def test_what_cannot_be_mapped_fails_who_reads_it_and_is_tried_again() -> None:
    arena = filled()
    arena.obey((maps((0, 0, 1), (0, 1, 3)),))
    pages = arena.pages
    assert isinstance(pages, MemfdPages)
    allowed, pages._max_mappings = pages._max_mappings, pages.num_mappings
    arena.obey((maps((0, 1, 7), (1, 0, 3)),))
    arena.require(as_ids([0]), as_ids([8]))
    with pytest.raises(PageError, match=r"slot 1 cannot be mapped: .* raise vm.max_map_count"):
        arena.require(as_ids([1]), as_ids([1]))
    with pytest.raises(PageError, match="slot 1"):
        arena.require(as_ids([0, 1]), as_ids([8, 4]))
    pages._max_mappings = allowed
    arena.obey((maps((1, 0, 4), (1, 1, 5)),))
    arena.require(as_ids([0, 1]), as_ids([8, 8]))
    assert shown(arena, 0, 8) == [1] * 4 + [7] * 4
    assert shown(arena, 1, 8) == [4] * 4 + [5] * 4, "what was told last"


def test_what_fails_ahead_of_need_fails_nobody_until_it_is_needed() -> None:
    arena = filled()
    arena.obey((maps((0, 0, 1)),))
    pages = arena.pages
    assert isinstance(pages, MemfdPages)
    allowed, pages._max_mappings = pages._max_mappings, pages.num_mappings
    ahead = maps((0, 1, 7))
    arena.obey((replace(ahead, is_ahead=True),))
    arena.require(as_ids([0]), as_ids([4]))
    with pytest.raises(PageError, match="slot 0 cannot be mapped"):
        arena.require(as_ids([0]), as_ids([5]))
    pages._max_mappings = allowed
    arena.require(as_ids([0]), as_ids([5]))
    assert shown(arena, 0, 8) == [1] * 4 + [7] * 4


def test_urgent_orders_overtake_and_only_what_is_read_is_waited_for() -> None:
    """The thread is held up at the first of many orders made ahead of need."""
    arena = VirtualArena(LAYOUT, 8, torch.float32, num_slots=8, max_model_len=15)
    started, go, order = Event(), Event(), []
    mapper, real = arena._slots.mapper, arena._slots.mapper._map

    def slow(slot: int, wanted: dict[int, int]) -> None:
        order.append(slot)
        started.set()
        assert go.wait(10)
        real(slot, wanted)

    mapper._map = slow  # type: ignore[method-assign]
    arena.obey((maps((7, 0, 1)),))
    assert started.wait(10)
    for slot in range(4):
        arena.obey((replace(maps((slot, 0, 1)), is_ahead=True),))
    arena.obey((maps((5, 0, 2)),))
    arena.require(as_ids([6]), as_ids([0]))
    go.set()
    arena.require(as_ids([5]), as_ids([4]))
    arena.settle()
    assert order[:2] == [7, 5]
    assert sorted(order[2:]) == [0, 1, 2, 3]


def test_the_rest_of_a_long_order_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece at a time, and others have their turn between them; the order of a slot's places
    stays, and what it gives up goes first."""
    monkeypatch.setattr(slots, "_PIECE", 2)
    arena = VirtualArena(LAYOUT, 8, torch.float32, num_slots=2, max_model_len=23)
    for block_id in range(8):
        arena.kv[block_id] = block_id
    mapper, real = arena._slots.mapper, arena._slots.mapper._map
    go, order = Semaphore(0), []

    def held(slot: int, wanted: dict[int, int]) -> None:
        assert go.acquire(timeout=10)
        order.append((slot, wanted))
        real(slot, wanted)

    mapper._map = held  # type: ignore[method-assign]
    arena.obey((maps(*((0, place, 1 + place) for place in range(5))),))
    arena.obey((maps((1, 0, 7)),))
    go.release()
    arena.require(as_ids([0]), as_ids([8]))
    assert order == [(0, {0: 1, 1: 2})]
    go.release(3)
    arena.require(as_ids([0, 1]), as_ids([20, 4]))
    assert order[1:] == [(1, {0: 7}), (0, {2: 3, 3: 4}), (0, {4: 5})]
    assert shown(arena, 0, 20) == [1 + place for place in range(5) for _ in range(4)]
    order.clear()
    go.release(2)
    arena.obey(
        (maps((0, 0, 6), (0, 1, 1), (0, 2, 2), *((0, p, NULL_BLOCK) for p in (3, 4))),),
    )
    arena.require(as_ids([0]), as_ids([12]))
    assert order == [(0, {0: 6, 1: 1, 3: NULL_BLOCK, 4: NULL_BLOCK}), (0, {2: 2})]
    assert shown(arena, 0, 12) == [6] * 4 + [1] * 4 + [2] * 4
    with pytest.raises(PageError, match="slot 0 shows nothing at place 3"):
        arena.require(as_ids([0]), as_ids([13]))


def test_a_piece_that_fails_fails_who_reads_that_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is behind it is not tried, and what is ordered later for any of it counts."""
    monkeypatch.setattr(slots, "_PIECE", 1)
    arena = filled()
    pages = arena.pages
    assert isinstance(pages, MemfdPages)
    allowed, pages._max_mappings = pages._max_mappings, pages.num_mappings + 2
    arena.obey((maps((0, 0, 1), (0, 1, 3), (0, 2, 5)),))
    arena.require(as_ids([0]), as_ids([4]))
    with pytest.raises(PageError, match="slot 0 cannot be mapped"):
        arena.require(as_ids([0]), as_ids([12]))
    arena.require(as_ids([0]), as_ids([4]))
    pages._max_mappings = allowed
    arena.obey((maps((0, 2, 6)),))
    arena.require(as_ids([0]), as_ids([12]))
    assert shown(arena, 0, 12) == [1] * 4 + [3] * 4 + [6] * 4


def test_a_hole_that_is_filled_again_shows_what_is_behind_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Places in the middle get other blocks, which the system refuses at first. It is told once in
    a while, whichever rows are read."""
    arena = filled()
    pages = arena.pages
    arena.obey((maps((0, 0, 1), (0, 1, 2), (0, 2, 3), (0, 3, 4), (1, 0, 1)),))
    everything = as_ids([0]), as_ids([16])
    assert arena.can_show(*everything)

    def refuse(*_: object) -> None:
        raise PageError("no memory")

    with monkeypatch.context() as refusing:
        refusing.setattr(pages, "map", refuse)
        arena.obey((maps((0, 1, 6), (0, 2, 7)),))
        for _ in range(3):
            assert not arena.can_show(*everything)
            assert arena.can_show(as_ids([1]), as_ids([4]))
        assert arena.can_show(as_ids([0]), as_ids([4]))
        assert caplog.text.count("cannot be mapped") == 1
        assert arena._slots._tell_after_s > 0
        arena._slots._tell_after_s = 0.0  # later
        assert not arena.can_show(*everything)
        assert caplog.text.count("cannot be mapped") == 2
        assert "(steps so far: 4)" in caplog.text
    assert arena.can_show(*everything)
    assert shown(arena, 0, 16) == [1] * 4 + [6] * 4 + [7] * 4 + [4] * 4


def test_a_mapping_thread_that_fails_fails_who_reads_and_goes_on() -> None:
    arena = filled()
    mapper, real = arena._slots.mapper, arena._slots.mapper._map

    def broken(slot: int, wanted: dict[int, int]) -> None:
        raise ZeroDivisionError("nobody thought of it")

    mapper._map = broken  # type: ignore[method-assign]
    arena.obey((maps((0, 0, 1), (1, 0, 2)),))
    with pytest.raises(PageError, match=r"slot 0 .* ZeroDivisionError: nobody thought of it"):
        arena.require(as_ids([0]), as_ids([4]))
    mapper._map = real  # type: ignore[method-assign]
    arena.require(as_ids([0, 1]), as_ids([4, 4]))
    assert shown(arena, 1, 4) == [2] * 4


def test_the_thread_ends_with_the_arena() -> None:
    gc.collect()
    before = active_count()
    arena = filled()
    arena.obey((maps((0, 0, 1)),))
    assert active_count() == before + 1
    del arena
    assert active_count() == before


def test_memory_and_files_go_with_the_arena() -> None:
    gc.collect()
    before = os.listdir("/proc/self/fd")
    arena = filled()
    arena.obey((maps((0, 0, 1)),))
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    del arena
    assert os.listdir("/proc/self/fd") == before


def test_an_arena_without_slots_refuses_to_map() -> None:
    arena = Arena(LAYOUT, 4, torch.float32)
    with pytest.raises(AssertionError, match="there are no slots"):
        arena.obey((maps((0, 0, 1)),))


def test_a_place_that_nobody_mapped_is_an_error_not_a_crash() -> None:
    arena = filled()
    arena.obey((maps((1, 0, 1)),))
    arena.require(as_ids([1]), as_ids([4]))
    with pytest.raises(PageError, match="slot 1 shows nothing at place 1"):
        arena.require(as_ids([1]), as_ids([5]))
