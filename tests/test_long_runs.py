"""`make test-long` runs every test that is longer with ``--long``, and nothing cuts it short."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_test_that_can_be_longer_is_run_there(pytestconfig: pytest.Config) -> None:
    told = subprocess.run(
        ["make", "-n", "test-long"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    command = told[told.index("-m pytest") :].replace("\\\n", " ").split("\n")[0]
    assert "--long" in command.split()
    readers = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if 'getoption("--long")' in path.read_text() and path != Path(__file__)
    }
    assert readers
    assert set(re.findall(r"tests/[\w/.]+", command)) == readers
    # The soak alone takes an hour.
    (timeout,) = re.findall(r"--timeout=(\d+)", command)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert int(timeout) > 3600 > settings["timeout"]
    # Pytest takes these options: it raises where one is unknown.
    assert pytestconfig.getoption("--long") in (True, False)
    pytestconfig.getoption("--timeout")
