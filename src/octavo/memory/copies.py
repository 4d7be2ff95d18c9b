"""Copies of blocks that a plan will order, and the references that keep their sources until then.

Knows block ids; knows no sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from octavo.core.plan import CopyBlocks, int_array


class CountedBlocks(Protocol):
    """Blocks with reference counts."""

    references: list[int]

    def release(self, block_ids: Sequence[int]) -> None: ...


class Copies:
    """A copy's source keeps the reference of the table that named it until the copy is done."""

    def __init__(self, pool: CountedBlocks) -> None:
        self._pool = pool
        self._waiting: list[tuple[int, int]] = []
        self.retained: Counter[int] = Counter()

    def add(self, source: int, destination: int) -> None:
        self._waiting.append((source, destination))
        self.retained[source] += 1

    def num_readers(self, block_id: int) -> int:
        """Tables that name the block; copies that still have to read it come before any write."""
        return self._pool.references[block_id] - self.retained[block_id]

    def cancel_orphans(self) -> None:
        """Forget copies nobody waits for: their destination may get another owner in this plan."""
        kept = []
        for source, destination in self._waiting:
            if self._pool.references[destination]:
                kept.append((source, destination))
            else:
                self.retained[source] -= 1
                self._pool.release([source])
        self._waiting = kept

    def take(self) -> CopyBlocks | None:
        """The command for what waits; `retire` is due when it is obeyed."""
        if not self._waiting:
            return None
        pairs = int_array(self._waiting)
        self._waiting = []
        return CopyBlocks(sources=pairs[:, 0], destinations=pairs[:, 1])

    def retire(self, command: CopyBlocks) -> None:
        sources = command.sources.tolist()
        self.retained.subtract(sources)
        self._pool.release(sources)
