"""Log probabilities of tokens and of the likeliest beside them, from raw logits.

A place's numbers depend on its own logits alone, and its first entries not on how many were asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.plan import IntArray, TokenScores, int_array

# The likeliest are found for all of a step's places at once, in one of these numbers: which of
# equal tokens come first must not depend on what the neighbours asked. 64 is twice the widest beam.
_WIDTHS = (20, 64)
MAX_TOP = _WIDTHS[-1]

# Positions of a prompt whose logits exist at a time: 64 of 152k in fp32 are 39 MB.
PROMPT_SLICE = 64


def token_scores(
    logits: torch.Tensor, token_ids: NDArray[np.int64], num_top: IntArray
) -> TokenScores:
    """Scores of ``token_ids [k]`` under fp32 ``logits [k, vocab]``.

    Entry i gets its ``num_top[i]`` likeliest tokens, at most `MAX_TOP`; of equal ones in the result
    the lower id comes first.
    """
    assert num_top.max() <= MAX_TOP, f"at most {MAX_TOP} tokens, got {num_top.max()}"
    chosen = torch.from_numpy(token_ids)[:, None]
    ranks = (logits > logits.gather(1, chosen)).sum(dim=-1, dtype=torch.int32) + 1
    table = torch.log_softmax(logits, dim=-1)
    num_top = np.minimum(num_top, int_array(logits.shape[1]))
    width = int(num_top.max())
    top_ids = np.zeros((len(num_top), width), dtype=np.int32)
    top_logprobs = np.full((len(num_top), width), -np.inf, dtype=np.float32)
    narrower = 0
    for limit in _WIDTHS:
        which = np.flatnonzero((num_top > narrower) & (num_top <= limit))
        narrower = limit
        if len(which):
            own = table if len(which) == len(table) else table[torch.from_numpy(which)]
            ids, values = _top(own, min(limit, table.shape[1]))
            kept = min(width, limit)
            top_ids[which, :kept] = ids[:, :kept]
            top_logprobs[which, :kept] = values[:, :kept]
    return TokenScores(
        logprobs=table.gather(1, chosen)[:, 0].numpy(),
        ranks=ranks.numpy(),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        num_top=num_top,
    )


def prompt_scores(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    token_ids: NDArray[np.int64],
    num_top: int,
) -> TokenScores:
    """Scores of a chunk's tokens: ``hidden[i]`` is the state before ``token_ids[i]``.

    Logits are made for at most `PROMPT_SLICE` positions at a time and dropped.
    """
    parts = []
    for start in range(0, len(token_ids), PROMPT_SLICE):
        part = slice(start, min(start + PROMPT_SLICE, len(token_ids)))
        counts = np.full(part.stop - start, num_top, dtype=np.int32)
        parts.append(token_scores(logits_of(hidden[part]), token_ids[part], counts))
    if len(parts) == 1:
        return parts[0]
    return TokenScores(
        logprobs=np.concatenate([scores.logprobs for scores in parts]),
        ranks=np.concatenate([scores.ranks for scores in parts]),
        top_ids=np.concatenate([scores.top_ids for scores in parts]),
        top_logprobs=np.concatenate([scores.top_logprobs for scores in parts]),
        num_top=np.concatenate([scores.num_top for scores in parts]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PlaceScores:
    """Scores of some ``places [k]`` as a device leaves them, int32 ``[k, 2 + 2 * w]``: each one's
    log probability (by its bits), rank, the ``w`` likeliest ids, and their log probabilities."""

    places: NDArray[np.int64]
    num_top: IntArray
    values: IntArray


def top_width(num_top: int) -> int:
    """How many likeliest tokens are looked for where ``num_top`` are wanted: one of few numbers, so
    that which of equal tokens come first does not depend on it."""
    return next((width for width in (0, *_WIDTHS) if num_top <= width), MAX_TOP)


def join_scores(count: int, parts: Sequence[PlaceScores]) -> TokenScores:
    """One `TokenScores` of ``count`` places out of ``parts`` that cover them."""
    num_top: IntArray = np.zeros(count, dtype=np.int32)
    for part in parts:
        num_top[part.places] = part.num_top
    width = int(num_top.max())
    logprobs: NDArray[np.float32] = np.empty(count, dtype=np.float32)
    ranks: IntArray = np.empty(count, dtype=np.int32)
    top_ids: IntArray = np.zeros((count, width), dtype=np.int32)
    top_logprobs = np.full((count, width), -np.inf, dtype=np.float32)
    for part in parts:
        places, own = part.places, part.values
        logprobs[places] = own[:, :1].copy().view(np.float32)[:, 0]
        ranks[places] = own[:, 1]
        found = (own.shape[1] - 2) // 2
        if kept := min(width, found):
            values = own[:, 2 + found :].copy().view(np.float32)
            ids, values = _in_order(own[:, 2 : 2 + found], values)
            top_ids[places, :kept] = ids[:, :kept]
            top_logprobs[places, :kept] = values[:, :kept]
    return TokenScores(logprobs, ranks, top_ids, top_logprobs, num_top)


def _top(table: torch.Tensor, count: int) -> tuple[NDArray[Any], NDArray[np.float32]]:
    found = torch.topk(table, count, dim=-1)
    return _in_order(found.indices.numpy(), found.values.numpy())


def _in_order(
    ids: NDArray[Any], values: NDArray[np.float32]
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    order = np.lexsort((ids, -values), axis=-1)
    return np.take_along_axis(ids, order, -1), np.take_along_axis(values, order, -1)
