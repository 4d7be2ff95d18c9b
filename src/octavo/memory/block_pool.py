"""The pool: which block ids are free and how often each is referenced. Knows no sequences.

Ids are handed out last-released-first, so that the memory touched last is touched again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.core.plan import NULL_BLOCK


class BlockPool:
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
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can own: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def try_allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one reference each, or None and no change."""
        free = self._free
        if count > len(free):
            return None
        if count == 0:
            return []
        block_ids = free[: -count - 1 : -1]
        del free[-count:]
        for block_id in block_ids:
            self.references[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """One more reference to each block."""
        for block_id in block_ids:
            assert self.references[block_id] > 0, f"block {block_id} is not allocated"
            self.references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One reference less; blocks without any are free again, the first to be reused first."""
        for block_id in reversed(block_ids):
            self.references[block_id] -= 1
            count = self.references[block_id]
            assert count >= 0, f"block {block_id} released too often"
            if count == 0:
                self._free.append(block_id)

    def check(self) -> None:
        """Raise AssertionError when the free list and the reference counts disagree."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert NULL_BLOCK not in free, "the null block is free"
        assert self.references[NULL_BLOCK] == 0, "the null block is referenced"
        for block_id in range(1, self.num_blocks):
            is_free = block_id in free
            assert is_free == (self.references[block_id] == 0), (
                f"block {block_id}: free={is_free}, references={self.references[block_id]}"
            )
