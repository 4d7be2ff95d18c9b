"""Attention backends against each other on one shape: which way reads the pool fastest here.

Each figure is a whole step's attention (all layers), median over rounds that alternate between the
backends, so that the machine's drift touches them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from octavo.core.layout import KVLayout
from octavo.core.plan import int_array
from octavo.execution.arena import Arena
from octavo.execution.attention.cpu import CPUAttention
from octavo.execution.attention.gather import GatherAttention
from octavo.execution.attention.interface import AttentionBackend, StepRows
from octavo.execution.models.rope import RopeTable

_LAYERS, _HEADS, _KV_HEADS, _DIM, _BLOCK_SIZE = 30, 9, 3, 64, 16
_POOL_BLOCKS = 2048
_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Work:
    """``rows`` rows of ``context`` tokens of which the last ``tokens`` run in the step."""

    name: str
    rows: int
    tokens: int
    context: int


WORKS = (
    Work("decode", 1, 1, 128),
    Work("decode", 1, 1, 1024),
    Work("decode", 1, 1, 4096),
    Work("decode", 8, 1, 128),
    Work("decode", 8, 1, 1024),
    Work("decode", 16, 1, 512),
    Work("prefill", 1, 128, 128),
    Work("prefill", 1, 512, 512),
    Work("chunk", 1, 256, 1024),
)


def run(threads: int) -> list[dict[str, object]]:
    """Milliseconds a step of each backend and work, in both dtypes."""
    torch.set_num_threads(threads)
    figures: list[dict[str, object]] = []
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            layout = KVLayout(_LAYERS, _KV_HEADS, _DIM, dtype.itemsize, _BLOCK_SIZE)
            arena = Arena(layout, _POOL_BLOCKS, dtype)
            arena.kv.normal_()
            angles = torch.rand(8192, _DIM // 2)
            rope = RopeTable(angles.cos(), angles.sin())
            backends: dict[str, AttentionBackend] = {
                "compiled": CPUAttention(arena, _HEADS, rope),
                "gather": GatherAttention(arena, _HEADS, rope),
            }
            for work in WORKS:
                timings = _compare(backends, work, dtype)
                figures.append(
                    {
                        "work": work.name,
                        "dtype": str(dtype).removeprefix("torch."),
                        "rows": work.rows,
                        "tokens": work.tokens,
                        "context": work.context,
                        **{f"{name}_ms": value for name, value in timings.items()},
                        "ratio": timings["gather"] / timings["compiled"],
                    }
                )
    return figures


def table(figures: list[dict[str, object]]) -> str:
    """The figures as text, one work a line."""
    lines = ["work     dtype     rows tokens context  compiled ms  gather ms  ratio"]
    lines += [
        f"{f['work']:<8} {f['dtype']:<9} {f['rows']:>4} {f['tokens']:>6} {f['context']:>7} "
        f"{f['compiled_ms']:>12.2f} {f['gather_ms']:>10.2f} {f['ratio']:>6.2f}"
        for f in figures
    ]
    return "\n".join(lines)


def _compare(
    backends: dict[str, AttentionBackend], work: Work, dtype: torch.dtype
) -> dict[str, float]:
    step = _step(work)
    qkv = torch.randn(step.num_tokens, (_HEADS + 2 * _KV_HEADS) * _DIM).to(dtype)
    calls = {name: _call(backend, step, qkv) for name, backend in backends.items()}
    samples: dict[str, list[float]] = {name: [] for name in backends}
    for call in calls.values():
        call()
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            samples[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in samples.items()}


def _call(backend: AttentionBackend, step: StepRows, qkv: torch.Tensor) -> Callable[[], None]:
    def call() -> None:
        attend = backend.plan(step)
        for layer in range(_LAYERS):
            attend(layer, qkv)

    return call


def _step(work: Work) -> StepRows:
    """Blocks of each row scattered over the pool, as after hours of serving."""
    per_row = -(-work.context // _BLOCK_SIZE)
    ids = np.random.default_rng(0).permutation(np.arange(1, _POOL_BLOCKS))
    tables = ids[: work.rows * per_row].reshape(work.rows, per_row).astype(np.int32)
    counts = int_array([work.tokens] * work.rows)
    starts = int_array([work.context - work.tokens] * work.rows)
    positions = np.concatenate([np.arange(work.tokens) + start for start in starts])
    return StepRows(
        rows=np.arange(work.rows, dtype=np.int32),
        counts=counts,
        offsets=(np.cumsum(counts) - counts).astype(np.int32),
        starts=starts,
        positions=positions.astype(np.int32),
        tables=tables,
    )
