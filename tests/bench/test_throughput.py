from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.tiny_engine import make_llm, save_gguf
from octavo.bench.throughput import latency, throughput
from octavo.cli import app
from octavo.workload.items import WorkItem


def test_outputs_have_the_workloads_lengths(tmp_path: Path) -> None:
    with make_llm(save_gguf(tmp_path / "tiny.gguf")) as llm:
        report = throughput(llm, [WorkItem(0.0, 5, 7), WorkItem(0.0, 9, 3)])
        assert (report["prompt_tokens"], report["output_tokens"]) == (14, 10)
        assert report["output_tokens_per_second"] > 0
        report = latency(llm, [WorkItem(0.0, 5, 4)] * 2, rounds=2, warmups=1)
    assert report["batch_size"] == 2
    assert report["output_tokens"] == 8
    assert 0 < report["latency_ms"]["min"] <= report["latency_ms"]["max"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "throughput", "--trace", "x.csv", "--input-len", "5"], "--input-len is for"),
        (["bench", "serve", "--trace", "x.csv", "--output-len", "5"], "--output-len is for fixed"),
        (["bench", "serve", "--max-total-len", "99"], "--max-total-len leaves out requests of a"),
        (["bench", "throughput", "--max-total-len", "99"], "--max-total-len leaves out requests"),
        (
            ["plan", "--slo", "itl_p99=1s", "--rate", "1", "--trace", "x.csv", "--input-len", "9"],
            "--input-len is for fixed lengths: leave it out, or --trace",
        ),
    ],
)
def test_lengths_that_would_change_nothing_are_refused(arguments: list[str], message: str) -> None:
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 2
    assert message in found.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["latency", "m", "--rounds", "0"],
        ["latency", "m", "--warmups", "-1"],
        ["latency", "m", "--batch-size", "0"],
        ["throughput", "m", "--trace", "x.csv", "--max-total-len", "0"],
        ["attention", "--threads", "0"],
        ["attention", "--threads", "-5"],
    ],
)
def test_numbers_that_cannot_be_are_refused_and_not_replaced(arguments: list[str]) -> None:
    found = CliRunner().invoke(app, ["bench", *arguments])
    assert found.exit_code == 2, found.output
    assert arguments[-2].strip("-") in found.stderr
    assert "Traceback" not in found.stderr
