"""Figure 15 of Kwon et al. (SOSP 2023): blocks saved by sharing, by samples and by beams.

The definition, and the runs, are those of `octavo.bench.sharing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.bench import sharing
from octavo.bench.paper.engines import engines_of
from octavo.bench.paper.interrupted import keeping_what_is_whole
from octavo.bench.paper.report import PaperOptions, PaperReport, Row, trace_name, work_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Percent of ShareGPT, smallest and largest over widths 2, 4 and 6.
PAPER = sharing.PAPER["ShareGPT"]
_NAMES = {"parallel": "parallel sampling", "beam": "beam search"}


TAKES = frozenset({"trace", "num_requests", "num_blocks", "block_size", "widths"})


def measure(options: PaperOptions) -> PaperReport:
    engines = engines_of(options, ("paged",))
    items = work_of(options, engines)
    values: dict[str, dict[str, float]] = {}
    with keeping_what_is_whole(values) as measuring, engines.open("paged") as engine:
        pool = engine.pool
        for kind in _NAMES:
            values[kind] = {}
            for width in options.widths or sharing.WIDTHS:
                requests = [
                    sharing.request_of(
                        number,
                        engine.prompt(number, item.num_prompt_tokens),
                        item.num_output_tokens,
                        width,
                        kind == "beam",
                    )
                    for number, item in enumerate(items)
                ]
                found = sharing.paced_saving(
                    engine.core,
                    requests,
                    num_blocks=pool.num_blocks,
                    block_size=pool.block_size,
                    load=sharing.LOAD,
                    seed=options.seed,
                )
                values[kind][str(width)] = found["saved_percent"]
    beams = "" if options.model else " Beams diverge by made-up probabilities."
    return PaperReport(
        title="Figure 15: blocks saved by sharing",
        conditions=(
            f"{len(items)} requests of {trace_name(options, engines)}, one by one, for "
            f"{100 * sharing.LOAD:.0f} % of the pool under paged: {engines.conditions}{beams}"
        ),
        values=values,
        rows=[
            {
                "decoding": kind,
                "width": width,
                "saved_percent": f"{saved:.4f}",
                "paper_lowest": PAPER[kind][0],
                "paper_highest": PAPER[kind][1],
            }
            for kind, by_width in values.items()
            for width, saved in by_width.items()
        ],
        text=_table(values),
        is_cut=measuring.is_cut,
    )


def _table(values: dict[str, dict[str, float]]) -> str:
    # The first kind has all of them; an interrupt may have left some of the second out.
    widths = list(next(iter(values.values())))
    lines = [f"{'blocks saved, %':<20}" + "".join(f"{w:>8}" for w in widths) + "   paper"]
    for kind, by_width in values.items():
        saved = "".join(f"{value:>8.1f}" for value in by_width.values()).ljust(8 * len(widths))
        lines.append(f"{_NAMES[kind]:<20}{saved}   {PAPER[kind][0]} to {PAPER[kind][1]}")
    return "\n".join(lines)


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), _NAMES, strict=True):
        mine = [row for row in rows if row["decoding"] == kind]
        axes.axhspan(*PAPER[kind], color="0.88", label="paper, widths 2 to 6")
        saved = [float(row["saved_percent"]) for row in mine]
        axes.bar(range(len(mine)), saved, 0.5, color="#4878a8", label="Octavo")
        axes.set_xticks(range(len(mine)), [row["width"] for row in mine])
        axes.set_title(_NAMES[kind], fontsize=9)
        axes.set_xlabel("samples" if kind == "parallel" else "beams")
        axes.set_ylim(0, 100)
        axes.legend(frameon=False, fontsize=8)
        if kind == "parallel":
            axes.set_ylabel("blocks saved, %")
