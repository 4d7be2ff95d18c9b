"""What commands write is found fit before they work: one rule for all of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo import output_files
from octavo.cli import app
from octavo.config import ConfigError
from octavo.output_files import check_directory, check_plot, check_writable


def test_a_file_in_a_directory_that_exists_may_be_written(tmp_path: Path) -> None:
    there = tmp_path / "there.csv"
    there.write_text("old")
    for path in (there, tmp_path / "new.csv", None):
        check_writable("--csv", path)
    check_plot("--plot", tmp_path / "new.PNG")
    check_directory("--output", tmp_path)
    assert there.read_text() == "old"
    assert list(tmp_path.iterdir()) == [there]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none/new.csv", r"--csv: the directory .*none does not exist; make it"),
        ("", r"is a directory; name a file in it"),
        ("there.csv/new.csv", r"--csv .*: Not a directory; name another file"),
        ("x" * 300, r"File name too long; name another file"),
    ],
)
def test_what_cannot_be_written_is_told(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "there.csv").write_text("old")
    with pytest.raises(ConfigError, match=message):
        check_writable("--csv", tmp_path / name)


def test_what_may_not_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may do anything, as root, would be refused nothing: the answer is given."""
    (tmp_path / "there.csv").write_text("old")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="the file may not be written"):
        check_writable("--csv", tmp_path / "there.csv")
    with pytest.raises(ConfigError, match="nothing may be written in the directory"):
        check_writable("--csv", tmp_path / "new.csv")


def test_a_plot_has_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"the name must end in .*\.png"):
        check_plot("--plot", tmp_path / "x.doc")
    monkeypatch.setattr(output_files, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--plot needs matplotlib; run: .*pip install"):
        check_plot("--plot", tmp_path / "x.png")


@pytest.mark.parametrize(
    "arguments",
    [
        "bench serve --csv no/x.csv",
        "bench serve --requests-csv no/x.csv",
        "bench serve --plot no/x.png",
        "bench sharing --plot no/x.png",
        "bench gpu --profile no/x.json",
        "bench paper --figure 12 --csv no/x.csv",
        "bench paper --figure 12 --output no",
        "calibrate --out no/x.json",
        "plan --slo ttft_p99=1s --rate 1 --plot no/x.png",
    ],
)
def test_every_command_looks_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code != 0
    assert "does not exist; make it" in result.stderr
    assert not list(tmp_path.iterdir())
