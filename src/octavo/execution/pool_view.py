"""The pool's own range of addresses: every block that has memory at its place, block i at place i.

Addresses are reserved for the largest pool there can be, so that tensors over them, and what was
captured of them, stay true when memory comes and goes. Knows blocks; knows no sequences, and of
slots only the lock of whoever maps them (`slots.Mapper`).
"""

from __future__ import annotations

import threading

import torch

from octavo.core.plan import CreateBlocks, ReleaseBlocks, ResizedBlocks, int_array
from octavo.execution.pages.interface import PageError, Pages
from octavo.execution.pages.ledger import runs


class PoolView:
    """``num_blocks`` blocks with memory, and addresses for ``max_blocks``.

    Raises:
        PageError: the system refuses memory or addresses.
    """

    def __init__(self, pages: Pages, num_blocks: int, max_blocks: int) -> None:
        self.pages = pages
        self.addresses = pages.reserve(max_blocks)
        # Handle i is block i: they are numbered from 0 on, and the lowest free number comes next.
        pages.map(self.addresses, 0, pages.create(num_blocks))
        pages.set_access(self.addresses, 0, num_blocks)
        # Mappings that the view may be cut into by holes; None: any number.
        self.max_pieces: int | None = None
        self._num_pieces = 0

    @property
    def num_blocks(self) -> int:
        """Blocks with memory."""
        return len(self.addresses.handles)

    def tensor(self) -> torch.Tensor:
        """``uint8 [max_blocks * block_bytes]``; only blocks with memory may be touched."""
        return self.pages.tensor(self.addresses)

    def resize(self, command: CreateBlocks | ReleaseBlocks, lock: threading.Lock) -> ResizedBlocks:
        """Obey. ``lock`` is held by whoever calls the same pages."""
        block_ids = command.block_ids.tolist()
        with lock:
            if isinstance(command, CreateBlocks):
                return self._create(block_ids, command.num_more)
            return self._release(block_ids)

    def _create(self, block_ids: list[int], num_more: int) -> ResizedBlocks:
        """All of them, or none."""
        handles: list[int] = []
        mapped: list[int] = []
        try:
            possible, needed = self.pages.num_available(), len(block_ids) + num_more
            if needed > possible:
                size = self.pages.block_bytes
                raise PageError(
                    f"{needed * size:,} bytes are needed for {needed:,} blocks more, and there is "
                    f"memory for {possible:,} ({possible * size:,} bytes)"
                )
            handles = self.pages.create(len(block_ids))
            if handles != block_ids:
                raise PageError(f"blocks {block_ids[0]} and on were never given back")
            for _, first, count in runs(block_ids):
                self._map(first, count)
                mapped += range(first, first + count)
        except PageError as error:
            for _, first, count in runs(mapped):
                self._unmap(first, count)
            if handles:
                self.pages.release(handles)
            return ResizedBlocks(int_array([]), str(error))
        return ResizedBlocks(int_array(block_ids))

    def _release(self, block_ids: list[int]) -> ResizedBlocks:
        """As many as the system takes, the highest first."""
        gone: list[int] = []
        try:
            for _, first, count in reversed(list(runs(block_ids))):
                self._unmap(first, count)
                try:
                    self._check_pieces()
                    self.pages.release(range(first, first + count))
                except PageError:
                    self._map(first, count)
                    raise
                gone += range(first, first + count)
        except PageError as error:
            # What could not be mapped again must not be touched.
            kept = self.addresses.accessible
            gone = [block_id for block_id in block_ids if block_id not in kept]
            return ResizedBlocks(int_array(gone), str(error))
        return ResizedBlocks(int_array(block_ids))

    def _map(self, first: int, count: int) -> None:
        before = self.pages.num_mappings
        self.pages.map(self.addresses, first, range(first, first + count))
        try:
            self.pages.set_access(self.addresses, first, count)
        except PageError:
            self.pages.unmap(self.addresses, first, count)
            raise
        self._num_pieces += self.pages.num_mappings - before

    def _unmap(self, first: int, count: int) -> None:
        before = self.pages.num_mappings
        self.pages.unmap(self.addresses, first, count)
        self._num_pieces += self.pages.num_mappings - before

    def _check_pieces(self) -> None:
        if self.max_pieces is not None and self._num_pieces > self.max_pieces:
            raise PageError(
                f"the pool would lie in more than {self.max_pieces:,} pieces beside what slots "
                "need; try again when less is cached or fewer requests run, lower max_num_seqs, or "
                "raise vm.max_map_count"
            )
