"""The tensors that back the pool, in the one layout. Knows no sequences."""

from __future__ import annotations

import torch

from octavo.core.layout import KVLayout
from octavo.core.plan import CopyBlocks, KVCommand
from octavo.execution.pages import plain


class Arena:
    """``kv [num_blocks, block_size, num_layers, 2, num_kv_heads, head_dim]``; block 0 is null."""

    def __init__(self, layout: KVLayout, num_blocks: int, dtype: torch.dtype) -> None:
        if dtype.itemsize != layout.dtype_bytes:
            raise ValueError(f"{dtype} does not have {layout.dtype_bytes} bytes an element")
        self.layout = layout
        self.num_blocks = num_blocks
        memory = plain.allocate(num_blocks * layout.block_bytes)
        self.kv = memory.view(dtype).view(num_blocks, *layout.block_shape())

    def obey(self, commands: tuple[KVCommand, ...]) -> None:
        """Run a plan's commands in order."""
        for command in commands:
            assert isinstance(command, CopyBlocks)
            sources = torch.from_numpy(command.sources).long()
            self.kv[torch.from_numpy(command.destinations).long()] = self.kv[sources]
