"""How a preempted group gets its tokens' keys and values back: computed again, or copied.

``auto`` compares what each costs: bytes over the rate of copying, out and in again, against tokens
over the rate of prefilling. Both rates are measured by the workers at start.
"""

from __future__ import annotations

from dataclasses import dataclass

PREEMPTION_MODES = ("recompute", "swap", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionPolicy:
    """``mode`` is one of ``PREEMPTION_MODES``; rates are bytes and tokens a second."""

    mode: str = "recompute"
    block_bytes: int = 1
    copy_bytes_per_s: float = float("inf")
    prefill_tokens_per_s: float = float("inf")

    def __post_init__(self) -> None:
        if self.mode not in PREEMPTION_MODES:
            raise ValueError(
                f"preemption must be one of {', '.join(PREEMPTION_MODES)}, got {self.mode!r}"
            )
        if min(self.copy_bytes_per_s, self.prefill_tokens_per_s) <= 0:
            raise ValueError("copy and prefill rates must be above 0")

    def prefers_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether to swap a group of ``num_blocks`` distinct blocks and ``num_tokens`` tokens."""
        if self.mode != "auto":
            return self.mode == "swap"
        swap_s = 2 * num_blocks * self.block_bytes / self.copy_bytes_per_s
        recompute_s = num_tokens / self.prefill_tokens_per_s
        return swap_s < recompute_s


RECOMPUTE = PreemptionPolicy()
