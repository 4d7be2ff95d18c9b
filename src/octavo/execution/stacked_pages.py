"""Several address ranges that are mapped alike: place p of all of them at once, by one piece.

A **piece** is one page of memory for each range: for keys and values of every layer, what the same
tokens need. It is created when it is first mapped. `slots.Mapper` works on a stack as on a single
range of pages; its thread is the only one that does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from octavo.execution.pages.interface import AddressRange, PageError, Pages
from octavo.execution.pages.ledger import runs


class StackedPages:
    """``num_ranges`` ranges of ``num_places`` pages; ``addresses`` stands for all of them.

    Raises:
        PageError: the system refuses the addresses.
    """

    def __init__(self, pages: Pages, num_ranges: int, num_places: int) -> None:
        self.pages = pages
        self.ranges = [pages.reserve(num_places) for _ in range(num_ranges)]
        self.addresses = AddressRange(0, num_places, num_ranges * pages.block_bytes)
        self._handles: dict[int, list[int]] = {}
        # Pieces whose memory goes back to the system as soon as nothing shows them.
        self._doomed: set[int] = set()

    @property
    def num_bytes(self) -> int:
        """Memory that was taken from the system."""
        return self.pages.num_handles * self.pages.block_bytes

    def release_unmapped(self, pieces: Iterable[int]) -> None:
        """Give the memory of ``pieces`` back when they are unmapped next, unless they are mapped
        elsewhere first."""
        self._doomed.update(pieces)

    def map(self, addresses: AddressRange, first: int, pieces: Iterable[int]) -> None:
        """As `Pages.map`, in every range, of pieces that get memory where they have none."""
        wanted = list(pieces)
        done: list[AddressRange] = []
        made: list[int] = []
        try:
            for piece in wanted:
                self._doomed.discard(piece)
                if piece not in self._handles:
                    self._handles[piece] = self.pages.create(len(self.ranges))
                    made.append(piece)
            for index, single in enumerate(self.ranges):
                self.pages.map(single, first, [self._handles[piece][index] for piece in wanted])
                done.append(single)
        except PageError:
            # The first error is the one to report.
            with contextlib.suppress(PageError):
                for single in done:
                    self.pages.unmap(single, first, len(wanted))
                for piece in made:
                    self.pages.release(self._handles.pop(piece))
            raise
        addresses.handles.update(enumerate(wanted, first))

    def set_access(self, addresses: AddressRange, first: int, count: int) -> None:
        """As `Pages.set_access`, in every range."""
        for single in self.ranges:
            self.pages.set_access(single, first, count)
        addresses.accessible.update(range(first, first + count))

    def unmap(self, addresses: AddressRange, first: int, count: int) -> list[int]:
        """As `Pages.unmap`, in every range."""
        for single in self.ranges:
            # What an error left half-way is finished.
            for _, start, length in runs(
                place for place in range(first, first + count) if place in single.handles
            ):
                self.pages.unmap(single, start, length)
        pieces = [addresses.handles.pop(place) for place in range(first, first + count)]
        addresses.accessible.difference_update(range(first, first + count))
        shown = set(addresses.handles.values()) if self._doomed else set()
        for piece in pieces:
            if piece in self._doomed and piece not in shown:
                self._doomed.discard(piece)
                self.pages.release(self._handles.pop(piece))
        return pieces

    def close(self) -> None:
        """Unmap, release and free everything."""
        self.pages.close()
        self._handles.clear()
