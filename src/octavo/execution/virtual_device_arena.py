"""The pool of a GPU in driver pages, seen twice: its view, and a slot of addresses for each row.

As `virtual_arena`, but that steps run while the next plan is obeyed. So the host does not wait for
the device when it orders mappings; policy names no place that a running step may read, but one:
where copy-on-write gives a row that decodes another block, `GPURunner` waits for the step before.
"""

from __future__ import annotations

import torch

from octavo.core.layout import KVLayout
from octavo.core.plan import CreateBlocks, KVCommand, MapBlocks, ReleaseBlocks, ResizedBlocks
from octavo.execution.device import Device
from octavo.execution.device_arena import DeviceArena
from octavo.execution.pages.interface import Pages
from octavo.execution.pool_view import PoolView
from octavo.execution.slots import Slots
from octavo.execution.staging import Staging
from octavo.execution.virtual_arena import close_at_end


class VirtualDeviceArena(DeviceArena):
    """An arena whose blocks can be mapped in ``num_slots`` slots of ``max_model_len`` tokens.

    ``layout.block_bytes`` is a whole number of the granularity of ``pages``. The pool can grow to
    ``max_blocks``, for which ``kv`` has addresses. There is one more slot than rows: the one of
    padding shows the null block at its first place.

    Raises:
        PageError: the driver refuses memory or addresses.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        dtype: torch.dtype,
        device: Device,
        num_host_blocks: int = 0,
        *,
        num_slots: int,
        max_model_len: int,
        pages: Pages,
        max_blocks: int | None = None,
    ) -> None:
        self.max_blocks = max(max_blocks or 0, num_blocks)
        self.pages = pages
        close_at_end(self, pages.close)
        super().__init__(layout, num_blocks, dtype, device, num_host_blocks)
        self._slots = Slots(pages, layout, dtype, num_slots + 1, max_model_len)
        close_at_end(self, self._slots.mapper.close)
        self._slots.show_null(num_slots)
        self._slots.show_null(-1)
        self._pool.max_pieces = self._slots.num_spare_mappings
        self._resized: ResizedBlocks | None = None

    def _allocate_pool(self, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
        self._pool = PoolView(self.pages, num_blocks, self.max_blocks)
        return self._pool.tensor().view(dtype).view(self.max_blocks, *self.layout.block_shape())

    @property
    def slots(self) -> Slots:
        return self._slots

    def obey(self, commands: tuple[KVCommand, ...], staging: Staging) -> tuple[int, ...]:
        """See `DeviceArena.obey`. A place that cannot be mapped concerns the steps that read it."""
        others = []
        for command in commands:
            if isinstance(command, MapBlocks):
                self._slots.order(command)
            elif isinstance(command, CreateBlocks | ReleaseBlocks):
                if isinstance(command, ReleaseBlocks):
                    # No launched step reads what goes, but a copy to host memory may.
                    self._device.synchronize()
                self._slots.mapper.wait()
                self._resized = self._pool.resize(command, self._slots.mapper.lock)
            else:
                others.append(command)
        return super().obey(tuple(others), staging)

    def take_resized(self) -> ResizedBlocks | None:
        resized, self._resized = self._resized, None
        return resized
