"""Slots: commands only for the difference, and what stays mapped when a sequence ends."""

from __future__ import annotations

import pytest

from octavo.core.plan import NULL_BLOCK, CopyBlocks, MapBlocks
from octavo.memory.virtual import VirtualManager
from toy_executor import as_ids

SIZE = 4


def manager(num_blocks: int = 17, rows: int = 3, max_mapped: int = 40, **options: bool | int):
    return VirtualManager(num_blocks, SIZE, rows, max_mapped_blocks=max_mapped, **options)


def mapped(virtual: VirtualManager) -> list[tuple[int, int, int]]:
    """Slot, place and block of what the next plan maps."""
    commands = virtual.drain().commands
    virtual.retire(commands)
    virtual.check()
    for command in commands:
        if isinstance(command, MapBlocks):
            assert command is commands[0], "before copies and swaps"
            places = zip(command.slots, command.places, command.block_ids, strict=True)
            return [(int(slot), int(place), int(block)) for slot, place, block in places]
    return []


def run(virtual: VirtualManager, row: int, tokens: list[int]) -> list[tuple[int, int, int]]:
    """Admit, publish and free; what was mapped for it."""
    assert virtual.admit(row, as_ids(tokens)) is not None
    virtual.publish(row, as_ids(tokens))
    found = mapped(virtual)
    virtual.free(row)
    return found


def test_a_slot_follows_its_table() -> None:
    virtual = manager()
    virtual.admit(1, as_ids(range(6)))
    table = virtual.block_ids(1).tolist()
    assert mapped(virtual) == [(1, 0, table[0]), (1, 1, table[1])]
    assert virtual.grow(1, 7)
    assert virtual.grow(1, 8)
    assert mapped(virtual) == [], "the second block has room still"
    assert virtual.grow(1, 9)
    assert mapped(virtual) == [(1, 2, virtual.block_ids(1)[2])]


def test_a_fork_maps_the_same_blocks_and_a_copy_one_place() -> None:
    virtual = manager()
    virtual.admit(0, as_ids(range(6)))
    table = virtual.block_ids(0).tolist()
    mapped(virtual)
    virtual.fork(0, 2, 6)
    assert mapped(virtual) == [(2, 0, table[0]), (2, 1, table[1])]
    assert virtual.grow(0, 7)
    commands = virtual.drain().commands
    assert [type(command) for command in commands] == [MapBlocks, CopyBlocks]
    assert isinstance(commands[0], MapBlocks)
    assert commands[0].places.tolist() == [1]
    assert commands[0].block_ids.tolist() == commands[1].destinations.tolist()


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_the_same_prompt_again_costs_no_mapping(prefix_caching: bool) -> None:
    """Its last block is free and already there; the others are hit, or free as well."""
    virtual = manager(prefix_caching=prefix_caching)
    first, second = list(range(10)), list(range(100, 110))
    assert len(run(virtual, 1, first)) == 3
    assert len(run(virtual, 2, second)) == 3
    for tokens, row in ((first, 1), (second, 2)):
        if prefix_caching:
            assert virtual.choose_rows([0, 1, 2], 1, as_ids(tokens)) == [row]
        assert run(virtual, row, tokens) == []
    virtual.admit(1, as_ids(first))
    assert virtual.grow(1, 12)
    assert mapped(virtual) == []


def test_the_longest_prefix_is_chosen_and_new_blocks_come_where_they_were() -> None:
    virtual = manager(prefix_caching=True)
    story = list(range(12))
    run(virtual, 0, [*story[:8], 50])
    run(virtual, 1, [*story, 60, 61, 62, 63, 64])
    assert virtual.choose_rows([0, 1, 2], 3, as_ids([*story, 1])) == [1, 0, 2]
    assert virtual.choose_rows([2, 0], 1, as_ids([*story, 1])) == [0]
    # Three hits; in place 3 is a block of another tail, still cached: it is left alone.
    (new,) = run(virtual, 1, [*story, 1])
    assert new[:2] == (1, 3)
    assert len(virtual.slot(1)) == 5, "what lies behind stays as it is"


