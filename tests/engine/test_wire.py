"""Arrays of log probabilities over the wire: nothing but their bytes, and the same again."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from octavo.core.plan import PromptLogprobs, StepLogprobs, TokenScores, int_array
from octavo.core.request import StepOutputs
from octavo.engine.logprobs import PromptScores, step_logprobs
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
