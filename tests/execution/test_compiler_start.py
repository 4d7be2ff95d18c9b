"""Triton is made ready without PyTorch, where there is a GPU, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from octavo.execution import compiler_start

compiler_start._DRIVERS = (sys.argv[1],)
compiler_start.start_compiler()
first = compiler_start._thread
compiler_start.start_compiler()
assert compiler_start._thread is first, "once in a process"
compiler_start.wait_for_compiler()
assert "torch" not in sys.modules
if "triton" in sys.modules:
    from triton.runtime.cache import triton_key

    print("ready", triton_key.cache_info().currsize)
else:
    print("nothing begun")
"""


@pytest.mark.parametrize(("has_gpu", "expected"), [(True, "ready 1"), (False, "nothing begun")])
def test_triton_is_made_ready_where_there_is_a_gpu(
    tmp_path: Path, has_gpu: bool, expected: str
) -> None:
    driver = tmp_path / "driver"
    if has_gpu:
        driver.touch()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(driver)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == expected, done.stderr