def test_no_row_is_chosen_for_whom_there_is_no_room() -> None:
    virtual = manager(num_blocks=9, prefix_caching=True)
    run(virtual, 0, list(range(8)))
    virtual.admit(1, as_ids(range(100, 120)))
    story = as_ids([*range(8), *range(50, 58)])
    # Three are free and cached; two of them are hit, and one more is needed beside the other.
    assert virtual.num_free_blocks == 3
    assert virtual.choose_rows([0, 2], 1, story[:12], reserve=0) == [0]
    assert virtual.choose_rows([0, 2], 1, story[:12], reserve=1) == []
    assert virtual.choose_rows([0, 2], 1, story, reserve=0) == []
    assert virtual.choose_rows([0, 2], 1, story) == [0]
    assert virtual.admit(0, story) is None


def test_of_equal_slots_the_emptiest_is_chosen() -> None:
    virtual = manager(prefix_caching=True)
    run(virtual, 0, list(range(8)))
    run(virtual, 1, list(range(100, 104)))
    assert virtual.choose_rows([0, 1, 2], 3, as_ids([7] * 9)) == [2, 1, 0]


def test_mapping_never_evicts_a_cached_prefix() -> None:
    virtual = manager(num_blocks=9, prefix_caching=True)
    story = list(range(9))
    run(virtual, 0, story)
    kept = virtual.slot(0).tolist()
    virtual.admit(0, as_ids(range(100, 124)))
    assert not set(kept[:2]) & set(virtual.block_ids(0).tolist()), "cached"
    assert virtual.block_ids(0)[2] == kept[2], "free"
    virtual.free(0)
    admission = virtual.admit(1, as_ids(story))
    assert admission is not None
    assert admission.num_cached_tokens == 8


def test_a_row_that_comes_and_goes_within_a_plan_changes_nothing() -> None:
    virtual = manager()
    virtual.admit(0, as_ids(range(6)))
    virtual.free(0)
    assert mapped(virtual) == []
    assert virtual.num_mapped_blocks == 0


def test_a_beam_that_takes_over_a_row_remaps_what_differs() -> None:
    virtual = manager()
    virtual.admit(0, as_ids(range(8)))
    virtual.fork(0, 1, 8)
    assert virtual.grow(0, 9)
    assert virtual.grow(1, 9)
    mapped(virtual)
    virtual.free(1)
    virtual.fork(0, 1, 9)
    assert mapped(virtual) == [(1, 2, virtual.block_ids(0)[2])]


def test_swapping_in_takes_the_blocks_that_are_there() -> None:
    virtual = manager(num_host_blocks=8)
    virtual.admit(0, as_ids(range(10)))
    mapped(virtual)
    tables = virtual.swap_out([0], [10])
    assert tables is not None
    virtual.free(0)
    virtual.drain()
    assert virtual.swap_in(tables, [0]) is not None
    assert mapped(virtual) == []


def test_stale_places_go_only_for_the_limit_and_the_oldest_first() -> None:
    virtual = manager(max_mapped=6)
    for row in (0, 1):
        virtual.admit(row, as_ids(range(12)))
    tables = [virtual.block_ids(row).tolist() for row in (0, 1)]
    mapped(virtual)
    virtual.free(1)
    virtual.free(0)
    virtual.admit(2, as_ids(range(8)))
    assert virtual.num_mapped_blocks == 6
    found = mapped(virtual)
    assert found[:2] == [(1, 2, NULL_BLOCK), (1, 1, NULL_BLOCK)], "unmapped first"
    assert [entry[:2] for entry in found[2:]] == [(2, 0), (2, 1)]
    assert virtual.slot(1).tolist() == tables[1][:1]
    assert virtual.slot(0).tolist() == tables[0]
    assert virtual.num_mapped_blocks == 6


def test_what_a_running_row_has_not_reached_goes_last() -> None:
    virtual = manager(max_mapped=6)
    run(virtual, 0, list(range(16)))
    run(virtual, 1, list(range(8)))
    virtual.admit(0, as_ids(range(5)))
    mapped(virtual)
    virtual.admit(2, as_ids(range(12)))
    found = mapped(virtual)
    assert found[:3] == [(1, 1, NULL_BLOCK), (1, 0, NULL_BLOCK), (0, 3, NULL_BLOCK)]
    assert len(virtual.slot(0)) == 3


