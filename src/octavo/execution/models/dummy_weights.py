"""Random weights for measuring without a checkpoint. The same name gives the same values."""

from __future__ import annotations

import zlib

import torch

# transformers' initializer_range: activations of any depth stay near 1 after each norm.
STD = 0.02
# Values drawn for a tensor; a larger tensor repeats them, at the speed of memory and not of the
# generator (0.1 billion a second on one core). A prime, so that no two rows of it are equal.
NUM_DRAWN = 1_000_003


class DummyWeights:
    """Normal weights (std 0.02), norms of one; the same whatever the tensor-parallel size."""

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        return

    def copy(
        self, name: str, shape: tuple[int, ...], into: torch.Tensor, axis: int, start: int
    ) -> None:
        if name.endswith("norm.weight"):
            into.fill_(1.0)
            return
        generator = torch.Generator(into.device).manual_seed(zlib.crc32(name.encode()))
        is_whole = tuple(into.shape) == shape
        whole = into if is_whole else torch.empty(shape, dtype=into.dtype, device=into.device)
        flat = whole.view(-1)
        flat[:NUM_DRAWN].normal_(0.0, STD, generator=generator)
        for first in range(NUM_DRAWN, flat.numel(), NUM_DRAWN):
            part = flat[first : first + NUM_DRAWN]
            part.copy_(flat[: part.numel()])
        if not is_whole:
            into.copy_(whole.narrow(axis, start, into.shape[axis]))

    def stored_rows(
        self, name: str, shape: tuple[int, ...], axis: int, start: int, size: int
    ) -> None:
        return None

    def is_quantized(self, name: str) -> bool:
        return False

    def check_all_used(self, ignored: frozenset[str]) -> None:
        return
