"""Ctrl-C in a program that runs an engine itself: it never cuts a step in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Ctrl-C raises at the call that this yields, where the engine's state is whole, and not in
    the middle of a step. A second one raises at once. Handlers of the program's own are left."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    was_interrupted = False

    def note(*_: object) -> None:
        nonlocal was_interrupted
        was_interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def raise_interrupt() -> None:
        if was_interrupted:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield raise_interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
