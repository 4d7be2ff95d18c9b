"""Repetition, frequency and presence penalties: what a row's own tokens do to their logits.

A row's distinct tokens stand in columns with the number of times that each was generated, so a
step touches those logits only and never a whole vocabulary::

    ids     [ 17 | 4 | 99 | . . ]      tokens of the output, and of the prompt where it counts
    counts  [  2 | 0 |  1 | . . ]      times generated; 0: in the prompt only
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.plan import BoolArray, IntArray
from octavo.core.sampling_params import SamplingParams

_FIRST_WIDTH = 256
# Nobody notices a smaller penalty; it keeps a divided logit finite.
_MIN_REPETITION = 1e-6


class Penalties:
    """The penalties of every row that has any, and the tokens that they are for."""

    def __init__(self, max_num_seqs: int) -> None:
        self._repetition = np.ones(max_num_seqs, dtype=np.float32)
        self._frequency = np.zeros(max_num_seqs, dtype=np.float32)
        self._presence = np.zeros(max_num_seqs, dtype=np.float32)
        self.is_used: BoolArray = np.zeros(max_num_seqs, dtype=np.bool_)
        self._num_ids = np.zeros(max_num_seqs, dtype=np.int64)
        self._ids = np.zeros((max_num_seqs, 0), dtype=np.int64)
        self._counts = np.zeros((max_num_seqs, 0), dtype=np.float32)

    def set_row(
        self, row: int, params: SamplingParams, token_ids: IntArray, num_prompt_tokens: int
    ) -> None:
        """The row starts with ``token_ids``, of which those after the prompt were generated."""
        repeats = params.repetition_penalty != 1
        self.is_used[row] = repeats or params.frequency_penalty or params.presence_penalty
        if not self.is_used[row]:
            return
        self._repetition[row] = max(params.repetition_penalty, _MIN_REPETITION)
        self._frequency[row] = params.frequency_penalty
        self._presence[row] = params.presence_penalty
        output = token_ids[num_prompt_tokens:]
        ids = np.unique(token_ids if repeats else output)
        generated, counts = np.unique(output, return_counts=True)
        self._fit_width(len(ids))
        self._num_ids[row] = len(ids)
        # Column 0 is read even of a row without tokens.
        self._ids[row, 0] = 0
        self._ids[row, : len(ids)] = ids
        self._counts[row, : max(len(ids), 1)] = 0
        self._counts[row, np.searchsorted(ids, generated)] = counts

    def apply(self, logits: torch.Tensor, places: NDArray[np.int64], rows: IntArray) -> None:
        """Change ``logits[places[i]]`` in place by the penalties of ``rows[i]``."""
        num_ids = self._num_ids[rows]
        width = max(int(num_ids.max()), 1)
        # Columns that a row does not have repeat its first: the same value is written again.
        columns = np.arange(width)
        columns = np.where(columns < num_ids[:, None], columns, 0)
        ids = torch.from_numpy(self._ids[rows[:, None], columns])
        counts = torch.from_numpy(self._counts[rows[:, None], columns])
        index = torch.from_numpy(places)[:, None]
        values = logits[index, ids]
        repetition = _column(self._repetition[rows])
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= _column(self._frequency[rows]) * counts
        values -= _column(self._presence[rows]) * (counts > 0)
        logits[index, ids] = values

    def advance(self, rows: IntArray, token_ids: NDArray[np.int64]) -> None:
        """Each row generated one more token."""
        num_ids = self._num_ids[rows]
        width = int(num_ids.max()) + 1
        self._fit_width(width)
        is_same = self._ids[rows, :width] == token_ids[:, None]
        is_same &= np.arange(width) < num_ids[:, None]
        is_known = is_same.any(axis=1)
        columns = num_ids.copy()
        columns[is_known] = is_same[is_known].argmax(axis=1)
        new, new_columns = rows[~is_known], columns[~is_known]
        self._ids[new, new_columns] = token_ids[~is_known]
        self._counts[new, new_columns] = 0
        self._counts[rows, columns] += 1
        self._num_ids[new] += 1

    def _fit_width(self, width: int) -> None:
        old = self._ids.shape[1]
        if width <= old and old:
            return
        more = ((0, 0), (0, max(width, 2 * old, _FIRST_WIDTH) - old))
        self._ids = np.pad(self._ids, more)
        self._counts = np.pad(self._counts, more)


def _column(values: NDArray[np.float32]) -> torch.Tensor:
    return torch.from_numpy(values)[:, None]
