"""To which sizes steps are padded, so that few are captured and the library's products are fast.

From measurements on an H200 (docs/decisions/0005); another chip's would be others.
"""

from __future__ import annotations

import bisect

MAX_CAPTURED_TOKENS = 2048
"""A forward pass over more tokens than this is long enough to hide its launches."""
ALIGN = 16
# Rows at which cuBLAS multiplies fast: in between it takes about as long as at the next of them, at
# 448 a third longer than at 512 (8B and 1B shapes).
_SIZES = (256, 320, 384, 512, 544, 640, 672, 768, 800, 864, 960, 1024, 1152, 1280, 1408, 1536)


def aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


def batch_bucket(count: int) -> int:
    """Rows of a captured step: powers of two to 16, multiples of 16 to 224, then `_SIZES`."""
    if count <= 16:
        return 1 << max(count - 1, 0).bit_length()
    return -(-count // 16) * 16 if count <= 224 else _library_size(count)


def captured_sizes() -> tuple[int, ...]:
    """All that `batch_bucket` gives, up to the longest step that is captured."""
    return tuple(sorted({batch_bucket(count) for count in range(1, MAX_CAPTURED_TOKENS + 1)}))


def tile_bucket(count: int) -> int:
    """Prefix tiles of a captured step: powers of two, four at least."""
    return max(4, 1 << max(count - 1, 0).bit_length())


def token_bucket(count: int) -> int:
    return -(-count // 64) * 64 if count <= 192 else _library_size(count)


def _library_size(count: int) -> int:
    """The next size at which the library's products are fast."""
    index = bisect.bisect_left(_SIZES, count)
    return _SIZES[index] if index < len(_SIZES) else -(-count // 256) * 256
