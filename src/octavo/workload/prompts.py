"""Token ids for a workload's prompts: random, repeatable, and shared where the trace says so."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.workload.items import WorkItem

HASHED_BLOCK_TOKENS = 512


def prompt_token_ids(
    item: WorkItem, index: int, *, lowest: int, highest: int, seed: int = 0
) -> NDArray[np.int64]:
    """The prompt of the ``index``-th item: ids from ``lowest`` to ``highest - 1``.

    Items whose first prefix hashes are equal begin with the same tokens, 512 for each hash.
    """
    parts = []
    length = 0
    for value in item.prefix_hashes:
        if length >= item.num_prompt_tokens:
            break
        shared = np.random.default_rng([seed, 1, value])
        parts.append(shared.integers(lowest, highest, HASHED_BLOCK_TOKENS))
        length += HASHED_BLOCK_TOKENS
    if length < item.num_prompt_tokens:
        own = np.random.default_rng([seed, 2, index])
        parts.append(own.integers(lowest, highest, item.num_prompt_tokens - length))
    return np.concatenate(parts)[: item.num_prompt_tokens]
