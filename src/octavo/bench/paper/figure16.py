"""Figure 16 of Kwon et al. (SOSP 2023): a prefix that all prompts share.

Theirs is translation (WMT16 English to German, LLaMA-13B): an instruction with one example, 80
tokens, or with five, 341 tokens, before each sentence. Sentences and translations are drawn here
from geometric distributions; LLaMA-13B has the size of OPT-13B. Reservations share nothing.
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
from octavo.bench.paper.report import PaperOptions, PaperReport
from octavo.bench.paper.serving import (
    Served,
    serve,
    shown_rate,
    sweep,
)
from octavo.core.plan import int_array
from octavo.workload.items import WorkItem

if TYPE_CHECKING:
    from octavo.core.request import Request

PREFIXES = {"1-shot": 80, "5-shot": 341}
NAMES = ("orca-oracle", "paged", "paged, shared")
RATES = (4, 8, 12, 16, 20, 24, 32, 40, 56, 80, 110, 150, 200, 260)
SENTENCE = (26.0, 30.0)
BOUND_S = 0.1
STOP_S = 0.5
_NUM_REQUESTS = 1500
PAPER = {"1-shot": 1.67, "5-shot": 3.58}


def measure(options: PaperOptions) -> PaperReport:
    pool = pool_of(options.scale, options.num_blocks, options.block_size)
    count = options.num_requests or _NUM_REQUESTS
    found: dict[str, Curves] = {
        label: {name: _curve(name, pool, prefix, count, options.seed) for name in NAMES}
        for label, prefix in PREFIXES.items()
    }
    rates = rates_of(found, BOUND_S)
    return PaperReport(
        title="Figure 16: a shared prefix",
        conditions=(
            f"{count} requests of 80 or 341 tokens in common and {SENTENCE[0]:g} of their own, "
            f"{SENTENCE[1]:g} out (means), Poisson arrivals, {pool.num_blocks} blocks of "
            f"{pool.block_size} tokens. The scheduler and the managers over the simulated "
            f"executor. {ASSUMED}"
        ),
        values=rates,
        rows=rows_of_all("prefix", found),
        text=_text(found, rates),
        draw=lambda figure: draw_rates(figure, rates, BOUND_S),
    )


def _curve(name: str, pool: Pool, prefix: int, count: int, seed: int) -> dict[float, Served]:
    random = np.random.default_rng(seed)
    lengths = [random.geometric(1 / mean, count) for mean in SENTENCE]
    items = [
        WorkItem(0.0, prefix + int(own), int(output)) for own, output in zip(*lengths, strict=True)
    ]
    common = random.integers(0, 30_000, prefix)

    def make(number: int, item: WorkItem) -> Request:
        own = np.random.default_rng((seed, number)).integers(
            0, 30_000, item.num_prompt_tokens - prefix
        )
        tokens = int_array(np.concatenate([common, own]))
        return replace(plain_request(number, item), prompt_token_ids=tokens)

    run = partial(
        serve,
        name.partition(",")[0],
        pool,
        latency=paper_opt13b_a100(pool.block_size),
        make=make,
        prefix_caching=name.endswith("shared"),
    )
    return sweep(RATES, items, lambda at: run(items=at), seed=seed, stop_at_s=STOP_S)


def _text(found: dict[str, Curves], rates: dict[str, dict[str, float]]) -> str:
    lines = []
    for label, curves in found.items():
        lines += [label, table_of("manager", curves), ""]
    lines.append(f"{'req/s at 0.1 s a token':<24}" + "".join(f"{n:>15}" for n in NAMES))
    for label, by_name in rates.items():
        shared, oracle = by_name["paged, shared"], by_name["orca-oracle"]
        ratio = f"{shared / oracle:.2f}" if oracle else "–"
        cells = "".join(f"{shown_rate(found[label][name], BOUND_S):>15}" for name in NAMES)
        lines.append(f"{label:<24}{cells}  shared is {ratio}× oracle, paper {PAPER[label]}×")
    return "\n".join(lines)
