"""Garbage collection beside an engine: what lives as long as it does need not be visited again.

A full collection visits every object, some hundred thousand once PyTorch is imported, while the
device waits for its next step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def freeze_process() -> None:
    """Leave all that is there out of collections, for good: for a process that is an engine's."""
    gc.collect()
    gc.freeze()


@contextmanager
def frozen_meanwhile() -> Iterator[None]:
    """Leave all that is there out of collections while inside: for a process that is somebody
    else's, whose own garbage, engines that were dropped among it, is collected afterwards.

    Does nothing where something is frozen already, which then is its owner's to thaw.
    """
    if gc.get_freeze_count():
        yield
        return
    # The young first: nobody would count what is frozen as new.
    gc.collect(1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
