"""What `octavo bench kernels` tells of a kernel."""

from __future__ import annotations

from typing import Any

BYTES, OPERATIONS = "bytes", "operations"
"""What a kernel's time is compared by: what it reads and writes, or what it multiplies."""


def figure(
    kernel: str, seconds: float, amount: float, ceiling: float, beside: str, of: str = BYTES
) -> dict[str, Any]:
    """What is told of a kernel that takes ``amount`` bytes, or operations, where a device does
    ``ceiling`` a second."""
    rate = amount / seconds
    return {
        "kernel": kernel,
        "us": seconds * 1e6,
        "amount": amount,
        "of": of,
        "rate": rate / 1e12,
        "share": rate / ceiling,
        "beside": beside,
    }
