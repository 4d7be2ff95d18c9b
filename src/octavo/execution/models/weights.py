"""What a source of weights offers to layers. Names are Hugging Face's, whatever the source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.model_config import ModelLoadError

# Tensors that some checkpoints carry and nothing needs.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "attn_rot_embd.weight")


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedRows:
    """A weight in 4 or 8 bits: ``values [N, K]`` uint8, ``scales`` and ``minima`` float16
    ``[N, K / 32]``. It stands for ``scale * value + minimum`` (4 bits, values 0 to 15) or
    ``scale * (value - 128)`` (8 bits)."""

    bits: int
    values: NDArray[np.uint8]
    scales: NDArray[np.float16]
    minima: NDArray[np.float16]


class Weights(Protocol):
    """Tensors by their Hugging Face names."""

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ``ModelLoadError`` unless ``name`` exists in ``shape``: layers ask before they
        allocate, so that an absurd configuration is an error and not an allocation."""
        ...

    def copy(
        self, name: str, shape: tuple[int, ...], into: torch.Tensor, axis: int, start: int
    ) -> None:
        """Fill ``into`` with ``name``'s slice that begins at ``start`` along ``axis``.

        ``shape`` is the whole tensor's; ``into`` has it but along ``axis``. Values are cast.
        ``check`` came before.

        Raises:
            ModelLoadError: the tensor cannot be read.
        """
        ...

    def stored_rows(
        self, name: str, shape: tuple[int, ...], axis: int, start: int, size: int
    ) -> QuantizedRows | None:
        """The slice of ``size`` along ``axis`` as it is stored, where the file holds it in a form
        that `QuantizedRows` can express without loss; None elsewhere. ``check`` came before."""
        ...

    def is_quantized(self, name: str) -> bool:
        """Whether the file holds ``name`` in fewer bits than a float's."""
        ...

    def check_all_used(self, ignored: frozenset[str]) -> None:
        """Raise ``ModelLoadError`` where a tensor outside ``ignored`` was never copied."""
        ...


def check_shape(
    path: Path, name: str, found: Sequence[int] | None, expected: tuple[int, ...]
) -> None:
    """Raise ``ModelLoadError`` where a tensor is missing (``None``) or misshapen."""
    if found is None:
        raise ModelLoadError(f"{path}: tensor {name} is missing")
    if tuple(found) != expected:
        raise ModelLoadError(
            f"{path}: tensor {name} has shape {list(found)}, expected {list(expected)}"
        )


def check_unused(path: Path, unused: set[str]) -> None:
    """Refuse tensors that the model would silently leave out: its answers would be wrong."""
    unused = {name for name in unused if not name.endswith(_IGNORED_SUFFIXES)}
    if unused:
        names = sorted(unused)
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise ModelLoadError(
            f"{path}: holds tensors that its configuration has no place for: "
            f"{', '.join(names[:4])}{more}"
        )
