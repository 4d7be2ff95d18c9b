"""Resizes of an engine in another process: who waits for which, and what became of it.

Knows messages; knows no sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from octavo.engine.messages import PoolChanged, ResizePool


class PoolCalls:
    """``send`` tells the engine."""

    def __init__(self, send: Callable[[ResizePool], None]) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[PoolChanged]] = {}
        self._next_number = 0

    async def ask(
        self, action: Literal["resize", "sleep", "wake_up"], num_blocks: int = 0
    ) -> PoolChanged:
        """Have it done and wait for the end. Who gives up waiting changes nothing.

        Raises:
            PoolSizeError, PoolBusyError: it came to nothing; the message says why.
        """
        number = self._next_number
        self._next_number += 1
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(ResizePool(number, num_blocks, action))
        try:
            changed = await future
        finally:
            self._waiting.pop(number, None)
        changed.raise_error()
        return changed

    def receive(self, message: PoolChanged) -> None:
        """News of the engine."""
        future = self._waiting.get(message.number)
        if future is not None and not future.done():
            future.set_result(message)

    def end_all(self, error: Callable[[], Exception]) -> None:
        """There will be no more news."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error())
