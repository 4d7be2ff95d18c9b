"""What only the kernel can show: how it merges mappings, its limits, and what it gets back."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from execution.pages.harness import (
    mappings_in,
    num_descriptors,
    num_process_mappings,
    shared_resident_kib,
)
from octavo.execution.pages import memfd
from octavo.execution.pages.interface import AddressRange, PageError, host_page_bytes
from octavo.execution.pages.memfd import MemfdPages

BLOCK = host_page_bytes()


@pytest.fixture
def pages() -> Iterator[MemfdPages]:
    made = MemfdPages(BLOCK)
    yield made
    made.close()


def map_all(pages: MemfdPages, addresses: AddressRange, first: int, handles: list[int]) -> None:
    pages.map(addresses, first, handles)
    pages.set_access(addresses, first, len(handles))


def test_handles_in_order_are_one_mapping(pages: MemfdPages) -> None:
    handles = pages.create(64)
    addresses = pages.reserve(64)
    assert mappings_in(addresses) == ["---p"]
    for handle in handles:  # one call each: the kernel merges, not we
        map_all(pages, addresses, handle, [handle])
    assert mappings_in(addresses) == ["rw-s"]
    assert pages.num_mappings == 1


def test_what_the_kernel_keeps_apart_is_counted(pages: MemfdPages) -> None:
    pages.create(16)
    addresses = pages.reserve(16)
    map_all(pages, addresses, 0, [7, 8, 9])
    map_all(pages, addresses, 5, [3])
    assert mappings_in(addresses) == ["rw-s", "---p", "rw-s", "---p"]
    assert pages.num_mappings == 4
    map_all(pages, addresses, 3, [10])
    assert mappings_in(addresses) == ["rw-s", "---p", "rw-s", "---p"]
    pages.unmap(addresses, 1, 1)
    assert len(mappings_in(addresses)) == pages.num_mappings == 6
    pages.map(addresses, 6, [4, 5])
    assert mappings_in(addresses)[-3:] == ["rw-s", "---s", "---p"], "no access before set_access"
    assert pages.num_mappings == 7
    pages.set_access(addresses, 5, 3)
    assert mappings_in(addresses)[-2:] == ["rw-s", "---p"]
    assert pages.num_mappings == 6


def test_the_budget_refuses_before_the_kernel_does() -> None:
    tight = MemfdPages(BLOCK, max_mappings=4)
    tight.create(8)
    addresses = tight.reserve(8)
    map_all(tight, addresses, 0, [1, 0])
    with pytest.raises(PageError, match=r"5 separate mappings are needed, and 4 are allowed"):
        tight.map(addresses, 4, [3])
    with pytest.raises(PageError, match=r"vm\.max_map_count"):
        tight.map(addresses, 2, [7, 5, 3])
    assert (addresses.handles, tight.num_mappings) == ({0: 1, 1: 0}, 3)
    assert mappings_in(addresses) == ["rw-s", "rw-s", "---p"]
    map_all(tight, addresses, 2, [3, 4, 5])  # in order: one more is enough
    assert tight.num_mappings == 4
    with pytest.raises(PageError, match="5 separate mappings"):
        tight.reserve(1)
    tight.unmap(addresses, 3, 1)  # makes two more, but memory can always be given back
    assert tight.num_mappings == len(mappings_in(addresses)) == 6
    tight.close()


def test_access_that_splits_a_mapping_is_within_the_budget() -> None:
    tight = MemfdPages(BLOCK, max_mappings=2)
    tight.create(8)
    addresses = tight.reserve(8)
    tight.map(addresses, 0, range(6))
    with pytest.raises(PageError, match="4 separate mappings"):
        tight.set_access(addresses, 2, 2)
    assert (addresses.accessible, mappings_in(addresses)) == (set(), ["---s", "---p"])
    tight.set_access(addresses, 0, 6)
    assert mappings_in(addresses) == ["rw-s", "---p"]
    tight.close()


def test_the_default_budget_is_what_the_limit_leaves(
    pages: MemfdPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pages.max_mappings is not None
    used = num_process_mappings()
    assert pages.max_mappings <= memfd._read_limit() - used + 100
    monkeypatch.setattr(memfd, "_read_limit", lambda: used)
    crowded = MemfdPages(BLOCK)
    with pytest.raises(PageError, match="1 separate mappings are needed, and 0 are allowed"):
        crowded.reserve(1)
    crowded.close()


# The call after the failing one puts the reservation back, which over the limit fails too.
@pytest.mark.parametrize("failing_calls", [{0}, {1}, {2}, {0, 1}, {1, 2}, {2, 3}])
def test_a_mapping_that_fails_half_way_is_undone(
    pages: MemfdPages, monkeypatch: pytest.MonkeyPatch, failing_calls: set[int]
) -> None:
    pages.create(8)
    addresses = pages.reserve(8)
    map_all(pages, addresses, 0, [0])
    real, calls = pages._libc.mmap, 0

    def failing(*arguments: int) -> int:
        nonlocal calls
        calls += 1
        if calls - 1 in failing_calls:
            memfd.ctypes.set_errno(memfd.errno.ENOMEM)
            raise memfd._failure("mmap of 4096 bytes")
        return real(*arguments)

    monkeypatch.setattr(pages._libc, "mmap", failing)
    with pytest.raises(PageError, match=r"\(ENOMEM\); .* bytes of host memory are available, and"):
        pages.map(addresses, 1, [5, 6, 1, 2, 4])
    assert mappings_in(addresses) == ["rw-s", "---p"]
    assert (addresses.handles, pages.num_mappings) == ({0: 0}, 2)
    pages.release(range(1, 8))


@pytest.mark.skipif(memfd._read_limit() > 70_000, reason="would take very many mappings")
def test_at_the_kernels_own_limit_a_mapping_is_undone() -> None:
    """In a process of its own, since beyond the limit nothing in it can map anything."""
    code = f"""
