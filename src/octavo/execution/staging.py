"""Numbers on their way to a device, without anybody waiting: pinned memory, used in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.plan import IntArray
from octavo.execution.device import Device
from octavo.execution.kernels.row_state import scatter

Int64Array = NDArray[np.int64]

_ALIGN = 32  # ints; kernels are compiled for aligned addresses


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """``target.view(-1)[places] = values``, int32; places differ from each other."""

    target: torch.Tensor
    places: Int64Array | IntArray
    values: IntArray


class Staging:
    """Pinned host memory for a step's numbers, in turns, and where they land on the device."""

    def __init__(self, device: Device, num_ints: int, depth: int) -> None:
        self.num_ints = num_ints
        self._slots = [(device.pinned(num_ints), device.event()) for _ in range(depth + 1)]
        self._turn = 0
        self.device = torch.zeros(num_ints, dtype=torch.int32, device=device.torch_device)

    def host(self) -> IntArray:
        """The next turn's memory, once the device has read what was there."""
        self._turn = (self._turn + 1) % len(self._slots)
        memory, event = self._slots[self._turn]
        event.synchronize()
        array: IntArray = memory.numpy()
        return array

    def send(self, count: int) -> torch.Tensor:
        """Copy the first ``count`` ints; returns them on the device, until the next `send`."""
        memory, event = self._slots[self._turn]
        target = self.device[:count]
        target.copy_(memory[:count], non_blocking=True)
        event.record()
        return target

    def scatter(self, writes: Sequence[Write]) -> None:
        """Make ``writes``, of which no two touch one place, in one copy where they fit in it."""
        targets = {id(write.target): write.target for write in writes}
        waiting: list[tuple[torch.Tensor, Int64Array | IntArray, IntArray]] = []
        room = self.num_ints
        for key, target in targets.items():
            own = [write for write in writes if id(write.target) == key]
            places = np.concatenate([write.places for write in own])
            values = np.concatenate([write.values for write in own])
            first = 0
            while first < len(places):
                most = room // 2 // _ALIGN * _ALIGN
                if not most:
                    self._send_writes(waiting)
                    waiting, room = [], self.num_ints
                    continue
                part = slice(first, min(first + most, len(places)))
                waiting.append((target, places[part], values[part]))
                room -= 2 * -(-(part.stop - first) // _ALIGN) * _ALIGN
                first = part.stop
        if waiting:
            self._send_writes(waiting)

    def _send_writes(
        self, writes: list[tuple[torch.Tensor, Int64Array | IntArray, IntArray]]
    ) -> None:
        host, first, found = self.host(), 0, []
        for target, places, values in writes:
            count = len(places)
            second = first + -(-count // _ALIGN) * _ALIGN
            host[first : first + count] = places
            host[second : second + count] = values
            found.append((target, slice(first, first + count), slice(second, second + count)))
            first = second + -(-count // _ALIGN) * _ALIGN
        sent = self.send(first)
        for target, places_at, values_at in found:
            scatter(target, sent[places_at], sent[values_at])
