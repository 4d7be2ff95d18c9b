"""Slots: ranges of contiguous addresses that show blocks in order, mapped on a thread of its own.

Knows places and blocks; knows no sequences. What is ordered for a slot is queued and mapped while
steps run, some places at a time; whoever is about to read slots says so (`Slots.require`) and waits
for what it reads, not for what others will read later, nor for the rest of a long prompt. Errors
surface there, at the step that would touch the place::

    order ──▶ pending {slot: {place: block}} ──▶ mapping thread ──▶ the driver
                                                      │
    require(rows, lengths) ◀── waits for these ───────┘   raises what failed, after one more try
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch

from octavo.core.layout import KVLayout, num_blocks_for
from octavo.core.plan import NULL_BLOCK, IntArray, MapBlocks
from octavo.execution.pages.interface import AddressRange, PageError, Pages
from octavo.execution.pages.ledger import runs

logger = logging.getLogger(__name__)


class MappingRefusedError(PageError):
    """The system did not map what was ordered. Another try may succeed."""


THREAD_NAME = "octavo-mapping"
# Between two messages that mappings are refused.
_TELL_INTERVAL_S = 10.0
# Places that are mapped before somebody else's turn: 4 ms of a driver's time.
_PIECE = 128
Wanted = dict[int, int]
"""Place → block, of one slot; the null block: nothing."""


class Slots:
    """``num_slots`` ranges of ``max_model_len`` tokens each; handle i of ``pages`` is block i.

    ``tensor [num_slots, max_tokens, num_layers, 2, num_kv_heads, head_dim]`` are their addresses;
    only tokens of mapped places may be touched. ``guarded`` is the same with one slot more in front
    of it, which shows the null block once `show_null` was called for slot -1.
    ``max_mapped_blocks`` places may be mapped at once.

    Raises:
        PageError: the system refuses the addresses.
    """

    def __init__(
        self,
        pages: Pages,
        layout: KVLayout,
        dtype: torch.dtype,
        num_slots: int,
        max_model_len: int,
    ) -> None:
        self.block_size = layout.block_size
        self.num_places = num_blocks_for(max_model_len, layout.block_size)
        addresses = pages.reserve((1 + num_slots) * self.num_places)
        memory = pages.tensor(addresses).view(dtype)
        max_tokens = self.num_places * layout.block_size
        self.guarded = memory.view(1 + num_slots, max_tokens, *layout.block_shape()[1:])
        self.tensor = self.guarded[1:]
        # Places of a slot are mapped from its start on, so that each is at most one mapping to the
        # host, whatever blocks it shows, and each slot ends in at most one hole.
        self.max_mapped_blocks = num_slots * self.num_places
        # What the system allows beside them; None: any number.
        self.num_spare_mappings: int | None = None
        if pages.max_mappings is not None:
            free = pages.max_mappings - pages.num_mappings - num_slots
            self.max_mapped_blocks = max(min(self.max_mapped_blocks, free), 0)
            self.num_spare_mappings = max(free - self.max_mapped_blocks, 0)
        self._num_null = 0
        self._num_refused = 0
        self._tell_after_s = 0.0
        self.mapper = Mapper(pages, addresses, self.num_places, num_slots)

    @property
    def num_mapped_blocks(self) -> int:
        """Places with a block behind them that were ordered."""
        return self.mapper.num_mapped() - self._num_null

    def show_null(self, slot: int) -> None:
        """Show the null block at the first place of a slot that nobody orders anything for."""
        self.mapper.map_now(slot, 0, NULL_BLOCK)
        self._num_null += 1

    def order(self, command: MapBlocks) -> None:
        """Have places mapped, soon. No running kernel may read them."""
        by_slot: defaultdict[int, Wanted] = defaultdict(dict)
        for slot, place, block_id in zip(
            command.slots.tolist(), command.places.tolist(), command.block_ids.tolist(), strict=True
        ):
            by_slot[slot][place] = block_id
        self.mapper.order(by_slot, is_urgent=not command.is_ahead)

    def require(self, slots: IntArray, lengths: IntArray) -> None:
        """See to it that ``slots`` show what was ordered for their first ``lengths`` tokens.

        Raises:
            MappingRefusedError: the system refuses a mapping, which will be tried again.
            PageError: one was never ordered: touching it would end the process.
        """
        self.mapper.require(slots, -(-lengths // self.block_size))

    def can_show(self, slots: IntArray, lengths: IntArray) -> bool:
        """`require`, or False where the system refuses: rows are read through their tables then,
        so that nobody's request ends for it. What is refused is tried again with every step, and
        told now and then."""
        try:
            self.require(slots, lengths)
        except MappingRefusedError as error:
            self._num_refused += 1
            now = time.monotonic()
            if now >= self._tell_after_s:
                self._tell_after_s = now + _TELL_INTERVAL_S
                logger.warning(
                    "%s; rows are read through their block tables meanwhile (steps so far: %d)",
                    error,
                    self._num_refused,
                )
            return False
        return True


def _first_piece(wanted: Wanted) -> tuple[Wanted, Wanted]:
    """What to map now, and what then. All that is given up goes first: a slot shows a run of places
    from its start on, and has one hole behind it."""
    if len(wanted) <= _PIECE:
        return wanted, {}
    shown = sorted(place for place, block_id in wanted.items() if block_id != NULL_BLOCK)
    rest = {place: wanted[place] for place in shown[_PIECE:]}
    return {place: wanted[place] for place in wanted if place not in rest}, rest


class MapsPlaces(Protocol):
    """What a mapping thread needs of `Pages`."""

    def map(self, addresses: AddressRange, first: int, handles: Iterable[int]) -> None: ...

    def set_access(self, addresses: AddressRange, first: int, count: int) -> None: ...

    def unmap(self, addresses: AddressRange, first: int, count: int) -> list[int]: ...


class Mapper:
    """The mapping thread and what it works on. It starts at the first order and ends with
    `close`."""

    def __init__(
        self, pages: MapsPlaces, addresses: AddressRange, num_places: int, num_slots: int
    ) -> None:
        self._pages = pages
        self._range = addresses
        self._num_places = num_places
        self._num_shown: IntArray = np.zeros(num_slots, dtype=np.int32)
        self._changed = threading.Condition()
        # Whoever calls `pages` holds this; waiting for orders needs no driver.
        self.lock = threading.Lock()
        self._pending: dict[int, Wanted] = {}
        self._urgent: dict[int, None] = {}
        # What the thread is mapping, and what could not be mapped, with the reason.
        self._current: tuple[int, Wanted] | None = None
        self._failed: dict[int, tuple[Wanted, PageError]] = {}
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def order(self, by_slot: dict[int, Wanted], *, is_urgent: bool) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)
                self._thread.start()
            for slot, wanted in by_slot.items():
                failed, _ = self._failed.pop(slot, ({}, None))
                # What was ordered last counts, wherever it waits.
                self._pending[slot] = failed | self._pending.get(slot, {}) | wanted
                if is_urgent:
                    self._urgent[slot] = None
            self._changed.notify_all()

    def require(self, slots: IntArray, counts: IntArray) -> None:
        with self._changed:
            if self._pending or self._current or self._failed:
                needed = dict(zip(slots.tolist(), counts.tolist(), strict=True))
                self._retry(needed)
                while self._is_busy(needed):
                    self._changed.wait()
                for slot, (wanted, error) in self._failed.items():
                    if min(wanted) < needed.get(slot, 0):
                        raise MappingRefusedError(
                            f"slot {slot} cannot be mapped: {error}"
                        ) from error
            missing = np.flatnonzero(self._num_shown[slots] < counts)
            if len(missing):
                slot = int(slots[missing[0]])
                raise PageError(f"slot {slot} shows nothing at place {self._num_shown[slot]}")

    def wait(self) -> None:
        """Wait until everything that was ordered is mapped, or has failed."""
        with self._changed:
            while self._pending or self._current:
                self._changed.wait()

    def map_now(self, slot: int, place: int, block_id: int) -> None:
        """Map one place before anything is ordered."""
        place += (1 + slot) * self._num_places
        with self.lock:
            self._pages.map(self._range, place, [block_id])
            self._pages.set_access(self._range, place, 1)

    def num_shown(self, slot: int) -> int:
        """Places at the start of a slot that are mapped now."""
        with self._changed:
            return int(self._num_shown[slot])

    def num_mapped(self) -> int:
        self.wait()
        return len(self._range.handles)

    def close(self) -> None:
        """End the thread. What is pending is forgotten."""
        with self._changed:
            self._is_closed = True
            self._pending.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _retry(self, needed: dict[int, int]) -> None:
        """Try once more what failed and is to be read now; what failed ahead of need can wait."""
        for slot, (wanted, _) in list(self._failed.items()):
            if min(wanted) < needed.get(slot, 0):
                del self._failed[slot]
                self._pending[slot] = wanted | self._pending.get(slot, {})
                self._urgent[slot] = None
                self._changed.notify_all()

    def _is_busy(self, needed: dict[int, int]) -> bool:
        """Whether something is still to be mapped within the first ``needed`` places of a slot."""
        if self._is_closed:
            return False
        waiting = list(self._pending.items())
        if self._current is not None:
            waiting.append(self._current)
        return any(min(wanted) < needed.get(slot, 0) for slot, wanted in waiting)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                slot = next(iter(self._urgent or self._pending))
                wanted, rest = _first_piece(self._pending.pop(slot))
                is_urgent = self._urgent.pop(slot, 0) is None
                if rest:
                    self._pending[slot] = rest
                self._current = slot, wanted
            failure = None
            try:
                self._map(slot, wanted)
            except PageError as error:
                # Without the frames it came through, this one among them, which would keep it.
                failure = error.with_traceback(None)
            except Exception as error:
                # The thread outlives what nobody thought of; the step that reads the slot fails.
                failure = PageError(f"{type(error).__name__}: {error}")
            with self._changed:
                self._current = None
                if failure is not None:
                    # What is behind it would fail as well, and what was ordered since replaces it.
                    self._urgent.pop(slot, None)
                    self._failed[slot] = wanted | self._pending.pop(slot, {}), failure
                elif rest and slot in self._pending:
                    # The rest is behind what was ordered meanwhile, which is waited for as well.
                    self._pending[slot] = self._pending.pop(slot)
                    if is_urgent:
                        self._urgent.pop(slot, None)
                        self._urgent[slot] = None
                self._changed.notify_all()

    def _map(self, slot: int, wanted: Wanted) -> None:
        """Show ``wanted`` in a slot. When it fails, what was there before may be gone."""
        base = (1 + slot) * self._num_places
        places = sorted(wanted)
        shown = self._range.handles
        with self.lock:
            # A place that shows its block already stays: it may be another try.
            old = [p for p in places if base + p in shown and shown[base + p] != wanted[p]]
            try:
                for _, first, count in runs(old):
                    self._pages.unmap(self._range, base + first, count)
                new = [p for p in places if wanted[p] != NULL_BLOCK and base + p not in shown]
                for _, first, count in runs(new):
                    blocks = [wanted[place] for place in range(first, first + count)]
                    self._pages.map(self._range, base + first, blocks)
                    try:
                        self._pages.set_access(self._range, base + first, count)
                    except PageError:
                        # So that another try maps it again.
                        self._pages.unmap(self._range, base + first, count)
                        raise
            finally:
                # A place that is shown again may have others behind it, which were never hidden.
                hidden = [p for p in places if base + p not in self._range.accessible]
                count = min([int(self._num_shown[slot]), *hidden[:1]])
                while count < self._num_places and base + count in self._range.accessible:
                    count += 1
                self._num_shown[slot] = count
