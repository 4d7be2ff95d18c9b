"""How kernels for CPUs are compiled: by numba, kept on disk where there is a place to keep them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit

logger = logging.getLogger(__name__)


class BFloatType(ir.Type):  # type: ignore[misc]
    """LLVM's ``bfloat``, which llvmlite lacks."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloatType)

    def __hash__(self) -> int:
        return hash(BFloatType)

    def __str__(self) -> str:
        return "bfloat"


def compiled(**flags: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Like ``numba.njit(cache=True)``, and without a cache where nothing can be written: neither
    beside the package nor in the user's cache directory. Each start compiles anew then."""

    def compile_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            kernel: Callable[..., Any] = njit(cache=True, **flags)(function)
        except RuntimeError as error:
            logger.warning(
                "kernels are compiled at every start, some seconds: %s; set NUMBA_CACHE_DIR to a "
                "directory that can be written",
                error,
            )
            kernel = njit(**flags)(function)
        return kernel

    return compile_kernel
