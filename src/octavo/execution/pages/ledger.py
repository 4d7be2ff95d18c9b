"""Which handles exist and where they are mapped: the checks that all kinds of pages share.

Knows no system call. A driver would answer misuse with "invalid value", or not at all: mapping over
a mapping silently replaces it on Linux. Here it is refused before anything is called.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from octavo.execution.pages.interface import AddressRange, PageError


class Ledger:
    """The handles and ranges of one ``Pages``.

    ``num_uses`` counts each handle's mappings, ``num_mapped`` all of them.
    """

    def __init__(self, block_bytes: int, granularity: int) -> None:
        if block_bytes < 1 or block_bytes % granularity:
            raise PageError(
                f"a block of {block_bytes:,} bytes is not a whole number of pages of "
                f"{granularity:,} bytes"
            )
        self.block_bytes = block_bytes
        self.granularity = granularity
        self.num_uses: dict[int, int] = {}
        self.num_mapped = 0
        self.ranges: dict[int, AddressRange] = {}
        self._free: list[int] = []
        self._next = 0

    def check_count(self, count: int, what: str) -> None:
        if count < 1:
            raise PageError(f"{what} must be at least 1, got {count}")

    def peek(self, count: int) -> list[int]:
        """The handles that the next ``count`` would be; ``add`` takes them."""
        reused = heapq.nsmallest(count, self._free)
        return reused + list(range(self._next, self._next + count - len(reused)))

    def add(self, handles: Sequence[int]) -> None:
        """Take what ``peek`` answered, in its order."""
        for handle in handles:
            if handle == self._next:
                self._next += 1
            else:
                heapq.heappop(self._free)
            self.num_uses[handle] = 0

    def remove(self, handle: int) -> None:
        del self.num_uses[handle]
        heapq.heappush(self._free, handle)

    def check_release(self, handles: Sequence[int]) -> None:
        self._check_handles(handles)
        if len(set(handles)) < len(handles):
            raise PageError("a handle is named twice in one release")
        for handle in handles:
            if self.num_uses[handle]:
                raise PageError(
                    f"handle {handle} is still mapped at {self.num_uses[handle]} places; unmap "
                    "them before releasing it"
                )

    def reserve(self, address: int, num_places: int) -> AddressRange:
        addresses = AddressRange(address, num_places, self.block_bytes)
        self.ranges[address] = addresses
        return addresses

    def check_free(self, addresses: AddressRange) -> None:
        self._check_places(addresses, 0, addresses.num_places)
        if addresses.handles:
            raise PageError(
                f"{len(addresses.handles)} places of the range at {addresses.address:#x} are "
                "still mapped; unmap them before freeing it"
            )

    def check_map(self, addresses: AddressRange, first: int, handles: Sequence[int]) -> None:
        self._check_places(addresses, first, len(handles))
        self._check_handles(handles)
        for place in range(first, first + len(handles)):
            if place in addresses.handles:
                raise PageError(
                    f"place {place} already holds handle {addresses.handles[place]}; unmap it first"
                )

    def check_mapped(self, addresses: AddressRange, first: int, count: int) -> None:
        self._check_places(addresses, first, count)
        for place in range(first, first + count):
            if place not in addresses.handles:
                raise PageError(f"place {place} of the range at {addresses.address:#x} is unmapped")

    def map(self, addresses: AddressRange, first: int, handles: Sequence[int]) -> None:
        for place, handle in enumerate(handles, first):
            addresses.handles[place] = handle
            self.num_uses[handle] += 1
        self.num_mapped += len(handles)

    def unmap(self, addresses: AddressRange, first: int, count: int) -> list[int]:
        handles = [addresses.handles.pop(place) for place in range(first, first + count)]
        addresses.accessible.difference_update(range(first, first + count))
        for handle in handles:
            self.num_uses[handle] -= 1
        self.num_mapped -= count
        return handles

    def _check_places(self, addresses: AddressRange, first: int, count: int) -> None:
        if self.ranges.get(addresses.address) is not addresses:
            raise PageError(f"the range at {addresses.address:#x} is not reserved here")
        if count < 0 or not 0 <= first <= first + count <= addresses.num_places:
            raise PageError(
                f"places {first} to {first + count} are outside a range of {addresses.num_places}"
            )

    def _check_handles(self, handles: Sequence[int]) -> None:
        for handle in handles:
            if handle not in self.num_uses:
                raise PageError(f"handle {handle} does not exist")


def runs(numbers: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    """``(index, number, length)`` of each longest run of consecutive ascending ``numbers``."""
    start = first = length = 0
    for index, number in enumerate(numbers):
        if length and number == first + length:
            length += 1
            continue
        if length:
            yield start, first, length
        start, first, length = index, number, 1
    if length:
        yield start, first, length
