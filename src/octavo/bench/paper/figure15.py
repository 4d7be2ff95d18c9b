"""Figure 15 of Kwon et al. (SOSP 2023): blocks saved by sharing, by samples and by beams.

The definition, and the runs, are those of `octavo.bench.sharing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.bench import sharing
from octavo.bench.paper.managers import pool_of
from octavo.bench.paper.report import PaperOptions, PaperReport, lengths, trace_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Percent of ShareGPT, smallest and largest over widths 2, 4 and 6.
PAPER = sharing.PAPER["ShareGPT"]
_NAMES = {"parallel": "parallel sampling", "beam": "beam search"}


def measure(options: PaperOptions) -> PaperReport:
    pool = pool_of(options.scale, options.num_blocks, sharing.BLOCK_SIZE)
    items = lengths(options, pool.max_model_len)
    values = {
        kind: {
            str(width): sharing.policy_saving(
                items,
                width,
                kind == "beam",
                num_blocks=pool.num_blocks,
                load=sharing.LOAD,
                seed=options.seed,
            )["saved_percent"]
            for width in sharing.WIDTHS
        }
        for kind in _NAMES
    }
    return PaperReport(
        title="Figure 15: blocks saved by sharing",
        conditions=(
            f"{len(items)} requests of {trace_name(options)} lengths, one by one, for "
            f"{100 * sharing.LOAD:.0f} % of {pool.num_blocks} blocks of {sharing.BLOCK_SIZE} "
            "tokens. The scheduler and the paged manager over the simulated executor; beams "
            "diverge by made-up probabilities."
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
        draw=lambda figure: _draw(figure, values),
    )


def _table(values: dict[str, dict[str, float]]) -> str:
    lines = [f"{'blocks saved, %':<20}" + "".join(f"{w:>8}" for w in sharing.WIDTHS) + "   paper"]
    for kind, by_width in values.items():
        saved = "".join(f"{value:>8.1f}" for value in by_width.values())
        lines.append(f"{_NAMES[kind]:<20}{saved}   {PAPER[kind][0]} to {PAPER[kind][1]}")
    return "\n".join(lines)


def _draw(figure: Figure, values: dict[str, dict[str, float]]) -> None:
    for axes, (kind, by_width) in zip(
        figure.subplots(1, 2, sharey=True), values.items(), strict=True
    ):
        axes.axhspan(*PAPER[kind], color="0.88", label="paper, widths 2 to 6")
        places = range(len(by_width))
        axes.bar(places, list(by_width.values()), 0.5, color="#4878a8", label="Octavo")
        axes.set_xticks(places, list(by_width))
        axes.set_title(_NAMES[kind], fontsize=9)
        axes.set_xlabel("samples" if kind == "parallel" else "beams")
        axes.set_ylim(0, 100)
        axes.legend(frameon=False, fontsize=8)
        if kind == "parallel":
            axes.set_ylabel("blocks saved, %")
