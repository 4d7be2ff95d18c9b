"""Throughput where every prompt begins alike: without a prefix cache, with one that is cold, and
with the prefix registered beforehand. All in turn, in one run, on one model."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from typing import Any

import numpy as np

from octavo.core.sampling_params import SamplingParams
from octavo.engine.llm import LLM

NUM_REQUESTS = 32
PREFIX_TOKENS = 512
OWN_TOKENS = 32
OUTPUT_TOKENS = 32


def shared_prefix(
    model: str,
    *,
    num_requests: int = NUM_REQUESTS,
    prefix_tokens: int = PREFIX_TOKENS,
    own_tokens: int = OWN_TOKENS,
    output_tokens: int = OUTPUT_TOKENS,
    rounds: int = 3,
    threads: int | None = 1,
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Seconds for all requests, submitted at once; medians over ``rounds``, each of which runs all
    three ways. The cold cache is emptied before each round. ``options`` are `LLM`'s."""
    random = np.random.default_rng(seed)
    total = prefix_tokens + own_tokens + output_tokens
    common = {"max_num_seqs": num_requests, "max_model_len": total, "threads": threads} | options
    ways = ("off", "on", "registered")
    with ExitStack() as stack:
        llms = {
            way: stack.enter_context(LLM(model, prefix_caching=way != "off", **common))
            for way in ways
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        cached = dict.fromkeys(ways, 0)
        vocab_size = llms["off"].report.vocab_size
        for _ in range(rounds):
            prefix = random.integers(0, vocab_size, prefix_tokens).tolist()
            prompts = [
                prefix + random.integers(0, vocab_size, own_tokens).tolist()
                for _ in range(num_requests)
            ]
            for way, llm in llms.items():
                llm.reset_prefix_cache()
                name = llm.register_prefix(prefix) if way == "registered" else None
                seconds_now, cached[way] = _run(llm, prompts, output_tokens)
                seconds[way].append(seconds_now)
                if name is not None:
                    llm.drop_prefix(name)
    without = statistics.median(seconds["off"])
    num_output = num_requests * output_tokens
    figures = []
    for way in ways:
        median = statistics.median(seconds[way])
        figures.append(
            {
                "caching": way,
                "seconds": median,
                "all_seconds": seconds[way],
                "speedup": without / median,
                "output_tokens_per_second": num_output / median,
                "cached_tokens": cached[way],
            }
        )
    return {
        "num_requests": num_requests,
        "prefix_tokens": prefix_tokens,
        "own_tokens": own_tokens,
        "output_tokens": output_tokens,
        "rounds": rounds,
        "figures": figures,
    }


def _run(llm: LLM, prompts: list[list[int]], output_tokens: int) -> tuple[float, int]:
    """Seconds, and how many prompt tokens came from the cache."""
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    start = time.perf_counter()
    completions = llm.generate(prompts, params)
    return time.perf_counter() - start, sum(c.num_cached_tokens for c in completions)
