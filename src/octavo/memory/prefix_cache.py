"""Keys of block contents: what two sequences must have in common to share a block.

A block's key covers its tokens, everything before them, and a salt that keeps tenants apart. It is
a 128-bit BLAKE2 digest, so that nobody can craft a prompt that hits another's blocks.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from octavo.core.plan import IntArray

_KEY_BYTES = 16


def root_key(salt: bytes) -> bytes:
    """The parent of a sequence's first block."""
    return blake2b(salt, digest_size=_KEY_BYTES, person=b"octavo-prefix").digest()


def block_key(parent: bytes, token_ids: IntArray) -> bytes:
    """The key of a full block that follows the block of key ``parent``."""
    data = np.ascontiguousarray(token_ids, dtype=np.int32).tobytes()
    return blake2b(parent + data, digest_size=_KEY_BYTES).digest()


class SequenceKeys:
    """The keys of one sequence's full blocks, computed as far as they are asked for."""

    __slots__ = ("_block_size", "_keys", "num_published")

    def __init__(self, block_size: int, salt: bytes = b"") -> None:
        self._block_size = block_size
        self._keys = [root_key(salt)]
        self.num_published = 0

    def extend(self, token_ids: IntArray) -> None:
        """Make keys for all full blocks of ``token_ids``, the sequence from its start."""
        size = self._block_size
        for index in range(len(self._keys) - 1, len(token_ids) // size):
            tokens = token_ids[index * size : (index + 1) * size]
            self._keys.append(block_key(self._keys[-1], tokens))

    def __len__(self) -> int:
        return len(self._keys) - 1

    def __getitem__(self, index: int) -> bytes:
        return self._keys[index + 1]

    def fork(self, num_blocks: int) -> SequenceKeys:
        """The keys of a sequence that shares the first ``num_blocks`` full blocks."""
        child = SequenceKeys.__new__(SequenceKeys)
        child._block_size = self._block_size
        child._keys = self._keys[: num_blocks + 1]
        child.num_published = min(self.num_published, num_blocks)
        return child
