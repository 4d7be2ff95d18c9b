#!/usr/bin/env python3
"""Transformers' own `generate` in static batches, on the work of `octavo bench throughput`.

The baseline of PagedAttention's announcement, as a process of its own: the engine never imports
Transformers. A batch is padded on the left, starts together and runs until its longest output is
done; what shorter ones generate beyond their lengths is not counted.

    scripts/hf_throughput.py MODEL [--trace FILE] [--num-requests 64] [--batch-size 8] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from octavo.workload.items import WorkItem, WorkloadError
from octavo.workload.prompts import prompt_token_ids
from octavo.workload.workload import make_workload


def generate(
    model: Any, items: Sequence[WorkItem], batch_size: int, *, seed: int = 0
) -> list[list[int]]:
    """Greedy outputs of exactly the items' lengths, in their order."""
    outputs: list[list[int]] = []
    for first in range(0, len(items), batch_size):
        batch = items[first : first + batch_size]
        prompts = [
            prompt_token_ids(
                item, first + index, lowest=0, highest=model.config.vocab_size, seed=seed
            )
            for index, item in enumerate(batch)
        ]
        longest = max(map(len, prompts))
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
            mask[row, longest - len(prompt) :] = 1
        num_new = max(item.num_output_tokens for item in batch)
        with torch.inference_mode():
            found = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                do_sample=False,
                min_new_tokens=num_new,
                max_new_tokens=num_new,
                pad_token_id=0,
            )
        for row, item in enumerate(batch):
            outputs.append(found[row, longest : longest + item.num_output_tokens].tolist())
    return outputs


def run(model: Any, items: Sequence[WorkItem], batch_size: int, *, seed: int = 0) -> dict[str, Any]:
    """The fields of `octavo bench throughput --json` that both have."""
    generate(model, [WorkItem(0.0, 8, 2)], 1)
    start = time.perf_counter()
    outputs = generate(model, items, batch_size, seed=seed)
    seconds = time.perf_counter() - start
    num_output = sum(map(len, outputs))
    num_prompt = sum(item.num_prompt_tokens for item in items)
    return {
        "num_requests": len(items),
        "batch_size": batch_size,
        "seconds": seconds,
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "requests_per_second": len(items) / seconds,
        "output_tokens_per_second": num_output / seconds,
        "total_tokens_per_second": (num_prompt + num_output) / seconds,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Transformers' generate in static batches.")
    parser.add_argument("model", help="a Hugging Face directory, or a config.json with --dummy")
    parser.add_argument("--dummy", action="store_true", help="random weights from a config alone")
    parser.add_argument("--trace", help="as of octavo bench throughput")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--max-total-len", type=int)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if given.batch_size < 1:
        parser.error(f"--batch-size must be at least 1, got {given.batch_size}")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        parser.error(f"this measures Transformers, which cannot be imported here: {error}")
    if given.threads:
        torch.set_num_threads(given.threads)
    dtype = getattr(torch, given.dtype)
    if given.dummy:
        torch.manual_seed(0)
        with torch.device(given.device):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(given.model), dtype=dtype
            )
    else:
        model = AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype).to(given.device)
    model.eval()
    model.generation_config.eos_token_id = None
    try:
        items = make_workload(
            trace=given.trace,
            num_requests=given.num_requests,
            input_len=given.input_len,
            output_len=given.output_len,
            max_total_len=given.max_total_len or model.config.max_position_embeddings,
            seed=given.seed,
        )
    except WorkloadError as error:
        parser.error(str(error))
    report = run(model, items, given.batch_size, seed=given.seed)
    if given.json:
        print(json.dumps(report))
        return
    print(
        f"{report['num_requests']} requests in batches of {report['batch_size']} in "
        f"{report['seconds']:.2f} s: {report['output_tokens_per_second']:.1f} output tokens/s"
    )


if __name__ == "__main__":
    sys.exit(main())
