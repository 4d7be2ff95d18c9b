"""The tensors that back the pool on a GPU, and its blocks' ways to host memory and back.

Copies inside the pool run in order with the steps. Swaps run beside them, on a stream of their own,
one copy a block from or to pinned memory: a block holds all layers, so it is one piece.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial

import torch

from octavo.core.layout import KVLayout
from octavo.core.plan import CopyBlocks, IntArray, KVCommand, ResizedBlocks, SwapIn, SwapOut
from octavo.execution.device import CUDADevice, Device, Event
from octavo.execution.kernels.block_copy import copy_blocks
from octavo.execution.slots import Slots
from octavo.execution.staging import Staging


class DeviceArena:
    """``kv [num_blocks, block_size, num_layers, 2, num_kv_heads, head_dim]``; block 0 is null.

    ``host`` has the same shape for swapped-out blocks, pinned; its block 0 is not used either.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        dtype: torch.dtype,
        device: Device,
        num_host_blocks: int = 0,
    ) -> None:
        if dtype.itemsize != layout.dtype_bytes:
            raise ValueError(f"{dtype} does not have {layout.dtype_bytes} bytes an element")
        self.layout = layout
        self.num_blocks = num_blocks
        self._device = device
        shape = layout.block_shape()
        self.kv = self._allocate_pool(num_blocks, dtype)
        self.kv[0].view(torch.uint8).zero_()
        self.host: torch.Tensor | None = None
        if num_host_blocks:
            is_cuda = isinstance(device, CUDADevice)
            self.host = torch.empty(num_host_blocks + 1, *shape, dtype=dtype, pin_memory=is_cuda)
        self._side = torch.cuda.Stream() if isinstance(device, CUDADevice) else None
        self._arriving: dict[int, Event] = {}
        # Swap-outs by the number of the plan that started them. Its blocks may be given to others
        # once its result was collected, so from then on the device waits for the copy.
        self._leaving: deque[tuple[int, Event]] = deque()
        self.num_obeyed = 0
        self._num_collected = 0

    def _allocate_pool(self, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
        shape = (num_blocks, *self.layout.block_shape())
        return torch.empty(shape, dtype=dtype, device=self._device.torch_device)

    @property
    def slots(self) -> Slots | None:
        """Contiguous addresses of rows; None under `paged`."""
        return None

    def take_resized(self) -> ResizedBlocks | None:
        """What became of the pool's memory in the plan that was obeyed last, where that resized."""
        return None

    def obey(self, commands: tuple[KVCommand, ...], staging: Staging) -> tuple[int, ...]:
        """Start a plan's commands; copies once ``staging`` sends what they copy. Returns the
        transfers among them; see `arrived`."""
        started = []
        while self._leaving and self._leaving[0][0] <= self._num_collected:
            self._wait_for(self._leaving.popleft()[1])
        self.num_obeyed += 1
        for command in commands:
            if isinstance(command, CopyBlocks):
                copy = partial(copy_blocks, self.kv)
                staging.then(copy, command.sources, command.destinations)
            elif isinstance(command, SwapOut):
                staging.then(partial(self._swap_out, command, self.num_obeyed))
            elif isinstance(command, SwapIn):
                staging.then(partial(self._swap_in, command))
                started.append(command.transfer_id)
        return tuple(started)

    def collected(self, number: int) -> None:
        """The result, or the failure, of the plan of this ``num_obeyed`` is known to policy."""
        self._num_collected = max(self._num_collected, number)

    def arrived(self, started: Iterable[int], *, wait: bool) -> tuple[int, ...]:
        """The transfers that have ended since the last call. ``wait`` for those that a plan
        ``started`` when nothing else would be waited for."""
        if wait:
            for transfer in started:
                if transfer in self._arriving:
                    self._arriving[transfer].synchronize()
        done = tuple(t for t, event in self._arriving.items() if event.query())
        for transfer in done:
            del self._arriving[transfer]
        return done

    def _swap_out(self, command: SwapOut, number: int) -> None:
        event = self._swap(command.block_ids, command.host_block_ids, is_out=True)
        self._leaving.append((number, event))

    def _swap_in(self, command: SwapIn) -> None:
        event = self._swap(command.block_ids, command.host_block_ids, is_out=False)
        self._arriving[command.transfer_id] = event

    def _swap(self, block_ids: IntArray, host_ids: IntArray, *, is_out: bool) -> Event:
        assert self.host is not None, "the plan swaps, but there is no host memory"
        pairs = zip(block_ids.tolist(), host_ids.tolist(), strict=True)
        event = self._device.event()
        if self._side is None:
            self._copy(pairs, is_out)
            event.record()
            return event
        # Behind everything that was started before: the steps that filled or read these blocks.
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            self._copy(pairs, is_out)
            event.record()
        return event

    def _copy(self, pairs: Iterable[tuple[int, int]], is_out: bool) -> None:
        assert self.host is not None
        for block, host_block in pairs:
            if is_out:
                self.host[host_block].copy_(self.kv[block], non_blocking=True)
            else:
                self.kv[block].copy_(self.host[host_block], non_blocking=True)

    def _wait_for(self, event: Event) -> None:
        if self._side is not None and not event.query():
            assert isinstance(event, torch.cuda.Event)
            torch.cuda.current_stream().wait_event(event)
