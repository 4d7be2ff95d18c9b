"""The seams of attention: what a model calls, and what a runner asks of a backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.plan import IntArray


class StepAttention(Protocol):
    """One step's attention: the backend has planned the step, the model calls it once a layer."""

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Rotate q and k, write k and v into the KV cache, attend.

        ``qkv`` is ``[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]``: this rank's heads,
        q then k then v. Returns ``[num_tokens, num_heads * head_dim]`` in the same dtype.
        Rotation is Hugging Face's ``rotate_half`` with the model's ``rope`` table.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """The tokens of a step, row after row.

    Row ``rows[i]`` runs ``counts[i]`` tokens, which stand from ``offsets[i]`` on among the step's
    tokens and from position ``starts[i]`` on in their sequence. ``positions`` is
    ``[num_tokens]``. ``tables [max_num_seqs, max_blocks]`` holds every row's block table.
    """

    rows: IntArray
    counts: IntArray
    offsets: IntArray
    starts: IntArray
    positions: IntArray
    tables: IntArray

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    def kv_offsets(self, block_size: int) -> NDArray[np.int64]:
        """``[num_tokens]``: where each token's keys and values go, block id × size + offset."""
        row_of_token = np.repeat(self.rows, self.counts)
        blocks = self.tables[row_of_token, self.positions // block_size].astype(np.int64)
        return blocks * block_size + self.positions % block_size


class AttentionBackend(Protocol):
    """Plans a step once, then runs it layer by layer."""

    def plan(self, step: StepRows) -> StepAttention: ...
