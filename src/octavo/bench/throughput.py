"""Offline work through the engine in this process: all at once, or one batch after another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from octavo.bench.percentiles import summary
from octavo.core.sampling_params import SamplingParams
from octavo.engine.llm import LLM, Completion
from octavo.workload.items import WorkItem
from octavo.workload.prompts import prompt_token_ids


def throughput(llm: LLM, items: Sequence[WorkItem], *, seed: int = 0) -> dict[str, Any]:
    """Submit every item at once; outputs have exactly the workload's lengths."""
    prompts = prompts_of(llm, items, seed)
    params = [
        SamplingParams(temperature=0.0, max_tokens=item.num_output_tokens, ignore_eos=True)
        for item in items
    ]
    start = time.perf_counter()
    completions = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    return {"num_requests": len(items), **_rates(completions, seconds), **_engine(llm)}


def latency(
    llm: LLM, items: Sequence[WorkItem], *, rounds: int, warmups: int, seed: int = 0
) -> dict[str, Any]:
    """Run the items as one batch, ``rounds`` times; how long a whole batch takes."""
    prompts = prompts_of(llm, items, seed)
    params = [
        SamplingParams(temperature=0.0, max_tokens=item.num_output_tokens, ignore_eos=True)
        for item in items
    ]
    seconds = []
    completions: list[Completion] = []
    for index in range(warmups + rounds):
        start = time.perf_counter()
        completions = llm.generate(prompts, params)
        if index >= warmups:
            seconds.append(time.perf_counter() - start)
    return {
        "batch_size": len(items),
        "rounds": rounds,
        "latency_ms": summary([s * 1e3 for s in seconds]),
        **_rates(completions, statistics.median(seconds)),
        **_engine(llm),
    }


def prompts_of(llm: LLM, items: Sequence[WorkItem], seed: int) -> list[list[int]]:
    """Random prompts over the model's whole vocabulary."""
    highest = llm.report.vocab_size
    return [
        prompt_token_ids(item, index, lowest=0, highest=highest, seed=seed).tolist()
        for index, item in enumerate(items)
    ]


def _rates(completions: Sequence[Completion], seconds: float) -> dict[str, Any]:
    num_prompt = sum(c.num_prompt_tokens for c in completions)
    num_output = sum(len(c.token_ids) for c in completions)
    return {
        "seconds": seconds,
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "requests_per_second": len(completions) / seconds,
        "output_tokens_per_second": num_output / seconds,
        "total_tokens_per_second": (num_prompt + num_output) / seconds,
    }


def _engine(llm: LLM) -> dict[str, Any]:
    report = llm.report
    return {
        "model": report.model,
        "dtype": report.dtype,
        "weights": report.weights,
        "attention": report.attention,
        "threads": report.num_threads,
        "depth": report.depth,
        "max_num_seqs": report.max_num_seqs,
    }
