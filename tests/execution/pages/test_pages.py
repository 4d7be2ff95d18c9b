"""What every kind of pages promises, on the host's real memory and on a driver that checks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from execution.pages.harness import KINDS, FakeMemory, HostMemory, Memory
from octavo.execution.pages.interface import AddressRange, PageError


@pytest.fixture(params=KINDS)
def memory(request: pytest.FixtureRequest) -> Iterator[Memory]:
    made = request.param()
    yield made
    made.pages.close()
    made.pages.close()


def usable(memory: Memory, num_places: int, handles: list[int]) -> AddressRange:
    addresses = memory.pages.reserve(num_places)
    memory.pages.map(addresses, 0, handles)
    memory.pages.set_access(addresses, 0, len(handles))
    return addresses


def test_one_block_at_two_addresses_is_the_same_memory(memory: Memory) -> None:
    handles = memory.pages.create(3)
    first = usable(memory, 4, handles)
    second = usable(memory, 4, handles[:2])
    assert first.address != second.address
    memory.write(first, 1, 7)
    assert memory.read(second, 1) == 7
    memory.write(second, 1, 9)
    assert memory.read(first, 1) == 9
    assert [memory.read(first, 0), memory.read(first, 2)] == [0, 0]
    again = memory.pages.reserve(1)
    memory.pages.map(again, 0, [handles[1]])
    memory.pages.set_access(again, 0, 1)
    assert memory.read(again, 0) == 9, "a third mapping must not clear it"


def test_memory_is_zero_when_created_also_where_it_was_used_before(memory: Memory) -> None:
    handles = memory.pages.create(2)
    addresses = usable(memory, 2, handles)
    for place in (0, 1):
        assert memory.read(addresses, place) == 0
        memory.write(addresses, place, 255)
    assert memory.pages.unmap(addresses, 0, 2) == handles
    memory.pages.release([1])
    assert memory.pages.create(1) == [1]
    memory.pages.map(addresses, 0, [1, 0])
    memory.pages.set_access(addresses, 0, 2)
    assert [memory.read(addresses, place) for place in (0, 1)] == [0, 255]


def test_the_lowest_free_handles_come_first(memory: Memory) -> None:
    pages = memory.pages
    assert pages.create(5) == [0, 1, 2, 3, 4]
    pages.release([3, 1])
    assert pages.num_handles == 3
    assert pages.create(4) == [1, 3, 5, 6]


def test_freeing_everything_leaves_nothing(memory: Memory) -> None:
    handles = memory.pages.create(3)
    addresses = usable(memory, 8, handles)
    for place in range(3):
        memory.write(addresses, place, 1)
    memory.pages.unmap(addresses, 0, 3)
    memory.pages.release(handles)
    memory.pages.free(addresses)
    assert (memory.pages.num_handles, memory.pages.num_mappings) == (0, 0)
    memory.check_empty()


def test_misuse_is_named_and_changes_nothing(memory: Memory) -> None:
    pages = memory.pages
    pages.create(3)
    addresses = usable(memory, 4, [0, 1])
    memory.write(addresses, 0, 5)
    memory.write(addresses, 1, 6)
    gone = pages.reserve(1)
    pages.free(gone)
    before = (pages.num_handles, pages.num_mappings, dict(addresses.handles))
    for call, message in [
        (lambda: pages.reserve(0), "num_places must be at least 1"),
        (lambda: pages.create(0), "count must be at least 1"),
        (lambda: pages.map(addresses, 1, [2]), "place 1 already holds handle 1"),
        (lambda: pages.map(addresses, 3, [2, 2]), "places 3 to 5 are outside a range of 4"),
        (lambda: pages.map(addresses, -1, [2]), "outside"),
        (lambda: pages.map(addresses, 2, [3]), "handle 3 does not exist"),
        (lambda: pages.map(gone, 0, [2]), "is not reserved here"),
        (lambda: pages.set_access(addresses, 1, 2), "place 2 .* is unmapped"),
        (lambda: pages.unmap(addresses, 1, 2), "place 2 .* is unmapped"),
        (lambda: pages.unmap(addresses, 0, -1), "outside"),
        (lambda: pages.release([1]), "handle 1 is still mapped at 1 places"),
        (lambda: pages.release([2, 2]), "named twice"),
        (lambda: pages.release([7]), "handle 7 does not exist"),
        (lambda: pages.free(addresses), "2 places .* are still mapped"),
        (lambda: pages.free(gone), "is not reserved here"),
    ]:
        with pytest.raises(PageError, match=message):
            call()
    assert (pages.num_handles, pages.num_mappings, addresses.handles) == before
    assert [memory.read(addresses, place) for place in (0, 1)] == [5, 6]
    pages.map(addresses, 2, [])
    pages.set_access(addresses, 0, 0)
    assert pages.unmap(addresses, 0, 0) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_a_whole_number_of_pages(kind: type[HostMemory] | type[FakeMemory]) -> None:
    pages = kind().pages
    assert pages.block_bytes == 2 * pages.granularity
    options = {"driver": pages._driver} if kind is FakeMemory else {}  # type: ignore[union-attr]
    for wrong in (0, pages.granularity + 512):
        with pytest.raises(PageError, match="is not a whole number of pages"):
            type(pages)(wrong, **options)
    pages.close()


class PagesMachine(RuleBasedStateMachine):
    """Any order of calls beside two dicts: what is in each handle, and which is at each place."""

    kind: type[HostMemory] | type[FakeMemory] = HostMemory
    num_places = 12

    def __init__(self) -> None:
        super().__init__()
        self.memory = self.kind()
        self.pages = self.memory.pages
        self.contents: dict[int, int] = {}
        self.ranges: list[AddressRange] = []
        self.places: list[dict[int, int]] = []
        self.counter = 0

    def teardown(self) -> None:
        for addresses, places in zip(self.ranges, self.places, strict=True):
            for place in places:
                self.pages.unmap(addresses, place, 1)
            self.pages.free(addresses)
        if self.contents:
            self.pages.release(self.contents)
        assert (self.pages.num_handles, self.pages.num_mappings) == (0, 0)
        self.memory.check_empty()
        self.pages.close()

    def pick(self, number: int) -> tuple[AddressRange, dict[int, int]]:
        return self.ranges[number % len(self.ranges)], self.places[number % len(self.ranges)]

    def run(self, places: dict[int, int], start: int, length: int, *, mapped: bool) -> range:
        """Up to ``length`` places in a row from ``start`` on that are mapped, or are not."""
        end = start
        while end < min(start + length, self.num_places) and (end in places) is mapped:
            end += 1
        return range(start, end)

    @precondition(lambda self: len(self.ranges) < 4)
    @rule()
    def reserve(self) -> None:
        self.ranges.append(self.pages.reserve(self.num_places))
        self.places.append({})

    @rule(count=st.integers(1, 4))
    def create(self, count: int) -> None:
        for handle in self.pages.create(count):
            assert handle not in self.contents
            self.contents[handle] = 0

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        used = {handle for places in self.places for handle in places.values()}
        idle = sorted(set(self.contents) - used)
        chosen = data.draw(st.lists(st.sampled_from(idle), unique=True)) if idle else []
        self.pages.release(chosen)
        for handle in chosen:
            del self.contents[handle]

    @precondition(lambda self: self.ranges and self.contents)
    @rule(
        number=st.integers(0, 3),
        start=st.integers(0, num_places - 1),
        length=st.integers(1, 6),
        data=st.data(),
        in_order=st.booleans(),
    )
    def map(
        self, number: int, start: int, length: int, data: st.DataObject, in_order: bool
    ) -> None:
        addresses, places = self.pick(number)
        free = self.run(places, start, length, mapped=False)
        known = sorted(self.contents)
        if in_order:
            first = data.draw(st.integers(0, len(known) - 1))
            handles = known[first : first + len(free)]
        else:
            handles = [data.draw(st.sampled_from(known)) for _ in free]
        self.pages.map(addresses, start, handles)
        self.pages.set_access(addresses, start, len(handles))
        places.update(zip(range(start, start + len(handles)), handles, strict=True))

    @precondition(lambda self: self.ranges)
    @rule(number=st.integers(0, 3), start=st.integers(0, num_places - 1), length=st.integers(1, 6))
    def unmap(self, number: int, start: int, length: int) -> None:
        addresses, places = self.pick(number)
        run = self.run(places, start, length, mapped=True)
        assert self.pages.unmap(addresses, start, len(run)) == [places.pop(place) for place in run]

    @precondition(lambda self: any(self.places))
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([n for n, places in enumerate(self.places) if places]))
        place = data.draw(st.sampled_from(sorted(self.places[number])))
        self.counter = self.counter % 254 + 1
        self.memory.write(self.ranges[number], place, self.counter)
        self.contents[self.places[number][place]] = self.counter

    @invariant()
    def every_place_reads_its_block(self) -> None:
        assert self.pages.num_handles == len(self.contents)
        for addresses, places in zip(self.ranges, self.places, strict=True):
            assert addresses.handles == places
            for place, handle in places.items():
                assert self.memory.read(addresses, place) == self.contents[handle]


class FakePagesMachine(PagesMachine):
    kind = FakeMemory


TestMemfdPages = PagesMachine.TestCase
TestCudaPages = FakePagesMachine.TestCase
TestMemfdPages.settings = settings(stateful_step_count=40)
TestCudaPages.settings = settings(stateful_step_count=30)
