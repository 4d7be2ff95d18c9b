"""bfloat16 on a GPU against Transformers in float32 on a CPU, through the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from execution.models.tiny_models import tiny_llama
from octavo.config import EngineConfig
from octavo.core.plan import int_array
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.build import build_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SHAPE: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
}


# Options, mean error of log probabilities at most, agreement of the likeliest tokens at least. What
# rounding to fp8 does to this model, in PyTorch: keys and values 0.025 and 0.93, weights 0.055 and
# 0.84, weights and their inputs 0.069 and 0.81, all three 0.072 and 0.79.
EXACT: dict[str, str] = {}
FP8_KV = {"kv_dtype": "fp8"}
FP8_WEIGHTS = {"weights": "fp8"}


@pytest.mark.parametrize(
    ("length", "options", "most", "least"),
    [
        (3, EXACT, 0.02, 0.93),
        (500, EXACT, 0.02, 0.93),
        (6000, EXACT, 0.02, 0.93),
        (500, FP8_KV, 0.035, 0.9),
        (6000, FP8_KV, 0.035, 0.9),
        (100, FP8_WEIGHTS, 0.09, 0.70),
        (6000, FP8_WEIGHTS, 0.09, 0.70),
        (6000, FP8_KV | FP8_WEIGHTS, 0.09, 0.70),
    ],
)
def test_scores_are_close_to_float32(
    tmp_path: Path, length: int, options: dict[str, str], most: float, least: float
) -> None:
    """Every token's log probability, and whether the likeliest is the same."""
    reference = tiny_llama(**SHAPE).float()
    reference.save_pretrained(tmp_path)
    prompt = np.random.default_rng(0).integers(3, SHAPE["vocab_size"], length)
    with torch.no_grad():
        logits = reference(torch.from_numpy(prompt)[None]).logits[0, :-1]
    expected = logits.log_softmax(dim=-1).gather(1, torch.from_numpy(prompt[1:])[:, None])[:, 0]
    best = logits.argmax(dim=-1).numpy()
    config = EngineConfig(
        model=str(tmp_path), device="cuda", dtype="bfloat16", kv_memory="1GiB", max_num_seqs=8,
        **options,
    )  # fmt: skip
    core, _ = build_engine(config)
    core.scheduler.add(
        Request(
            number=0,
            prompt_token_ids=int_array(prompt),
            params=SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1),
            max_tokens=1,
            seed=0,
            stop_token_ids=(),
        )
    )
    found, likeliest = np.zeros(length - 1), np.zeros(length - 1, dtype=np.int64)
    while core.has_work:
        for piece in core.step().prompt_logprobs:
            own = slice(piece.start - 1, piece.start - 1 + len(piece.token_ids))
            found[own] = piece.scores.logprobs
            likeliest[own] = piece.scores.top_ids[:, 0]
    core.close()
    error = np.abs(found - expected.numpy())
    agreement = float((likeliest == best).mean())
    print(f"{length} tokens: mean error {error.mean():.4f}, agreement {agreement:.4f}")
    assert error.mean() < most
    assert agreement > least


@pytest.mark.parametrize(
    ("kv", "rows", "longer"), [("paged", 8, 90), ("virtual", 8, 90), ("paged", 72, 1)]
)
def test_generated_tokens_are_close_to_float32(
    tmp_path: Path, kv: str, rows: int, longer: int
) -> None:
    """Of rows that decode together, each ``longer`` than the one before, every token that was
    generated: its log probability, and whether Transformers would have chosen it after the same
    tokens."""
    reference = tiny_llama(**SHAPE).float()
    reference.save_pretrained(tmp_path)
    config = EngineConfig(
        model=str(tmp_path), device="cuda", dtype="bfloat16", kv=kv, kv_memory="1GiB",
        max_num_seqs=rows,
    )  # fmt: skip
    core, _ = build_engine(config)
    random = np.random.default_rng(1)
    prompts = [
        random.integers(3, SHAPE["vocab_size"], 5 + longer * row).tolist() for row in range(rows)
    ]
    for row, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, logprobs=0)
        core.scheduler.add(Request(row, int_array(prompt), params, max_tokens=64, seed=0))
    tokens: list[list[int]] = [[] for _ in prompts]
    scores: list[list[float]] = [[] for _ in prompts]
    while core.has_work:
        outputs = core.step()
        if outputs.logprobs is None:
            continue
        told = outputs.logprobs.scores.logprobs
        for row, token, score in zip(outputs.numbers, outputs.token_ids, told, strict=True):
            tokens[row].append(int(token))
            scores[row].append(float(score))
    core.close()
    errors, same = [], []
    for prompt, own, found in zip(prompts, tokens, scores, strict=True):
        assert len(own) == 64
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + own[:-1]])).logits[0, len(prompt) - 1 :]
        expected = logits.log_softmax(dim=-1).gather(1, torch.tensor(own)[:, None])[:, 0]
        errors.append(np.abs(np.array(found) - expected.numpy()))
        same.append(logits.argmax(dim=-1).numpy() == np.array(own))
    error, agreement = float(np.mean(errors)), float(np.mean(same))
    print(f"{kv}, {rows} rows of 64 tokens: mean error {error:.4f}, agreement {agreement:.4f}")
    assert error < 0.02
    assert agreement > 0.93
