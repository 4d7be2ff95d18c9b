"""A step's numbers on their way to a device: put together in pinned memory, of which steps take
turns, sent in one copy, and waited for by nobody.

Copied is what a step put there, from the first place to the last; a step without numbers copies
nothing. As int32::

    what stays until it is     what a step takes, at the same places    what is sent for work
    sent again                 where it takes the same                  that waits for it
    ├─ keep, take_kept ───────┼─ reserve, take ───────────────────────┼─ room, then ───────┤
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.plan import IntArray
from octavo.execution.device import Device, Event

Int64Array = NDArray[np.int64]

_ALIGN = 32  # ints; kernels are compiled for aligned addresses


class Staging:
    """``room`` is how many ints of `then` fit in one copy. While up to ``depth`` steps are in
    flight, and each sends one copy, none waits for another's."""

    def __init__(self, device: Device, depth: int, room: int = 0) -> None:
        self._device = device
        self._depth = depth
        self._num_kept = 0
        self._num_ints = _padded(room)
        # Allocated at the first use, when all have said what they take.
        self._landing: torch.Tensor | None = None
        self._turns: list[tuple[torch.Tensor, IntArray, Event]] = []
        self._turn = 0
        # Of the copy that is being put together.
        self._is_open = False
        self._first = self._end = 0
        self._waiting: list[tuple[Callable[..., None], tuple[Int64Array | IntArray, ...]]] = []

    def keep(self, num_ints: int) -> None:
        """Have a place for ``num_ints`` that stay, of one owner; before anything is taken."""
        assert not self._num_kept, "somebody else keeps something"
        self.reserve(num_ints)
        self._num_kept = self._first = self._end = _padded(num_ints)

    def reserve(self, num_ints: int) -> None:
        """Have room for ``num_ints`` that a step takes at once; before anything is taken."""
        assert self._landing is None, "memory is allocated already"
        self._num_ints += _padded(num_ints)

    @property
    def device(self) -> torch.Tensor:
        """Where all of it lands, int32."""
        if self._landing is None:
            pinned = [self._device.pinned(self._num_ints) for _ in range(self._depth + 1)]
            self._turns = [(memory, memory.numpy(), self._device.event()) for memory in pinned]
            place = self._device.torch_device
            self._landing = torch.zeros(self._num_ints, dtype=torch.int32, device=place)
        return self._landing

    def take(self, num_ints: int) -> tuple[IntArray, torch.Tensor]:
        """Host memory to be filled before `send`, behind what was taken before; and where it is on
        the device from then on, until the next step sends."""
        landing = self.device
        if not self._is_open:
            self._is_open = True
            self._turn = (self._turn + 1) % len(self._turns)
            # The device has read what was there.
            self._turns[self._turn][2].synchronize()
        first, last = self._end, self._end + num_ints
        assert last <= self._num_ints, "more is taken than was reserved"
        self._end = _padded(last)
        return self._turns[self._turn][1][first:last], landing[first:last]

    def take_kept(self, num_ints: int) -> IntArray:
        """As `take`, of what stays, at the start of `device`; before anything else of a step."""
        assert not self._is_open, "something was taken before"
        assert num_ints <= self._num_kept, "more is taken than was kept for"
        self._first = self._end = 0
        return self.take(num_ints)[0]

    def then(self, work: Callable[..., None], *arrays: Int64Array | IntArray) -> None:
        """Call ``work`` behind the copy with what ``arrays``, all of one length, are on the device;
        in the order of these calls, and not at all if they are empty. What finds no room goes in
        another copy, and part by part if one is not enough."""
        if not arrays or len(arrays[0]):
            self._waiting.append((work, arrays))

    def send(self) -> None:
        """Copy what was put together, if anything, and start the work that waits for it."""
        if not self._is_open and not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        ready: list[tuple[Callable[..., None], list[torch.Tensor]]] = []
        # Further copies leave what was taken where it is: the step is still to read it.
        behind = self._end
        try:
            for work, arrays in waiting:
                first, count = 0, len(arrays[0]) if arrays else 0
                while count - first > (most := self._most(len(arrays))):
                    if ready:
                        self._copy(ready)
                        self._first = self._end = behind
                        ready = []
                    else:
                        parts = [array[first : first + most] for array in arrays]
                        ready.append((work, [self._put(part) for part in parts]))
                        first += most
                ready.append((work, [self._put(array[first:]) for array in arrays]))
            self._copy(ready)
        finally:
            # Whatever happened, the next step finds the same places.
            self._is_open = False
            self._first = self._end = self._num_kept

    def _most(self, num_arrays: int) -> int:
        """Of how many ints each of ``num_arrays`` would still fit."""
        free = self._num_ints - self._end
        return free // num_arrays // _ALIGN * _ALIGN if num_arrays else 0

    def _put(self, values: Int64Array | IntArray) -> torch.Tensor:
        host, landed = self.take(len(values))
        host[:] = values
        return landed

    def _copy(self, ready: list[tuple[Callable[..., None], list[torch.Tensor]]]) -> None:
        if self._is_open:
            memory, _, event = self._turns[self._turn]
            part = slice(self._first, self._end)
            self.device[part].copy_(memory[part], non_blocking=True)
            event.record()
            self._is_open = False
        for work, arrays in ready:
            work(*arrays)


def _padded(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN
