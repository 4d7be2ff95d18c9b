"""Counter-based noise: a uniform number is a pure function of a seed and a token's index.

Nothing is carried from step to step, so batching, chunking, preemption and pipelining cannot
change what a request samples. The mixing function is SplitMix64's finalizer (Steele et al.,
OOPSLA 2014), applied to the seed and then to the counter.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: NDArray[np.uint64], counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """``[n]`` numbers in [0, 1), one for each seed and counter."""
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seeds + _GOLDEN) ^ (counters.astype(np.uint64) * _GOLDEN))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
