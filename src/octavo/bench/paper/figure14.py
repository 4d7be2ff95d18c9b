"""Figure 14 of Kwon et al. (SOSP 2023): several outputs of a prompt, by samples and by beams.

Their workload is Alpaca's: 19.3 tokens in and 58.5 out on average. No table of its lengths is at
hand, so they are drawn from geometric distributions of these means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from octavo.bench.paper.curves import (
    Curves,
    all_curves_of,
    draw_rates,
    rates_of,
    rows_of_all,
    table_of,
)
from octavo.bench.paper.engines import ALL_MANAGERS, Engine, engines_of, plain_request
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
from octavo.bench.paper.serving import load_of, shown_rate, shown_ratio, sweep
from octavo.workload.items import WorkItem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octavo.core.request import Request

NAMES = ("orca-max", "orca-oracle", "paged")
KINDS = ("parallel", "beam")
WIDTHS = (2, 4, 6)
RATES = (0.2, 0.5, 1, 2, 4, 6, 8, 11, 14, 18, 22, 28, 36, 48, 64)
DURATION_S = 30.0
BOUND_S = 0.1
STOP_S = 0.5
ALPACA = (19.3, 58.5)
_NUM_LENGTHS = 1000
# Paged against Orca (Oracle): no beams 1.3 times, six beams 2.3 times.
PAPER = {"beam 6": 2.3}
TAKES = frozenset(
    {"trace", "num_requests", "num_blocks", "block_size"}
    | {"managers", "rates", "duration_s", "widths"}
)


def measure(options: PaperOptions) -> PaperReport:
    names = managers_of(options, NAMES, ALL_MANAGERS)
    load = load_of(options, RATES, DURATION_S, STOP_S)
    engines = engines_of(options, names)
    if options.trace is None:
        items = alpaca(_NUM_LENGTHS, options.seed, engines.pool.max_model_len)
        source = "Lengths of Alpaca's mean"
    else:
        items = work_of(replace(options, num_requests=None), engines)
        source = trace_name(options, engines)
    asked = [(kind, width) for kind in KINDS for width in options.widths or WIDTHS]
    found: dict[str, Curves] = {f"{kind} {width}": {} for kind, width in asked}
    with keeping_what_is_whole(found) as measuring:
        for name in names:
            with engines.open(name) as engine:
                for kind, width in asked:
                    make = partial(_request, kind == "beam", width)
                    curve = found[f"{kind} {width}"][name] = {}
                    sweep(engine, items, load, make=make, per_request=width, found=curve)
    rates = rates_of(found, BOUND_S)
    beams = "" if options.model else " Beams diverge by made-up probabilities."
    return PaperReport(
        title="Figure 14: parallel sampling and beam search",
        conditions=f"{source}, {load}, {engines.conditions}{beams}{assumed(options)}",
        values=rates,
        rows=rows_of_all("decoding", found),
        text=_text(found),
        is_cut=measuring.is_cut,
    )


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    draw_rates(figure, rates_of(all_curves_of("decoding", rows), BOUND_S), BOUND_S)


def alpaca(count: int, seed: int, max_total_len: int) -> list[WorkItem]:
    """Geometric lengths of Alpaca's means, one token at least, cut to ``max_total_len`` in all."""
    random = np.random.default_rng(seed)
    prompts, outputs = (random.geometric(1 / mean, count) for mean in ALPACA)
    most = max_total_len // 2
    return [
        WorkItem(0.0, int(min(prompt, most)), int(min(output, 500, most)))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _request(is_beam: bool, width: int, engine: Engine, number: int, item: WorkItem) -> Request:
    request = plain_request(engine, number, item)
    if is_beam:
        params = replace(request.params, use_beam_search=True)
        return replace(request, params=params, n=width, beam_width=width)
    return replace(request, params=replace(request.params, temperature=1.0), n=width)


def _text(found: dict[str, Curves]) -> str:
    lines = []
    for label, curves in found.items():
        lines += [label, table_of("manager", curves), ""]
    names = list(next(iter(found.values())))
    lines.append(f"{'req/s at 0.1 s a token':<24}" + "".join(f"{n:>18}" for n in names))
    for label, curves in found.items():
        cells = "".join(f"{shown_rate(curve, BOUND_S):>18}" for curve in curves.values())
        ratio = shown_ratio(curves, "paged", "orca-oracle", BOUND_S)
        paper = f", paper {PAPER[label]}×" if label in PAPER else ""
        lines.append(f"{label:<24}{cells}  paged is {ratio} oracle{paper}")
    return "\n".join(lines)
