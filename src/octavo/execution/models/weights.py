"""What a source of weights offers to layers. Names are Hugging Face's, whatever the source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from octavo.core.model_config import ModelLoadError

# Tensors that some checkpoints carry and nothing needs.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "attn_rot_embd.weight")


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
