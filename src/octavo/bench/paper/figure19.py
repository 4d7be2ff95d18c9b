"""Figure 19 of Kwon et al. (SOSP 2023): swapping against recomputation, by block size.

They found recomputation better at small blocks, swapping at large ones, and both alike from 16 to
64 tokens, because a block of theirs is a copy for each layer's keys and one for its values. A block
of ours is one copy, whatever the number of layers; both layouts are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.bench.paper.machine import A100, ASSUMED, OPT_13B, paper_opt13b_a100
from octavo.bench.paper.managers import pool_of
from octavo.bench.paper.report import SHAREGPT, PaperOptions, PaperReport, Row, lengths
from octavo.bench.paper.serving import serve
from octavo.bench.paper.simulated import SimulatedEngines
from octavo.core.layout import num_blocks_for
from octavo.scheduling.preemption import PreemptionPolicy
from octavo.simulate.load import StepLoad
from octavo.workload.arrivals import arrival_times, with_arrivals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WAYS = ("recompute", "swap")
CONTEXT = 256
# Of one copy between host and device that is too small to matter otherwise.
COPY_S = 8e-6
RATE = 5.0
_NUM_REQUESTS = 400
TAKES = frozenset({"trace", "num_requests"})


def measure(options: PaperOptions) -> PaperReport:
    pool = pool_of(options.scale)
    items = lengths(options, pool.max_model_len, _NUM_REQUESTS)
    times = arrival_times("poisson", len(items), rate=RATE, seed=options.seed)
    values: dict[str, dict[str, float]] = {}
    for size in SIZES:
        found = overheads_ms(size)
        sized = pool_of(options.scale, None, size)
        for way in WAYS:
            engines = SimulatedEngines(
                sized,
                paper_opt13b_a100(size),
                preemption=PreemptionPolicy(mode=way),
                num_host_blocks=sized.num_blocks if way == "swap" else 0,
            )
            with engines.open("paged") as engine:
                served = serve(engine, with_arrivals(items, times))
            found[f"{way}_normalized_latency_s"] = served.normalized_latency_s
            found[f"{way}_preemptions"] = served.num_preemptions
        values[str(size)] = found
    return PaperReport(
        title="Figure 19: swapping and recomputation",
        conditions=(
            f"Overhead: {CONTEXT} tokens out and in again, or computed again; {COPY_S * 1e6:g} µs "
            f"for each copy beside its bytes. Service: {len(items)} requests of "
            f"{options.trace or SHAREGPT} lengths "
            f"at {RATE:g} a second over the simulated executor. {ASSUMED}"
        ),
        values=values,
        rows=[{"block_size": size, **found} for size, found in values.items()],
        text=_text(values),
    )


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


def _text(values: dict[str, dict[str, float]]) -> str:
    lines = [
        f"{CONTEXT} tokens given up and had back, ms; then normalized latency, s a token",
        f"{'block':>6}{'recompute':>11}{'swap':>9}{'swap, 80 copies a block':>25}"
        f"{'recompute':>12}{'swap':>9}{'preemptions':>14}",
    ]
    lines += [
        f"{size:>6}{v['recompute_ms']:>11.1f}{v['swap_one_ms']:>9.1f}{v['swap_layered_ms']:>25.1f}"
        f"{v['recompute_normalized_latency_s']:>12.4f}{v['swap_normalized_latency_s']:>9.4f}"
        f"{v['recompute_preemptions']:>8.0f}/{v['swap_preemptions']:.0f}"
        for size, v in values.items()
    ]
    return "\n".join(lines)


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    overhead, service = figure.subplots(1, 2)
    places = range(len(rows))
    for key, label in (
        ("recompute_ms", "recompute"),
        ("swap_one_ms", "swap, one copy a block"),
        ("swap_layered_ms", "swap, a copy a layer, K and V"),
    ):
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
