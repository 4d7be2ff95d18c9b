"""Weights of a Hugging Face directory: memory-mapped safetensors, whole or sharded. No pickle."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from octavo.core.model_config import ModelLoadError
from octavo.execution.models.hf_config import read_json
from octavo.execution.models.weight_reader import StoredTensor, WeightReader
from octavo.execution.models.weights import check_shape, check_unused

INDEX = "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")


class SafetensorsWeights:
    """Tensors of the ``*.safetensors`` files in ``directory``; files stay mapped while it lives.

    With a ``reader`` tensors are read by it instead of through the map.
    """

    def __init__(
        self, directory: str | os.PathLike[str], reader: WeightReader | None = None
    ) -> None:
        self.path = Path(directory)
        self._reader = reader
        self._stored: dict[Path, dict[str, StoredTensor]] = {}
        self._places: dict[str, tuple[Path, Any, str]] = {}
        for path, expected in _find_files(self.path).items():
            try:
                file = safe_open(path, framework="pt", device="cpu")
                found = set(file.keys())
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"{path}: broken safetensors file: {error}") from error
            if expected is not None and (missing := expected - found):
                raise ModelLoadError(
                    f"{path}: tensor {min(missing)} is missing, which {INDEX} puts there"
                )
            for name in found if expected is None else expected:
                self._places[_full_name(name)] = (path, file, name)
        self._unused = set(self._places)

    def names(self) -> set[str]:
        return set(self._places)

    def dtype_name(self, name: str) -> str | None:
        """As the file spells it: ``BF16``, ``F8_E4M3``; None where there is no such tensor."""
        if name not in self._places:
            return None
        _, file, stored = self._places[name]
        dtype: str = file.get_slice(stored).get_dtype()
        return dtype

    def read(self, name: str) -> torch.Tensor:
        """The whole of a small tensor, such as scales, of any shape."""
        if name not in self._places:
            check_shape(self.path, name, None, ())
        path, file, stored = self._places[name]
        try:
            tensor: torch.Tensor = file.get_tensor(stored)
        except SafetensorError as error:
            raise ModelLoadError(f"{path}: tensor {name} cannot be read: {error}") from error
        self._unused.discard(name)
        return tensor

    def check(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = ()) -> None:
        """``dtypes`` are taken beside the plain ones."""
        if name not in self._places:
            check_shape(self.path, name, None, shape)
        path, file, stored = self._places[name]
        tensor = file.get_slice(stored)
        check_shape(path, name, tensor.get_shape(), shape)
        if tensor.get_dtype() not in DTYPES + dtypes:
            raise ModelLoadError(
                f"{path}: tensor {name} is {tensor.get_dtype()}; supported: {', '.join(DTYPES)}"
            )

    def copy(
        self, name: str, shape: tuple[int, ...], into: torch.Tensor, axis: int, start: int
    ) -> None:
        path, file, stored = self._places[name]
        if (place := self._place(path, stored)) is not None:
            assert self._reader is not None
            self._reader.copy(place, into, axis, start)
            self._unused.discard(name)
            return
        stop = start + into.shape[axis]
        try:
            tensor = file.get_slice(stored)
            into.copy_(tensor[start:stop] if axis == 0 else tensor[:, start:stop])
        except SafetensorError as error:
            raise ModelLoadError(f"{path}: tensor {name} cannot be read: {error}") from error
        self._unused.discard(name)

    def _place(self, path: Path, stored: str) -> StoredTensor | None:
        """Where the reader finds a tensor; None: through the map."""
        if self._reader is None:
            return None
        if path not in self._stored:
            self._stored[path] = _stored_tensors(path)
        place = self._stored[path].get(stored)
        return place if place is not None and self._reader.fits(place) else None

    def stored_rows(
        self, name: str, shape: tuple[int, ...], axis: int, start: int, size: int
    ) -> None:
        return None

    def is_quantized(self, name: str) -> bool:
        return False

    def check_all_used(self, ignored: frozenset[str]) -> None:
        check_unused(self.path, self._unused - ignored)


_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}


def _stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """By name, from the header of a file that was found sound: eight bytes of length, a JSON
    object, and the data that its offsets count in."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {
        name: StoredTensor(
            path,
            name,
            8 + size + entry["data_offsets"][0],
            tuple(entry["shape"]),
            _TORCH_DTYPES[entry["dtype"]],
        )
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] in _TORCH_DTYPES
    }


def _full_name(name: str) -> str:
    """OPT's own checkpoints leave out the first part of their names."""
    return f"model.{name}" if name.startswith("decoder.") else name


def _find_files(directory: Path) -> dict[Path, set[str] | None]:
    """Files to read, each with the tensors to take from it (``None``: all of them)."""
    index = directory / INDEX
    if index.exists():
        return _read_index(index)
    single = directory / "model.safetensors"
    if single.exists():
        return {single: None}
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return {files[0]: None}
    if files:
        raise ModelLoadError(f"{directory}: {len(files)} safetensors files, but no {INDEX}")
    pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pth"))
    hint = "; pickled weights (.bin, .pth) are never read: convert them" if pickled else ""
    raise ModelLoadError(f"{directory}: no safetensors files{hint}")


def _read_index(index: Path) -> dict[Path, set[str] | None]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index}: weight_map is missing")
    files: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelLoadError(f"{index}: {name} is in {file!r}, which is not a plain file name")
        files.setdefault(file, set()).add(name)
    for file in files:
        if not (index.parent / file).exists():
            raise ModelLoadError(f"{index}: names {file}, which does not exist beside it")
    return {index.parent / file: names for file, names in files.items()}
