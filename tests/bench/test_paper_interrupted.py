"""Ctrl-C in a figure of the papers: rows that are whole are kept, drawn and told as such."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner, Result

from octavo.bench.paper import figure18
from octavo.bench.paper.registry import FIGURES
from octavo.bench.paper.report import PaperOptions
from octavo.bench.paper.simulated import SimulatedEngines
from octavo.cli import app
from octavo.engine.core import EngineCore

SMALL: dict[str, dict[str, Any]] = {
    "2": {"num_blocks": 140},
    "12": {"num_requests": 12, "rates": (0.5, 2.0), "managers": ("orca-max", "paged")},
    "13": {"num_blocks": 140},
    "14": {"num_requests": 8, "rates": (2.0,), "widths": (2,), "managers": ("orca-max", "paged")},
    "15": {"num_requests": 4, "widths": (2, 4)},
    "16": {"num_requests": 8, "rates": (8.0,), "managers": ("orca-oracle", "paged")},
    "18": {"num_requests": 8},
    "19": {"num_requests": 8},
}


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """More than 140 blocks hold at once, and soon over."""
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n" + "900,20\n700,30\n" * 4)
    return str(path)


@pytest.fixture(autouse=True)
def few_block_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedEngines, "block_sizes", (16, 64))
    monkeypatch.setattr(figure18, "kernel_ms", lambda *_: (2.0, 1.0))


def interrupt_at(monkeypatch: pytest.MonkeyPatch, number: int) -> Callable[[], int]:
    """Press Ctrl-C at an engine's step of this number; how many there were in all."""
    step, count = EngineCore.step, 0

    def counted(core: EngineCore) -> Any:
        nonlocal count
        count += 1
        if count == number:
            raise KeyboardInterrupt
        return step(core)

    monkeypatch.setattr(EngineCore, "step", counted)
    return lambda: count


@pytest.mark.parametrize("number", list(FIGURES))
def test_what_is_whole_is_as_if_nothing_had_happened(
    number: str, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = SMALL[number] if number not in ("2", "13") else SMALL[number] | {"trace": trace}
    figure, options = FIGURES[number], PaperOptions(**given)
    with monkeypatch.context() as patch:
        num_steps = interrupt_at(patch, -1)
        whole = figure.measure(options)
        total = num_steps()
    assert not whole.is_cut
    interrupt_at(monkeypatch, total)  # in the very last step
    cut = figure.measure(options)
    assert cut.is_cut
    assert 0 < len(cut.rows) < len(whole.rows)
    assert all(row in whole.rows for row in cut.rows)
    assert cut.text
    figure.draw(Figure(), cut.rows)


def paper(trace: str, *arguments: str) -> Result:
    small = ("--trace", trace, "--num-blocks", "140")
    return CliRunner().invoke(app, ["bench", "paper", "--figure", "13", *small, *arguments])


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_command_writes_what_is_whole(
    tmp_path: Path, trace: str, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    with monkeypatch.context() as patch:
        num_steps = interrupt_at(patch, -1)
        assert paper(trace).exit_code == 0
        total = num_steps()
    interrupt_at(monkeypatch, total)
    table = tmp_path / "table.csv"
    as_json = ["--json"] if form == "json" else []
    done = paper(trace, "--csv", str(table), "--output", str(tmp_path), *as_json)
    assert done.exit_code == 130
    assert "interrupted; rows of the table that are whole: 4" in done.stderr
    assert (tmp_path / "figure-13.png").read_bytes().startswith(b"\x89PNG")
    lines = table.read_text().splitlines()
    assert lines[1].endswith("Interrupted: what is missing was not measured.")
    names = [row["manager"] for row in csv.DictReader(lines[3:])]
    assert len(names) == 4
    if form == "json":
        assert list(json.loads(done.stdout)) == names
    else:
        assert "Interrupted: what is missing was not measured." in done.stdout
        assert f"written: {table}" in done.stdout
    # A table of a run that was cut is a table like others.
    redrawn = CliRunner().invoke(app, ["bench", "paper", "--figure", "13", "--redraw", str(table)])
    assert redrawn.exit_code == 0


def test_before_anything_is_whole_nothing_is_written(
    tmp_path: Path, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(monkeypatch, 5)
    table = tmp_path / "table.csv"
    done = paper(trace, "--csv", str(table))
    assert done.exit_code == 130
    assert "nothing that counts was measured yet" in done.stderr
    assert not table.exists()
