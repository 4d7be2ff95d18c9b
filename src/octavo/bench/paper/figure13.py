"""Figure 13 of Kwon et al. (SOSP 2023): how many requests run at once, by manager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.bench.paper.engines import ALL_MANAGERS, engines_of
from octavo.bench.paper.interrupted import keeping_what_is_whole
from octavo.bench.paper.managers import MANAGERS
from octavo.bench.paper.report import (
    PaperOptions,
    PaperReport,
    Row,
    managers_of,
    trace_name,
    work_of,
)
from octavo.bench.paper.saturation import CONDITIONS, saturate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# At 2 requests a second of ShareGPT.
PAPER = {"orca-max": 7.0, "orca-pow2": 9.8, "orca-oracle": 13.6, "paged": 30.4}


TAKES = frozenset({"trace", "num_requests", "num_blocks", "block_size", "managers"})


def measure(options: PaperOptions) -> PaperReport:
    names = managers_of(options, MANAGERS, ALL_MANAGERS)
    engines = engines_of(options, names)
    items = work_of(options, engines)
    values: dict[str, float] = {}
    with keeping_what_is_whole(values) as measuring:
        for name in names:
            values[name] = saturate(engines, name, items).mean_running
    return PaperReport(
        title="Figure 13: requests that run at once",
        conditions=(
            f"{len(items)} requests of {trace_name(options, engines)}, {engines.conditions} "
            f"{CONDITIONS}"
        ),
        values=values,
        rows=[
            {"manager": name, "mean_running": f"{value:.4f}", "paper": PAPER.get(name, "")}
            for name, value in values.items()
        ],
        text=_table(values),
        is_cut=measuring.is_cut,
    )


def _table(values: dict[str, float]) -> str:
    lines = [
        f"{'requests at once':<18}{'measured':>10}{'paged is':>10}{'paper':>8}{'paged is':>10}"
    ]
    for name, value in values.items():
        paper = PAPER.get(name)
        ratio = f"{values['paged'] / value:.1f}×" if "paged" in values else "–"
        line = f"{name:<18}{value:>10.1f}{ratio:>10}"
        if paper is not None:
            line += f"{paper:>8.1f}{PAPER['paged'] / paper:>9.1f}×"
        lines.append(line)
    return "\n".join(lines)


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    values = [float(row["mean_running"]) for row in rows]
    axes.bar(
        [place - 0.2 for place in range(len(rows))], values, 0.36, color="#4878a8", label="Octavo"
    )
    known = [(place, float(row["paper"])) for place, row in enumerate(rows) if row["paper"]]
    axes.bar(
        [place + 0.2 for place, _ in known],
        [value for _, value in known],
        0.36,
        color="0.8",
        hatch="//",
        label="paper, 2 requests/s",
    )
    for place, value in enumerate(values):
        axes.text(place - 0.2, value, f"{value:.1f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(rows)), [row["manager"] for row in rows])
    axes.set_ylabel("requests at once")
    axes.legend(frameon=False, fontsize=8)
