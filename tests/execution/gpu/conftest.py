"""Kernels run compiled where there is a GPU, and in Triton's interpreter elsewhere (see the
conftest above)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
