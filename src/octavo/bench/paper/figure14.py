"""Figure 14 of Kwon et al. (SOSP 2023): several outputs of a prompt, by samples and by beams.

Their workload is Alpaca's: 19.3 tokens in and 58.5 out on average. No table of its lengths is at
hand, so they are drawn from geometric distributions of these means.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from octavo.bench.paper.curves import Curves, draw_rates, rates_of, rows_of_all, table_of
from octavo.bench.paper.engine import plain_request
from octavo.bench.paper.machine import ASSUMED, paper_opt13b_a100
from octavo.bench.paper.managers import Pool, pool_of
from octavo.bench.paper.report import PaperOptions, PaperReport, lengths, trace_name
from octavo.bench.paper.serving import (
    Served,
    serve,
    shown_rate,
    sweep,
)
from octavo.workload.items import WorkItem

if TYPE_CHECKING:
    from octavo.core.request import Request

NAMES = ("orca-max", "orca-oracle", "paged")
WIDTHS = (2, 4, 6)
RATES = (0.5, 1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
BOUND_S = 0.1
STOP_S = 0.5
ALPACA = (19.3, 58.5)
_NUM_REQUESTS = 300
# Paged against Orca (Oracle): no beams 1.3 times, six beams 2.3 times.
PAPER = {"beam 6": 2.3}


def measure(options: PaperOptions) -> PaperReport:
    pool = pool_of(options.scale, options.num_blocks, options.block_size)
    if options.trace is None:
        items = alpaca(options.num_requests or _NUM_REQUESTS, options.seed)
        source = "Alpaca's mean"
    else:
        items, source = lengths(options, pool.max_model_len), trace_name(options)
    found: dict[str, Curves] = {}
    for kind in ("parallel", "beam"):
        for width in WIDTHS:
            found[f"{kind} {width}"] = {
                name: sweep(
                    RATES,
                    items,
                    partial(_serve, name, pool, kind == "beam", width),
                    seed=options.seed,
                    stop_at_s=STOP_S,
                )
                for name in NAMES
            }
    rates = rates_of(found, BOUND_S)
    return PaperReport(
        title="Figure 14: parallel sampling and beam search",
        conditions=(
            f"{len(items)} requests of {source} lengths, Poisson arrivals, {pool.num_blocks} "
            f"blocks of {pool.block_size} tokens. The scheduler and the managers over the "
            f"simulated executor; beams diverge by made-up probabilities. {ASSUMED}"
        ),
        values=rates,
        rows=rows_of_all("decoding", found),
        text=_text(found, rates),
        draw=lambda figure: draw_rates(figure, rates, BOUND_S),
    )


def alpaca(count: int, seed: int) -> list[WorkItem]:
    """Geometric lengths of Alpaca's means, one token at least."""
    random = np.random.default_rng(seed)
    prompts, outputs = (random.geometric(1 / mean, count) for mean in ALPACA)
    return [
        WorkItem(0.0, int(prompt), int(min(output, 500)))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _serve(name: str, pool: Pool, is_beam: bool, width: int, items: list[WorkItem]) -> Served:
    def make(number: int, item: WorkItem) -> Request:
        request = plain_request(number, item)
        if is_beam:
            params = replace(request.params, use_beam_search=True)
            return replace(request, params=params, n=width, beam_width=width)
        return replace(request, params=replace(request.params, temperature=1.0), n=width)

    latency = paper_opt13b_a100(pool.block_size)
    return serve(name, pool, items, latency, make=make, per_request=width)


def _text(found: dict[str, Curves], rates: dict[str, dict[str, float]]) -> str:
    lines = []
    for label, curves in found.items():
        lines += [label, table_of("manager", curves), ""]
    lines.append(
        f"{'req/s at 0.1 s a token':<24}" + "".join(f"{n:>13}" for n in NAMES) + "  paged is"
    )
    for label, by_name in rates.items():
        ratio = by_name["paged"] / by_name["orca-oracle"] if by_name["orca-oracle"] else 0.0
        paper = f", paper {PAPER[label]}×" if label in PAPER else ""
        cells = "".join(f"{shown_rate(found[label][name], BOUND_S):>13}" for name in NAMES)
        lines.append(f"{label:<24}{cells}  {ratio:.1f}× of oracle{paper}")
    return "\n".join(lines)
