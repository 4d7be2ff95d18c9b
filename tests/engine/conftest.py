"""An offline `LLM` on a tiny random model with a byte-level tokenizer, shared by a file's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.tiny_engine import is_idle, make_llm, save_gguf
from octavo.engine.llm import LLM


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.fixture(scope="module")
def shared(gguf: Path) -> Iterator[LLM]:
    with make_llm(gguf, max_num_seqs=3, max_queued_requests=2) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The shared engine; whatever a test does, nothing is left behind."""
    yield shared
    assert is_idle(shared)
