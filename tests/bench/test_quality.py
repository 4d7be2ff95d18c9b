from __future__ import annotations

from pathlib import Path

import pytest

from engine.tiny_engine import save_gguf
from octavo.bench import quality


def test_modes_are_compared_with_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(quality, "MODES", (("float32", "bf16"), ("bfloat16", "bf16")))
    figures = quality.run(str(path), max_tokens=64)
    assert [f["kept_as"] for f in figures] == ["float32", "bfloat16"]
    assert figures[0]["same_top_token"] == 1.0
    assert figures[0]["tokens"] == 63
    assert figures[1]["perplexity"] == pytest.approx(figures[0]["perplexity"], rel=0.1)
    assert "perplexity" in quality.table(figures)
