"""Whatever the scheduler does with block tables it does with slots."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scheduling.harness import Harness


@pytest.fixture(scope="module", params=["paged", "virtual", "ahead"])
def translation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every `Harness` of the module runs under one, then the other."""
    Harness.kv = request.param
    yield request.param
    Harness.kv = "paged"
