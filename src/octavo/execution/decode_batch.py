"""A decode batch as the device needs it: rows, and tiles of those that begin with the same blocks.

It is sent when the batch changes, and stays at addresses that captured steps read. As int32::

    rows, padded with the null row         [size], in a place of a multiple of 16
    tokens of each that a tile covers      [size], likewise; 0: none
    of each tile: its first row            [max_tiles]
    tokens of the prefix                   [max_tiles]
    number of tiles                        1, in a place of 16
    places in the batch, -1 beyond         [max_tiles, rows of a tile]
"""

from __future__ import annotations

import torch

from octavo.core.plan import Batch
from octavo.execution.captured_sizes import ALIGN, aligned, tile_bucket
from octavo.execution.kernels.prefix_attention import PrefixTiles
from octavo.execution.staging import Staging


class DecodeBatch:
    """``num_rows`` at most, and a tile for ``per_tile`` of them; the null row is behind them."""

    def __init__(self, staging: Staging, num_rows: int, per_tile: int) -> None:
        self._num_rows = num_rows
        self._per_tile = per_tile
        self._most_tiles = tile_bucket(2 * num_rows // per_tile + 2)
        self._staging = staging
        staging.keep(2 * aligned(num_rows) + (2 + per_tile) * self._most_tiles + ALIGN)

    def put(self, batch: Batch, size: int) -> int:
        """Have sent the rows of a batch, padded to ``size``, and its prefix tiles. Returns how many
        tiles its graph is for."""
        count, width, per_tile = len(batch.rows), aligned(size), self._per_tile
        groups, num_tiles = [], 0
        for group in batch.prefix_groups or ():
            # Those that find no room are read a row at a time, as all rows once were.
            if num_tiles + (needed := -(-len(group.places) // per_tile)) <= self._most_tiles:
                groups.append(group)
                num_tiles += needed
        max_tiles = tile_bucket(num_tiles) if num_tiles else 0
        first = 2 * width
        num_ints = first + (2 + per_tile) * max_tiles + ALIGN if num_tiles else size
        host = self._staging.take_kept(num_ints)
        host[:count] = batch.rows
        host[count:size] = self._num_rows
        if not num_tiles:
            return 0
        covered = host[width : width + size]
        covered[:] = 0
        rows, lengths = host[first:][:max_tiles], host[first + max_tiles :][:max_tiles]
        tokens = host[first + 2 * max_tiles + ALIGN :][: max_tiles * per_tile]
        host[first + 2 * max_tiles] = num_tiles
        tokens = tokens.reshape(max_tiles, per_tile)
        tile = 0
        for group in groups:
            covered[group.places] = group.num_tokens
            for start in range(0, len(group.places), per_tile):
                places = group.places[start : start + per_tile]
                tokens[tile] = -1
                tokens[tile, : len(places)] = places
                rows[tile] = batch.rows[places[0]]
                lengths[tile] = group.num_tokens
                tile += 1
        return max_tiles

    def rows(self, size: int) -> torch.Tensor:
        """Row numbers ``[size]``, int32."""
        return self._staging.device[:size]

    def prefix_tiles(self, size: int, max_tiles: int) -> PrefixTiles | None:
        """The tiles that `put` made for a graph of ``max_tiles``."""
        if not max_tiles:
            return None
        width = aligned(size)
        sent, first = self._staging.device, 2 * width
        return PrefixTiles(
            tokens=sent[first + 2 * max_tiles + ALIGN :][: max_tiles * self._per_tile],
            rows=sent[first:][:max_tiles],
            lengths=sent[first + max_tiles :][:max_tiles],
            num_tiles=sent[first + 2 * max_tiles :][:1],
            token_lengths=sent[width:][:size],
        )
