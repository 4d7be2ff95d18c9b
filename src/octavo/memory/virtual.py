"""The paged manager with a slot for every row: the mapping is a cache of the block table.

A slot is a range of contiguous virtual addresses (Prabhu et al., ASPLOS 2025). Row r uses slot r:
rows and slots are then released by the same rule, and beams that take over a dead one's row need no
word about slots. Who owns which block is decided as ever; here is only noted what each slot shows,
so that commands are made for the difference between that and the block table alone::

    table of the row     [ 7 ][ 3 ][ 12 ]
    what its slot shows  [ 7 ][ 3 ][  9 ][ 4 ]      one command: place 2 shows block 12
                                          └ stale: read by nobody, pins nothing, and costs no
                                            driver call when block 4 is free and comes there again

What a slot shows is always a run from place 0 on. It stays when a sequence ends; only to keep to
``max_mapped_blocks`` are stale places given up, from the ends of the slots that rest longest.

**Ahead of need** a slot may show a free block behind its table: the mapping pins nothing, and since
free blocks that a slot shows are taken first, the block is most likely there when the table gets to
it. Only if somebody else had to take it, the place is mapped anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nsmallest
from itertools import islice

import numpy as np

from octavo.core.layout import num_blocks_for
from octavo.core.plan import (
    NULL_BLOCK,
    Admission,
    Drained,
    IntArray,
    KVCommand,
    MapBlocks,
    ReleaseBlocks,
    int_array,
)
from octavo.memory.paged import PagedManager
from octavo.memory.swap import SwappedTable


class VirtualManager(PagedManager):
    """Implements `octavo.core.protocols.KVManager`; adds `MapBlocks` to what is drained.

    ``max_mapped_blocks`` is how many places may be mapped in all slots together. Nothing is refused
    for it here: whoever admits sees to it that the tables of all rows together stay within it.

    ``num_ahead`` places are mapped ahead in the slot of a row that is likely to be next, and one
    behind the table of each row that grows, of the ``num_places`` that a slot has; 0: none. Without
    ``maps_forks`` the slots of rows that forked, or were forked, do not follow their tables any
    more until they are freed (`is_mapped`).
    """

    # What was free a moment ago is what a slot still shows.
    _takes_oldest = True

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        *,
        max_mapped_blocks: int,
        num_places: int = 0,
        num_ahead: int = 0,
        maps_forks: bool = True,
        prefix_caching: bool = False,
        num_host_blocks: int = 0,
        sharing: bool = True,
    ) -> None:
        super().__init__(
            num_blocks,
            block_size,
            max_num_seqs,
            prefix_caching=prefix_caching,
            num_host_blocks=num_host_blocks,
            sharing=sharing,
        )
        self._max_mapped_blocks = max_mapped_blocks
        self.num_mapped_blocks = 0
        self._slots: list[list[int]] = [[] for _ in range(max_num_seqs)]
        # Rows whose tables changed since the last plan, and from which place on.
        self._changed: dict[int, int] = {}
        # Rows that ended, the longest ago first: the order in which stale places are given up.
        self._resting: dict[int, None] = {}
        self._num_ahead = num_ahead
        self._num_places = num_places
        # The row whose slot was made ready last for whoever comes next.
        self._prepared: int | None = None
        self._maps_forks = maps_forks
        self._is_unmapped = np.zeros(max_num_seqs, dtype=np.bool_)
        self._num_unmapped = 0

    @property
    def max_mapped_blocks(self) -> int | None:
        return self._max_mapped_blocks

    def slot(self, row: int) -> IntArray:
        """The blocks that the row's slot shows once every plan so far has been obeyed."""
        return int_array(self._slots[row])

    def choose_rows(
        self,
        free_rows: Sequence[int],
        count: int,
        token_ids: IntArray,
        *,
        reserve: int | None = None,
        salt: bytes = b"",
        use_cache: bool = True,
    ) -> list[int]:
        """Rows whose slots show the longest beginning of what the block table would be: cached
        blocks that are hit, then free ones that could be taken. Of equals the emptiest slot, so
        that others keep what they show."""
        _, hits = self._look_up(token_ids, salt) if use_cache else (None, [])
        # While somebody waits for blocks it is asked at every step: rows are looked at only once
        # there are enough.
        if reserve is not None and not self._has_room(len(token_ids), hits, reserve):
            return []
        num_blocks, slots, is_free = (
            num_blocks_for(len(token_ids), self.block_size), self._slots, self.pool.is_free
        )  # fmt: skip

        def begins_well(row: int) -> bool:
            slot = slots[row]
            return bool(slot) and (slot[0] == hits[0] if hits else is_free(slot[0]))

        def merit(row: int) -> tuple[int, int]:
            return self._num_shown(slots[row][:num_blocks], hits), -len(slots[row])

        # Most slots differ at their first place; of those that do not, some are enough.
        promising = list(islice(filter(begins_well, free_rows), _MOST_COMPARED))
        promising.sort(key=merit, reverse=True)
        if len(promising) < count:
            others = (row for row in free_rows if row not in promising)
            missing = count - len(promising)
            promising += nsmallest(missing, others, key=lambda row: len(slots[row]))
        return promising[:count]

    def _num_shown(self, slot: list[int], hits: list[int]) -> int:
        for place, block_id in enumerate(slot):
            is_hit = place < len(hits)
            if not (block_id == hits[place] if is_hit else self.pool.is_free(block_id)):
                return place
        return len(slot)

    def _mapped(self, row: int, first: int, count: int) -> Sequence[int]:
        return self._slots[row][first : first + max(count, 0)]

    # ── what changes tables ──────────────────────────────────────────────────────────────────

    def admit(
        self,
        row: int,
        token_ids: IntArray,
        *,
        max_length: int | None = None,
        reserve: int = 0,
        salt: bytes = b"",
        use_cache: bool = True,
    ) -> Admission | None:
        admission = super().admit(row, token_ids, reserve=reserve, salt=salt, use_cache=use_cache)
        if admission is not None:
            self._start(row)
        return admission

    def grow(self, row: int, num_tokens: int, *, reserve: int = 0) -> bool:
        first = int(self.writable[row]) // self.block_size
        if not super().grow(row, num_tokens, reserve=reserve):
            return False
        if self._is_unmapped[row]:
            return True
        self._changed[row] = min(self._changed.get(row, first), first)
        return True

    def fork(self, parent: int, child: int, num_tokens: int) -> None:
        super().fork(parent, child, num_tokens)
        self._start(child)
        if not self._maps_forks:
            for row in (parent, child):
                self._num_unmapped += not self._is_unmapped[row]
                self._is_unmapped[row] = True
                self._changed.pop(row, None)

    def swap_in(
        self, tables: Sequence[SwappedTable], rows: Sequence[int], *, reserve: int = 0
    ) -> int | None:
        transfer = super().swap_in(tables, rows, reserve=reserve)
        if transfer is not None:
            for row in rows:
                self._start(row)
        return transfer

    def _start(self, row: int) -> None:
        self._changed[row] = 0
        self._resting.pop(row, None)

    def free(self, row: int) -> None:
        super().free(row)
        self._changed.pop(row, None)
        self._num_unmapped -= int(self._is_unmapped[row])
        self._is_unmapped[row] = False
        self._resting[row] = None

    def remove_idle(self, count: int) -> tuple[KVCommand, ...]:
        """No slot may show what goes: of each that does, nothing is kept from there on. Whatever is
        read through a slot beyond such a place is read together with it, and nobody reads that."""
        commands = super().remove_idle(count)
        gone = {b for c in commands if isinstance(c, ReleaseBlocks) for b in c.block_ids.tolist()}
        given = []
        for row, slot in enumerate(self._slots):
            first = next((place for place, block in enumerate(slot) if block in gone), len(slot))
            given += [(row, place, NULL_BLOCK) for place in range(first, len(slot))]
            del slot[first:]
        self.num_mapped_blocks -= len(given)
        return (_map_blocks(given), *commands) if given else commands

    # ── what follows for slots ───────────────────────────────────────────────────────────────

    def is_mapped(self, rows: IntArray) -> bool:
        return not self._num_unmapped or not bool(self._is_unmapped[rows].any())

    def drain(self) -> Drained:
        drained = super().drain()
        if not self._changed:
            return drained
        changed = list(self._changed)
        mapped = self._difference()
        commands: list[KVCommand] = []
        if mapped:
            commands.append(_map_blocks([*self._give_up_stale(), *mapped]))
        if self._num_ahead and (ahead := self._look_ahead(changed)):
            commands.append(_map_blocks(ahead, is_ahead=True))
        if not commands:
            return drained
        return Drained((*commands, *drained.commands), drained.table_deltas)

    def forget_places(self, first: int = 0) -> MapBlocks | None:
        """Give up what the slots of rows without a sequence show from place ``first`` on.

        Returns:
            What unmaps it, to be obeyed before the next plan; None: they show nothing there.
        """
        given = []
        for row, slot in enumerate(self._slots):
            if not self._tables[row]:
                given += [(row, place, NULL_BLOCK) for place in range(first, len(slot))]
                del slot[first:]
        self.num_mapped_blocks -= len(given)
        return _map_blocks(given) if given else None

    def _difference(self) -> list[tuple[int, int, int]]:
        """Slot, place and block of whatever is in a table but not in its slot. It is in the slot
        from now on."""
        found = []
        for row, first in self._changed.items():
            table, slot = self._tables[row], self._slots[row]
            for place in range(first, len(table)):
                block_id = table[place]
                if place == len(slot):
                    slot.append(block_id)
                    self.num_mapped_blocks += 1
                elif slot[place] != block_id:
                    slot[place] = block_id
                else:
                    continue
                found.append((row, place, block_id))
        self._changed.clear()
        return found

    def _look_ahead(self, changed: Iterable[int]) -> list[tuple[int, int, int]]:
        """Free blocks behind the tables that ``changed``, and in the slot that is likely to be
        needed next. Never at the cost of a mapping that somebody may want."""
        found: list[tuple[int, int, int]] = []
        for row in changed:
            self._show_free(row, len(self._tables[row]), found)
        if self._prepared is None or self._tables[self._prepared]:
            self._prepared = self._likely_next()
            if self._prepared is not None:
                self._resting.setdefault(self._prepared)
                for place in range(self._num_ahead):
                    self._show_free(self._prepared, place, found)
        return found

    def _likely_next(self) -> int | None:
        """The row that a prompt of which nothing is cached would be given."""
        free = [row for row, table in enumerate(self._tables) if not table]
        chosen = self.choose_rows(free, 1, _NO_TOKENS, use_cache=False)
        return chosen[0] if chosen else None

    def _show_free(self, row: int, place: int, found: list[tuple[int, int, int]]) -> None:
        """Let the slot show a free block at ``place``. What another sequence may come back for, at
        a place of a slot that rests, is left alone."""
        slot = self._slots[row]
        if place >= self._num_places or place > len(slot):
            return
        if place < len(slot):
            if self.pool.is_free(slot[place]) or not self._tables[row]:
                return
        elif self.num_mapped_blocks >= self._max_mapped_blocks:
            return
        block_id = self.pool.try_set_aside()
        if block_id is None:
            return
        if place == len(slot):
            slot.append(block_id)
            self.num_mapped_blocks += 1
        else:
            slot[place] = block_id
        found.append((row, place, block_id))

    def _give_up_stale(self) -> list[tuple[int, int, int]]:
        """As many stale places as are mapped too many: what rests longest, then what running rows
        have not reached yet."""
        excess = self.num_mapped_blocks - self._max_mapped_blocks
        if excess <= 0:
            return []
        given = []
        running = (row for row, table in enumerate(self._tables) if table)
        for row in [*self._resting, *running]:
            slot = self._slots[row]
            count = min(excess, len(slot) - len(self._tables[row]))
            if count > 0:
                given += [(row, len(slot) - 1 - i, NULL_BLOCK) for i in range(count)]
                del slot[len(slot) - count :]
                excess -= count
            if not excess:
                break
        self.num_mapped_blocks = self._max_mapped_blocks + excess
        assert not excess, f"running sequences need {excess} mappings more than there may be"
        return given

    def check(self) -> None:
        super().check()
        assert self.num_mapped_blocks == sum(map(len, self._slots)), "mappings are miscounted"
        for row, table in enumerate(self._tables):
            right = self._changed.get(row, len(table))
            if self._is_unmapped[row]:
                continue
            assert self._slots[row][:right] == table[:right], f"slot {row} is not its table's"
            assert bool(table) <= (row not in self._resting), f"row {row} runs but rests"


_NO_TOKENS = int_array([])
# Slots that begin alike and are compared to their ends.
_MOST_COMPARED = 32


def _map_blocks(places: list[tuple[int, int, int]], *, is_ahead: bool = False) -> MapBlocks:
    """``places`` are slot, place and block."""
    slots, numbers, block_ids = int_array(places).T
    return MapBlocks(slots, numbers, block_ids, is_ahead)
