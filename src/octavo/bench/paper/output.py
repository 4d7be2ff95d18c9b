"""A figure as a plot and a table on disk, each with the command, the machine and the commit."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
import textwrap
from collections.abc import Sequence
from pathlib import Path

from octavo import __version__
from octavo.bench.paper.registry import PaperFigure
from octavo.bench.paper.report import PaperReport, Row
from octavo.config import ConfigError
from octavo.output_files import check_plot


def caption_of(report: PaperReport, command: str) -> list[str]:
    """The title, the conditions, and the command with machine and commit."""
    conditions = report.conditions
    if report.is_cut:
        conditions += " Interrupted: what is missing was not measured."
    return [report.title, conditions, f"{command} — {machine()} — {commit()}"]


def write_table(path: Path, caption: Sequence[str], rows: Sequence[Row]) -> None:
    """A CSV with the caption as comments."""
    with path.open("w", newline="", encoding="utf-8") as file:
        for line in caption:
            file.write(f"# {line}\n")
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def read_table(path: Path) -> tuple[list[str], list[Row]]:
    """The caption and the rows of `write_table`, all of them texts.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # as spreadsheets write
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    caption = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    try:
        rows: list[Row] = list(csv.DictReader(lines[len(caption) :]))
    except csv.Error as error:
        raise ConfigError(f"{path} is no table: {error}") from error
    if len(caption) != 3 or not rows:
        raise ConfigError(f"{path} is not a table that octavo bench paper wrote with --csv")
    return caption, rows


def plot(drawn: PaperFigure, path: Path, caption: Sequence[str], rows: Sequence[Row]) -> None:
    """A PNG with the caption below it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), dpi=120, layout="constrained")
    body, foot = figure.subfigures(2, 1, height_ratios=[1, 0.2])
    body.suptitle(caption[0], fontsize=11)
    drawn.draw(body, rows)
    lines = [line for part in caption[1:] for line in textwrap.wrap(part, 118)]
    foot.text(0.02, 0.95, "\n".join(lines), fontsize=6.5, va="top")
    figure.savefig(path)


def redraw(number: str, drawn: PaperFigure, path: Path) -> Path:
    """Draw a table of `write_table` beside it; returns the PNG.

    Raises:
        ConfigError: it is none, another figure's, or damaged; or nothing can be written there.
    """
    caption, rows = read_table(path)
    title = caption[0].partition(":")[0]
    if title != f"Figure {number}":
        raise ConfigError(f"{path} holds {title[:40]!r}: give it with the --figure that it is of")
    place = path.with_suffix(".png")
    check_plot("--redraw", place)
    # A short row has None where a column is missing, and one too long a list under None.
    if any(None in row or None in row.values() for row in rows):
        raise ConfigError(f"{path} is damaged: a row has not as many values as there are columns")
    try:
        plot(drawn, place, caption, rows)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {error!r}") from error
    return place


def machine() -> str:
    """The processor that measured, and how many of its cores may be used."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"


def commit() -> str:
    """The checkout's commit, marked where files differ from it; else the version."""
    folder = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude", "*"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return f"octavo {__version__}"
    return f"octavo {__version__}, commit {found.stdout.strip()}"
