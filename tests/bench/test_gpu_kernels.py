"""What the bench of the GPU's kernels says of one of them; the kernels themselves need a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from octavo.bench.gpu_kernels import OPERATIONS, figure, table


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
            "read_tb_per_s": 5.0,
            "matmul_tflop_per_s": 800.0,
            "figures": [read, multiplied],
        }
    )
    _, header, first, second = text.splitlines()
    assert header.split()[:5] == ["kernel", "µs", "amount", "rate", "share"]
    assert "50.0" in first
    assert "200.0 MB" in first
    assert "0.80" in first
    assert "500.0 GFLOP" in second
    assert "0.62" in second