def test_running_rows_are_not_to_need_more_than_the_limit() -> None:
    virtual = manager(max_mapped=3)
    virtual.admit(0, as_ids(range(16)))
    with pytest.raises(AssertionError, match="need 1 mappings more"):
        virtual.drain()


Places = list[tuple[int, int, int]]


def urgent_and_ahead(virtual: VirtualManager) -> tuple[Places, Places]:
    """What the next plan maps for its own step, and what for later ones."""
    found: tuple[Places, Places] = ([], [])
    commands = virtual.drain().commands
    virtual.retire(commands)
    virtual.check()
    for command in commands:
        if isinstance(command, MapBlocks):
            places = zip(command.slots, command.places, command.block_ids, strict=True)
            found[command.is_ahead].extend((int(s), int(p), int(b)) for s, p, b in places)
    return found


def test_free_blocks_are_shown_ahead_of_need() -> None:
    """Behind the row that grows, and where the next prompt would go; what comes to be needed there
    is mapped already."""
    virtual = manager(num_places=8, num_ahead=2)
    virtual.admit(1, as_ids(range(6)))
    urgent, ahead = urgent_and_ahead(virtual)
    assert [place[:2] for place in urgent] == [(1, 0), (1, 1)]
    (next_row,) = virtual.choose_rows([0, 2], 1, as_ids([7] * 6))
    assert {place[:2] for place in ahead} == {(1, 2), (next_row, 0), (next_row, 1)}
    assert len(ahead) == 3
    blocks = {place[:2]: place[2] for place in ahead}
    assert len(set(blocks.values()) - {NULL_BLOCK}) == 3
    assert all(virtual.pool.is_free(block) for block in blocks.values()), "they pin nothing"
    assert virtual.num_mapped_blocks == 5
    assert virtual.grow(1, 9)
    assert virtual.block_ids(1)[2] == blocks[1, 2]
    urgent, ahead = urgent_and_ahead(virtual)
    assert urgent == []
    assert [place[:2] for place in ahead] == [(1, 3)], "the other slot is ready still"
    virtual.admit(next_row, as_ids([7] * 6))
    assert virtual.block_ids(next_row).tolist() == [blocks[next_row, 0], blocks[next_row, 1]]
    urgent, ahead = urgent_and_ahead(virtual)
    assert urgent == []
    other = 2 - next_row
    assert {place[:2] for place in ahead} == {(next_row, 2), (other, 0), (other, 1)}


def test_nothing_is_shown_ahead_beyond_a_slot_or_the_limit() -> None:
    virtual = manager(num_places=2, num_ahead=2)
    virtual.admit(1, as_ids(range(6)))
    _, ahead = urgent_and_ahead(virtual)
    assert {place[:2] for place in ahead} == {(0, 0), (0, 1)}, "row 1 has all of its places"
    virtual = manager(max_mapped=3, num_places=8, num_ahead=2)
    virtual.admit(1, as_ids(range(6)))
    _, ahead = urgent_and_ahead(virtual)
    assert [place[:2] for place in ahead] == [(1, 2)]
    virtual = manager(num_places=8)
    virtual.admit(1, as_ids(range(6)))
    assert urgent_and_ahead(virtual)[1] == []


def test_a_block_that_was_shown_ahead_and_taken_is_mapped_anew() -> None:
    virtual = manager(num_blocks=6, num_places=8, num_ahead=1)
    virtual.admit(0, as_ids(range(4)))
    _, ahead = urgent_and_ahead(virtual)
    shown = {place[:2]: place[2] for place in ahead}
    assert virtual.admit(2, as_ids([7] * 16)) is not None
    assert shown[0, 1] in virtual.block_ids(2)
    urgent_and_ahead(virtual)
    virtual.free(2)
    assert virtual.grow(0, 5)
    urgent, _ = urgent_and_ahead(virtual)
    table, slot = virtual.block_ids(0).tolist(), virtual.slot(0).tolist()
    assert slot[:2] == table
    assert urgent in ([], [(0, 1, table[1])])
