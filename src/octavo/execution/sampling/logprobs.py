"""Log probabilities of tokens and of the likeliest beside them, from raw logits.

A place's numbers depend on its own logits alone, and its first entries not on how many were asked.
"""

from __future__ import annotations

from collections.abc import Callable

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


def _top(table: torch.Tensor, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    found = torch.topk(table, count, dim=-1)
    ids, values = found.indices.numpy(), found.values.numpy()
    order = np.lexsort((ids, -values), axis=-1)
    return np.take_along_axis(ids, order, -1), np.take_along_axis(values, order, -1)
