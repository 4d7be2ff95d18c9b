"""One tiny model and one server for all; modules that need other options start their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny_model import write_tiny_model
from tiny_server import TinyServer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[TinyServer]:
    server = TinyServer(tiny_model)
    try:
        yield server.wait_ready()
    finally:
        server.stop()
