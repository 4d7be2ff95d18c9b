"""Blocks that stay in the prefix cache although no sequence uses them: one more reference each.

Knows block ids; knows no tokens and no requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from octavo.memory.block_pool import BlockPool


class Pins:
    """Counts how often each block of ``pool`` is pinned: prefixes that begin alike share blocks."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._counts: Counter[int] = Counter()

    def __len__(self) -> int:
        """Pinned blocks, each counted once."""
        return len(self._counts)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._counts

    @property
    def counts(self) -> Counter[int]:
        """The references that pins hold, by block."""
        return self._counts

    def num_idle(self) -> int:
        """Pinned blocks that nothing but pins refers to."""
        references = self._pool.references
        return sum(references[block_id] == count for block_id, count in self._counts.items())

    def add(self, block_ids: Iterable[int]) -> tuple[int, ...]:
        """Pin cached or referenced blocks once more."""
        pinned = tuple(block_ids)
        self._pool.share(pinned)
        self._counts.update(pinned)
        return pinned

    def drop(self, block_ids: Iterable[int]) -> None:
        """Undo one `add`."""
        pinned = list(block_ids)
        self._counts.subtract(pinned)
        self._counts = +self._counts
        self._pool.release(pinned)

    def check(self) -> None:
        """Raise AssertionError when a pinned block cannot be hit any more."""
        for block_id in self._counts:
            assert self._pool.has_key(block_id), f"block {block_id} is pinned but not published"
