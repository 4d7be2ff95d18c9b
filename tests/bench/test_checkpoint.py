"""A checkpoint that is written to be measured is one that loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from execution.models.tiny_models import tiny_llama, tiny_opt
from octavo.bench import checkpoint
from octavo.bench.checkpoint import write_checkpoint
from octavo.config import ConfigError
from octavo.execution.models.loading import load_model


@pytest.mark.parametrize("tiny", [tiny_llama, tiny_opt])
def test_it_loads(tmp_path: Path, tiny: object) -> None:
    source, folder = tmp_path / "source", tmp_path / "written"
    folder.mkdir()
    tiny().save_pretrained(source)  # type: ignore[operator]
    num_bytes = write_checkpoint(str(source / "config.json"), str(folder), shard_bytes=60_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    model = load_model(folder)
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) > num_bytes
    assert torch.isfinite(model.embedding.weight).all()  # type: ignore[arg-type]
    assert load_model(source).weight_bytes() == model.weight_bytes()


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama().save_pretrained(tmp_path)
    monkeypatch.setattr(
        checkpoint.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000})
    )
    with pytest.raises(ConfigError, match=r"does not fit .* set TMPDIR to a larger disk"):
        write_checkpoint(str(tmp_path / "config.json"), str(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())
