"""Ctrl-C while a figure is measured: what is whole by then is kept, the rest is left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Measuring:
    """``is_cut``: an interrupt ended it."""

    is_cut: bool = False


@contextmanager
def keeping_what_is_whole(found: dict[Any, Any]) -> Iterator[Measuring]:
    """Goes on behind its block after an interrupt inside, which ``found`` has got its results in
    one by one; parts of it that are empty are taken out.

    Raises:
        KeyboardInterrupt: nothing was found yet.
    """
    measuring = Measuring()
    try:
        yield measuring
    except KeyboardInterrupt:
        measuring.is_cut = True
        _drop_empty(found)
        if not found:
            raise


def _drop_empty(found: dict[Any, Any]) -> None:
    for key, value in list(found.items()):
        if isinstance(value, dict):
            _drop_empty(value)
            if not value:
                del found[key]
