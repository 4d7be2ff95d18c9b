"""How the tokens of prompts are cut into tiles, and tiles with many keys into parts. On the host,
in numpy: `kernels.prefill_attention` does what it is told."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.core.plan import IntArray

FIELDS = 9
"""First token, tokens, row, first token's position, first key, end of keys, slot, place, parts."""
# Programs that fill a GPU of 132 multiprocessors, one each, twice.
_PROGRAMS = 264
# Keys of a part that is worth a result of its own.
MIN_KEYS = 512
KEY_TILE = 128
"""Parts begin at multiples of the kernel's tiles of keys."""


@dataclass(frozen=True, slots=True)
class TileCutter:
    """Tiles have ``tile`` tokens. ``cuts``: whether tiles with many keys become parts."""

    tile: int
    num_kv_heads: int
    cuts: bool = True

    @property
    def max_parts(self) -> int:
        """The most parts that tiles are cut into, whole ones not counted."""
        return _PROGRAMS // self.num_kv_heads + 1 if self.cuts else 0

    def tiles(
        self, rows: IntArray, counts: IntArray, starts: IntArray, done: IntArray, first: int
    ) -> IntArray:
        """``[FIELDS, tiles]`` for the rows from ``first`` on, whose first ``done`` tokens are
        covered otherwise. A tile that is cut is there once for each part; a whole one has slot
        -1. Those with most keys come first, so that the last to end are short."""
        tile = self.tile
        offsets = (np.cumsum(counts) - counts + done)[first:]
        rows, counts, starts = rows[first:], (counts - done)[first:], (starts + done)[first:]
        per_row = -(-counts // tile)
        within = np.arange(int(per_row.sum())) - np.repeat(np.cumsum(per_row) - per_row, per_row)
        found = np.empty((FIELDS, len(within)), dtype=np.int32)
        found[0] = np.repeat(offsets, per_row) + within * tile
        found[1] = np.minimum(np.repeat(counts, per_row) - within * tile, tile)
        found[2] = np.repeat(rows, per_row)
        found[3] = np.repeat(starts, per_row) + within * tile
        found[4] = 0
        found[5] = found[3] + found[1]
        found[6:] = [[-1], [0], [1]]
        return self._cut(found[:, np.argsort(-found[3], kind="stable")])

    def _cut(self, whole: IntArray) -> IntArray:
        """Tiles with far more keys than an even share become parts of about that share."""
        ends = whole[5].astype(np.int64)
        if not self.cuts or not len(ends) or ends[0] < 2 * MIN_KEYS:
            return whole
        share = -(-int(ends.sum()) * self.num_kv_heads // _PROGRAMS)
        span = max(-(-share // MIN_KEYS) * MIN_KEYS, MIN_KEYS)
        parts = np.maximum(ends // span, 1)
        if parts.max() == 1:
            return whole
        found = np.repeat(whole, parts, axis=1)
        place = np.arange(found.shape[1]) - np.repeat(np.cumsum(parts) - parts, parts)
        # Whole tiles of keys each, as even as that allows.
        own = np.repeat(-(-ends // (parts * KEY_TILE)) * KEY_TILE, parts)
        is_used = place * own < found[5]
        found, place, own = found[:, is_used], place[is_used], own[is_used]
        found[4] = place * own
        found[7] = place
        found[8] = -(-found[5] // own)
        found[5] = np.minimum(found[4] + own, found[5])
        is_part = found[8] > 1
        found[6, is_part] = np.arange(int(is_part.sum()))
        return found
