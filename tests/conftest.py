from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    # Without a GPU's driver Triton's kernels run in its interpreter. That is decided when a kernel
    # is imported, by whichever test comes first.
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60)
settings.register_profile("long", deadline=None, max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # So shells start what runs in the background, and processes that tests interrupt inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@atexit.register
def _silence_leaks() -> None:
    """Triton's interpreter leaves objects behind, which nanobind lists at exit in hundreds of
    lines, below what the tests have to say."""
    if os.environ.get("TRITON_INTERPRET") and "triton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and "TRITON_INTERPRET" not in os.environ:
        skip = pytest.mark.skip(reason="needs the GPU for itself: run it with -m alone, without -n")
        for item in items:
            if item.get_closest_marker("alone"):
                item.add_marker(skip)


def pytest_report_header() -> str:
    return f"OCTAVO_TEST_SEED={os.environ.get('OCTAVO_TEST_SEED', '0')} (of GPU kernels' inputs)"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Also where there is no header, as with -q: a failure can be had again."""
    if "OCTAVO_TEST_SEED" in os.environ:
        terminalreporter.write_line(pytest_report_header())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="run the tests that are bounded in CI at full length"
    )
