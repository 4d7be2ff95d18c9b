"""Figure 19 of Kwon et al. (SOSP 2023): swapping against recomputation, by block size.

They found recomputation better at small blocks, swapping at large ones, and both alike from 16 to
64 tokens, because a block of theirs is a copy for each layer's keys and one for its values. A block
of ours is one copy, whatever the number of layers; both layouts are shown.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from octavo.bench.paper.engines import Engine, engines_of, plain_request
from octavo.bench.paper.interrupted import keeping_what_is_whole
from octavo.bench.paper.machine import A100, OPT_13B, assumed, paper_opt13b_a100
from octavo.bench.paper.one_rate import (
    MANAGER,
    TAKES,
    check_rate,
    conditions,
    serve_at_one_rate,
)
from octavo.bench.paper.report import PaperOptions, PaperReport, Row
from octavo.core.layout import num_blocks_for
from octavo.core.plan import Batch, StepPlan, SwapIn, SwapOut, int_array
from octavo.simulate.load import StepLoad
from octavo.workload.items import WorkItem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WAYS = ("recompute", "swap")
CONTEXT = 256
# Of one copy between host and device that is too small to matter otherwise.
COPY_S = 8e-6
RATE = 5.0
_ROUNDS = 5
__all__ = ["CONTEXT", "COPY_S", "RATE", "TAKES", "WAYS", "draw", "measure", "overheads_ms"]


def measure(options: PaperOptions) -> PaperReport:
    check_rate(options)
    values: dict[str, dict[str, float]] = {}
    is_real = options.model is not None
    with keeping_what_is_whole(values) as measuring:
        for size in engines_of(options, (MANAGER,)).block_sizes:
            sized = replace(options, block_size=size)
            found = {} if is_real else overheads_ms(size)
            for way in WAYS:
                engines = engines_of(sized, (MANAGER,), preemption=way)
                with engines.open(MANAGER) as engine:
                    num_tokens = _context(engine)
                    if is_real:
                        found |= measured_ms(engine, way)
                    served = serve_at_one_rate(options, engines, engine, RATE)
                found[f"{way}_normalized_latency_s"] = served.normalized_latency_s
                found[f"{way}_preemptions"] = served.num_preemptions
            values[str(size)] = found
    how = (
        f"the least of {_ROUNDS}, each of an idle engine"
        if is_real
        else f"{COPY_S * 1e6:g} µs for each copy beside its bytes"
    )
    return PaperReport(
        title="Figure 19: swapping and recomputation",
        conditions=(
            f"Overhead: {num_tokens} tokens out and in again, or computed again; {how}. "
            f"{conditions(options, engines, RATE)}{assumed(options)}"
        ),
        values=values,
        rows=[{"block_size": size, **found} for size, found in values.items()],
        text=_text(values, num_tokens),
        is_cut=measuring.is_cut,
    )


def measured_ms(engine: Engine, way: str) -> dict[str, float]:
    """What it takes an idle engine to give up ``CONTEXT`` tokens, or its longest prompt if that is
    shorter, and to have them back."""
    seconds = []
    for number in range(_ROUNDS + 1):
        started = time.perf_counter()
        if way == "swap":
            _swap(engine)
        else:
            item = WorkItem(0.0, _context(engine), 1)
            engine.core.scheduler.add(plain_request(engine, number, item))
            while engine.core.has_work:
                engine.core.step()
        seconds.append(time.perf_counter() - started)
    # The first compiles, or touches the host's memory for the first time.
    name = "swap_one_ms" if way == "swap" else "recompute_ms"
    return {name: min(seconds[1:]) * 1e3}


def _context(engine: Engine) -> int:
    return min(CONTEXT, engine.pool.max_model_len - 1)


def _swap(engine: Engine) -> None:
    """Blocks of nobody, to as many of the host's and back."""
    count = num_blocks_for(_context(engine), engine.pool.block_size)
    random = np.random.default_rng(0)
    blocks = int_array(random.permutation(engine.pool.num_blocks)[:count] + 1)
    host = int_array(np.arange(1, count + 1))
    executor = engine.core.executor
    for command in (SwapOut(blocks, host), SwapIn(-1, host, blocks)):
        executor.launch(StepPlan(step_id=0, batch=Batch.empty(), commands=(command,)))
        executor.collect()


def overheads_ms(block_size: int) -> dict[str, float]:
    """What it takes to give up ``CONTEXT`` tokens and to have them back."""
    blocks = num_blocks_for(CONTEXT, block_size)
    bytes_s = 2 * blocks * block_size * OPT_13B.token_bytes / A100.swap_rate
    copies_of_a_layout = {"one": 1, "layered": 2 * OPT_13B.num_layers}
    recompute = paper_opt13b_a100(block_size).seconds(
        StepLoad(
            num_tokens=CONTEXT,
            num_rows=1,
            num_chunks=1,
            num_sampled=1,
            kv_tokens=0,
            attention_pairs=CONTEXT * (CONTEXT + 1) // 2,
        )
    )
    return {
        "recompute_ms": recompute * 1e3,
        **{
            f"swap_{name}_ms": (bytes_s + 2 * blocks * copies * COPY_S) * 1e3
            for name, copies in copies_of_a_layout.items()
        },
    }


def _text(values: dict[str, dict[str, float]], num_tokens: int) -> str:
    lines = [
        f"{num_tokens} tokens given up and had back, ms; then normalized latency, s a token",
        f"{'block':>6}{'recompute':>11}{'swap':>9}{'swap, 80 copies a block':>25}"
        f"{'recompute':>12}{'swap':>9}{'preemptions':>14}",
    ]
    for size, v in values.items():
        layered = v.get("swap_layered_ms")
        shown = f"{'–':>25}" if layered is None else f"{layered:>25.1f}"
        lines.append(
            f"{size:>6}{v['recompute_ms']:>11.1f}{v['swap_one_ms']:>9.1f}{shown}"
            f"{v['recompute_normalized_latency_s']:>12.4f}{v['swap_normalized_latency_s']:>9.4f}"
            f"{v['recompute_preemptions']:>8.0f}/{v['swap_preemptions']:.0f}"
        )
    return "\n".join(lines)


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    overhead, service = figure.subplots(1, 2)
    places = range(len(rows))
    for key, label in (
        ("recompute_ms", "recompute"),
        ("swap_one_ms", "swap, one copy a block"),
        ("swap_layered_ms", "swap, a copy a layer, K and V"),
    ):
        if key in rows[0]:
            overhead.plot(places, [float(row[key]) for row in rows], marker="o", label=label)
    overhead.set_yscale("log")
    overhead.set_ylabel(f"ms for {CONTEXT} tokens")
    for way in WAYS:
        service.plot(
            places,
            [float(row[f"{way}_normalized_latency_s"]) for row in rows],
            marker="o",
            label=way,
        )
    service.set_ylabel("normalized latency, s a token")
    for axes in (overhead, service):
        axes.set_xticks(places, [row["block_size"] for row in rows])
        axes.set_xlabel("tokens in a block")
        axes.legend(frameon=False, fontsize=7)
