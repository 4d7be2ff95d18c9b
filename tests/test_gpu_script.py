"""`make gpu-test` runs every test that needs a GPU: CI has none."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_needs_a_gpu_is_run_there() -> None:
    script = (ROOT / "scripts" / "gpu-test").read_text()
    named = [ROOT / path for path in re.findall(r"tests/[\w/.]+", script)]
    assert named
    assert all(path.exists() for path in named)
    marked = [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "pytest.mark.gpu" in path.read_text() and path != Path(__file__)
    ]
    assert marked
    left_out = [
        str(path.relative_to(ROOT))
        for path in marked
        if not any(path.is_relative_to(place) for place in named)
    ]
    assert left_out == []
