"""Arrays on the wire: bytes of little-endian values inside msgspec structs. Knows no messages."""

from __future__ import annotations

import msgspec
import numpy as np

from octavo.core.plan import FloatArray, IntArray, PromptLogprobs, StepLogprobs, TokenScores
from octavo.core.request import BeamResult, RequestError

INT32 = np.dtype("<i4")
INT64 = np.dtype("<i8")
_FLOAT32 = np.dtype("<f4")


class _Arrays(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class WireScores(_Arrays, frozen=True):
    """A `TokenScores`, its arrays in C order."""

    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes
    num_top: bytes

    @classmethod
    def of(cls, scores: TokenScores) -> WireScores:
        return cls(
            _floats_out(scores.logprobs),
            ints_out(scores.ranks),
            ints_out(scores.top_ids),
            _floats_out(scores.top_logprobs),
            ints_out(scores.num_top),
        )

    def scores(self) -> TokenScores:
        logprobs = _floats_in(self.logprobs)
        top_ids, top_logprobs = ints_in(self.top_ids), _floats_in(self.top_logprobs)
        shape = (len(logprobs), len(top_ids) // max(len(logprobs), 1))
        return TokenScores(
            logprobs,
            ints_in(self.ranks),
            top_ids.reshape(shape),
            top_logprobs.reshape(shape),
            ints_in(self.num_top),
        )


class WireLogprobs(_Arrays, frozen=True):
    """A `StepLogprobs`."""

    places: bytes
    scores: WireScores

    @classmethod
    def of(cls, logprobs: StepLogprobs) -> WireLogprobs:
        return cls(ints_out(logprobs.places), WireScores.of(logprobs.scores))

    def logprobs(self) -> StepLogprobs:
        return StepLogprobs(ints_in(self.places), self.scores.scores())


class WirePrompt(_Arrays, frozen=True):
    """A `PromptLogprobs`."""

    owner: int
    start: int
    token_ids: bytes
    scores: WireScores

    @classmethod
    def of(cls, piece: PromptLogprobs) -> WirePrompt:
        scores = WireScores.of(piece.scores)
        return cls(piece.owner, piece.start, ints_out(piece.token_ids), scores)

    def piece(self) -> PromptLogprobs:
        return PromptLogprobs(self.owner, self.start, ints_in(self.token_ids), self.scores.scores())


class WireBeam(_Arrays, frozen=True):
    """A `BeamResult`."""

    number: int
    token_ids: bytes
    score: float
    cumulative_logprob: float
    logprobs: WireScores | None

    @classmethod
    def of(cls, beam: BeamResult) -> WireBeam:
        return cls(
            beam.number,
            ints_out(beam.token_ids),
            beam.score,
            beam.cumulative_logprob,
            None if beam.logprobs is None else WireScores.of(beam.logprobs),
        )

    def beam(self) -> BeamResult:
        return BeamResult(
            self.number,
            ints_in(self.token_ids),
            self.score,
            self.cumulative_logprob,
            None if self.logprobs is None else self.logprobs.scores(),
        )


def array_in(data: bytes, wire: np.dtype, native: np.dtype) -> np.ndarray:
    if len(data) % wire.itemsize:
        raise RequestError(f"{len(data)} bytes are not a whole number of {wire} values")
    return np.frombuffer(data, dtype=wire).astype(native, copy=False)


def ints_in(data: bytes) -> IntArray:
    return array_in(data, INT32, np.dtype(np.int32))


def ints_out(values: IntArray) -> bytes:
    return values.astype(INT32, copy=False).tobytes()


def _floats_in(data: bytes) -> FloatArray:
    return array_in(data, _FLOAT32, np.dtype(np.float32))


def _floats_out(values: FloatArray) -> bytes:
    return values.astype(_FLOAT32, copy=False).tobytes()