from execution.pages.harness import num_process_mappings
from octavo.execution.pages.memfd import MemfdPages, PageError
limit = {memfd._read_limit()}
pages = MemfdPages({BLOCK}, max_mappings=10 * limit)
pages.create(limit + 10)
addresses = pages.reserve(limit + 10)
before = num_process_mappings()
try:
    pages.map(addresses, 0, range(limit + 9, -1, -1))
except PageError as error:
    message = str(error)
assert num_process_mappings() < before + 20
assert (pages.num_mappings, addresses.handles) == (1, {{}})
pages.map(addresses, 0, range(limit))
print(message)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert f"of {memfd._read_limit():,} mappings (/proc/sys/vm/max_map_count)" in run.stdout


def test_access_that_fails_half_way_is_undone(
    pages: MemfdPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages.create(8)
    addresses = pages.reserve(4)
    pages.map(addresses, 0, [3, 1, 5])
    pages.set_access(addresses, 0, 1)
    real = pages._libc.mprotect

    def half_way(address: int, num_bytes: int, access: int) -> None:
        if access == memfd._READ_WRITE:
            real(address, num_bytes - BLOCK, access)
            raise PageError("mprotect failed")
        real(address, num_bytes, access)

    monkeypatch.setattr(pages._libc, "mprotect", half_way)
    with pytest.raises(PageError, match="mprotect failed"):
        pages.set_access(addresses, 0, 3)
    assert mappings_in(addresses) == ["rw-s", "---s", "---s", "---p"]
    assert addresses.accessible == {0}


def test_what_the_kernel_refuses_says_how_much(pages: MemfdPages) -> None:
    with pytest.raises(
        PageError, match=r"mmap of 281,474,976,710,656 bytes at 0x0 failed: .*ENOMEM"
    ):
        pages.reserve((1 << 48) // BLOCK)
    with pytest.raises(PageError, match="more than there are addresses"):
        pages.reserve((1 << 63) // BLOCK)
    pages._ledger._next = (1 << 63) // BLOCK
    with pytest.raises(PageError, match=r"ftruncate .* failed: .* bytes of host memory"):
        pages.create(1)
    assert (pages.num_mappings, pages.num_handles) == (0, 0)


def test_addresses_cost_no_memory_and_holes_give_it_back(pages: MemfdPages) -> None:
    addresses = pages.reserve((1 << 40) // BLOCK)
    assert pages.tensor(addresses).shape == (1 << 40,)
    pages.create(100)
    map_all(pages, addresses, 0, list(range(100)))
    assert pages.resident_bytes == 0
    tensor = pages.tensor(addresses)[: 100 * BLOCK]
    tensor.fill_(1)
    assert pages.resident_bytes == 100 * BLOCK
    pages.unmap(addresses, 0, 60)
    assert pages.resident_bytes == 100 * BLOCK, "unmapping keeps what is there"
    pages.release(range(10, 60))
    assert pages.resident_bytes == 50 * BLOCK
    assert int(tensor[60 * BLOCK :].min()) == 1


def test_a_slot_is_an_ordinary_tensor_in_any_type(pages: MemfdPages) -> None:
    pages.create(4)
    addresses = pages.reserve(4)
    map_all(pages, addresses, 0, [2, 0, 3, 1])
    slot = pages.tensor(addresses).view(torch.bfloat16).view(-1, 2, 8, 16)
    slot.copy_(torch.arange(slot.numel()).reshape(slot.shape))
    expected = torch.arange(slot.numel()).reshape(slot.shape).to(torch.bfloat16)
    assert torch.equal(slot, expected)
    view = pages.reserve(4)
    map_all(pages, view, 0, [0, 1, 2, 3])
    blocks = pages.tensor(view).view(torch.bfloat16).view(4, -1)
    assert torch.equal(blocks[[2, 0, 3, 1]].flatten(), expected.flatten())


def test_churn_ends_where_it_started(request: pytest.FixtureRequest) -> None:
    """Ten thousand random calls against dicts, read back through every mapping."""
    rng = random.Random(20)
    before = (num_process_mappings(), shared_resident_kib(), num_descriptors())
    pages = MemfdPages(BLOCK)
    slots = [pages.reserve(64) for _ in range(8)]
    tensors = [pages.tensor(slot).view(torch.int64).view(64, -1) for slot in slots]
    contents: dict[int, int] = {}
    for step in range(1, 100_001 if request.config.getoption("--long") else 10_001):
        number = rng.randrange(8)
        slot, tensor = slots[number], tensors[number]
        place, length = rng.randrange(64), rng.randint(1, 8)
        match rng.choice(["create", "release", "map", "map", "unmap", "write", "write", "read"]):
            case "create" if len(contents) < 200:
                contents |= dict.fromkeys(pages.create(length), 0)
            case "release":
                used = {handle for each in slots for handle in each.handles.values()}
                idle = [handle for handle in contents if handle not in used][:length]
                pages.release(idle)
                for handle in idle:
                    del contents[handle]
            case "map" if contents:
                end = next((p for p in range(place, 64) if p in slot.handles), 64)
                length = min(length, end - place)
                handles = rng.choices(list(contents), k=length)
                if rng.random() < 0.5:
                    first = rng.choice(list(contents))
                    run = range(first, first + length)
                    handles = [handle for handle in run if handle in contents]
                map_all(pages, slot, place, handles)
            case "unmap":
                end = next((p for p in range(place, 64) if p not in slot.handles), 64)
                pages.unmap(slot, place, min(length, end - place))
            case "write" if place in slot.handles:
                contents[slot.handles[place]] = step
                tensor[place] = step
            case "read":
                for mapped, handle in slot.handles.items():
                    assert tensor[mapped, 0] == tensor[mapped, -1] == contents[handle]
        if step % 500 == 0:
            assert sum(len(mappings_in(slot)) for slot in slots) == pages.num_mappings
            written = sum(value > 0 for value in contents.values())
            assert written * BLOCK <= pages.resident_bytes <= len(contents) * BLOCK
    for slot in slots:
        for place in list(slot.handles):
            pages.unmap(slot, place, 1)
        pages.free(slot)
    pages.release(contents)
    assert (pages.num_mappings, pages.num_handles, pages.resident_bytes) == (0, 0, 0)
    assert num_process_mappings() <= before[0] + 5, "torch and the allocator may take a few"
    pages.close()
    assert shared_resident_kib() <= before[1] + 64
    assert num_descriptors() == before[2]
