"""The pool's size as those outside the engine see it: in bytes, and asleep or awake.

Knows the scheduler's words for it; knows no sockets and no pages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from octavo.config import ConfigError, KVMemory
from octavo.core.plan import KVCapacity
from octavo.core.request import PoolBusyError, PoolSizeError
from octavo.engine.core import EngineCore
from octavo.engine.report import EngineReport


@dataclass(frozen=True, slots=True)
class PoolSize:
    """``num_blocks`` blocks of ``block_bytes`` bytes and ``block_size`` tokens, beside the null
    block, which ``num_bytes`` counts too."""

    num_blocks: int
    block_size: int
    block_bytes: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return (self.num_blocks + 1) * self.block_bytes

    @classmethod
    def of(cls, capacity: KVCapacity, num_blocks: int) -> PoolSize:
        return cls(num_blocks, capacity.block_size, capacity.block_bytes)


def blocks_in(size: str | int, capacity: KVCapacity) -> int:
    """Blocks beside the null block in ``size``: bytes, or a text such as ``2GiB``.

    Raises:
        PoolSizeError: it is neither, or holds not even one.
    """
    num_bytes: int | None = None
    if isinstance(size, str):
        # ``auto`` and shares are for the start, when it is known what remains.
        with contextlib.suppress(ConfigError):
            num_bytes = KVMemory.parse(size).num_bytes
    elif isinstance(size, int) and not isinstance(size, bool):
        num_bytes = size
    if num_bytes is None:
        raise PoolSizeError(
            f"kv_memory must be a size such as 2GiB or a number of bytes, got {size!r:.60}"
        )
    if num_bytes >= 1 << 60:
        raise PoolSizeError(f"kv_memory {size} is more than any machine has; ask for less")
    num_blocks = num_bytes // capacity.block_bytes - 1
    if num_blocks < 1:
        raise PoolSizeError(
            f"kv_memory {size} is less than two blocks of {capacity.block_bytes:,} bytes, the null "
            "block and one to use; ask for more, or put the engine to sleep"
        )
    return num_blocks


def resized_report(report: EngineReport, num_blocks: int) -> EngineReport:
    """``report`` of a pool that has ``num_blocks`` beside the null block now."""
    return replace(report, capacity=replace(report.capacity, num_blocks=num_blocks + 1))


def run_resize(core: EngineCore, start: Callable[[], None]) -> int:
    """``start`` a resize of an idle engine and see it through.

    Returns:
        Blocks beside the null block.

    Raises:
        PoolSizeError: there cannot be so many or so few.
        PoolBusyError: it came to nothing; the message says why.
    """
    resizing = core.scheduler.resizing
    start()
    while core.has_work:
        core.step()
    ended = resizing.take_ended()
    assert ended is not None, "a resize ended without a word"
    if ended.error is not None:
        raise PoolBusyError(ended.error)
    return ended.num_blocks
