"""Figure 16 of Kwon et al. (SOSP 2023): a prefix that all prompts share.

Theirs is translation (WMT16 English to German, LLaMA-13B): an instruction with one example, 80
tokens, or with five, 341 tokens, before each sentence. Sentences and translations are drawn here
from geometric distributions; LLaMA-13B has the size of OPT-13B. Reservations share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
from octavo.bench.paper.engines import (
    ALL_MANAGERS,
    SHARED,
    Engine,
    MakeRequest,
    engines_of,
    plain_request,
)
from octavo.bench.paper.interrupted import keeping_what_is_whole
from octavo.bench.paper.machine import assumed
from octavo.bench.paper.report import PaperOptions, PaperReport, Row, managers_of
from octavo.bench.paper.serving import load_of, shown_rate, shown_ratio, sweep
from octavo.core.plan import int_array
from octavo.workload.items import WorkItem, WorkloadError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octavo.core.request import Request

PREFIXES = {"1-shot": 80, "5-shot": 341}
NAMES = ("orca-oracle", "paged", f"paged{SHARED}")
RATES = (4, 8, 12, 16, 20, 24, 32, 40, 56, 80, 110, 150, 200, 260)
DURATION_S = 120.0
SENTENCE = (26.0, 30.0)
BOUND_S = 0.1
STOP_S = 0.5
_NUM_LENGTHS = 1500
PAPER = {"1-shot": 1.67, "5-shot": 3.58}
TAKES = frozenset({"num_requests", "num_blocks", "block_size", "managers", "rates", "duration_s"})


def measure(options: PaperOptions) -> PaperReport:
    sharing = (f"paged{SHARED}", f"virtual{SHARED}")
    names = managers_of(options, NAMES, (*ALL_MANAGERS, *sharing))
    load = load_of(options, RATES, DURATION_S, STOP_S)
    engines = engines_of(options, names)
    longest = engines.pool.max_model_len
    if longest <= max(PREFIXES.values()) + 2:
        raise WorkloadError(
            f"sequences of {longest} tokens have no room beside {max(PREFIXES.values())} tokens in "
            "common; give a larger max_model_len"
        )
    found: dict[str, Curves] = {label: {} for label in PREFIXES}
    with keeping_what_is_whole(found) as measuring:
        for name in names:
            with engines.open(name) as engine:
                for label, prefix in PREFIXES.items():
                    items = sentences(prefix, options.seed, longest)
                    make = _maker(engine, prefix, options.seed)
                    curve = found[label][name] = {}
                    sweep(engine, items, load, make=make, found=curve)
    rates = rates_of(found, BOUND_S)
    return PaperReport(
        title="Figure 16: a shared prefix",
        conditions=(
            f"80 or 341 tokens in common and {SENTENCE[0]:g} of their own, {SENTENCE[1]:g} out "
            f"(means), {load}, {engines.conditions}{assumed(options)}"
        ),
        values=rates,
        rows=rows_of_all("prefix", found),
        text=_text(found),
        is_cut=measuring.is_cut,
    )


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    draw_rates(figure, rates_of(all_curves_of("prefix", rows), BOUND_S), BOUND_S)


def sentences(prefix: int, seed: int, max_total_len: int) -> list[WorkItem]:
    """Lengths of sentences behind ``prefix`` tokens, cut to ``max_total_len`` in all."""
    random = np.random.default_rng(seed)
    lengths = [random.geometric(1 / mean, _NUM_LENGTHS) for mean in SENTENCE]
    most = (max_total_len - prefix) // 2
    return [
        WorkItem(0.0, prefix + int(min(own, most)), int(min(output, most)))
        for own, output in zip(*lengths, strict=True)
    ]


def _maker(engine: Engine, prefix: int, seed: int) -> MakeRequest:
    common = np.random.default_rng(seed).integers(0, engine.vocab_size, prefix)

    def make(engine: Engine, number: int, item: WorkItem) -> Request:
        own = np.random.default_rng((seed, number)).integers(
            0, engine.vocab_size, item.num_prompt_tokens - prefix
        )
        tokens = int_array(np.concatenate([common, own]))
        return replace(plain_request(engine, number, item), prompt_token_ids=tokens)

    return make


def _text(found: dict[str, Curves]) -> str:
    lines = []
    for label, curves in found.items():
        lines += [label, table_of("manager", curves), ""]
    names = list(next(iter(found.values())))
    lines.append(f"{'req/s at 0.1 s a token':<24}" + "".join(f"{n:>18}" for n in names))
    for label, curves in found.items():
        cells = "".join(f"{shown_rate(curve, BOUND_S):>18}" for curve in curves.values())
        ratio = shown_ratio(curves, f"paged{SHARED}", "orca-oracle", BOUND_S)
        lines.append(f"{label:<24}{cells}  shared is {ratio} oracle, paper {PAPER[label]}×")
    return "\n".join(lines)
