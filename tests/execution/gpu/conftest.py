"""Kernels run compiled where there is a GPU, and in Triton's interpreter elsewhere.

The interpreter is chosen before any kernel is imported: a kernel is one or the other for good.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# uint64 arithmetic wraps around, as it should; the interpreter's numpy warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
