"""Which replica gets a request. A policy sees what a router in front of engines can know: whom it
sent what, and what has ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import IntArray
from octavo.workload.items import WorkItem

# A replica is passed over for its prefix when it has this many times the mean load, and more than
# a few requests.
_MOST_LOAD = 1.5
_FEW = 4
_KNOWN_PREFIXES = 1_000_000


class Router(Protocol):
    """Chooses by the number of requests outstanding at each replica, ``[num_replicas]``."""

    def choose(self, item: WorkItem, outstanding: IntArray) -> int:
        """The replica for ``item``; called once for each request, in order of arrival."""


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, item: WorkItem, outstanding: IntArray) -> int:
        chosen = self._next % len(outstanding)
        self._next = chosen + 1
        return chosen


class LeastLoaded:
    """The fewest requests outstanding; of equals the one that was chosen longest ago."""

    def __init__(self) -> None:
        self._turn = 0
        self._chosen_at: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def choose(self, item: WorkItem, outstanding: IntArray) -> int:
        if len(self._chosen_at) != len(outstanding):
            self._chosen_at = np.zeros(len(outstanding), dtype=np.int64)
        least = np.flatnonzero(outstanding == outstanding.min())
        chosen = int(least[np.argmin(self._chosen_at[least])])
        self._turn += 1
        self._chosen_at[chosen] = self._turn
        return chosen


class PrefixAware:
    """The replica that got the longest beginning of the prompt last, unless it is busy; others go
    where the load is least."""

    def __init__(self) -> None:
        self._fallback = LeastLoaded()
        self._replica_of: OrderedDict[int, int] = OrderedDict()

    def choose(self, item: WorkItem, outstanding: IntArray) -> int:
        chosen = self._holder(item.prefix_hashes, outstanding)
        if chosen is None:
            chosen = self._fallback.choose(item, outstanding)
        for value in item.prefix_hashes:
            self._replica_of[value] = chosen
            self._replica_of.move_to_end(value)
        while len(self._replica_of) > _KNOWN_PREFIXES:
            self._replica_of.popitem(last=False)
        return chosen

    def _holder(self, hashes: Sequence[int], outstanding: IntArray) -> int | None:
        """Hashes name a block and all before it, so the last one known is the longest."""
        for value in reversed(hashes):
            replica = self._replica_of.get(value)
            if replica is None or replica >= len(outstanding):
                continue
            load = int(outstanding[replica])
            if load <= _FEW or load <= _MOST_LOAD * float(outstanding.mean()):
                return replica
            return None
        return None


ROUTERS: dict[str, type[RoundRobin] | type[LeastLoaded] | type[PrefixAware]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}
