"""One rank's place among tensor-parallel ranks. How ranks talk is injected; nothing here knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Collective = Callable[[torch.Tensor], torch.Tensor]


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """``rank`` of ``size``, and what sums or joins over ranks.

    ``all_reduce`` returns the sum over ranks (it may work in place); ``all_gather`` returns the
    ranks' tensors concatenated along the last dimension. Both are the identity at size 1.

    Raises:
        ValueError: the rank is out of range, or size > 1 comes without collectives.
    """

    rank: int = 0
    size: int = 1
    all_reduce: Collective = _alone
    all_gather: Collective = _alone

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"rank must be at least 0 and less than size {self.size}, got {self.rank}"
            )
        if self.size > 1 and _alone in (self.all_reduce, self.all_gather):
            raise ValueError(f"size {self.size} needs all_reduce and all_gather")

    def share(self, total: int, what: str) -> int:
        """This rank's part of ``total``, which must divide evenly."""
        if total % self.size:
            raise ValueError(
                f"{what} ({total}) cannot be split over {self.size} tensor-parallel ranks; "
                f"choose a size that divides {total}"
            )
        return total // self.size
