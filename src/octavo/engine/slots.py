"""What ``kv=virtual`` needs of a host: blocks that can be mapped, and slots for all rows."""

from __future__ import annotations

import os

import torch

from octavo.config import ConfigError, ResourceError
from octavo.core.layout import (
    BlockSizeError,
    KVLayout,
    choose_block,
    mappable_block,
    num_blocks_for,
)
from octavo.engine.mechanism import Limits
from octavo.execution import host
from octavo.execution.pages.interface import PageError
from octavo.execution.virtual_arena import VirtualArena

# What a sequence is expected to grow to where nobody knows: decides whether layers are padded.
_EXPECTED_TOKENS = 1024


def mappable_layout(
    layout: KVLayout, asked: int | None, max_model_len: int, page_bytes: int
) -> KVLayout:
    """``layout`` with a block that is a whole number of pages, padded where that wastes less.

    Raises:
        ConfigError: the block size that was ``asked`` for cannot be mapped.
    """
    if asked is None:
        return choose_block(layout, page_bytes, min(max_model_len, _EXPECTED_TOKENS)).layout
    try:
        return mappable_block(layout, page_bytes).layout
    except BlockSizeError as error:
        raise ConfigError(f"kv=virtual: {error}; or leave block_size out") from error


def build_slots(
    layout: KVLayout,
    num_blocks: int,
    dtype: torch.dtype,
    num_host_blocks: int,
    limits: Limits,
) -> VirtualArena:
    """The pool in host pages, and a slot of the longest sequence for every row.

    Raises:
        ConfigError: the host is not Linux.
        ResourceError: it refuses memory, addresses, descriptors, or mappings for one such sequence.
    """
    check_host()
    try:
        arena = VirtualArena(
            layout,
            num_blocks,
            dtype,
            num_host_blocks,
            num_slots=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            max_blocks=host.total_bytes() // layout.block_bytes,
        )
    except PageError as error:
        raise ResourceError(f"kv=virtual: {error}; or use kv=paged") from error
    check_longest(layout, num_blocks, arena.max_mapped_blocks, limits)
    return arena


def check_host() -> None:
    """Raises ConfigError where the host has no files in memory to map."""
    if not hasattr(os, "memfd_create"):
        raise ConfigError("kv=virtual needs Linux (memfd_create); use kv=paged")


def check_longest(layout: KVLayout, num_blocks: int, possible: int, limits: Limits) -> None:
    """Raises ResourceError when the longest sequence that fits could not be mapped."""
    longest = min(limits.max_model_len, (num_blocks - 1) * layout.block_size + 1)
    needed = num_blocks_for(longest, layout.block_size)
    if possible < needed:
        raise ResourceError(
            f"kv=virtual: a sequence of {longest} tokens needs {needed} mapped blocks and the host "
            f"allows {possible}; lower max_model_len or max_num_seqs, raise block_size or "
            "vm.max_map_count, or use kv=paged"
        )
