"""The tensors that back the pool, in the one layout. Knows no sequences."""

from __future__ import annotations

import torch

from octavo.core.layout import KVLayout
from octavo.core.plan import (
    CopyBlocks,
    IntArray,
    KVCommand,
    MapBlocks,
    ResizedBlocks,
    SwapIn,
    SwapOut,
)
from octavo.execution.pages import plain


class Arena:
    """``kv [num_blocks, block_size, num_layers, 2, num_kv_heads, head_dim]``; block 0 is null.

    ``host`` has the same shape for swapped-out blocks; its block 0 is not used either.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, dtype: torch.dtype, num_host_blocks: int = 0
    ) -> None:
        if dtype.itemsize != layout.dtype_bytes:
            raise ValueError(f"{dtype} does not have {layout.dtype_bytes} bytes an element")
        self.layout = layout
        self.num_blocks = num_blocks
        self.kv = self._allocate_pool(num_blocks, dtype)
        self.host = self._allocate(num_host_blocks + 1, dtype) if num_host_blocks else None

    def _allocate_pool(self, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
        return self._allocate(num_blocks, dtype)

    def _allocate(self, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
        memory = plain.allocate(num_blocks * self.layout.block_bytes)
        return self._shaped(memory, num_blocks, dtype)

    def _shaped(self, memory: torch.Tensor, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
        return memory.view(dtype).view(num_blocks, *self.layout.block_shape())

    def take_resized(self) -> ResizedBlocks | None:
        """What became of the pool's memory in the plan that was obeyed last, where that resized."""
        return None

    def obey(self, commands: tuple[KVCommand, ...]) -> tuple[int, ...]:
        """Run a plan's commands in order.

        Returns:
            The transfers that have finished: all of them, since copies are made at once.
        """
        finished = []
        for command in commands:
            assert not isinstance(command, MapBlocks), "the plan maps, but there are no slots"
            if isinstance(command, CopyBlocks):
                _copy(self.kv, command.sources, self.kv, command.destinations)
                continue
            assert isinstance(command, SwapOut | SwapIn), "the plan resizes a pool that cannot be"
            assert self.host is not None, "the plan swaps, but there is no host memory"
            if isinstance(command, SwapOut):
                _copy(self.kv, command.block_ids, self.host, command.host_block_ids)
            else:
                _copy(self.host, command.host_block_ids, self.kv, command.block_ids)
                finished.append(command.transfer_id)
        return tuple(finished)


def _copy(
    source: torch.Tensor, source_ids: IntArray, target: torch.Tensor, target_ids: IntArray
) -> None:
    target[torch.from_numpy(target_ids).long()] = source[torch.from_numpy(source_ids).long()]
