"""Log probabilities as the front end hands them out: one value a token. Knows no text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.core.plan import PromptLogprobs, TokenScores
from octavo.core.request import BeamResult, StepOutputs


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model's raw distribution said of one token.

    ``rank`` counts from 1, the likeliest. ``top`` pairs the ids of the likeliest tokens with their
    log probabilities, best first; the token itself is among them only where its rank says so.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def step_logprobs(outputs: StepOutputs) -> dict[int, TokenLogprobs]:
    """A step's sampled tokens by request number, of the requests that asked."""
    logprobs = outputs.logprobs
    if logprobs is None:
        return {}
    numbers = outputs.numbers[logprobs.places].tolist()
    token_ids = outputs.token_ids[logprobs.places].tolist()
    return dict(zip(numbers, _values(token_ids, logprobs.scores), strict=True))


def beam_logprobs(beam: BeamResult) -> tuple[TokenLogprobs, ...]:
    """One for each token of a beam whose request asked."""
    if beam.logprobs is None:
        return ()
    return tuple(_values(beam.token_ids.tolist(), beam.logprobs))


class PromptScores:
    """Collects a prompt's pieces. Kept as arrays until they are asked for: a Python object for
    each entry of a long prompt takes a hundred times the memory."""

    def __init__(self) -> None:
        self._pieces: list[PromptLogprobs] = []
        self._length = 1

    def add(self, piece: PromptLogprobs) -> None:
        """Digest the next piece; positions that are known already, from before a preemption, keep
        their first values."""
        end = piece.start + len(piece.token_ids)
        if end > self._length:
            assert piece.start <= self._length, "a piece of the prompt is missing"
            self._pieces.append(piece)
            self._length = end

    def values(self) -> tuple[TokenLogprobs | None, ...]:
        """One for each token of the prompt, so far: the first is None, nothing precedes it."""
        found: list[TokenLogprobs | None] = [None]
        for piece in self._pieces:
            values = list(_values(piece.token_ids.tolist(), piece.scores))
            found += values[len(found) - piece.start :]
        return tuple(found)


def _values(token_ids: list[int], scores: TokenScores) -> Iterator[TokenLogprobs]:
    rows = zip(
        token_ids,
        scores.logprobs.tolist(),
        scores.ranks.tolist(),
        scores.top_ids.tolist(),
        scores.top_logprobs.tolist(),
        scores.num_top.tolist(),
        strict=True,
    )
    for token_id, logprob, rank, ids, values, count in rows:
        top = tuple(zip(ids[:count], values[:count], strict=True))
        yield TokenLogprobs(token_id, logprob, rank, top)
