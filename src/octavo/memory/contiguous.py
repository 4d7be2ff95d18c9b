"""The papers' baseline: every sequence in one contiguous run, reserved whole when it is admitted.

What engines had before paging (Orca, FasterTransformer), as Kwon et al. (SOSP 2023, section 6.1)
compare with them: a buddy allocator, no sharing, no preemption. A sequence that is admitted has
room for all it may become, so nothing ever grows. Samples and beams have a run each, and a fork
copies.

A run of 8 blocks of 4 tokens; 21 slots are reserved, the sequence will hold 14 and holds 9::

    [ 9 live ][ 5 reserved ][ 7 + 3 internal waste ][ 8 external waste ]
                              ↑ never used, and the   ↑ what the allocator adds to reach
                                rest of a block         a power of two
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from octavo.core.layout import num_blocks_for
from octavo.core.plan import (
    NOTHING_DRAINED,
    Admission,
    CopyBlocks,
    Drained,
    IntArray,
    KVCommand,
    KVUsage,
    PrefixGroup,
    TableDeltas,
    int_array,
)
from octavo.core.protocols import Swapped
from octavo.core.request import Request
from octavo.memory.buddy import BuddyPool
from octavo.memory.checks import check_references
from octavo.memory.copies import Copies
from octavo.memory.reservation import Reservation
from octavo.memory.usage import check_usage

_NO_RUN = range(0)


class ContiguousManager:
    """Implements `octavo.core.protocols.KVManager`.

    ``num_blocks`` counts the null block; ``max_num_seqs`` is the number of rows. A row's block
    table holds consecutive ids: those of its reservation, without what the allocator adds.
    """

    sharing = False
    prefix_caching = False
    reserves_ahead = True
    max_mapped_blocks = None
    num_pinned_blocks = 0

    def __init__(
        self, num_blocks: int, block_size: int, max_num_seqs: int, reservation: Reservation
    ) -> None:
        self.pool = BuddyPool(num_blocks)
        self.block_size = block_size
        self.reservation = reservation
        self.writable: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self._num_known: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self._num_computed: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        # Slots that the row's sequence will fill in the end, and blocks of its reservation.
        self._num_final: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self._num_reserved: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self._runs: list[range] = [_NO_RUN] * max_num_seqs
        # What a forked row will copy into its own run before its next step: the parent's blocks,
        # each with a reference.
        self._sources: dict[int, range] = {}
        self._copies = Copies(self.pool)
        self._deltas: list[tuple[int, int, int]] = []
        # The run that was asked for last, in vain.
        self._refused = 1

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def num_usable_blocks(self) -> int:
        return self.pool.num_usable

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
        return list(free_rows[:count])

    def num_blocks_needed(self, request: Request) -> int:
        """Runs of one length fill an empty pool up to what is left of its size, whatever that is:
        so many of them fit as their sum says."""
        length = self.reservation.num_blocks(
            len(request.prompt_token_ids), request.max_length, self.block_size
        )
        return request.num_sequences * length

    def can_never_fit(self, num_blocks: int) -> bool:
        return num_blocks > self.pool.num_usable

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
        assert max_length is not None, "a reservation needs the sequence's final length"
        assert not self._runs[row], f"row {row} still owns blocks"
        num_known = len(token_ids)
        length = self.reservation.num_blocks(num_known, max_length, self.block_size)
        run = None if length + reserve > self.pool.num_free else self.pool.try_allocate(length)
        if run is None:
            self._refused = length
            return None
        self._refused = 1
        num_tokens = self.reservation.num_tokens(num_known, max_length)
        self._take(row, run, num_blocks_for(num_tokens, self.block_size), max_length - 1)
        self.writable[row] = self._num_reserved[row] * self.block_size
        self._num_known[row] = num_known
        return Admission()

    def _take(self, row: int, run: range, num_reserved: int, num_final: int) -> None:
        self._runs[row] = run
        self._num_reserved[row] = num_reserved
        self._num_final[row] = num_final

    def grow(self, row: int, num_tokens: int, *, reserve: int = 0) -> bool:
        end = int(self._num_reserved[row]) * self.block_size
        assert num_tokens <= end, f"row {row} outgrows its reservation of {end} tokens"
        sources = self._sources.pop(row, None)
        if sources is not None:
            # The references to the sources stay until the copy is done (see `retire`).
            for source, destination in zip(sources, self._runs[row], strict=False):
                self._copies.add(source, destination)
            table = self.block_ids(row).tolist()
            self._deltas += [(row, index, block_id) for index, block_id in enumerate(table)]
        self.writable[row] = end
        return True

    def fork(self, parent: int, child: int, num_tokens: int) -> None:
        """The child's own run is the one that it was admitted with, or, where a beam takes over a
        dead one's row, one like that which was just freed."""
        assert parent not in self._sources, f"row {parent} has not got its own tokens yet"
        assert not self._num_computed[child], f"row {child} has begun already"
        if not self._runs[child]:
            run = self.pool.try_allocate(len(self._runs[parent]))
            assert run is not None, f"no run is free for row {child} to fork into"
            self._take(child, run, int(self._num_reserved[parent]), int(self._num_final[parent]))
        sources = self._runs[parent][: num_blocks_for(num_tokens, self.block_size)]
        self.pool.share(sources)
        self._sources[child] = sources
        # Nothing may be written before the copy, which the next `grow` orders.
        self.writable[child] = 0
        self._num_known[child] = num_tokens
        self.follow(parent, child)

    def follow(self, parent: int, child: int) -> None:
        shared = int(self._num_known[child])
        self._num_computed[child] = min(int(self._num_computed[parent]), shared)

    def commit(self, rows: IntArray, num_tokens: IntArray) -> None:
        self._num_computed[rows] += num_tokens

    def free(self, row: int) -> None:
        self.pool.release(self._runs[row])
        self.pool.release(self._sources.pop(row, _NO_RUN))
        self._take(row, _NO_RUN, 0, 0)
        if self.pool.num_free == self.pool.num_usable:
            # Whoever was refused may have given up.
            self._refused = 1
        self.writable[row] = 0
        self._num_known[row] = 0
        self._num_computed[row] = 0
        if self._deltas:
            self._deltas = [delta for delta in self._deltas if delta[0] != row]
        self._copies.cancel_orphans()

    def block_ids(self, row: int) -> IntArray:
        """Until a fork's copy is ordered, the blocks that it is to copy."""
        if row in self._sources:
            return int_array(self._sources[row])
        return int_array(self._runs[row][: self._num_reserved[row]])

    def remove_idle(self, count: int) -> tuple[KVCommand, ...]:
        """Nothing: its runs are of one allocation, which cannot be resized."""
        return ()

    def missing_blocks(self, count: int) -> IntArray:
        return int_array([])

    def add_blocks(self, block_ids: IntArray) -> None:
        assert not len(block_ids), "a pool of runs does not grow"

    def drain(self) -> Drained:
        copies = self._copies.take()
        if copies is None and not self._deltas:
            return NOTHING_DRAINED
        deltas = int_array(self._deltas).reshape(-1, 3)
        self._deltas = []
        table_deltas = TableDeltas(deltas[:, 0], deltas[:, 1], deltas[:, 2])
        return Drained((copies,) if copies else (), table_deltas)

    def retire(self, commands: tuple[KVCommand, ...]) -> None:
        for command in commands:
            assert isinstance(command, CopyBlocks)
            self._copies.retire(command)

    def usage(self) -> KVUsage:
        """``reserved`` slots will be used by the sequence that has them, ``internal_waste`` never:
        what was reserved too much, and the rest of the last block. ``external_waste`` is what the
        allocator adds to a reservation, and what is free in runs too short for the request that was
        refused last, if none was admitted since (Kwon et al., figure 2)."""
        size = self.block_size
        capacity = self.pool.num_usable * size
        live = int(self._num_computed.sum())
        reserved = int(self._num_final.sum()) - live
        too_short = self.pool.num_free_below(self._refused)
        rounding = sum(map(len, self._runs)) - int(self._num_reserved.sum())
        free = (self.pool.num_free - too_short) * size
        external = (rounding + too_short) * size
        return KVUsage(
            capacity=capacity,
            live=live,
            cached=0,
            reserved=reserved,
            internal_waste=capacity - free - external - live - reserved,
            external_waste=external,
            free=free,
        )

    def check(self) -> None:
        self.pool.check()
        waiting = Counter(block_id for run in self._sources.values() for block_id in run)
        check_references(self.pool, self._runs, self._copies.retained, waiting)
        for row, run in enumerate(self._runs):
            end = int(self._num_reserved[row]) * self.block_size
            computed, final = int(self._num_computed[row]), int(self._num_final[row])
            assert bool(run) == (end > 0), f"row {row}: a run without a reservation"
            assert computed <= final <= end <= len(run) * self.block_size, f"row {row} is too long"
            expected = 0 if row in self._sources else end
            assert self.writable[row] == expected, f"row {row}: writable is not its reservation"
        check_usage(self.usage())

    # ── what there is nothing of ─────────────────────────────────────────────────────────────

    def publish(self, row: int, token_ids: IntArray) -> list[int]:
        return []

    def unpublish(self, block_ids: Iterable[int]) -> None:
        pass

    def reset_prefix_cache(self) -> None:
        pass

    def pin(self, token_ids: IntArray, *, salt: bytes = b"") -> tuple[int, ...] | None:
        return None

    def unpin(self, block_ids: Iterable[int]) -> None:
        assert not list(block_ids), "nothing was pinned"

    def num_to_pin(self, token_ids: IntArray, *, salt: bytes = b"") -> int:
        return len(token_ids) // self.block_size

    def swap_out(self, rows: Sequence[int], num_tokens: Sequence[int]) -> list[Swapped] | None:
        return None

    def swap_in(
        self, tables: Sequence[Swapped], rows: Sequence[int], *, reserve: int = 0
    ) -> int | None:
        raise AssertionError("nothing was swapped out")

    def drop_swapped(self, tables: Iterable[Swapped]) -> None:
        assert not list(tables), "nothing was swapped out"

    def prefix_groups(self, rows: IntArray, num_computed: IntArray) -> tuple[PrefixGroup, ...]:
        return ()

    def is_mapped(self, rows: IntArray) -> bool:
        return True
