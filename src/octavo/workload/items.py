"""One request of a workload: when it comes, how long it is, what it shares with others."""

from __future__ import annotations

from dataclasses import dataclass

# Of a prompt or an output: more than any model or patience; beyond them memory ends before anything
# is sent.
MOST_TOKENS = 10_000_000


class WorkloadError(ValueError):
    """A workload or trace cannot be used as asked; the message says what to change."""


@dataclass(frozen=True, slots=True)
class WorkItem:
    """``arrival_s`` counts from the start of the work. ``prefix_hashes`` name the blocks of 512
    prompt tokens that equal those of other items with the same hashes; empty: nothing shared."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_hashes: tuple[int, ...] = ()
