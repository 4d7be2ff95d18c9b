"""Beam search over one prompt: which candidates go on, which have ended, and when to stop.

Knows log probabilities of next tokens; knows no rows, no blocks and no steps. The rules are those
of Transformers' beam search: scores are sums in float32, ended candidates compete by their score
over length to the power ``length_penalty``, and ties go to the candidate that ranks higher, then to
the lower token id.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from octavo.core.plan import BoolArray, FloatArray, IntArray, TokenScores, int_array


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """What was told of a token, where wanted: ``rank`` counts from 1, ``top_ids`` and
    ``top_logprobs`` are the likeliest in its place."""

    logprob: np.float32
    rank: int
    top_ids: IntArray
    top_logprobs: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A token of a candidate, and the one before it: candidates share their past."""

    parent: Node | None
    token_id: int
    place: Place | None = None

    def path(self) -> list[Node]:
        """From the first generated token to this one."""
        nodes: list[Node] = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        nodes.reverse()
        return nodes


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """A candidate that has ended, by a stop token or else by length. ``total`` is the sum of its
    tokens' log probabilities."""

    leaf: Node
    total: float
    score: float
    is_stopped: bool

    def token_ids(self) -> IntArray:
        return int_array([node.token_id for node in self.leaf.path()])

    def logprobs(self) -> TokenScores | None:
        """What was told of each token, where wanted."""
        places = [node.place for node in self.leaf.path() if node.place is not None]
        if not places:
            return None
        return TokenScores(
            logprobs=np.array([place.logprob for place in places], dtype=np.float32),
            ranks=int_array([place.rank for place in places]),
            top_ids=np.stack([place.top_ids for place in places]),
            top_logprobs=np.stack([place.top_logprobs for place in places]),
            num_top=int_array([len(place.top_ids) for place in places]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Survivors:
    """The candidates that go on, best first: ``parents [width]`` are ranks in the step before,
    ``token_ids [width]`` their next tokens."""

    parents: IntArray
    token_ids: IntArray


class BeamSearch:
    """The candidates of one request. The first step has one, the prompt; then there are ``width``.

    ``stop_token_ids`` end a candidate, but not among its first ``min_tokens`` tokens;
    ``max_tokens`` end all. ``num_logprobs`` of the likeliest tokens are kept for each token (None:
    nothing). There must be ``width`` tokens that do not stop.
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        *,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        stop_token_ids: tuple[int, ...] = (),
        min_tokens: int = 0,
        num_logprobs: int | None = None,
    ) -> None:
        self.width = width
        self.length = 0
        self.scores: FloatArray = np.zeros(1, dtype=np.float32)
        # Best first.
        self.finished: list[Hypothesis] = []
        self._leaves: list[Node | None] = [None]
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._stop_token_ids = int_array(stop_token_ids)
        self._min_tokens = min_tokens
        self._num_logprobs = num_logprobs

    @property
    def num_candidates(self) -> int:
        """How many go on."""
        return len(self._leaves)

    @property
    def num_top(self) -> int:
        """How many of the likeliest tokens `advance` has to be told of: the best ``width`` of all
        candidates, and as many that do not stop, are then among them."""
        return max(self.width + len(self._stop_token_ids), self._num_logprobs or 0)

    def token_ids(self, rank: int) -> IntArray:
        """What the candidate has generated."""
        leaf = self._leaves[rank]
        return int_array([] if leaf is None else [node.token_id for node in leaf.path()])

    def advance(self, top_ids: IntArray, top_logprobs: FloatArray) -> Survivors | None:
        """One step: ``top_ids``, ``top_logprobs`` ``[num_candidates, k]`` are the likeliest next
        tokens of each candidate, best first; ``k`` is `num_top`, or the whole vocabulary.

        Returns:
            Who goes on; None when the search is over and `finished` holds the results.
        """
        parents, places, totals = self._ranked(top_ids, top_logprobs)
        token_ids = top_ids[parents, places]
        stops: BoolArray = np.isin(token_ids, self._stop_token_ids)
        if self.length < self._min_tokens:
            allowed = ~stops
            parents, places, totals = parents[allowed], places[allowed], totals[allowed]
            token_ids, stops = token_ids[allowed], stops[allowed]
        self.length += 1
        is_last = self.length >= self._max_tokens

        def node(index: int) -> Node:
            parent, token_id = int(parents[index]), int(token_ids[index])
            if (count := self._num_logprobs) is None:
                return Node(self._leaves[parent], token_id)
            values = top_logprobs[parent]
            logprob = values[places[index]]
            rank = int((values > logprob).sum()) + 1
            top = top_ids[parent, :count].copy(), values[:count].copy()
            return Node(self._leaves[parent], token_id, Place(logprob, rank, *top))

        # Only what is among the best `width` may end: the rest is there to go on with.
        for index in range(min(self.width, len(parents))):
            if stops[index] or is_last:
                self._finish(node(index), totals[index], bool(stops[index]))
        if is_last:
            return None
        going_on = np.flatnonzero(~stops)[: self.width]
        self._leaves, self.scores = [node(i) for i in going_on.tolist()], totals[going_on]
        if not self._can_improve():
            return None
        return Survivors(parents[going_on], token_ids[going_on])

    def _ranked(
        self, top_ids: IntArray, top_logprobs: FloatArray
    ) -> tuple[IntArray, IntArray, FloatArray]:
        """Parent, place among its tokens, and sum of every continuation, best first."""
        totals = self.scores[:, None] + top_logprobs
        ranks, places = np.indices(totals.shape, dtype=np.int32).reshape(2, -1)
        order = np.lexsort((top_ids.ravel(), ranks, -totals.ravel()))
        return ranks[order], places[order], totals.ravel()[order]

    def _finish(self, leaf: Node, total: np.float32, is_stopped: bool) -> None:
        """Keep the best ``width``; of equal ones those that ended first."""
        score = total / self._penalty(self.length)
        found = Hypothesis(leaf, float(total), float(score), is_stopped)
        index = sum(other.score >= found.score for other in self.finished)
        self.finished.insert(index, found)
        del self.finished[self.width :]

    def _can_improve(self) -> bool:
        """Whether going on might change `finished`, as far as ``early_stopping`` cares."""
        if len(self.finished) < self.width:
            return True
        if self._early_stopping is True:
            return False
        is_longest_best = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_tokens if is_longest_best else self.length
        return bool(self.scores[0] / self._penalty(length) > np.float32(self.finished[-1].score))

    def _penalty(self, length: int) -> np.float32:
        return np.float32(float(length) ** self._length_penalty)


def common_length(first: IntArray, second: IntArray) -> int:
    """How many tokens two sequences begin with alike."""
    count = min(len(first), len(second))
    differing = np.flatnonzero(first[:count] != second[:count])
    return int(differing[0]) if len(differing) else count


def closest_before(sequences: list[IntArray]) -> Iterator[tuple[int, int]]:
    """For each sequence but the first, which earlier one it begins most like, and for how long."""
    for index in range(1, len(sequences)):
        lengths = [common_length(other, sequences[index]) for other in sequences[:index]]
        best = max(range(index), key=lengths.__getitem__)
        yield best, lengths[best]
