"""`make gpu-test` runs every test that needs a GPU: CI has none."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("script", ["gpu-test", "gpu-bench"])
def test_a_python_without_pytorch_is_named(script: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    done = subprocess.run(
        [ROOT / "scripts" / script],
        env=os.environ | {"PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"{python} cannot import PyTorch; name one that can with: make {script}" in done.stderr
