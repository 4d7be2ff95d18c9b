"""Figure 12 of Kwon et al. (SOSP 2023): normalized latency against the rate of requests, by
manager."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from octavo.bench.paper.curves import Curves, draw_curves, rows_of, table_of
from octavo.bench.paper.engine import STATIC
from octavo.bench.paper.machine import ASSUMED, paper_opt13b_a100
from octavo.bench.paper.managers import MANAGERS, Pool, pool_of
from octavo.bench.paper.report import PaperOptions, PaperReport, lengths, trace_name
from octavo.bench.paper.serving import Served, serve, shown_rate, sustained_rate, sweep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.workload.items import WorkItem

NAMES = (STATIC, *MANAGERS)
RATES = (0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.2, 1.5, 1.8, 2.1, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)
_NUM_REQUESTS = 500
# Seconds an output token: what is compared is the rate at which it is reached.
BOUND_S = 0.1
STOP_S = 0.5
PAPER = {"orca-oracle": "1.7 to 2.7", "orca-max": "2.7 to 8", STATIC: "up to 22"}


def measure(options: PaperOptions) -> PaperReport:
    pool = pool_of(options.scale, options.num_blocks, options.block_size)
    items = lengths(options, pool.max_model_len, _NUM_REQUESTS)
    curves = {name: curve(name, pool, items, options.seed) for name in NAMES}
    rates = {name: sustained_rate(found, BOUND_S) for name, found in curves.items()}
    return PaperReport(
        title="Figure 12: normalized latency against request rate",
        conditions=(
            f"{len(items)} requests of {trace_name(options)} lengths, Poisson arrivals, "
            f"{pool.num_blocks} blocks of {pool.block_size} tokens. The scheduler and the managers "
            f"over the simulated executor. {ASSUMED}"
        ),
        values={
            "sustained_rate": rates,
            "curves": {
                name: {str(rate): served.normalized_latency_s for rate, served in found.items()}
                for name, found in curves.items()
            },
        },
        rows=rows_of("manager", curves),
        text=_text(curves, rates),
        draw=lambda figure: draw_curves(figure, curves, BOUND_S),
    )


def curve(name: str, pool: Pool, items: Sequence[WorkItem], seed: int) -> dict[float, Served]:
    """One manager at each rate."""
    run = partial(serve, name, pool, latency=paper_opt13b_a100(pool.block_size))
    return sweep(RATES, items, lambda at: run(items=at), seed=seed, stop_at_s=STOP_S)


def _text(curves: Curves, rates: dict[str, float]) -> str:
    lines = [
        table_of("manager", curves),
        "",
        f"{f'rate at {BOUND_S:g} s a token':<26}{'req/s':>8}{'paged is':>10}   paper",
    ]
    for name, rate in rates.items():
        ratio = f"{rates['paged'] / rate:.1f}×" if rate else "–"
        shown = shown_rate(curves[name], BOUND_S)
        lines.append(f"{name:<26}{shown:>8}{ratio:>10}   {PAPER.get(name, '')}")
    return "\n".join(lines)
