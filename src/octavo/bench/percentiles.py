"""Summaries of samples, in the words that serving benches use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_PERCENTILES = (50, 90, 95, 99)


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation, minimum, maximum and percentiles; empty for no samples."""
    if not samples:
        return {}
    values = np.asarray(samples, dtype=np.float64)
    result = {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "min": float(values.min()),
        "max": float(values.max()),
    }
    for percentile in _PERCENTILES:
        result[f"p{percentile}"] = float(np.percentile(values, percentile))
    return result
