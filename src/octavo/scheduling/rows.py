"""The rows of the persistent batch, as numpy columns. Knows no blocks and makes no decision.

Columns are indexed by row, so that a whole decode batch is advanced by a few vector operations.
A row's tokens, with one step in flight::

    tokens        [ prompt ........ | generated .... ]
    num_computed  ────────────────────────────────┘      computed once all launched steps are done
    num_tokens    ──────────────────────────────────┘    known or being sampled
    num_received  ────────────────────────────────┘      values the host has seen
"""

from __future__ import annotations

import numpy as np

from octavo.core.plan import BoolArray, IntArray
from octavo.core.request import Request

_FIRST_WIDTH = 1024


class RowTable:
    """Columns for ``max_num_seqs`` rows of at most ``max_model_len`` tokens."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.size = max_num_seqs
        self.max_model_len = max_model_len
        self.num_tokens: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_computed: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_received: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self.max_length: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self.last_step = np.zeros(max_num_seqs, dtype=np.int64)
        self.number = np.zeros(max_num_seqs, dtype=np.int64)
        self.arrival = np.zeros(max_num_seqs, dtype=np.int64)
        self.is_wanted: BoolArray = np.zeros(max_num_seqs, dtype=np.bool_)
        self.is_decoding: BoolArray = np.zeros(max_num_seqs, dtype=np.bool_)
        # Beams get their tokens from a search over all of them, not from what they sample.
        self.is_beam: BoolArray = np.zeros(max_num_seqs, dtype=np.bool_)
        self.num_beams = 0
        self._stop_token_ids: IntArray = np.full((max_num_seqs, 1), -1, dtype=np.int32)
        self._num_rows_with_stops = 0
        width = min(_FIRST_WIDTH, max_model_len)
        self._tokens: IntArray = np.zeros((max_num_seqs, width), dtype=np.int32)
        self._free = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.size - len(self._free)

    def peek(self, index: int = 0) -> int:
        """The row that `take` hands out next, or ``index`` rows after that."""
        return self._free[-1 - index]

    @property
    def free_rows(self) -> list[int]:
        """In the order in which `take` would hand them out. A copy."""
        return self._free[::-1]

    def prefer(self, rows: list[int]) -> None:
        """Hand out these free rows next, in this order."""
        first = set(rows)
        self._free = [row for row in self._free if row not in first] + rows[::-1]

    def take(
        self,
        number: int,
        request: Request,
        arrival: int,
        token_ids: IntArray,
        num_computed: int,
    ) -> int:
        """Give the next free row to sequence ``number`` of ``request``, whose ``token_ids`` are
        known."""
        row = self._free.pop()
        self._fit_width(request.max_length)
        count = len(token_ids)
        self._tokens[row, :count] = token_ids
        self.num_tokens[row] = count
        self.num_computed[row] = num_computed
        self.num_received[row] = count
        self.max_length[row] = request.max_length
        self.last_step[row] = 0
        self.number[row] = number
        self.arrival[row] = arrival
        self.is_wanted[row] = True
        self.is_decoding[row] = False
        if request.beam_width:
            self.is_beam[row] = True
            self.num_beams += 1
            return row
        stops = request.stop_token_ids
        if stops:
            self._fit_stops(len(stops))
            self._stop_token_ids[row, : len(stops)] = stops
            self._num_rows_with_stops += 1
        return row

    def give_back(self, row: int) -> None:
        if self._stop_token_ids[row, 0] >= 0:
            self._num_rows_with_stops -= 1
            self._stop_token_ids[row] = -1
        self.num_beams -= int(self.is_beam[row])
        self.is_beam[row] = False
        self.is_wanted[row] = False
        self.is_decoding[row] = False
        self.max_length[row] = 0
        self._free.append(row)

    def token_ids(self, row: int) -> IntArray:
        """A copy of the tokens that the host knows."""
        return self._tokens[row, : self.num_received[row]].copy()

    def first_token_ids(self, row: int, count: int) -> IntArray:
        """The first ``count`` tokens, all of them known to the host. A view: do not keep it."""
        return self._tokens[row, :count]

    def receive(self, rows: IntArray, token_ids: IntArray) -> IntArray:
        """Append one sampled token to each row.

        Returns:
            The rows that end with it, by a stop token or by length.
        """
        counts = self.num_received[rows]
        self._tokens[rows, counts] = token_ids
        counts += 1
        self.num_received[rows] = counts
        ends = counts >= self.max_length[rows]
        if self._num_rows_with_stops:
            ends |= self._hits_stop(rows, token_ids)
        return rows[ends]

    def ended_by_stop(self, row: int) -> bool:
        """Whether the last token the host knows is one of the row's stop tokens."""
        last = self._tokens[row, self.num_received[row] - 1]
        return bool((self._stop_token_ids[row] == last).any())

    def _hits_stop(self, rows: IntArray, token_ids: IntArray) -> BoolArray:
        hits: BoolArray = (self._stop_token_ids[rows] == token_ids[:, None]).any(axis=1)
        return hits

    def _fit_width(self, length: int) -> None:
        width = self._tokens.shape[1]
        if length > width:
            wider = min(self.max_model_len, max(length, 2 * width))
            grown = np.zeros((self.size, wider), dtype=np.int32)
            grown[:, :width] = self._tokens
            self._tokens = grown

    def _fit_stops(self, count: int) -> None:
        width = self._stop_token_ids.shape[1]
        if count > width:
            grown = np.full((self.size, max(count, 2 * width)), -1, dtype=np.int32)
            grown[:, :width] = self._stop_token_ids
            self._stop_token_ids = grown
