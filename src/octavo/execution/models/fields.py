"""Typed reading of untrusted key-value metadata. Knows the file's name, for its errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from octavo.core.model_config import ModelLoadError

MAX_INT = 2**31 - 1
MAX_POSITIONS = 1 << 24  # the rotary table of a longer context would not fit in memory
_REQUIRED = object()


class Fields:
    """A mapping whose values are checked as they are read.

    A missing or ``None`` value gives the default; without a default it is an error.

    Raises:
        ModelLoadError: from every method, naming the file and the key.
    """

    def __init__(self, path: Path, values: Mapping[str, object], prefix: str = "") -> None:
        self.path = path
        self._values = values
        self._prefix = prefix

    def error(self, name: str, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {self._prefix}{name} {problem}")

    def get(self, name: str) -> object:
        return self._values.get(self._prefix + name)

    def has(self, name: str) -> bool:
        return self._prefix + name in self._values

    def integer(
        self, name: str, default: object = _REQUIRED, *, low: int = 1, high: int = MAX_INT
    ) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"must be an integer from {low} to {high}, got {value!r:.40}")
        return value

    def positive(self, name: str, default: object = _REQUIRED) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"must be a number, got {value!r}")
        if not math.isfinite(value) or value <= 0:
            raise self.error(name, f"must be positive and finite, got {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {value!r}")
        return value

    def string(self, name: str, default: object = _REQUIRED) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, got {value!r}")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, a list of them, or none."""
        value = self.get(name)
        ids: list[int] = []
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise self.error(name, f"must be a token id or a list of them, got {value!r:.40}")
            if token_id >= 0:  # -1 stands for none in old checkpoints
                ids.append(token_id)
        return tuple(ids)

    def _value(self, name: str, default: object) -> object:
        value = self.get(name)
        if value is None:
            if default is _REQUIRED:
                raise self.error(name, "is missing")
            return default
        return value


def check_heads(
    fields: Fields, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int | None
) -> int:
    """The head dimension, given or derived; checks that the heads fit each other."""
    if num_heads % num_kv_heads:
        raise fields.error(
            "attention heads",
            f"({num_heads}) are not a multiple of the key-value heads ({num_kv_heads})",
        )
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.error(
                "hidden size", f"{hidden_size} is not a multiple of {num_heads} attention heads"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise fields.error("head dimension", f"must be even to be rotated, got {head_dim}")
    return head_dim
