"""The pool in driver pages: a view with every block in order, and a slot of addresses for each row.

The same memory is seen twice::

    pool view   [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ] …     by copies, swaps and paged kernels
    slot 0      [ 4 ][ 1 ][ · ][ · ]                 by contiguous kernels: tokens in order
    slot 1      [ 4 ][ 2 ][ 5 ][ · ]                 the first block is shared with slot 0

On a CPU a plan's mappings are ordered when the step before it has ended, so none is changed while
something reads through it, however deep the pipeline.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from octavo.core.layout import KVLayout
from octavo.core.plan import (
    CreateBlocks,
    IntArray,
    KVCommand,
    MapBlocks,
    ReleaseBlocks,
    ResizedBlocks,
)
from octavo.execution.arena import Arena
from octavo.execution.pages.interface import Pages
from octavo.execution.pages.memfd import MemfdPages
from octavo.execution.pool_view import PoolView
from octavo.execution.slots import Slots


class VirtualArena(Arena):
    """An arena whose blocks can be mapped in ``num_slots`` slots of ``max_model_len`` tokens.

    ``slots`` is their tensor, see `Slots`. ``layout.block_bytes`` is a whole number of the pages'
    granularity; ``pages`` are by default the host's. The pool can grow to ``max_blocks``, for which
    ``kv`` has addresses.

    Raises:
        PageError: the host refuses memory or addresses.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        dtype: torch.dtype,
        num_host_blocks: int = 0,
        *,
        num_slots: int,
        max_model_len: int,
        pages: Pages | None = None,
        max_blocks: int | None = None,
    ) -> None:
        self.max_blocks = max(max_blocks or 0, num_blocks)
        self.pages = pages or MemfdPages(layout.block_bytes)
        close_at_end(self, self.pages.close)
        super().__init__(layout, num_blocks, dtype, num_host_blocks)
        self._slots = Slots(self.pages, layout, dtype, num_slots, max_model_len)
        close_at_end(self, self._slots.mapper.close)
        self.slots = self._slots.tensor
        self.max_mapped_blocks = self._slots.max_mapped_blocks
        self._pool.max_pieces = self._slots.num_spare_mappings
        self._resized: ResizedBlocks | None = None

    def _allocate_pool(self, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
        self._pool = PoolView(self.pages, num_blocks, self.max_blocks)
        return self._shaped(self._pool.tensor(), self.max_blocks, dtype)

    @property
    def num_mapped_blocks(self) -> int:
        """Places of slots with a block behind them."""
        return self._slots.num_mapped_blocks

    def obey(self, commands: tuple[KVCommand, ...]) -> tuple[int, ...]:
        """See `Arena.obey`. A place that cannot be mapped concerns the steps that read it
        (`can_show`), not the one that ordered it."""
        others = []
        for command in commands:
            if isinstance(command, MapBlocks):
                self._slots.order(command)
            elif isinstance(command, CreateBlocks | ReleaseBlocks):
                self.settle()
                self._resized = self._pool.resize(command, self._slots.mapper.lock)
            else:
                others.append(command)
        return super().obey(tuple(others))

    def take_resized(self) -> ResizedBlocks | None:
        resized, self._resized = self._resized, None
        return resized

    def settle(self) -> None:
        """Wait until all that was ordered is mapped, or has failed."""
        self._slots.mapper.wait()

    def require(self, rows: IntArray, lengths: IntArray) -> None:
        """See `Slots.require`."""
        self._slots.require(rows, lengths)

    def can_show(self, rows: IntArray, lengths: IntArray) -> bool:
        """See `Slots.can_show`."""
        return self._slots.can_show(rows, lengths)


def close_at_end(owner: object, close: Callable[[], None]) -> None:
    """Have ``close`` called when ``owner`` goes: what was named last is closed first.

    Tensors are views of memory that is not theirs: it goes with the arena, and stays at the
    interpreter's end, when a thread may be running still.
    """
    weakref.finalize(owner, close).atexit = False
