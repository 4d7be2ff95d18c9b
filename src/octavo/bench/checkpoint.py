"""A checkpoint on disk of a model's shape, with random weights: to measure reading one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from octavo.config import ConfigError
from octavo.execution.models.decoder import Decoder
from octavo.execution.models.dummy_weights import NUM_DRAWN, STD
from octavo.execution.models.loading import load_config, resolve_dtype
from octavo.execution.models.parallel import TensorParallel
from octavo.execution.models.registry import MODELS
from octavo.execution.models.safetensors_weights import INDEX

_SHARD_BYTES = 5 * 10**9


class _Shapes:
    """Implements `octavo.execution.models.weights.Weights` for a model without memory: notes what
    it asks for."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, ...]] = {}

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        return

    def copy(
        self, name: str, shape: tuple[int, ...], into: torch.Tensor, axis: int, start: int
    ) -> None:
        self.found[name] = shape

    def stored_rows(
        self, name: str, shape: tuple[int, ...], axis: int, start: int, size: int
    ) -> None:
        return None

    def is_quantized(self, name: str) -> bool:
        return False

    def check_all_used(self, ignored: frozenset[str]) -> None:
        return


def write_checkpoint(config_path: str, folder: str, shard_bytes: int = _SHARD_BYTES) -> int:
    """Write ``config.json`` and shards of the model that ``config_path`` describes, in its own
    dtype. Returns the weights' bytes.

    Raises:
        ConfigError: the folder's disk has too little room.
    """
    config = load_config(config_path)
    dtype = resolve_dtype(config, "auto", "cuda")
    shapes = _Shapes()
    Decoder(
        MODELS[config.architecture],
        config,
        shapes,
        dtype=dtype,
        device=torch.device("meta"),
        parallel=TensorParallel(),
        max_positions=1,
    )
    sizes = {
        name: torch.Size(shape).numel() * dtype.itemsize for name, shape in shapes.found.items()
    }
    total, free = sum(sizes.values()), shutil.disk_usage(folder).free
    if total > 0.9 * free:
        raise ConfigError(
            f"a checkpoint of {total / 2**30:.1f} GiB does not fit in the {free / 2**30:.1f} GiB "
            f"that are free at {folder}; set TMPDIR to a larger disk, or take a smaller model"
        )
    shutil.copy(config_path, Path(folder) / "config.json")
    drawn = torch.empty(NUM_DRAWN, dtype=dtype).normal_(0.0, STD)
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def write() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(shard, Path(folder) / file)
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    held = 0
    for name, shape in shapes.found.items():
        if shard and held + sizes[name] > shard_bytes:
            write()
            held = 0
        held += sizes[name]
        shard[name] = _values(name, shape, drawn)
    write()
    (Path(folder) / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    # Of one word: token ids go in and out.
    Tokenizer(WordLevel({"?": 0}, unk_token="?")).save(str(Path(folder) / "tokenizer.json"))
    return total


def _values(name: str, shape: tuple[int, ...], drawn: torch.Tensor) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=drawn.dtype)
    count = torch.Size(shape).numel()
    return drawn.repeat(-(-count // len(drawn)))[:count].view(shape).clone()
