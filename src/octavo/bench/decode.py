"""Decode and prefill speed of a model in this process, token ids in and out.

``decode N`` is the time of 65 outputs less the time of 1, over 64 steps, for N prompts of 64
random tokens; ``prefill`` is one prompt of 512 tokens and one output. The ceiling beside them is a
plain read of memory larger than any cache, measured in the same run: a decode step reads every
weight once, so it cannot be faster than weight bytes over that rate.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from octavo.core.sampling_params import SamplingParams
from octavo.engine.llm import LLM

_DECODE_ROWS = (1, 4, 8, 16)
_DECODE_STEPS = 64
_PROMPT_TOKENS = 64
_PREFILL_TOKENS = 512
_ROUNDS = 3


def run(
    model: str, *, dtype: str, weights: str, threads: int | None, depth: int | None
) -> dict[str, Any]:
    """All figures, ready for JSON; rates are tokens a second, medians of three rounds."""
    started = time.perf_counter()
    with LLM(
        model, dtype=dtype, weights=weights, threads=threads, depth=depth, prefix_caching=False
    ) as llm:
        load_s = time.perf_counter() - started
        read = _read_bytes_per_second()
        report = llm.report
        floor_ms = report.weight_bytes / read * 1e3
        figures = []
        for rows in _DECODE_ROWS:
            step_ms = statistics.median(_decode_ms(llm, rows) for _ in range(_ROUNDS))
            figures.append(
                {
                    "work": f"decode {rows}",
                    "step_ms": step_ms,
                    "tokens_per_second": rows / step_ms * 1e3,
                    "ceiling_ms": floor_ms,
                    "share_of_ceiling": floor_ms / step_ms,
                }
            )
        seconds = statistics.median(_prefill_s(llm) for _ in range(_ROUNDS))
        return {
            "model": model,
            "dtype": report.dtype,
            "weights": report.weights,
            "attention": report.attention,
            "threads": report.num_threads,
            "depth": report.depth,
            "load_s": load_s,
            "memory_read_gb_per_second": read / 1e9,
            "weight_bytes": report.weight_bytes,
            "decode": figures,
            "prefill_tokens_per_second": _PREFILL_TOKENS / seconds,
        }


def table(report: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [
        f"{report['model']}, {report['dtype']}, {report['weights']} weights, "
        f"{report['threads']} threads, depth {report['depth']}, {report['attention']} attention; "
        f"loaded in "
        f"{report['load_s']:.1f} s; memory reads {report['memory_read_gb_per_second']:.1f} GB/s",
        "work         ms a step   tokens/s   weights' floor ms   share of it",
    ]
    lines += [
        f"{f['work']:<12} {f['step_ms']:>9.2f} {f['tokens_per_second']:>10.1f} "
        f"{f['ceiling_ms']:>19.2f} {f['share_of_ceiling']:>13.2f}"
        for f in report["decode"]
    ]
    lines.append(f"prefill 512             {report['prefill_tokens_per_second']:>8.1f}")
    return "\n".join(lines)


def _prompts(llm: LLM, rows: int, length: int) -> list[list[int]]:
    random = np.random.default_rng(rows)
    ids: list[list[int]] = random.integers(0, llm.report.vocab_size, (rows, length)).tolist()
    return ids


def _seconds(llm: LLM, prompts: list[list[int]], max_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - start


def _decode_ms(llm: LLM, rows: int) -> float:
    prompts = _prompts(llm, rows, _PROMPT_TOKENS)
    one = _seconds(llm, prompts, 1)
    many = _seconds(llm, prompts, _DECODE_STEPS + 1)
    return (many - one) / _DECODE_STEPS * 1e3


def _prefill_s(llm: LLM) -> float:
    return _seconds(llm, _prompts(llm, 1, _PREFILL_TOKENS), 1)


def _read_bytes_per_second() -> float:
    """Best of five sums over 512 MiB."""
    data = np.ones(2**26, dtype=np.float64)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.nbytes / min(times)
