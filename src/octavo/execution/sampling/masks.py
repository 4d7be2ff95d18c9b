"""Tokens that a row may not sample: allowed ids, bad words, stop tokens during ``min_tokens``.

Each row's ids are collected, and all rows' written at once. A row that forbids nothing is in none
of the tables.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.plan import IntArray
from octavo.core.sampling_params import SamplingParams

_NO_TOKEN = -1
_ANY = -2


class TokenMasks:
    """What the rows forbid. At least one token must be left to each: the door sees to that."""

    def __init__(self) -> None:
        self._allowed: dict[int, NDArray[np.int64]] = {}
        self._banned: dict[int, NDArray[np.int64]] = {}
        self._phrases: dict[int, Phrases] = {}
        # Ids, and the length of the sequence from which on they are allowed.
        self._stops: dict[int, tuple[NDArray[np.int64], int]] = {}

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        token_ids: IntArray,
        num_prompt_tokens: int,
        stop_token_ids: tuple[int, ...],
    ) -> int:
        """The row starts with ``token_ids``, of which those after the prompt were generated.

        Returns:
            The length of the sequence from which on nothing is forbidden any more.
        """
        for table in (self._allowed, self._banned, self._phrases, self._stops):
            table.pop(row, None)
        until = 0
        if params.min_tokens and stop_token_ids:
            until = num_prompt_tokens + params.min_tokens
            self._stops[row] = (_as_ids(stop_token_ids), until)
        if params.allowed_token_ids is not None:
            self._allowed[row] = _as_ids(params.allowed_token_ids)
        if words := params.bad_words_token_ids:
            single = [word[0] for word in words if len(word) == 1]
            longer = [word for word in words if len(word) > 1]
            if single:
                self._banned[row] = _as_ids(single)
            if longer:
                self._phrases[row] = Phrases(longer, token_ids[num_prompt_tokens:])
        is_lasting = words or params.allowed_token_ids is not None
        return np.iinfo(np.int64).max if is_lasting else until

    def apply(
        self,
        logits: torch.Tensor,
        places: NDArray[np.int64],
        rows: IntArray,
        token_indices: NDArray[np.int64],
    ) -> None:
        """Put -inf into ``logits[places[i]]`` where ``rows[i]`` forbids it."""
        allowed, forbidden = Entries(), Entries()
        for place, row, index in zip(
            places.tolist(), rows.tolist(), token_indices.tolist(), strict=True
        ):
            if (ids := self._allowed.get(row)) is not None:
                allowed.add(place, ids)
            if (ids := self._banned.get(row)) is not None:
                forbidden.add(place, ids)
            if (phrases := self._phrases.get(row)) is not None:
                forbidden.add(place, phrases.forbidden())
            if (stops := self._stops.get(row)) is not None and index < stops[1]:
                forbidden.add(place, stops[0])
        if allowed.places:
            index = allowed.index()
            kept = logits[index]
            logits[torch.tensor(allowed.places)] = -math.inf
            logits[index] = kept
        if forbidden.places:
            logits[forbidden.index()] = -math.inf

    def advance(self, rows: IntArray, token_ids: NDArray[np.int64]) -> None:
        """Each row generated one more token."""
        if self._phrases:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                if (phrases := self._phrases.get(row)) is not None:
                    phrases.add(token_id)


class Phrases:
    """Sequences of two and more tokens that one row must not complete.

    All are compared with the row's last tokens at once, aligned to the right::

        starts  [ any  any   7 ]  last 9      7 9
                [ any   5    7 ]  last 2      5 7 2
        tail    [ 3     5    7 ]              forbids 9 and 2
    """

    def __init__(self, words: list[tuple[int, ...]], output: IntArray) -> None:
        width = max(map(len, words)) - 1
        self._starts = np.full((len(words), width), _ANY, dtype=np.int64)
        self._last = np.array([word[-1] for word in words], dtype=np.int64)
        for index, word in enumerate(words):
            self._starts[index, width + 1 - len(word) :] = word[:-1]
        self._tail = np.full(width, _NO_TOKEN, dtype=np.int64)
        recent = output[-width:]
        self._tail[width - len(recent) :] = recent

    def add(self, token_id: int) -> None:
        self._tail[:-1] = self._tail[1:]
        self._tail[-1] = token_id

    def forbidden(self) -> NDArray[np.int64]:
        """The tokens that would complete a sequence now."""
        matches = (self._starts == self._tail) | (self._starts == _ANY)
        return self._last[matches.all(axis=1)]


class Entries:
    """Ids of several rows, collected to be one index into their logits."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self._ids: list[NDArray[np.int64]] = []

    def add(self, place: int, ids: NDArray[np.int64]) -> None:
        if len(ids):
            self.places.append(place)
            self._ids.append(ids)

    def index(self) -> tuple[torch.Tensor, torch.Tensor]:
        places = np.repeat(self.places, [len(ids) for ids in self._ids])
        return torch.from_numpy(places), torch.from_numpy(np.concatenate(self._ids))


def _as_ids(token_ids: object) -> NDArray[np.int64]:
    return np.array(token_ids, dtype=np.int64)
