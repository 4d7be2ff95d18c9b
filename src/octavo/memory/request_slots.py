"""vAttention's own bookkeeping (Prabhu et al., ASPLOS 2025): slots own their memory.

For engines that have no block tables (`octavo.vattention`). A request has a slot, and memory for
its tokens from the slot's start on, in **pieces**: a piece holds the same tokens of every layer,
keys and values. Nothing is shared. What is mapped stays when a request ends (deferred reclamation),
and serves the next one in the slot; it is taken away only when others need it, when more than a
share of all memory is mapped, or after a time::

    slot 0   [ 5 ][ 2 ][ 9 ]      running, 3 places kept
    slot 1   [ 1 ][ 7 ]           idle: stale, serves the next request, or others under pressure
    slot 2   [ ]

Knows no tensors, no driver and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

NO_PIECE = 0
"""Pieces are numbered from 1 on; this one stands for nothing, as the null block does."""

Orders = dict[int, dict[int, int]]
"""Slot → place → the piece that it shows, or `NO_PIECE`."""


class OutOfPiecesError(RuntimeError):
    """More memory is needed than idle slots can give; nothing has changed."""


@dataclass(slots=True)
class Growth:
    """What a step needs: ``mapped`` before it runs, after ``taken`` was unmapped from others.
    ``before`` undoes it (see `RequestSlots.undo`)."""

    mapped: Orders = field(default_factory=dict)
    taken: Orders = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)


class RequestSlots:
    """``num_slots`` slots of ``num_places`` places, and ``num_pieces`` pieces of memory in all.

    At most ``max_idle_share`` of the pieces are mapped as long as some of them are idle; idle ones
    go after ``idle_timeout_s``. ``num_eager`` places are mapped ahead for the next request.
    """

    def __init__(
        self,
        num_slots: int,
        num_places: int,
        num_pieces: int,
        *,
        max_idle_share: float,
        idle_timeout_s: float,
        num_eager: int,
    ) -> None:
        self.num_places = num_places
        self.num_pieces = num_pieces
        self._most_mapped = int(max_idle_share * num_pieces)
        self._timeout_s = idle_timeout_s
        self._num_eager = min(num_eager, num_places)
        # The last is taken first: what was unmapped a moment ago, and then the lowest number.
        self._free = list(range(num_pieces, 0, -1))
        self.slots: list[list[int]] = [[] for _ in range(num_slots)]
        # Places of slots in use that hold tokens, or are about to.
        self._kept: dict[int, int] = {}
        # Slots without a request and since when, the longest first.
        self._idle_since: dict[int, float] = dict.fromkeys(range(num_slots), 0.0)

    @property
    def num_mapped(self) -> int:
        """Pieces that some slot shows."""
        return self.num_pieces - len(self._free)

    @property
    def num_idle_slots(self) -> int:
        return len(self._idle_since)

    def is_used(self, slot: int) -> bool:
        """Whether a request has the slot."""
        return slot in self._kept

    def next_slot(self) -> int | None:
        """The slot that the next request gets: of the idle ones that with most of its memory
        mapped; None when there is none."""
        return max(self._idle_since, key=lambda s: (len(self.slots[s]), -s), default=None)

    def alloc(self) -> int | None:
        """Give `next_slot` to a request; None when there is none."""
        slot = self.next_slot()
        if slot is not None:
            del self._idle_since[slot]
            self._kept[slot] = 0
        return slot

    def free(self, slot: int, now_s: float) -> None:
        """The request has ended; what its slot shows stays for now."""
        del self._kept[slot]
        self._idle_since[slot] = now_s

    def grow(self, wanted: Sequence[int]) -> Growth:
        """See to it that slot i has ``wanted[i]`` places (0: it keeps what it has).

        Raises:
            OutOfPiecesError: there are not enough pieces.
        """
        growth = Growth()
        for slot, count in enumerate(wanted):
            if count:
                growth.before[slot] = self._kept[slot]
                self._kept[slot] = count
        missing = sum(max(self._kept[s] - len(self.slots[s]), 0) for s in growth.before)
        spare = sum(len(self.slots[slot]) - kept for slot, kept in self._spare())
        if missing > len(self._free) + spare:
            self._kept.update(growth.before)
            raise OutOfPiecesError(
                f"{missing} more pieces are needed, and of {self.num_pieces} {len(self._free)} are "
                f"free and {spare} idle"
            )
        if missing > len(self._free):
            self._take(missing - len(self._free), growth.taken)
        for slot in growth.before:
            self._extend(slot, self._kept[slot], growth.mapped)
        return growth

    def undo(self, growth: Growth) -> Orders:
        """The pieces that ``growth`` mapped could not be: what unmaps them again. What it took from
        slots that wanted less than before is not brought back."""
        orders: Orders = {}
        for slot, places in growth.mapped.items():
            self._cut(slot, min(places), orders)
        for slot, count in growth.before.items():
            self._kept[slot] = min(count, len(self.slots[slot]))
        return orders

    def look_ahead(self, next_wanted: Sequence[int]) -> Orders:
        """Places that are likely to be needed soon, as far as pieces are free: ``next_wanted[i]``
        in slot i, and some in `next_slot`."""
        orders: Orders = {}
        for slot, count in enumerate(next_wanted):
            if len(self.slots[slot]) < count and self._free:
                self._extend(slot, count, orders)
        following = self.next_slot()
        if following is not None:
            room = max(self._most_mapped - self.num_mapped, 0)
            have = len(self.slots[following])
            self._extend(following, min(self._num_eager, have + room), orders)
        return orders

    def reclaim(self, now_s: float) -> tuple[Orders, list[int]]:
        """What has been idle for too long, or is too much.

        Returns:
            What unmaps it, and the pieces whose memory is to be given back to the system: those of
            slots that nobody has wanted for ``idle_timeout_s``.
        """
        orders: Orders = {}
        released: list[int] = []
        following = self.next_slot()
        for slot, since_s in self._idle_since.items():
            # What is mapped ahead for the next request is not idle.
            kept = self._num_eager if slot == following else 0
            if now_s - since_s >= self._timeout_s:
                released += self.slots[slot][kept:]
                self._cut(slot, kept, orders)
        excess = self.num_mapped - self._most_mapped
        if excess > 0:
            self._take(excess, orders, only_idle=True)
        return orders, released

    def _spare(self, only_idle: bool = False) -> Iterable[tuple[int, int]]:
        """Slots that show more than they need, and what that is: the longest idle first, the next
        request's last of these, then those in use."""
        following = self.next_slot()
        idle = [slot for slot in self._idle_since if slot != following]
        for slot in idle if following is None else [*idle, following]:
            if self.slots[slot]:
                yield slot, 0
        for slot, kept in () if only_idle else self._kept.items():
            if len(self.slots[slot]) > kept:
                yield slot, kept

    def _take(self, count: int, orders: Orders, only_idle: bool = False) -> None:
        """Free ``count`` spare pieces, or as many as there are, from the ends of slots."""
        for slot, kept in list(self._spare(only_idle)):
            length = len(self.slots[slot])
            first = max(kept, length - count)
            self._cut(slot, first, orders)
            count -= length - first
            if not count:
                return

    def _extend(self, slot: int, count: int, orders: Orders) -> None:
        """Show pieces up to ``count`` places, while there are free ones."""
        shown = self.slots[slot]
        while len(shown) < min(count, self.num_places) and self._free:
            piece = self._free.pop()
            orders.setdefault(slot, {})[len(shown)] = piece
            shown.append(piece)

    def _cut(self, slot: int, first: int, orders: Orders) -> None:
        """Show nothing from place ``first`` on."""
        shown = self.slots[slot]
        for place in range(len(shown) - 1, first - 1, -1):
            orders.setdefault(slot, {})[place] = NO_PIECE
            self._free.append(shown.pop())

    def check(self) -> None:
        """Raise AssertionError when pieces and slots disagree."""
        shown = [piece for slot in self.slots for piece in slot]
        assert sorted(shown + self._free) == list(range(1, self.num_pieces + 1)), "pieces are lost"
        assert sorted([*self._kept, *self._idle_since]) == list(range(len(self.slots)))
        for slot, kept in self._kept.items():
            assert kept <= len(self.slots[slot]) <= self.num_places, f"slot {slot} lacks places"
