"""Arrays of log probabilities over the wire: nothing but their bytes, and the same again."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from octavo.core.plan import PromptLogprobs, StepLogprobs, TokenScores, int_array
from octavo.core.request import BeamResult, Finished, FinishReason, StepOutputs
from octavo.engine import messages
from octavo.engine.logprobs import PromptScores, beam_logprobs, step_logprobs
from octavo.engine.messages import StepMessage, decode_from_engine, encode


def scores(count: int, width: int) -> TokenScores:
    def floats(*shape: int) -> np.ndarray:
        return -np.arange(1, 1 + math.prod(shape), dtype=np.float32).reshape(shape)

    def ints(*shape: int) -> np.ndarray:
        return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)

    ids, logprobs = ints(width, count).T, floats(width, count).T  # not contiguous
    return TokenScores(floats(count), ints(count), ids, logprobs, int_array([width] * count))


@pytest.mark.parametrize("width", [0, 3])
def test_log_probabilities_survive_the_wire(width: int) -> None:
    outputs = StepOutputs(
        np.array([3, 4, 5]),
        int_array([7, 8, 9]),
        logprobs=StepLogprobs(int_array([0, 2]), scores(2, width)),
        prompt_logprobs=(PromptLogprobs(2**40, 5, int_array([1, 2, 3, 4]), scores(4, width)),),
    )
    data = encode(StepMessage.of(outputs, None))
    assert len(data) < 200 + 6 * (16 + 8 * width)
    message = decode_from_engine(data)
    assert isinstance(message, StepMessage)
    got = message.outputs()
    assert step_logprobs(got) == step_logprobs(outputs)
    assert step_logprobs(got).keys() == {3, 5}
    (piece,), (expected,) = got.prompt_logprobs, outputs.prompt_logprobs
    assert (piece.owner, piece.start) == (2**40, 5)
    kept, same = PromptScores(), PromptScores()
    kept.add(replace(piece, start=1))
    same.add(replace(expected, start=1))
    assert kept.values() == same.values()
    assert len(kept.values()) == 5


def beam(number: int, count: int, width: int | None) -> BeamResult:
    logprobs = None if width is None else scores(count, width)
    return BeamResult(number, int_array(range(count)), -0.25, -2.5, logprobs)


@pytest.mark.parametrize("width", [None, 0, 3])
def test_beams_survive_the_wire(width: int | None) -> None:
    sent = tuple(beam(number, 4, width) for number in (2**40, 5))
    ends = tuple(Finished(b.number, FinishReason.LENGTH, 4) for b in sent)
    outputs = StepOutputs(np.array([3]), int_array([7]), ends, beams=sent)
    assert StepMessage.parts(outputs) == [outputs]
    message = decode_from_engine(encode(StepMessage.of(outputs, None)))
    assert isinstance(message, StepMessage)
    for got, expected in zip(message.outputs().beams, sent, strict=True):
        assert (got.number, got.token_ids.tolist()) == (expected.number, [0, 1, 2, 3])
        assert (got.score, got.cumulative_logprob) == (-0.25, -2.5)
        assert beam_logprobs(got) == beam_logprobs(expected)
        assert len(beam_logprobs(got)) == (0 if width is None else 4)


def test_many_long_beams_come_in_messages_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_BEAM_TOKENS_A_MESSAGE", 7)
    sent = tuple(beam(number, 4, 1) for number in (5, 6))
    ends = tuple(Finished(number, FinishReason.LENGTH, 4) for number in (5, 3, 6))
    outputs = StepOutputs(np.array([3]), int_array([7]), ends, beams=sent)
    first, *rest = StepMessage.parts(outputs)
    assert (first.numbers.tolist(), first.beams) == ([3], ())
    assert [end.number for end in first.finished] == [3]
    for part, number in zip(rest, (5, 6), strict=True):
        assert not len(part.numbers)
        assert [b.number for b in part.beams] == [end.number for end in part.finished] == [number]
