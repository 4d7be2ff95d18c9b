"""Long calls beside an event loop, on threads that keep nothing from ending."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """The result of a long call on a thread of its own, which keeps neither the loop nor the
    process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (function(), None)
        except BaseException as error:
            outcome = (None, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=work, name="octavo-load", daemon=True).start()
    return future
