"""How many token slots a sequence is given once and for all, as engines before paging did.

Orca's three ways, as Kwon et al. (SOSP 2023, section 6.1) compare with them. Arithmetic only: where
the slots are is the business of `octavo.memory.contiguous`.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.layout import num_blocks_for

RESERVES = ("max", "pow2", "oracle")


@dataclass(frozen=True, slots=True)
class Reservation:
    """``reserve`` is one of ``RESERVES``:

    - ``max``: the model's longest sequence, ``max_model_len`` tokens;
    - ``pow2``: the prompt, and the output's length rounded up to a power of two;
    - ``oracle``: exactly what the sequence will hold at its end.

    The output's length is the request's ``max_tokens``: true where ends of sequence are ignored,
    its limit elsewhere. A reservation is never outgrown.
    """

    reserve: str
    max_model_len: int

    def __post_init__(self) -> None:
        if self.reserve not in RESERVES:
            raise ValueError(f"reserve must be one of {', '.join(RESERVES)}, got {self.reserve!r}")

    def num_tokens(self, num_known: int, max_length: int) -> int:
        """Slots for a sequence of ``num_known`` tokens that ends with ``max_length`` tokens, of
        which the last one's keys and values are never needed."""
        if self.reserve == "max":
            return self.max_model_len
        if self.reserve == "pow2":
            output = power_of_two(max(max_length - num_known, 1))
            return min(num_known + output, self.max_model_len)
        return max_length - 1

    def num_blocks(self, num_known: int, max_length: int, block_size: int) -> int:
        """Blocks of the run that a buddy allocator takes for it: a power of two."""
        return power_of_two(num_blocks_for(self.num_tokens(num_known, max_length), block_size))

    def longest(self, num_prompt: int, num_blocks: int, block_size: int) -> int:
        """Longest sequence with a prompt of ``num_prompt`` tokens whose run is no longer than the
        longest power of two within ``num_blocks``; at most ``num_prompt``: there is none."""
        room = (1 << num_blocks.bit_length() - 1) * block_size if num_blocks > 0 else 0
        if room >= self.max_model_len:
            return self.max_model_len
        if self.reserve == "max":
            return 0
        if self.reserve == "oracle":
            return room + 1
        left = room - num_prompt
        return num_prompt + (1 << left.bit_length() - 1 if left > 0 else 0)


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least ``count``, which is at least 1."""
    return 1 << (count - 1).bit_length()
