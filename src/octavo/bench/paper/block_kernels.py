"""Attention of decoding rows over scattered and over consecutive blocks, on this machine."""

from __future__ import annotations

import statistics
import time

import numpy as np

from octavo.core.layout import KVLayout
from octavo.core.plan import int_array

# SmolLM2-135M's heads, a few of its layers.
_LAYERS, _HEADS, _KV_HEADS, _DIM = 4, 9, 3, 64
_ROWS, _CONTEXT, _ROUNDS = 8, 1024, 9
# On a GPU an 8B's.
_GPU_ROWS, _GPU_CONTEXT = 64, 1024


def kernel_ms(block_size: int, device: str = "cpu") -> tuple[float, float]:
    """Attention of a step (on a GPU, of a layer) in ms: over scattered, over consecutive blocks."""
    return _cpu_ms(block_size) if device == "cpu" else _gpu_ms(block_size)


def kernel_conditions(device: str) -> str:
    if device == "cpu":
        return (
            f"Kernel: the compiled one of this CPU, {_ROWS} rows of {_CONTEXT} tokens, median of "
            f"{_ROUNDS}."
        )
    return f"Kernel: ours on this GPU, a layer of an 8B, {_GPU_ROWS} rows of {_GPU_CONTEXT} tokens."


def _cpu_ms(block_size: int) -> tuple[float, float]:
    """By turns."""
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


def _gpu_ms(block_size: int) -> tuple[float, float]:
    from octavo.bench.gpu_kernels import decode_seconds

    scattered, consecutive = (
        decode_seconds(_GPU_ROWS, _GPU_CONTEXT, block_size, is_scattered=is_scattered) * 1e3
        for is_scattered in (True, False)
    )
    return scattered, consecutive
