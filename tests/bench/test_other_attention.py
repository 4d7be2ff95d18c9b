"""What is timed beside our attention computes the same, over the same pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from execution.gpu.fake_flashinfer import FakeFlashInfer
from execution.gpu.references import Pool, attend
from octavo.bench import gpu_kernels, other_attention
from octavo.execution.attention.dense import DenseChunk
from octavo.execution.device import PlainDevice
from octavo.execution.kernels.decode_attention import decode_attention

LAYERS, BLOCK, KV_HEADS, HEADS, DIM = 2, 4, 2, 6, 8


@pytest.fixture
def layers() -> torch.Tensor:
    torch.manual_seed(0)
    shape = (13, BLOCK, LAYERS, 2, KV_HEADS, DIM)
    return torch.randn(shape).permute(2, 0, 1, 3, 4, 5)


def test_nothing_is_timed_where_nothing_is_installed(
    layers: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("find_flashinfer", "find_flash3"):
        monkeypatch.setattr(other_attention, name, lambda: None)
    tables = torch.arange(1, 13, dtype=torch.int32).view(3, 4)
    queries = torch.randn(3, HEADS, DIM)
    assert other_attention.decoders(queries, layers, tables) == {}
    chunk = DenseChunk(0, 0, 3, 13)
    assert other_attention.prefills(queries, layers[0], tables[:1], chunk, queries) == {}


def test_the_same_work(layers: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_attention, "find_flashinfer", FakeFlashInfer)
    monkeypatch.setattr(other_attention, "find_flash3", lambda: None)
    monkeypatch.setattr(other_attention, "CUDADevice", PlainDevice)
    tables = (torch.randperm(12, dtype=torch.int32) + 1).view(3, 4)
    queries = torch.randn(3, HEADS, DIM)
    kernels = other_attention._flashinfer(layers[0], tables, HEADS)
    assert kernels is not None
    found = kernels.decode(queries, layers[1])
    pool = Pool(layers[1], tables)
    for row in range(3):
        expected = attend(queries[row : row + 1], pool, row, 15)
        torch.testing.assert_close(found[row : row + 1], expected, atol=1e-5, rtol=1e-5)
    other_attention.decoders(queries, layers, tables)["FlashInfer"]()
    chunk = DenseChunk(0, 0, 3, 13)
    works = other_attention.prefills(queries, layers[1], tables[:1], chunk, queries)
    assert list(works) == ["FlashInfer"]
    expected = attend(queries, pool, 0, 13)
    torch.testing.assert_close(works["FlashInfer"](), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_scattered", [True, False])
def test_a_decode_kernel_is_timed_over_blocks_of_any_size(
    monkeypatch: pytest.MonkeyPatch, is_scattered: bool
) -> None:
    """On a CPU, in the interpreter, where no time is told."""
    seen: list[torch.Tensor] = []

    def decode(
        queries: torch.Tensor, layer: torch.Tensor, parts: Any, *arguments: Any, **options: Any
    ) -> None:
        seen.append(arguments[0].clone())
        decode_attention(queries, layer, parts, *arguments, **options)
        assert arguments[1].isfinite().all()

    def captured(work: Callable[[], object], count: int) -> float:
        work()
        return 2e-6 * count

    for name, value in {
        "_DEVICE": "cpu", "_DTYPE": torch.float32, "_HEADS": 4, "_KV_HEADS": 2, "_DIM": 16,
        "SHARES": 4, "_captured": captured, "decode_attention": decode,
    }.items():  # fmt: skip
        monkeypatch.setattr(gpu_kernels, name, value)
    seconds = gpu_kernels.decode_seconds(2, 24, 8, is_scattered=is_scattered)
    assert seconds == 2e-6 * 8, "as many launches as layers"
    assert len(seen) == 8
    tables = seen[0]
    assert sorted(tables.flatten().tolist()) == [1, 2, 3, 4, 5, 6]
    assert tables.shape == (2, 3)
    assert is_scattered or tables.tolist() == [[1, 2, 3], [4, 5, 6]]
