"""A GGUF file's header, read lazily from a memory map. Knows the container; knows no model.

The file is untrusted input: every count, length and offset is checked against the file's size
before it is used, so a broken file gives a ``ModelLoadError`` and never a large allocation.

::

    magic version num_tensors num_keys | key type value ... | name dims type offset ... | pad | data
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.core.model_config import ModelLoadError

MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# GGUF value type -> numpy dtype of one value.
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. ``shape`` is row-major (torch's order, GGUF's reversed).

    ``ggml_type`` is a ``gguf.GGMLQuantizationType`` value; ``offset`` counts from the start of
    the file; ``row_bytes`` is the stored size of one row of ``shape[-1]`` values.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    type_name: str
    offset: int
    num_bytes: int
    row_bytes: int


class GGUFFile:
    """A validated GGUF file.

    ``metadata`` maps keys to ``int``, ``float``, ``bool``, ``str``, a list of ``str``, or a
    numpy array (arrays of numbers); values are decoded when first asked for.
    ``tensors`` maps names to ``TensorInfo``.

    Raises:
        ModelLoadError: the file is absent, truncated or malformed; the message names it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._buffer = _map_file(self.path)
        reader = _Reader(self.path, self._buffer)
        if reader.take(4) != b"GGUF":
            raise reader.error("it does not start with the GGUF magic")
        self.version = reader.u32()
        if self.version not in (2, 3):
            raise reader.error(
                f"GGUF version {self.version} (little-endian versions 2 and 3 are read)"
            )
        num_tensors, num_keys = reader.u64(), reader.u64()
        reader.check_count(num_keys, _MIN_KEY_BYTES, "metadata keys")
        self.metadata: Mapping[str, object] = _Metadata(reader, num_keys)
        reader.check_count(num_tensors, _MIN_TENSOR_BYTES, "tensors")
        self.tensors: dict[str, TensorInfo] = _read_tensors(
            reader, num_tensors, self._alignment(reader)
        )

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes of tensor ``name``: read-only uint8 ``[*shape[:-1], row_bytes]``."""
        info = self.tensors[name]
        data = np.frombuffer(self._buffer, np.uint8, info.num_bytes, info.offset)
        return data.reshape(*info.shape[:-1], info.row_bytes)

    def _alignment(self, reader: _Reader) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise reader.error(f"general.alignment is {alignment!r}")
        if alignment & (alignment - 1):
            raise reader.error(f"general.alignment {alignment} is not a power of two")
        return alignment


class _Reader:
    """A cursor over the file that never reads past its end."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.position = 0

    def error(self, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: broken GGUF file: {problem}")

    def skip(self, num_bytes: int) -> int:
        """Move past ``num_bytes`` and return where they start."""
        start = self.position
        if num_bytes > self.size - start:
            raise self.error(
                f"{num_bytes} bytes wanted at offset {start}, but the file has {self.size}"
            )
        self.position = start + num_bytes
        return start

    def take(self, num_bytes: int) -> bytes:
        start = self.skip(num_bytes)
        return self.buffer[start : start + num_bytes]

    def u32(self) -> int:
        return int(_U32.unpack_from(self.buffer, self.skip(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self.buffer, self.skip(8))[0])

    def name(self) -> str:
        data = self.take(self.u64())
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise self.error(f"the name {data[:40]!r} is not UTF-8") from None

    def check_count(self, count: int, min_bytes: int, what: str) -> None:
        if count * min_bytes > self.size - self.position:
            raise self.error(f"{count} {what} cannot fit in a file of {self.size} bytes")

    def skip_strings(self, count: int) -> None:
        """Move past ``count`` strings, checking every length (a hot loop: 100K strings)."""
        position, size, buffer, unpack = self.position, self.size, self.buffer, _U64.unpack_from
        for _ in range(count):
            if position + 8 > size:
                raise self.error(f"an array of {count} strings runs past the end")
            position += 8 + unpack(buffer, position)[0]
        if position > size:
            raise self.error(f"an array of {count} strings runs past the end")
        self.position = position


class _Metadata(Mapping[str, object]):
    """Metadata that remembers where values lie and decodes one when it is asked for."""

    def __init__(self, reader: _Reader, num_keys: int) -> None:
        self._reader = reader
        # key -> (element type, number of elements or None for a single value, offset)
        self._places: dict[str, tuple[int, int | None, int]] = {}
        self._values: dict[str, object] = {}
        for _ in range(num_keys):
            key = reader.name()
            if key in self._places:
                raise reader.error(f"metadata key {key!r} appears twice")
            self._places[key] = self._skip_value(key)

    def _skip_value(self, key: str) -> tuple[int, int | None, int]:
        reader = self._reader
        kind, count = reader.u32(), None
        if kind == _ARRAY:
            kind, count = reader.u32(), reader.u64()
        start = reader.position
        if kind == _STRING:
            reader.check_count(1 if count is None else count, 8, f"strings of {key!r}")
            reader.skip_strings(1 if count is None else count)
        elif kind in _SCALARS:
            reader.skip(_SCALARS[kind].itemsize * (1 if count is None else count))
        elif kind == _ARRAY:
            raise reader.error(f"metadata key {key!r} is an array of arrays")
        else:
            raise reader.error(f"metadata key {key!r} has unknown value type {kind}")
        return kind, count, start

    def __getitem__(self, key: str) -> object:
        if key not in self._values:
            kind, count, start = self._places[key]
            if kind == _STRING:
                strings = self._strings(key, start, 1 if count is None else count)
                self._values[key] = strings[0] if count is None else strings
            else:
                array = np.frombuffer(
                    self._reader.buffer, _SCALARS[kind], 1 if count is None else count, start
                )
                self._values[key] = array[0].item() if count is None else array
        return self._values[key]

    def _strings(self, key: str, position: int, count: int) -> list[str]:
        buffer, unpack = self._reader.buffer, _U64.unpack_from
        strings = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(buffer, position)[0]
                strings.append(buffer[start:position].decode())
        except UnicodeDecodeError:
            raise self._reader.error(
                f"string {len(strings)} of metadata key {key!r} is not UTF-8"
            ) from None
        return strings

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot open the GGUF file: {error.strerror}") from error
    except ValueError as error:  # mmap of an empty file
        raise ModelLoadError(f"{path}: broken GGUF file: it is empty") from error


def _read_tensors(reader: _Reader, num_tensors: int, alignment: int) -> dict[str, TensorInfo]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # 0.2 s: only with a GGUF file

    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    headers = []
    for _ in range(num_tensors):
        name, num_dims = reader.name(), reader.u32()
        if not 1 <= num_dims <= MAX_DIMS:
            raise reader.error(f"tensor {name!r} has {num_dims} dimensions (1 to {MAX_DIMS})")
        shape = tuple(reader.u64() for _ in range(num_dims))[::-1]
        headers.append((name, shape, reader.u32(), reader.u64()))
    data_start = -(-reader.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in headers:
        if name in tensors:
            raise reader.error(f"tensor {name!r} appears twice")
        if kind not in sizes:
            raise reader.error(f"tensor {name!r} has unknown type {kind}")
        type_name = GGMLQuantizationType(kind).name
        block, block_bytes = sizes[kind]
        if 0 in shape or shape[-1] % block:
            raise reader.error(f"tensor {name!r} of type {type_name} has shape {list(shape)}")
        if offset % alignment:
            raise reader.error(f"tensor {name!r} starts at {offset}, not aligned to {alignment}")
        row_bytes = shape[-1] // block * block_bytes
        num_bytes = row_bytes
        for length in shape[:-1]:
            num_bytes *= length
        start = data_start + offset
        if start + num_bytes > reader.size:
            raise reader.error(
                f"tensor {name!r} ends at byte {start + num_bytes}, but the file has "
                f"{reader.size} (an incomplete download?)"
            )
        tensors[name] = TensorInfo(name, shape, kind, type_name, start, num_bytes, row_bytes)
    return tensors
