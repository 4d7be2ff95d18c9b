"""The tokens of a step with prompts as the device needs them, and the tiles that prompts are cut
into. Sent in each such step, to addresses that captured ones read. As int32::

    token ids; negative: what the row sampled last     [size], in a place of a multiple of 16
    their rows, padded with the null row               [size], likewise
    their positions                                    [size], likewise
    rows that decode, number of tiles                  2, in a place of 16
    tiles                                              [fields, max_tiles], each in such a place
    tokens whose states alone are wanted               [wanted]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.plan import IntArray
from octavo.execution.captured_sizes import ALIGN, aligned
from octavo.execution.kernels.prefill_attention import PrefillTiles
from octavo.execution.prefill_tiles import FIELDS
from octavo.execution.staging import Staging


@dataclass(frozen=True, slots=True, eq=False)
class ForwardInputs:
    """``sent``, laid out as above for ``size`` tokens, ``max_tiles`` tiles and the states of
    ``num_wanted`` tokens (None: of all). It is there once the step has sent."""

    sent: torch.Tensor
    size: int
    max_tiles: int
    num_wanted: int | None

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, rows and positions, ``[size]`` each, int32."""
        width = aligned(self.size)
        ids, rows, positions = self.sent[: 3 * width].view(3, width)[:, : self.size]
        return ids, rows, positions

    def num_decode(self) -> torch.Tensor:
        """``[1]``, int32."""
        return self.sent[3 * aligned(self.size) :][:1]

    def tiles(self) -> PrefillTiles | None:
        if not self.max_tiles:
            return None
        counts = self.sent[3 * aligned(self.size) :]
        width = aligned(self.max_tiles)
        table = counts[ALIGN:][: FIELDS * width].view(FIELDS, width)
        return PrefillTiles(table[:, : self.max_tiles], counts[1:2])

    def wanted(self) -> torch.Tensor | None:
        """``[num_wanted]``, int32."""
        if self.num_wanted is None:
            return None
        return self.sent[num_ints(self.size, self.max_tiles, 0) :]


def num_ints(num_tokens: int, num_tiles: int, num_wanted: int) -> int:
    return 3 * aligned(num_tokens) + ALIGN + FIELDS * aligned(num_tiles) + num_wanted


def put_tokens(
    staging: Staging,
    token_ids: IntArray,
    rows: IntArray,
    positions: IntArray,
    num_decode: int,
    tiles: IntArray,
    wanted: NDArray[np.int64] | None,
    *,
    size: int,
    max_tiles: int,
    null: int,
) -> ForwardInputs:
    """Have these sent, padded to ``size`` tokens, of row ``null``, and ``max_tiles`` tiles."""
    count, num_tiles = len(token_ids), tiles.shape[1]
    width, tile_width = aligned(size), aligned(max_tiles)
    num_wanted = None if wanted is None else len(wanted)
    host, sent = staging.take(num_ints(size, max_tiles, num_wanted or 0))
    for part, (values, fill) in enumerate(((token_ids, 0), (rows, null), (positions, 0))):
        host[part * width : part * width + count] = values
        host[part * width + count : (part + 1) * width] = fill
    first = 3 * width
    host[first : first + 2] = (num_decode, num_tiles)
    first += ALIGN
    host[first:][: FIELDS * tile_width].reshape(FIELDS, tile_width)[:, :num_tiles] = tiles
    if wanted is not None:
        host[first + FIELDS * tile_width :] = wanted
    return ForwardInputs(sent, size, max_tiles, num_wanted)
