"""Figure 18 of Kwon et al. (SOSP 2023): what the block size costs, in the kernel and in service.

The kernel is measured on this machine, over tables of scattered blocks against the same keys in
consecutive ones. A simulated service tells what a block's size wastes; a real one both together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.bench.paper.block_kernels import kernel_conditions, kernel_ms
from octavo.bench.paper.engines import engines_of
from octavo.bench.paper.interrupted import keeping_what_is_whole
from octavo.bench.paper.machine import assumed
from octavo.bench.paper.one_rate import (
    MANAGER,
    TAKES,
    check_rate,
    conditions,
    serve_at_one_rate,
)
from octavo.bench.paper.report import PaperOptions, PaperReport, Row
from octavo.bench.paper.serving import Served

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATE = 3.0
__all__ = ["RATE", "TAKES", "draw", "measure"]


def measure(options: PaperOptions) -> PaperReport:
    check_rate(options)
    engines = engines_of(options, (MANAGER,))
    served: dict[int, Served] = {}
    with keeping_what_is_whole(served) as measuring:
        for size in engines.block_sizes:
            sized = engines_of(replace(options, block_size=size), (MANAGER,))
            with sized.open(MANAGER) as engine:
                served[size] = serve_at_one_rate(options, sized, engine, RATE)
    kernel = {size: kernel_ms(size, engines.device) for size in served}
    values = {
        str(size): {
            "scattered_ms": kernel[size][0],
            "consecutive_ms": kernel[size][1],
            "kernel_ratio": kernel[size][0] / kernel[size][1],
            "normalized_latency_s": served[size].normalized_latency_s,
            "mean_running": served[size].mean_running,
        }
        for size in served
    }
    return PaperReport(
        title="Figure 18: block sizes",
        conditions=(
            f"{kernel_conditions(engines.device)} {conditions(options, sized, RATE)}"
            f"{assumed(options)}"
        ),
        values=values,
        rows=[{"block_size": size, **found} for size, found in values.items()],
        text=_text(values),
        is_cut=measuring.is_cut,
    )


def _text(values: dict[str, dict[str, float]]) -> str:
    lines = [
        f"{'block':>6}{'scattered ms':>14}{'consecutive':>13}{'ratio':>8}{'s a token':>12}"
        f"{'at once':>9}"
    ]
    lines += [
        f"{size:>6}{v['scattered_ms']:>14.3f}{v['consecutive_ms']:>13.3f}{v['kernel_ratio']:>8.2f}"
        f"{v['normalized_latency_s']:>12.4f}{v['mean_running']:>9.1f}"
        for size, v in values.items()
    ]
    return "\n".join(lines)


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    kernel, service = figure.subplots(1, 2)
    places = range(len(rows))
    kernel.bar(places, [float(row["kernel_ratio"]) for row in rows], color="#4878a8")
    kernel.set_ylabel("scattered to consecutive blocks, time")
    service.bar(places, [float(row["normalized_latency_s"]) for row in rows], color="#4878a8")
    service.set_ylabel("normalized latency, s a token")
    for axes in (kernel, service):
        axes.set_xticks(places, [row["block_size"] for row in rows])
        axes.set_xlabel("tokens in a block")
