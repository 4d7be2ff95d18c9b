"""Where the blocks of swapped-out sequences are: a pool of blocks in host memory.

Sharing is kept: a block that several sequences share is moved once, each way (Kwon et al., SOSP
2023, section 4.5). Knows block ids on both sides; knows no tensors and no scheduling.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.core.plan import SwapIn, SwapOut, int_array
from octavo.memory.block_pool import BlockPool
from octavo.memory.prefix_cache import SequenceKeys


@dataclass(frozen=True, slots=True, eq=False)
class SwappedTable:
    """A sequence's block table in host memory, and how many of its tokens are computed."""

    host_block_ids: tuple[int, ...]
    num_computed_tokens: int
    keys: SequenceKeys | None = None


class SwapSpace:
    """``num_blocks`` host blocks; none: nothing can be swapped."""

    def __init__(self, num_blocks: int) -> None:
        self._pool = BlockPool(num_blocks + 1) if num_blocks else None
        self._num_transfers = 0

    @property
    def num_blocks(self) -> int:
        return self._pool.num_usable if self._pool else 0

    @property
    def num_free(self) -> int:
        return self._pool.num_free if self._pool else 0

    def try_out(self, tables: Sequence[list[int]]) -> tuple[SwapOut, list[tuple[int, ...]]] | None:
        """Host blocks for the distinct blocks of ``tables``; None when they do not fit.

        Returns:
            The command, and each table in host block ids.
        """
        block_ids = _distinct(tables)
        if self._pool is None:
            return None
        host_ids = self._pool.try_allocate(len(block_ids))
        if host_ids is None:
            return None
        place = dict(zip(block_ids, host_ids, strict=True))
        # One reference for each table that names a block, so that tables can be dropped singly.
        for block_id in _repeated(tables):
            self._pool.share([place[block_id]])
        command = SwapOut(int_array(block_ids), int_array(host_ids))
        return command, [tuple(place[block_id] for block_id in table) for table in tables]

    def bring_in(self, tables: Sequence[SwappedTable], block_ids: Sequence[int]) -> SwapIn:
        """The command that fills ``block_ids``, one for each of `distinct` host block. The host
        blocks stay taken until `drop`."""
        host_ids = self.distinct(tables)
        self._num_transfers += 1
        return SwapIn(self._num_transfers, int_array(host_ids), int_array(list(block_ids)))

    def distinct(self, tables: Sequence[SwappedTable]) -> list[int]:
        """Host blocks of the tables, shared ones once, in order of appearance."""
        return _distinct([list(table.host_block_ids) for table in tables])

    def num_next_blocks(
        self, tables: Sequence[SwappedTable], block_size: int, *, sharing: bool
    ) -> int:
        """Blocks that swapped-out sequences take with their next token each: new ones, and copies
        for all but one of those who share what they write into (or, without sharing, anything)."""
        written: list[int] = []
        num_new = 0
        for table in tables:
            if table.num_computed_tokens % block_size == 0:
                num_new += 1
            elif sharing:
                written.append(table.host_block_ids[-1])
            if not sharing:
                written += table.host_block_ids
        return num_new + len(written) - len(set(written))

    def drop(self, table: SwappedTable) -> None:
        """The table is not needed any more: it came in, or its sequence is not wanted."""
        assert self._pool is not None
        self._pool.release(list(table.host_block_ids))

    def check(self) -> None:
        if self._pool is not None:
            self._pool.check()


def _distinct(tables: Sequence[Iterable[int]]) -> list[int]:
    return list(dict.fromkeys(block_id for table in tables for block_id in table))


def _repeated(tables: Sequence[Iterable[int]]) -> list[int]:
    """Every occurrence of a block but its first."""
    seen: set[int] = set()
    repeated = []
    for table in tables:
        for block_id in table:
            if block_id in seen:
                repeated.append(block_id)
            seen.add(block_id)
    return repeated
