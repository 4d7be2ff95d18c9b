"""Plain host memory for the pool: one anonymous mapping, in huge pages where the host has them."""

from __future__ import annotations

import contextlib
import mmap

import torch


def allocate(num_bytes: int) -> torch.Tensor:
    """``uint8 [num_bytes]`` of zeros. Memory is only taken when it is first written.

    Attention jumps by a token stride of tens of kilobytes, a new 4 KiB page each time; huge pages
    spare most of those address translations.

    Raises:
        MemoryError: the host refuses that much address space.
    """
    try:
        mapping = mmap.mmap(-1, num_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(
            f"cannot reserve {num_bytes / 2**30:.2f} GiB for blocks: {error}; lower --kv-memory, "
            "or --swap-memory"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages answers EINVAL; small pages work as well, only slower.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)
