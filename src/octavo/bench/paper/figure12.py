"""Figure 12 of Kwon et al. (SOSP 2023): normalized latency against the rate of requests, by
manager."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.bench.paper.curves import Curves, curves_of, draw_curves, rows_of, table_of
from octavo.bench.paper.engines import ALL_MANAGERS, STATIC, engines_of
from octavo.bench.paper.interrupted import keeping_what_is_whole
from octavo.bench.paper.machine import assumed
from octavo.bench.paper.report import (
    PaperOptions,
    PaperReport,
    Row,
    managers_of,
    trace_name,
    work_of,
)
from octavo.bench.paper.serving import load_of, shown_rate, shown_ratio, sustained_rate, sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATES = (0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.2, 1.5, 1.8, 2.1, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)
DURATION_S = 600.0
# Seconds an output token: what is compared is the rate at which it is reached.
BOUND_S = 0.1
STOP_S = 0.5
PAPER = {"orca-oracle": "1.7 to 2.7", "orca-max": "2.7 to 8", STATIC: "up to 22"}
TAKES = frozenset(
    {"trace", "num_requests", "num_blocks", "block_size"} | {"managers", "rates", "duration_s"}
)


def measure(options: PaperOptions) -> PaperReport:
    names = managers_of(options, ALL_MANAGERS, ALL_MANAGERS)
    load = load_of(options, RATES, DURATION_S, STOP_S)
    engines = engines_of(options, names)
    items = work_of(replace(options, num_requests=None), engines)
    curves: Curves = {}
    with keeping_what_is_whole(curves) as measuring:
        for name in names:
            curves[name] = {}
            with engines.open(name) as engine:
                sweep(engine, items, load, found=curves[name])
    rates = {name: sustained_rate(found, BOUND_S) for name, found in curves.items()}
    return PaperReport(
        title="Figure 12: normalized latency against request rate",
        conditions=(
            f"{trace_name(options, engines)}, {load}, {engines.conditions}{assumed(options)}"
        ),
        values={
            "sustained_rate": rates,
            "curves": {
                name: {str(rate): served.normalized_latency_s for rate, served in found.items()}
                for name, found in curves.items()
            },
        },
        rows=rows_of("manager", curves),
        text=_text(curves),
        is_cut=measuring.is_cut,
    )


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    draw_curves(figure, curves_of("manager", rows), BOUND_S)


def _text(curves: Curves) -> str:
    lines = [
        table_of("manager", curves),
        "",
        f"{f'rate at {BOUND_S:g} s a token':<26}{'req/s':>8}{'paged is':>10}   paper",
    ]
    for name in curves:
        ratio = shown_ratio(curves, "paged", name, BOUND_S)
        shown = shown_rate(curves[name], BOUND_S)
        lines.append(f"{name:<26}{shown:>8}{ratio:>10}   {PAPER.get(name, '')}")
    return "\n".join(lines)
