"""Figure 13 of Kwon et al. (SOSP 2023): how many requests run at once, by manager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.bench.paper.managers import MANAGERS, pool_of
from octavo.bench.paper.report import PaperOptions, PaperReport, lengths, trace_name
from octavo.bench.paper.saturation import CONDITIONS, saturate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# At 2 requests a second of ShareGPT.
PAPER = {"orca-max": 7.0, "orca-pow2": 9.8, "orca-oracle": 13.6, "paged": 30.4}


def measure(options: PaperOptions) -> PaperReport:
    pool = pool_of(options.scale, options.num_blocks, options.block_size)
    items = lengths(options, pool.max_model_len)
    values = {name: saturate(name, pool, items).mean_running for name in MANAGERS}
    return PaperReport(
        title="Figure 13: requests that run at once",
        conditions=(
            f"{len(items)} requests of {trace_name(options)} lengths at saturation, "
            f"{pool.num_blocks} blocks of {pool.block_size} tokens ({options.scale}). {CONDITIONS}"
        ),
        values=values,
        rows=[
            {"manager": name, "mean_running": f"{value:.4f}", "paper": PAPER.get(name, "")}
            for name, value in values.items()
        ],
        text=_table(values),
        draw=lambda figure: _draw(figure, values),
    )


def _table(values: dict[str, float]) -> str:
    lines = [
        f"{'requests at once':<18}{'measured':>10}{'paged is':>10}{'paper':>8}{'paged is':>10}"
    ]
    for name, value in values.items():
        paper = PAPER.get(name)
        line = f"{name:<18}{value:>10.1f}{values['paged'] / value:>9.1f}×"
        if paper is not None:
            line += f"{paper:>8.1f}{PAPER['paged'] / paper:>9.1f}×"
        lines.append(line)
    return "\n".join(lines)


def _draw(figure: Figure, values: dict[str, float]) -> None:
    axes = figure.subplots()
    places = range(len(values))
    axes.bar(
        [p - 0.2 for p in places], list(values.values()), 0.36, color="#4878a8", label="Octavo"
    )
    known = [(place + 0.2, PAPER[name]) for place, name in enumerate(values) if name in PAPER]
    axes.bar(*zip(*known, strict=True), 0.36, color="0.8", hatch="//", label="paper, 2 requests/s")
    for place, value in enumerate(values.values()):
        axes.text(place - 0.2, value, f"{value:.1f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(places, list(values))
    axes.set_ylabel("requests at once")
    axes.legend(frameon=False, fontsize=8)
