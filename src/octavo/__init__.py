"""Octavo: an LLM inference and serving engine whose subject is the KV cache's memory.

The public names; everything heavy is imported when a name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.core.request import FinishReason, PoolBusyError, PoolSizeError, RequestError
    from octavo.core.sampling_params import SamplingParams
    from octavo.engine.completion import Beam, Completion
    from octavo.engine.llm import LLM

__version__ = "0.1.0"

_HOMES = {
    "LLM": "octavo.engine.llm",
    "Beam": "octavo.engine.completion",
    "Completion": "octavo.engine.completion",
    "FinishReason": "octavo.core.request",
    "PoolBusyError": "octavo.core.request",
    "PoolSizeError": "octavo.core.request",
    "RequestError": "octavo.core.request",
    "SamplingParams": "octavo.core.sampling_params",
}

__all__ = [
    "LLM",
    "Beam",
    "Completion",
    "FinishReason",
    "PoolBusyError",
    "PoolSizeError",
    "RequestError",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
