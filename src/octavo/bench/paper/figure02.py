"""Figure 2 of Kwon et al. (SOSP 2023): where the bytes of the KV cache are, by manager."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.bench.paper.engines import ALL_MANAGERS, engines_of
from octavo.bench.paper.interrupted import keeping_what_is_whole
from octavo.bench.paper.managers import MANAGERS, OPT_13B, driver_block
from octavo.bench.paper.report import (
    PaperOptions,
    PaperReport,
    Row,
    managers_of,
    trace_name,
    work_of,
)
from octavo.bench.paper.saturation import CONDITIONS, Saturation, saturate
from octavo.workload.items import WorkItem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Share of the pool. The paper does not split what is neither live, reserved nor internal waste.
PAPER = {
    "orca-max": {"live": 0.204, "reserved": 0.133, "internal": 0.573, "external": 0.089},
    "orca-pow2": {"live": 0.268, "reserved": 0.179, "internal": 0.136, "external": 0.416},
    "orca-oracle": {"live": 0.382, "reserved": 0.252, "internal": 0.0, "external": 0.366},
    "paged": {"live": 0.963},
}
PARTS = ("live", "reserved", "internal", "external", "free")
_COLORS = ("#3f7f4f", "#d9b44a", "#b5533c", "#7a5c8e", "#d8d8d8")


TAKES = frozenset({"trace", "num_requests", "num_blocks", "block_size", "managers"})


def measure(options: PaperOptions) -> PaperReport:
    names = managers_of(options, MANAGERS, ALL_MANAGERS)
    engines = engines_of(options, names)
    items = work_of(options, engines)
    found: dict[str, Saturation] = {}
    with keeping_what_is_whole(found) as measuring:
        for name in names:
            found[name] = saturate(engines, name, items)
        found |= _in_driver_blocks(options, names, items)
    return PaperReport(
        title="Figure 2: where the bytes of the KV cache are",
        conditions=(
            f"{len(items)} requests of {trace_name(options, engines)}, prefix caching off, "
            f"{engines.conditions} {CONDITIONS}"
        ),
        values={name: shares(found[name]) for name in names if name in found},
        rows=_rows(found),
        text=_table(found),
        is_cut=measuring.is_cut,
    )


def shares(found: Saturation) -> dict[str, float]:
    """The figure's parts, which sum to 1: nothing is cached."""
    of = found.shares
    assert of["cached"] == 0
    return {
        "live": of["live"],
        "reserved": of["reserved"],
        "internal": of["internal_waste"],
        "external": of["external_waste"],
        "free": of["free"],
    }


def _in_driver_blocks(
    options: PaperOptions, names: Sequence[str], items: Sequence[WorkItem]
) -> dict[str, Saturation]:
    """OPT-13B's 16 tokens are no whole number of driver pages: what `virtual` does with the
    smallest block of its own that is. A real engine's blocks are such at once."""
    if options.model is not None or options.scale != "opt-13b" or "virtual" not in names:
        return {}
    size = driver_block(OPT_13B)
    num_tokens = engines_of(options, names).pool.num_tokens
    coarse = replace(options, num_blocks=num_tokens // size, block_size=size)
    return {f"virtual, blocks of {size}": saturate(engines_of(coarse, names), "virtual", items)}


def _rows(found: dict[str, Saturation]) -> list[Row]:
    return [
        {
            "manager": name,
            **{part: f"{value:.6f}" for part, value in shares(run).items()},
            "pool_bytes": run.pool_bytes,
            "counted_steps": run.num_steps,
            "preemptions": run.num_preemptions,
            **{f"paper_{part}": PAPER.get(name, {}).get(part, "") for part in PARTS[:4]},
        }
        for name, run in found.items()
    ]


def _table(found: dict[str, Saturation]) -> str:
    lines = [f"{'% of the KV cache':<22}" + "".join(f"{part:>10}" for part in PARTS) + "   paper"]
    for name, run in found.items():
        values = "".join(f"{100 * value:>10.1f}" for value in shares(run).values())
        paper = " / ".join(f"{100 * value:.1f}" for value in PAPER.get(name, {}).values())
        lines.append(f"{name:<22}{values}   {paper}".rstrip())
    return "\n".join(lines)


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Ours, and the paper's beside it, hatched."""
    axes = figure.subplots()
    for place, row in enumerate(rows):
        for ours, shift, hatch in ((True, -0.2, ""), (False, 0.2, "//")):
            bottom = 0.0
            for part, color in zip(PARTS, _COLORS, strict=True):
                value = 100 * float(row.get(part if ours else f"paper_{part}") or 0.0)
                label = part if place == 0 and ours else None
                axes.bar(
                    place + shift, value, 0.36, bottom, color=color, hatch=hatch, label=label, lw=0
                )
                if part == "live" and value:
                    text = {"ha": "center", "fontsize": 7, "color": "white", "weight": "bold"}
                    axes.text(place + shift, value / 2, f"{value:.1f}", **text)
                bottom += value
    labels = [row["manager"].replace(", ", ",\n") for row in rows]
    axes.set_xticks(range(len(rows)), labels, fontsize=8)
    axes.set_ylabel("% of the KV cache")
    axes.set_ylim(0, 100)
    axes.bar(0, 0, color="white", edgecolor="black", hatch="//", lw=0, label="the paper's")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=6, fontsize=8, frameon=False)
