"""GGUF's blocks of 32 weights that can be used as they are stored: Q4_0, Q4_1 and Q8_0.

Their bytes, for one block::

    Q4_0   float16 d,             16 bytes: weight i in the low half of byte i, 16 + i in the high
    Q4_1   float16 d, float16 m,  16 bytes: likewise
    Q8_0   float16 d,             32 signed bytes
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.execution.models.weights import QuantizedRows

GROUP = 32
STORED_TYPES = ("Q4_0", "Q4_1", "Q8_0")


def stored_rows(raw: NDArray[np.uint8], type_name: str) -> QuantizedRows:
    """``raw``: uint8 ``[N, row_bytes]`` of one of ``STORED_TYPES``."""
    block_bytes = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[type_name]
    blocks = raw.reshape(len(raw), -1, block_bytes)
    num_blocks = blocks.shape[1]
    scales = _halves(blocks, 0)
    if type_name == "Q8_0":
        # Signed to offset binary: -128 becomes 0.
        values = blocks[:, :, 2:] ^ np.uint8(128)
        return QuantizedRows(8, values.reshape(len(raw), -1), scales, np.zeros_like(scales))
    nibbles = blocks[:, :, block_bytes - 16 :]
    values = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    # Q4_0 stands for d * (q - 8); -8 d is exact in float16 unless it overflows.
    minima = _halves(blocks, 2) if type_name == "Q4_1" else scales * np.float16(-8)
    return QuantizedRows(4, values.reshape(len(raw), num_blocks * GROUP), scales, minima)


def _halves(blocks: NDArray[np.uint8], offset: int) -> NDArray[np.float16]:
    """``float16 [N, num_blocks]`` at ``offset`` of each block."""
    return np.ascontiguousarray(blocks[:, :, offset : offset + 2]).view(np.float16)[..., 0]
