"""From a model's place on disk to a model that is ready to run. Downloads nothing."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import torch

from octavo.core.gguf_file import GGUFFile
from octavo.core.model_config import ModelConfig, ModelLoadError
from octavo.execution.models.decoder import Decoder
from octavo.execution.models.dummy_weights import DummyWeights
from octavo.execution.models.fp8_checkpoint import Fp8Checkpoint
from octavo.execution.models.gguf_config import gguf_config
from octavo.execution.models.gguf_weights import GGUFWeights
from octavo.execution.models.hf_config import DTYPES, load_hf_config
from octavo.execution.models.parallel import Collective, TensorParallel
from octavo.execution.models.quantization import resolve_quantization
from octavo.execution.models.registry import MODELS
from octavo.execution.models.safetensors_weights import SafetensorsWeights
from octavo.execution.models.weight_reader import WeightReader
from octavo.execution.models.weights import Weights

logger = logging.getLogger(__name__)
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


def load_model(
    source: str | os.PathLike[str],
    *,
    load_format: str = "auto",
    dtype: str = "auto",
    weights: str = "bf16",
    rank: int = 0,
    size: int = 1,
    device: str | torch.device = "cpu",
    max_positions: int | None = None,
    all_reduce: Collective | None = None,
    all_gather: Collective | None = None,
) -> Decoder:
    """Load rank ``rank`` of ``size`` of a model.

    ``source`` is a Hugging Face directory or a ``.gguf`` file; with ``load_format="dummy"``,
    whose weights are random, also a ``config.json``. ``dtype`` is ``auto`` (see
    ``resolve_dtype``) or a name of ``DTYPES``; ``weights`` is one of ``WEIGHT_MODES`` (see
    ``resolve_quantization``). ``max_positions`` is the rotary table's length,
    by default the model's own. ``size`` > 1 needs the collectives of ``TensorParallel``.

    Raises:
        ModelLoadError: a file is absent, broken or unsupported; the message names it.
        ValueError: an option is wrong, or the model cannot be split over ``size`` ranks.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format must be one of {', '.join(LOAD_FORMATS)}: {load_format!r}")
    collectives = {"all_reduce": all_reduce, "all_gather": all_gather}
    parallel = TensorParallel(rank, size, **{k: v for k, v in collectives.items() if v is not None})
    with contextlib.ExitStack() as stack:
        reader = None
        if torch.device(device).type == "cuda":
            reader = stack.enter_context(WeightReader(torch.device(device)))
        config, tensors = _open(Path(source), load_format, reader)
        resolved = resolve_dtype(config, dtype, device)
        if max_positions is not None and max_positions < 1:
            raise ValueError(f"max_positions must be at least 1, got {max_positions}")
        scales = None
        if isinstance(tensors, Fp8Checkpoint):
            scales = tensors.kv_scales(config.num_layers, config.num_kv_heads)
        return Decoder(
            MODELS[config.architecture],
            config,
            tensors,
            dtype=resolved,
            device=torch.device(device),
            parallel=parallel,
            max_positions=max_positions or config.max_position_embeddings,
            quantization=resolve_quantization(weights, resolved, torch.device(device), tensors),
            kv_scales=scales,
        )


def load_config(source: str | os.PathLike[str]) -> ModelConfig:
    """The configuration of a Hugging Face directory, a ``config.json`` or a ``.gguf`` file."""
    path = Path(source)
    return gguf_config(GGUFFile(path)) if path.suffix == ".gguf" else load_hf_config(path)


def resolve_dtype(config: ModelConfig, requested: str, device: str | torch.device) -> torch.dtype:
    """The dtype to run in: ``requested``, or for ``auto`` the checkpoint's own.

    A float16 checkpoint runs in bfloat16 on a CPU: CPUs without AVX512-FP16 take 8 to 10 times
    as long for float16 products of 16 rows or more. A quantized GGUF's own dtype is bfloat16.
    """
    if requested == "auto":
        is_cpu = torch.device(device).type == "cpu"
        requested = "bfloat16" if is_cpu and config.dtype == "float16" else config.dtype
    if requested not in DTYPES:
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}: got {requested!r}")
    dtype = getattr(torch, requested)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _open(path: Path, load_format: str, reader: WeightReader | None) -> tuple[ModelConfig, Weights]:
    if not path.exists():
        raise ModelLoadError(f"{path}: no such file or directory")
    is_gguf = path.suffix == ".gguf" or load_format == "gguf"
    if is_gguf and load_format == "safetensors":
        raise ModelLoadError(f"{path}: is a GGUF file, but load_format is safetensors")
    if is_gguf:
        if path.is_dir():
            raise ModelLoadError(f"{path}: is a directory; name the .gguf file in it")
        file = GGUFFile(path)
        config = gguf_config(file)
        return config, DummyWeights() if load_format == "dummy" else GGUFWeights(file, config)
    if load_format == "dummy":
        return load_hf_config(path), DummyWeights()
    if not path.is_dir():
        raise ModelLoadError(f"{path}: is neither a directory nor a .gguf file")
    config = load_hf_config(path)
    tensors = SafetensorsWeights(path, reader)
    if config.fp8 is None:
        return config, tensors
    if config.fp8.inputs != "token":
        logger.info(
            "%s: was made for inputs of products in %s; on a GPU they are rounded to fp8 by a "
            "scale for each token, and its input_scale is not used",
            path,
            "fp8 by a static scale" if config.fp8.inputs == "tensor" else "their own dtype",
        )
    return config, Fp8Checkpoint(tensors)
