"""A figure as a plot and a table on disk, each with the command, the machine and the commit."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
import textwrap
from importlib.util import find_spec
from pathlib import Path

from octavo import __version__
from octavo.bench.paper.report import PaperReport
from octavo.config import ConfigError


def require_plots() -> None:
    """Raises `ConfigError` where nothing can be drawn, before anything is measured."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--output needs matplotlib; install the extra octavo[plots]")


def write(report: PaperReport, number: str, folder: Path, command: str) -> tuple[Path, Path]:
    """``figure-N.png`` and ``figure-N.csv`` in ``folder``, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    caption = [report.conditions, f"{command} — {machine()} — {commit()}"]
    table, plot = folder / f"figure-{number}.csv", folder / f"figure-{number}.png"
    with table.open("w", newline="", encoding="utf-8") as file:
        for line in (report.title, *caption):
            file.write(f"# {line}\n")
        rows = csv.DictWriter(file, list(report.rows[0]), lineterminator="\n")
        rows.writeheader()
        rows.writerows(report.rows)
    _plot(report, caption, plot)
    return plot, table


def _plot(report: PaperReport, caption: list[str], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), dpi=120, layout="constrained")
    body, foot = figure.subfigures(2, 1, height_ratios=[1, 0.2])
    body.suptitle(report.title, fontsize=11)
    report.draw(body)
    lines = [line for part in caption for line in textwrap.wrap(part, 118)]
    foot.text(0.02, 0.95, "\n".join(lines), fontsize=6.5, va="top")
    figure.savefig(path)


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
