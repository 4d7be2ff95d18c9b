"""What narrow weights cost: perplexity on a text that the package ships.

The text is the beginning of Lewis Carroll's "Alice's Adventures in Wonderland" (1865, in the public
domain). Lower is better; what counts is the difference between the rows of one run.
"""

from __future__ import annotations

import math
from importlib.resources import files
from typing import Any

import numpy as np
import torch

from octavo.core.layout import KVLayout
from octavo.core.plan import int_array
from octavo.execution.arena import Arena
from octavo.execution.attention.gather import GatherAttention
from octavo.execution.attention.interface import StepRows
from octavo.execution.models.loading import load_config, load_model
from octavo.model_store import ensure_model
from octavo.text.tokenizer import load_tokenizer

# fp32 first: the others are compared with it.
MODES = (
    ("float32", "bf16"),
    ("bfloat16", "bf16"),
    ("bfloat16", "auto"),
    ("bfloat16", "int8"),
    ("bfloat16", "int4"),
)
_BLOCK_SIZE = 16
_CHUNK = 256


def run(model: str, *, max_tokens: int = 2048) -> list[dict[str, Any]]:
    """Perplexity of every mode, and how often its likeliest token is that of fp32."""
    path = ensure_model(model)
    text = (files("octavo.bench") / "data" / "alice.txt").read_text(encoding="utf-8")
    token_ids = load_tokenizer(path).encode(text)
    longest = min(max_tokens, load_config(path).max_position_embeddings)
    token_ids = token_ids[:longest]
    figures: list[dict[str, Any]] = []
    reference: torch.Tensor | None = None
    for dtype, weights in MODES:
        loaded = load_model(path, dtype=dtype, weights=weights, max_positions=len(token_ids))
        losses, best = _score(loaded, token_ids)
        reference = best if reference is None else reference
        figures.append(
            {
                "dtype": dtype,
                "weights": weights,
                "kept_as": loaded.weight_kinds(),
                "weight_bytes": loaded.weight_bytes(),
                "tokens": len(losses),
                "perplexity": math.exp(float(losses.mean())),
                "same_top_token": float((best == reference).float().mean()),
            }
        )
    return figures


def table(figures: list[dict[str, Any]]) -> str:
    """The figures as text."""
    lines = ["dtype     weights  kept as         MB  perplexity  of fp32's  same top token"]
    base = figures[0]["perplexity"]
    lines += [
        f"{f['dtype']:<9} {f['weights']:<8} {f['kept_as']:<12} {f['weight_bytes'] / 1e6:>5.0f} "
        f"{f['perplexity']:>11.3f} {f['perplexity'] / base:>10.4f} {f['same_top_token']:>15.3f}"
        for f in figures
    ]
    return "\n".join(lines)


@torch.inference_mode()
def _score(model: Any, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Negative log likelihood of each token but the first, and the likeliest token before it."""
    num_blocks = -(-len(token_ids) // _BLOCK_SIZE) + 1
    layout = KVLayout(
        model.config.num_layers,
        model.num_kv_heads,
        model.head_dim,
        model.dtype.itemsize,
        _BLOCK_SIZE,
    )
    arena = Arena(layout, num_blocks, model.dtype)
    attention = GatherAttention(arena, model.num_heads, model.rope)
    tables = np.arange(1, num_blocks, dtype=np.int32)[None, :]
    losses, best = [], []
    for start in range(0, len(token_ids) - 1, _CHUNK):
        end = min(start + _CHUNK, len(token_ids) - 1)
        positions = np.arange(start, end, dtype=np.int32)
        step = StepRows(
            rows=int_array([0]),
            counts=int_array([end - start]),
            offsets=int_array([0]),
            starts=int_array([start]),
            positions=positions,
            tables=tables,
        )
        hidden = model.forward(
            torch.tensor(token_ids[start:end]), torch.from_numpy(positions), attention.plan(step)
        )
        logits = model.logits(hidden)
        targets = torch.tensor(token_ids[start + 1 : end + 1])
        losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
        best.append(logits.argmax(-1))
    return torch.cat(losses), torch.cat(best)
