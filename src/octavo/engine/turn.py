"""One call at a time: what keeps two users of one engine from taking each other's results."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turn:
    """A lock that knows its holder: other threads wait for it, the same thread is told."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None
        self.is_over = False

    def end(self) -> None:
        """There are no turns any more: who waits for one, or asks, is told. Any thread may call."""
        self.is_over = True

    def check(self) -> None:
        """Raises RuntimeError after `end`."""
        if self.is_over:
            raise RuntimeError("this LLM is closed; make a new one")

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Raises RuntimeError where waiting would never end, and after `end`."""
        if self._holder == threading.get_ident():
            raise RuntimeError(
                "this LLM is in the middle of a stream_chat; finish or close that iterator first"
            )
        with self._lock:
            self.check()
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None
