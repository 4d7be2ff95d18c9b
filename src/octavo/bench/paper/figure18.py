"""Figure 18 of Kwon et al. (SOSP 2023): what the block size costs, in the kernel and in service.

The kernel is measured on this machine, over tables of scattered blocks against the same keys in
consecutive ones; the service is simulated, where a block's size tells in what is wasted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from octavo.bench.paper.machine import ASSUMED, paper_opt13b_a100
from octavo.bench.paper.managers import pool_of
from octavo.bench.paper.report import SHAREGPT, PaperOptions, PaperReport, Row, lengths
from octavo.bench.paper.serving import serve
from octavo.bench.paper.simulated import SimulatedEngines
from octavo.core.layout import KVLayout
from octavo.core.plan import int_array
from octavo.workload.arrivals import arrival_times, with_arrivals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RATE = 3.0
# SmolLM2-135M's heads, a few of its layers.
_LAYERS, _HEADS, _KV_HEADS, _DIM = 4, 9, 3, 64
_ROWS, _CONTEXT, _ROUNDS = 8, 1024, 9
_NUM_REQUESTS = 400
TAKES = frozenset({"trace", "num_requests"})


def measure(options: PaperOptions) -> PaperReport:
    kernel = {size: kernel_ms(size) for size in SIZES}
    pool = pool_of(options.scale)
    items = lengths(options, pool.max_model_len, _NUM_REQUESTS)
    times = arrival_times("poisson", len(items), rate=RATE, seed=options.seed)
    served = {}
    for size in SIZES:
        sized = pool_of(options.scale, None, size)
        with SimulatedEngines(sized, paper_opt13b_a100(size)).open("paged") as engine:
            served[size] = serve(engine, with_arrivals(items, times))
    values = {
        str(size): {
            "scattered_ms": kernel[size][0],
            "consecutive_ms": kernel[size][1],
            "kernel_ratio": kernel[size][0] / kernel[size][1],
            "normalized_latency_s": served[size].normalized_latency_s,
            "mean_running": served[size].mean_running,
        }
        for size in SIZES
    }
    return PaperReport(
        title="Figure 18: block sizes",
        conditions=(
            f"Kernel: the compiled one of this CPU, {_ROWS} rows of {_CONTEXT} tokens, median of "
            f"{_ROUNDS}. Service: {len(items)} requests of {options.trace or SHAREGPT} lengths at "
            f"{RATE:g} a second over the simulated executor. {ASSUMED}"
        ),
        values=values,
        rows=[{"block_size": size, **found} for size, found in values.items()],
        text=_text(values),
    )


def kernel_ms(block_size: int) -> tuple[float, float]:
    """A step's attention in ms, over scattered and over consecutive blocks, by turns."""
    import torch

    from octavo.execution.arena import Arena
    from octavo.execution.attention.cpu import CPUAttention
    from octavo.execution.attention.interface import StepRows
    from octavo.execution.models.rope import RopeTable

    torch.set_num_threads(1)
    per_row = -(-_CONTEXT // block_size)
    count = _ROWS * per_row
    arena = Arena(KVLayout(_LAYERS, _KV_HEADS, _DIM, 2, block_size), count + 1, torch.bfloat16)
    arena.kv.normal_()
    angles = torch.rand(_CONTEXT, _DIM // 2)
    backend = CPUAttention(arena, _HEADS, RopeTable(angles.cos(), angles.sin()))
    rows = int_array(range(_ROWS))
    qkv = torch.randn(_ROWS, (_HEADS + 2 * _KV_HEADS) * _DIM, dtype=torch.bfloat16)
    consecutive = np.arange(1, count + 1, dtype=np.int32)
    scattered = np.random.default_rng(0).permutation(consecutive)
    times: list[list[float]] = [[], []]
    for _ in range(_ROUNDS + 1):
        for kind, ids in enumerate((scattered, consecutive)):
            step = StepRows(
                rows=rows,
                counts=int_array([1] * _ROWS),
                offsets=rows,
                starts=int_array([_CONTEXT - 1] * _ROWS),
                positions=int_array([_CONTEXT - 1] * _ROWS),
                tables=ids.reshape(_ROWS, per_row),
            )
            started = time.perf_counter()
            attend = backend.plan(step)
            for layer in range(_LAYERS):
                attend(layer, qkv)
            times[kind].append((time.perf_counter() - started) * 1e3)
    # The first round compiles, and warms up.
    return statistics.median(times[0][1:]), statistics.median(times[1][1:])


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
