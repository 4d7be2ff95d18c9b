"""Which rows of a batch begin with the same blocks, and so could read them once. Pure arithmetic on
block tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.core.plan import IntArray, PrefixGroup, int_array

MIN_SAVED_TOKENS = 32768
"""Tokens that need not be read for a group to be worth its own pass: (rows - 1) × prefix. An 8B's
are 128 MB a layer then, six times what the pass costs on a GPU of 4 TB/s."""


def prefix_groups(
    tables: Sequence[Sequence[int]],
    rows: IntArray,
    num_full_blocks: IntArray,
    block_size: int,
) -> tuple[PrefixGroup, ...]:
    """Groups among ``rows``, of which ``tables[row]`` is the block table and whose first
    ``num_full_blocks`` blocks are full and computed (``[n]``, as ``rows``).

    Of the rows that share their first block, those are taken whose common prefix saves the most.
    """
    firsts = np.fromiter((tables[row][0] for row in rows.tolist()), dtype=np.int64, count=len(rows))
    ids, counts = np.unique(firsts, return_counts=True)
    found = []
    for block_id in ids[counts > 1].tolist():
        places = np.flatnonzero(firsts == block_id)
        longest = int(num_full_blocks[places].max())
        if (len(places) - 1) * longest * block_size < MIN_SAVED_TOKENS:
            continue
        leader = _leader(places, num_full_blocks)
        common = _common(tables, rows, places, num_full_blocks, leader)
        order = np.argsort(-common, kind="stable")
        saved = common[order] * np.arange(len(places)) * block_size
        best = int(np.argmax(saved))
        if saved[best] >= MIN_SAVED_TOKENS:
            members = np.sort(places[order[: best + 1]])
            length = int(common[order[best]]) * block_size
            found.append(PrefixGroup(int_array(members), length))
    return tuple(found)


def _leader(places: np.ndarray, num_full_blocks: IntArray) -> int:
    """The place of the longest table: the one that the others can have most in common with."""
    return int(places[np.argmax(num_full_blocks[places])])


def _common(
    tables: Sequence[Sequence[int]],
    rows: IntArray,
    places: np.ndarray,
    num_full_blocks: IntArray,
    leader: int,
) -> IntArray:
    """``[len(places)]``: full blocks that each table begins with as the leader's does."""
    model = list(tables[rows[leader]])
    found = []
    for place in places.tolist():
        limit = int(num_full_blocks[place])
        table = tables[rows[place]]
        if table[:limit] == model[:limit]:
            found.append(limit)
        else:
            pairs = zip(table[:limit], model[:limit], strict=False)
            found.append(next((i for i, (a, b) in enumerate(pairs) if a != b), limit))
    return int_array(found)
