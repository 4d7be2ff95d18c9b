"""The pool's memory comes and goes at fixed addresses, on the host's pages and a driver's calls."""

from __future__ import annotations

import threading

import pytest

from execution.pages.fake_driver import PAGE
from execution.pages.harness import KINDS, FakeMemory, HostMemory, Memory
from octavo.core.plan import CreateBlocks, ReleaseBlocks
from octavo.execution import host
from octavo.execution.pages.interface import PageError
from octavo.execution.pool_view import PoolView
from toy_executor import as_ids

LOCK = threading.Lock()


@pytest.fixture(params=KINDS)
def memory(request: pytest.FixtureRequest) -> Memory:
    made: Memory = request.param()
    return made


def release(view: PoolView, *block_ids: int) -> tuple[list[int], str | None]:
    resized = view.resize(ReleaseBlocks(as_ids(list(block_ids))), LOCK)
    return resized.block_ids.tolist(), resized.error


def create(view: PoolView, *block_ids: int) -> tuple[list[int], str | None]:
    resized = view.resize(CreateBlocks(as_ids(list(block_ids))), LOCK)
    return resized.block_ids.tolist(), resized.error


def used_bytes(memory: Memory) -> int:
    if isinstance(memory, FakeMemory):
        return memory.driver.used_bytes
    assert isinstance(memory, HostMemory)
    return memory.pages.resident_bytes


def test_memory_goes_back_and_comes_again_as_zeros(memory: Memory) -> None:
    view, size = PoolView(memory.pages, 6, 10), memory.pages.block_bytes
    for place in range(6):
        memory.write(view.addresses, place, 10 + place)
    assert used_bytes(memory) == 6 * size
    assert release(view, 2, 3, 5) == ([2, 3, 5], None)
    assert used_bytes(memory) == 3 * size
    assert [memory.read(view.addresses, place) for place in (0, 1, 4)] == [10, 11, 14]
    assert create(view, 2, 3, 5, 6, 7) == ([2, 3, 5, 6, 7], None)
    assert [memory.read(view.addresses, p) for p in range(8)] == [10, 11, 0, 0, 14, 0, 0, 0]
    assert view.num_blocks == 8
    assert release(view, *range(1, 8)) == (list(range(1, 8)), None)
    assert used_bytes(memory) == size
    memory.pages.close()
    memory.check_empty() if isinstance(memory, FakeMemory) else None


def test_what_a_slot_still_shows_is_not_given_back(memory: Memory) -> None:
    view = PoolView(memory.pages, 6, 6)
    slot = memory.pages.reserve(2)
    memory.pages.map(slot, 0, [4])
    memory.write(view.addresses, 4, 44)
    gone, error = release(view, 3, 4, 5)
    assert error is not None
    assert "handle 4 is still mapped at 1 places" in error
    assert gone == [], "one run of three"
    assert memory.read(view.addresses, 4) == 44
    assert release(view, 1, 4) == ([], error)
    assert release(view, 1) == ([1], None)
    memory.pages.unmap(slot, 0, 1)
    assert release(view, 4) == ([4], None)


def test_more_than_the_machine_has_is_refused_whole(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = memory.pages.block_bytes
    view = PoolView(memory.pages, 3, 100)
    if isinstance(memory, FakeMemory):
        memory.driver.total_bytes = 8 * size
    else:
        # Three blocks were promised and never written.
        monkeypatch.setattr(host, "available_bytes", lambda: 8 * size)
    before = (memory.pages.num_handles, memory.pages.num_mappings)
    made, error = create(view, *range(3, 9))
    assert made == []
    assert error is not None
    assert f"{6 * size:,} bytes are needed for 6 blocks more" in error
    assert f"memory for 5 ({5 * size:,} bytes)" in error
    assert (memory.pages.num_handles, memory.pages.num_mappings) == before
    many = view.resize(CreateBlocks(as_ids([3, 4]), num_more=4), LOCK)
    assert many.error == error, "refused at once"
    assert create(view, *range(3, 8)) == ([3, 4, 5, 6, 7], None)


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_mapping_that_fails_leaves_nothing_behind(call: str) -> None:
    memory = FakeMemory()
    view = PoolView(memory.pages, 6, 12)
    assert release(view, 2, 4) == ([2, 4], None)
    # 2, 4, then 6 and 7 in one run.
    memory.driver.fail_at = {call: memory.driver.counts[call] + 2}
    made, error = create(view, 2, 4, 6, 7)
    assert made == []
    assert error is not None
    assert call in error
    assert memory.driver.used_bytes == 4 * 2 * PAGE
    assert create(view, 2, 4, 6, 7) == ([2, 4, 6, 7], None)


def test_holes_are_bounded_by_what_slots_leave() -> None:
    memory = HostMemory()
    view = PoolView(memory.pages, 12, 12)
    view.max_pieces = 4
    # From the highest on; each hole in the middle makes two pieces more.
    gone, error = release(view, 3, 5, 7, 9)
    assert gone == [7, 9]
    assert error is not None
    assert "more than 4 pieces" in error
    assert "raise vm.max_map_count" in error
    memory.write(view.addresses, 5, 1)
    assert release(view, 8, 10, 11) == ([8, 10, 11], None)
    assert release(view, 5) == ([5], None)


def test_a_pool_whose_memory_is_not_there_is_refused() -> None:
    memory = FakeMemory()
    memory.driver.total_bytes = 4 * PAGE
    with pytest.raises(PageError, match="cuMemCreate"):
        PoolView(memory.pages, 3, 3)
