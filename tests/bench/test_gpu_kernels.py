"""What the bench of the GPU's kernels says of one of them; the kernels themselves need a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from octavo.bench import gpu_row_kernels, works
from octavo.bench.ceilings import Ceilings
from octavo.bench.gpu_kernels import table
from octavo.bench.gpu_row_kernels import Sizes, row_kernels
from octavo.bench.kernel_figures import OPERATIONS, figure
from octavo.execution.attention import flash3, flashinfer


def test_a_figure_has_time_amount_rate_and_share() -> None:
    read = figure("decode 64 x 1024", 50e-6, 2e8, 5e12, "64 parts")
    assert read == {
        "kernel": "decode 64 x 1024",
        "us": pytest.approx(50),
        "amount": 2e8,
        "of": "bytes",
        "rate": pytest.approx(4.0),
        "share": pytest.approx(0.8),
        "beside": "64 parts",
    }
    multiplied = figure("prefill 8192 of 8192, dense", 1e-3, 5e11, 8e14, "", OPERATIONS)
    assert (multiplied["of"], multiplied["rate"]) == ("operations", pytest.approx(500.0))
    text = table(
        {
            "gpu": "a GPU",
            "versions": {"torch": "2", "flashinfer": "none"},
            "read_tb_per_s": 5.0,
            "matmul_tflop_per_s": 800.0,
            "figures": [read, multiplied],
        }
    )
    _, header, first, second, last = text.splitlines()
    assert last == "Versions: torch 2, flashinfer none"
    assert header.split()[:5] == ["kernel", "µs", "amount", "rate", "share"]
    assert "50.0" in first
    assert "200.0 MB" in first
    assert "0.80" in first
    assert "500.0 GFLOP" in second
    assert "0.62" in second


def test_kernels_of_rows_run_as_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, where nothing is told of time."""
    monkeypatch.setattr(gpu_row_kernels, "_LAUNCHES", 2)
    outputs: list[object] = []

    def timed(work: Callable[[], object], count: int) -> float:
        found = work()
        assert isinstance(found, list)
        assert len(found) == count
        outputs.extend(found)
        return 1e-6

    sizes = Sizes(
        hidden=32, features=48, heads=4, kv_heads=2, head_dim=16, vocab=300, prefix=24, block=8,
        rows=(3,), unnormed_rows=(4,), gated_rows=(2,), prefix_rows=(5,),
    )  # fmt: skip
    ceilings = Ceilings(
        read_bytes=1e12, matmul_flops=1e14, fp8_flops=0, to_host_bytes=1e10, from_host_bytes=1e10
    )
    told = list(row_kernels(ceilings, timed, sizes, "cpu", torch.float32))
    amounts = {each["kernel"]: (each["amount"], each["of"]) for each in told}
    assert amounts == {
        "norm 3": (4 * 3 * 32 * 4, "bytes"),
        "activation 3": (3 * 3 * 48 * 4, "bytes"),
        "rotate and write 3": (2 * 3 * 8 * 16 * 4, "bytes"),
        "likeliest 3": (3 * 300 * 4, "bytes"),
        "top-k and top-p 3": (3 * 300 * 4, "bytes"),
        "activation 4, not normed": (3 * 4 * 48 * 4 + 4 * 32 * 4, "bytes"),
        "rotate and write 4, not normed": (2 * 4 * 8 * 16 * 4 + 4 * 32 * 4, "bytes"),
        "gated product 2": (96 * 32 * 4, "bytes"),
        "prefix 5 x 24": (4 * 5 * 24 * 4 * 16, "operations"),
    }
    assert "library, then activation 1.0 µs" in told[-2]["beside"]
    tensors = [each for each in outputs if isinstance(each, torch.Tensor)]
    assert len(tensors) >= 2 * 5
    assert all(tensor.isfinite().all() for tensor in tensors)


def test_versions_say_which_kernels_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(flash3, "find_flash3", lambda: None)
    found = SimpleNamespace(__version__="0.6")
    monkeypatch.setattr(flashinfer, "find_flashinfer", lambda: found)
    said = works.versions()
    assert (said["flash-attention 3"], said["flashinfer"]) == ("none", "0.6")
    monkeypatch.setattr(flash3, "find_flash3", lambda: object())
    monkeypatch.setattr(flashinfer, "find_flashinfer", lambda: None)
    said = works.versions()
    assert (said["flash-attention 3"], said["flashinfer"]) == ("installed", "none")
