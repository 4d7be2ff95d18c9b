"""What several threads read is what a plain read gives, to the byte; and no thread outlives it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import tiny_llama

from octavo.core.model_config import ModelLoadError
from octavo.execution.models import weight_reader
from octavo.execution.models.decoder import Decoder
from octavo.execution.models.loading import load_config
from octavo.execution.models.parallel import TensorParallel
from octavo.execution.models.registry import MODELS
from octavo.execution.models.safetensors_weights import SafetensorsWeights
from octavo.execution.models.weight_reader import WeightReader

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def num_threads() -> int:
    return sum(thread.name.startswith("octavo-weights") for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors take several pieces, and more than there are buffers."""
    monkeypatch.setattr(weight_reader, "_BUFFER_BYTES", 1024)
    monkeypatch.setattr(weight_reader, "_NUM_BUFFERS", 3)


def load(folder: Path, reader: WeightReader | None, dtype: torch.dtype, rank: int) -> Decoder:
    config = load_config(folder)
    parallel = TensorParallel(rank, 2, lambda x: x, lambda x: x)
    return Decoder(
        MODELS[config.architecture],
        config,
        SafetensorsWeights(folder, reader),
        dtype=dtype,
        device=DEVICE,
        parallel=parallel,
        max_positions=32,
    )


def tensors(model: Decoder) -> list[torch.Tensor]:
    found = [model.embedding.weight, model.head.weight, model.norm.weight]  # type: ignore[union-attr]
    for layer in model.layers:
        found += [part.weight for part in (*layer.norms(), *layer.linears())]  # type: ignore[union-attr]
    return [tensor for tensor in found if tensor is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_shard_and_rank(tmp_path: Path, dtype: torch.dtype) -> None:
    tiny_llama().save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    for rank in range(2):
        with WeightReader(DEVICE) as reader:
            found = tensors(load(tmp_path, reader, dtype, rank))
            assert num_threads()
        expected = tensors(load(tmp_path, None, dtype, rank))
        assert len(found) == len(expected) > 10
        for one, two in zip(found, expected, strict=True):
            assert torch.equal(one, two)
    assert not num_threads()


@pytest.mark.parametrize(("axis", "start", "size"), [(0, 0, 37), (0, 5, 9), (1, 0, 20), (1, 7, 11)])
def test_slices_of_a_matrix(tmp_path: Path, axis: int, start: int, size: int) -> None:
    values = torch.randn(37, 20)
    save_file({"w": values, "b": values[0].half()}, tmp_path / "model.safetensors")
    shape = (size, 20) if axis == 0 else (37, size)
    into = torch.full(shape, float("nan"), device=DEVICE)
    with WeightReader(DEVICE) as reader:
        weights = SafetensorsWeights(tmp_path, reader)
        weights.copy("w", (37, 20), into, axis, start)
        assert torch.equal(into.cpu(), values.narrow(axis, start, size))
        vector = torch.zeros(6, device=DEVICE)
        weights.copy("b", (20,), vector, 0, 3)
        assert torch.equal(vector.cpu(), values[0, 3:9].half().float())
        weights.check_all_used(frozenset())


def test_a_row_that_fits_in_no_buffer(tmp_path: Path) -> None:
    values = torch.randn(3, 300)
    save_file({"w": values}, tmp_path / "model.safetensors")
    into = torch.zeros(3, 300, device=DEVICE)
    with WeightReader(DEVICE) as reader:
        SafetensorsWeights(tmp_path, reader).copy("w", (3, 300), into, 0, 0)
    assert torch.equal(into.cpu(), values)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (False, "cannot be read: the file ends .* too early"),
        (True, "cannot be read: .*No such file"),
    ],
)
def test_a_file_that_shrinks_or_goes(tmp_path: Path, ends: bool, message: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.randn(100, 200)}, path)
    into = torch.zeros(100, 200, device=DEVICE)
    with WeightReader(DEVICE) as reader:
        weights = SafetensorsWeights(tmp_path, reader)
        weights.copy("w", (100, 200), into[:1], 0, 0)
        if ends:
            os.close(reader._files.pop(path))
            path.unlink()
        else:
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 2)
        with pytest.raises(ModelLoadError, match=rf"model\.safetensors: tensor w {message}"):
            weights.copy("w", (100, 200), into, 0, 0)
    assert not num_threads()
