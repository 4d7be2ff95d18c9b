"""Ranges that are mapped alike, by pieces of one page for each, on both kinds of pages."""

from __future__ import annotations

import pytest

from execution.pages.fake_driver import PAGE
from execution.pages.harness import KINDS, FakeMemory, Memory
from octavo.execution.pages.interface import PageError
from octavo.execution.stacked_pages import StackedPages


@pytest.fixture(params=KINDS)
def memory(request: pytest.FixtureRequest) -> Memory:
    made: Memory = request.param()
    return made


def show(stack: StackedPages, first: int, *pieces: int) -> None:
    stack.map(stack.addresses, first, pieces)
    stack.set_access(stack.addresses, first, len(pieces))


def write(memory: Memory, stack: StackedPages, place: int, value: int) -> None:
    for index, addresses in enumerate(stack.ranges):
        memory.write(addresses, place, value + index)


def read(memory: Memory, stack: StackedPages, place: int) -> list[int]:
    return [memory.read(addresses, place) for addresses in stack.ranges]


def test_a_piece_is_a_page_of_its_own_in_every_range(memory: Memory) -> None:
    stack = StackedPages(memory.pages, 3, 5)
    show(stack, 1, 7, 2)
    assert stack.num_bytes == 2 * 3 * memory.pages.block_bytes
    write(memory, stack, 1, 10)
    write(memory, stack, 2, 20)
    assert read(memory, stack, 1) == [10, 11, 12]
    assert stack.addresses.handles == {1: 7, 2: 2}
    show(stack, 4, 7)
    assert stack.unmap(stack.addresses, 1, 1) == [7]
    assert read(memory, stack, 4) == [10, 11, 12], "it moved, with what it holds"
    assert stack.num_bytes == 2 * 3 * memory.pages.block_bytes
    stack.close()
    memory.check_empty() if isinstance(memory, FakeMemory) else None


def test_memory_goes_when_nothing_shows_a_piece_that_is_given_up(memory: Memory) -> None:
    stack = StackedPages(memory.pages, 2, 4)
    show(stack, 0, 1, 2)
    write(memory, stack, 0, 5)
    write(memory, stack, 1, 6)
    stack.release_unmapped([1, 2])
    assert stack.unmap(stack.addresses, 0, 1) == [1]
    assert stack.num_bytes == 2 * memory.pages.block_bytes
    show(stack, 0, 1)
    assert read(memory, stack, 0) == [0, 0], "new pages"
    # Somebody took it before it was gone.
    show(stack, 3, 2)
    stack.unmap(stack.addresses, 1, 1)
    assert read(memory, stack, 3) == [6, 7]
    stack.release_unmapped([2])
    stack.map(stack.addresses, 1, [2])
    stack.release_unmapped([2])
    stack.unmap(stack.addresses, 1, 1)
    assert read(memory, stack, 3) == [6, 7], "it is shown elsewhere"


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap"])
@pytest.mark.parametrize("nth", range(5))
def test_a_driver_that_refuses_half_way_leaves_nothing(call: str, nth: int) -> None:
    memory = FakeMemory()
    stack = StackedPages(memory.pages, 3, 4)
    show(stack, 0, 9)
    memory.driver.fail_at = {call: memory.driver.counts[call] + nth}
    with pytest.raises(PageError, match=call):
        stack.map(stack.addresses, 1, [3, 4])
    assert memory.driver.used_bytes == 3 * 2 * PAGE
    assert len(memory.driver.mapped) == 3
    assert stack.addresses.handles == {0: 9}
    show(stack, 1, 3, 4)
    assert read(memory, stack, 2) == [0, 0, 0]
    stack.close()
    memory.check_empty()
