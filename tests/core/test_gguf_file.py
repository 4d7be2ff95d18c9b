"""The GGUF header reader: what gguf writes is read back; what is broken is refused by name."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.core.gguf_file import GGUFFile
from octavo.core.model_config import ModelLoadError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -5)
    writer.add_uint16("a.u16", 60000)
    writer.add_int16("a.i16", -300)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -70000)
    writer.add_uint64("a.u64", 2**63)
    writer.add_int64("a.i64", -(2**40))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "größe")
    writer.add_array("a.strings", ["x", "", "Ġé"])
    writer.add_array("a.ints", [3, 1, 2])
    writer.add_array("a.floats", [0.5, 1.5])
    values = np.arange(4 * 64, dtype=np.float32).reshape(4, 64)
    writer.add_tensor("plain", values)
    kind = gguf.GGMLQuantizationType.Q4_0
    writer.add_tensor("quantized", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf"


def test_metadata_is_decoded(path: Path) -> None:
    metadata = dict(GGUFFile(path).metadata)
    ints, floats = metadata.pop("a.ints"), metadata.pop("a.floats")
    assert isinstance(ints, np.ndarray)
    assert isinstance(floats, np.ndarray)
    assert (ints.tolist(), floats.tolist()) == ([3, 1, 2], [0.5, 1.5])
    assert metadata == {
        "general.architecture": "llama",
        "a.u8": 200,
        "a.i8": -5,
        "a.u16": 60000,
        "a.i16": -300,
        "a.u32": 4_000_000_000,
        "a.i32": -70000,
        "a.u64": 2**63,
        "a.i64": -(2**40),
        "a.f32": 0.5,
        "a.f64": 0.1,
        "a.bool": True,
        "a.string": "größe",
        "a.strings": ["x", "", "Ġé"],
    }


def test_tensors_are_where_gguf_put_them(path: Path) -> None:
    file = GGUFFile(path)
    values = np.arange(4 * 64, dtype=np.float32).reshape(4, 64)
    assert file.tensors["plain"].shape == (4, 64)
    assert np.array_equal(file.raw("plain").view(np.float32), values)
    info = file.tensors["quantized"]
    assert (info.shape, info.type_name, info.row_bytes) == ((4, 64), "Q4_0", 36)
    kind = gguf.GGMLQuantizationType.Q4_0
    assert np.array_equal(file.raw("quantized"), gguf.quantize(values, kind))
    assert not file.raw("plain").flags.writeable


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def header(num_tensors: int, num_keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def tensor(
    dims: tuple[int, ...], kind: int = 0, offset: int = 0, num_dims: int | None = None
) -> bytes:
    count = len(dims) if num_dims is None else num_dims
    return (
        string("t")
        + struct.pack("<I", count)
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


def key(kind: int, value: bytes, name: str = "k") -> bytes:
    return string(name) + struct.pack("<I", kind) + value


HUGE = struct.pack("<Q", 2**62)
BROKEN = {
    "empty": (b"", "it is empty"),
    "magic": (b"GGML" + bytes(40), "GGUF magic"),
    "version": (header(0, 0, version=1), "version 1"),
    "big-endian": (header(0, 0, version=3 << 24), "version 50331648"),
    "cut header": (b"GGUF" + bytes([3, 0, 0, 0, 1]), "8 bytes wanted"),
    "key count": (header(0, 2**60), "metadata keys cannot fit"),
    "tensor count": (header(2**60, 0), "tensors cannot fit"),
    "key length": (header(0, 1) + HUGE + bytes(99), "bytes wanted"),
    "key bytes": (header(0, 1) + string(b"\xff\xfe") + bytes(99), "not UTF-8"),
    "string length": (header(0, 1) + key(8, HUGE + bytes(99)), "runs past the end"),
    "value type": (header(0, 1) + key(77, bytes(99)), "unknown value type 77"),
    "array count": (
        header(0, 1) + key(9, struct.pack("<I", 4) + HUGE + bytes(99)),
        "bytes wanted",
    ),
    "strings count": (
        header(0, 1) + key(9, struct.pack("<I", 8) + HUGE + bytes(99)),
        "cannot fit",
    ),
    "nested array": (
        header(0, 1) + key(9, struct.pack("<IQ", 9, 1) + bytes(99)),
        "array of arrays",
    ),
    "duplicate key": (
        header(0, 2) + 2 * key(4, bytes(4)),
        "'k' appears twice",
    ),
    "alignment": (
        header(0, 1) + key(4, struct.pack("<I", 24), "general.alignment"),
        "24 is not a power of two",
    ),
    "zero alignment": (
        header(0, 1) + key(4, bytes(4), "general.alignment"),
        "general.alignment is 0",
    ),
    "dimensions": (
        header(1, 0) + tensor((1,), num_dims=5) + bytes(99),
        "5 dimensions",
    ),
    "no dimensions": (header(1, 0) + tensor(()) + bytes(99), "0 dimensions"),
    "zero length": (header(1, 0) + tensor((4, 0)) + bytes(99), r"shape \[0, 4\]"),
    "overflow": (
        header(1, 0) + tensor((2**62, 2**62, 2**62)) + bytes(99),
        "incomplete download",
    ),
    "past the end": (header(1, 0) + tensor((64,)) + bytes(99), "incomplete download"),
    "tensor type": (header(1, 0) + tensor((4,), kind=999) + bytes(99), "unknown type 999"),
    "row of blocks": (header(1, 0) + tensor((33,), kind=2) + bytes(99), "Q4_0 has shape"),
    "misaligned": (header(1, 0) + tensor((4,), offset=8) + bytes(99), "not aligned to 32"),
    "duplicate tensor": (header(2, 0) + 2 * tensor((4,)) + bytes(99), "'t' appears twice"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused(tmp_path: Path, case: str) -> None:
    data, message = BROKEN[case]
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError, match=rf"broken\.gguf.*{message}"):
        GGUFFile(path)


def test_a_string_that_is_not_utf8_is_an_error_only_where_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header(0, 1) + key(8, string(b"\xff")))
    file = GGUFFile(path)
    with pytest.raises(ModelLoadError, match="'k' is not UTF-8"):
        file.metadata["k"]


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"nothing\.gguf: cannot open"):
        GGUFFile(tmp_path / "nothing.gguf")


def test_damage_anywhere_is_an_error_or_harmless(path: Path) -> None:
    """Truncated at every length, and 1,000 times with bytes overwritten."""
    whole = path.read_bytes()
    dice = random.Random(0)
    for cut in range(0, len(whole), 7):
        try_to_read(path, whole[:cut])
    for _ in range(1000):
        damaged = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            damaged[dice.randrange(700)] = dice.choice([0, 1, 8, 9, 127, 255])
        try_to_read(path, bytes(damaged))


def try_to_read(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        file = GGUFFile(path)
        for name in file.metadata:
            file.metadata[name]
        for name in file.tensors:
            file.raw(name)
    except ModelLoadError:
        pass
