"""What must hold of block tables at any moment. For tests and debug runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from octavo.core.layout import num_blocks_for
from octavo.core.plan import IntArray
from octavo.memory.block_pool import BlockPool
from octavo.memory.copies import CountedBlocks


def check_references(
    pool: CountedBlocks,
    tables: Sequence[Sequence[int]],
    retained: Counter[int],
    pinned: Counter[int],
) -> None:
    """Raise AssertionError unless every reference is a table's, a copy's or a pin's."""
    references = Counter(chain.from_iterable(tables))
    references.update(+retained)
    references.update(pinned)
    for block_id, count in enumerate(pool.references):
        assert references[block_id] == count, (
            f"block {block_id}: {count} references, {references[block_id]} owners"
        )


def check_tables(
    pool: BlockPool,
    tables: Sequence[list[int]],
    retained: Counter[int],
    block_size: int,
    writable: IntArray,
    num_known: IntArray,
    num_computed: IntArray,
) -> None:
    """Raise AssertionError when a row has more than its blocks, or may write what others read.

    The last three are tokens by row, as ``tables`` are.
    """
    for row, table in enumerate(tables):
        end, computed = int(writable[row]), int(num_computed[row])
        assert computed <= len(table) * block_size, f"row {row}: more tokens than blocks"
        assert end <= len(table) * block_size, f"row {row}: writable beyond blocks"
        assert len(set(table)) == len(table), f"row {row}: a block appears twice"
        first = max(int(num_known[row]), computed) // block_size
        for block_id in table[first : num_blocks_for(end, block_size)]:
            readers = pool.references[block_id] - retained[block_id]
            assert readers == 1 or end % block_size, (
                f"row {row}: may write block {block_id} which has {readers} references"
            )
