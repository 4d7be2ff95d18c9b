"""A buddy allocator over the pool's blocks: runs of consecutive ids, powers of two long.

A run of length 2^k begins at a multiple of 2^k, counted from the first block. A longer run than is
asked for is halved until it fits; a run that comes back joins its other half, its *buddy*, whenever
that is free, too (Knowlton, 1965). Of equal runs the one with the lowest ids is taken, so that the
same calls give the same runs. Knows no sequences and no tokens.

A pool of 11 blocks, and what is left after runs of 1, 2 and 2 blocks were taken::

    offset   0   1   2   3   4   5   6   7   8   9   10
    empty    [              8              ][  2   ][ 1 ]
    then     [ taken ][  2  ][      4      ][ taken][ taken ]
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from octavo.core.plan import NULL_BLOCK


class BuddyPool:
    """Ids ``1 .. num_blocks - 1`` with reference counts; id 0 is the null block.

    Raises:
        ValueError: fewer than two blocks (the null block and one to use).
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"a pool needs at least 2 blocks (one is the null block), got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self.num_free = self.num_usable
        # By order k: offsets of free runs of 2^k blocks, ascending.
        self._free: list[list[int]] = [[] for _ in range(self.num_usable.bit_length())]
        offset = 0
        for order in reversed(range(len(self._free))):
            # The longest run first, so that each begins at a multiple of its length.
            if self.num_usable >> order & 1:
                self._free[order].append(offset)
                offset += 1 << order

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can own: all but the null block."""
        return self.num_blocks - 1

    def num_free_below(self, length: int) -> int:
        """Free blocks in runs that are shorter than ``length``, a power of two."""
        orders = range(min(length.bit_length() - 1, len(self._free)))
        return sum(len(self._free[order]) << order for order in orders)

    def try_allocate(self, length: int) -> range | None:
        """A run of ``length`` blocks, a power of two, with one reference each; None and no change
        when no free run is that long."""
        assert length & (length - 1) == 0 < length, f"{length} is no power of two"
        wanted = length.bit_length() - 1
        order = wanted
        while order < len(self._free) and not self._free[order]:
            order += 1
        if order >= len(self._free):
            return None
        offset = self._free[order].pop(0)
        while order > wanted:
            order -= 1
            insort(self._free[order], offset + (1 << order))
        self.num_free -= length
        run = range(offset + NULL_BLOCK + 1, offset + NULL_BLOCK + 1 + length)
        for block_id in run:
            self.references[block_id] = 1
        return run

    def share(self, block_ids: Iterable[int]) -> None:
        """One more reference to each block, which somebody owns."""
        for block_id in block_ids:
            assert self.references[block_id] > 0, f"block {block_id} is not allocated"
            self.references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One reference less. Blocks without any are free, joined with their buddies; a run need
        not come back whole."""
        for block_id in block_ids:
            self.references[block_id] -= 1
            count = self.references[block_id]
            assert count >= 0, f"block {block_id} released too often"
            if count == 0:
                self._join(block_id - NULL_BLOCK - 1)
                self.num_free += 1

    def _join(self, offset: int) -> None:
        order = 0
        while True:
            runs, buddy = self._free[order], offset ^ (1 << order)
            index = bisect_left(runs, buddy)
            if index == len(runs) or runs[index] != buddy:
                insort(runs, offset)
                return
            del runs[index]
            offset = min(offset, buddy)
            order += 1

    def free_runs(self) -> list[range]:
        """All free runs, in the order of their ids."""
        return sorted(
            (
                range(offset + NULL_BLOCK + 1, offset + NULL_BLOCK + 1 + (1 << order))
                for order, runs in enumerate(self._free)
                for offset in runs
            ),
            key=lambda run: run.start,
        )

    def check(self) -> None:
        """Raise AssertionError when the runs and the reference counts disagree, or two buddies are
        free and apart."""
        assert self.references[NULL_BLOCK] == 0, "the null block is referenced"
        free: set[int] = set()
        for order, runs in enumerate(self._free):
            assert runs == sorted(set(runs)), "free runs are out of order"
            for offset in runs:
                assert offset % (1 << order) == 0, f"a run of {1 << order} begins at {offset}"
                assert offset ^ (1 << order) not in runs, "two buddies are not joined"
        for run in self.free_runs():
            assert free.isdisjoint(run), "free runs overlap"
            free.update(run)
        assert len(free) == self.num_free, "free blocks are miscounted"
        for block_id in range(1, self.num_blocks):
            count = self.references[block_id]
            assert (count == 0) == (block_id in free), f"block {block_id}: {count} references"
