"""Log probabilities on their way out of the engine: pieces of prompts, samples of a request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.tiny_engine import build, save_llama
from octavo.core.plan import PromptLogprobs, TokenScores, int_array
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.engine.logprobs import PromptScores, TokenLogprobs, step_logprobs


def piece(start: int, token_ids: list[int], offset: float = 0.0) -> PromptLogprobs:
    """Token t at position p has the log probability -t - p / 100 and itself as likeliest."""
    positions = np.arange(start, start + len(token_ids))
    values = (-np.array(token_ids) - positions / 100 + offset).astype(np.float32)
    ids = int_array(token_ids)
    ones = np.ones(len(ids), dtype=np.int32)
    return PromptLogprobs(
        7, start, ids, TokenScores(values, ones, ids[:, None], values[:, None], ones)
    )


@pytest.mark.parametrize(
    "pieces",
    [
        [(1, [4, 5, 6, 7])],
        [(1, [4]), (2, [5, 6]), (4, [7])],
        # Preempted and begun again, in other chunks.
        [(1, [4, 5]), (1, [4]), (2, [5]), (3, [6, 7])],
        [(1, [4, 5, 6]), (1, [4, 5, 6, 7])],
        [(1, [4, 5]), (1, [4]), (2, [5, 6]), (1, [4, 5, 6, 7]), (4, [7])],
    ],
)
def test_pieces_of_a_prompt(pieces: list[tuple[int, list[int]]]) -> None:
    scores, expected = PromptScores(), PromptScores()
    for start, token_ids in pieces:
        scores.add(piece(start, token_ids))
    expected.add(piece(1, [4, 5, 6, 7]))
    values = scores.values()
    assert values == expected.values()
    assert [value.token_id for value in values[1:] if value] == [4, 5, 6, 7]
    assert values[0] is None


def test_what_was_first_stays() -> None:
    scores = PromptScores()
    scores.add(piece(1, [4, 5]))
    before = scores.values()
    scores.add(piece(1, [4, 5, 6], offset=-9.0))
    assert scores.values()[:3] == before
    assert PromptScores().values() == (None,), "a prompt of one token"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("tiny"))


def collect(
    core: EngineCore, requests: list[Request]
) -> tuple[dict[int, list[TokenLogprobs]], dict[int, tuple[TokenLogprobs | None, ...]]]:
    """Each sample's tokens and each request's prompt."""
    tokens: dict[int, list[TokenLogprobs]] = {}
    prompts: dict[int, PromptScores] = {}
    for request in requests:
        core.scheduler.add(request)
    while core.has_work:
        outputs = core.step()
        core.scheduler.check()
        found = step_logprobs(outputs)
        assert set(found) == {n for n in outputs.numbers.tolist() if n < 100}
        for number, token_id in zip(outputs.numbers.tolist(), outputs.token_ids, strict=True):
            if number in found:
                assert found[number].token_id == token_id
                tokens.setdefault(number, []).append(found[number])
        for part in outputs.prompt_logprobs:
            prompts.setdefault(part.owner, PromptScores()).add(part)
    core.close()
    return tokens, {number: scores.values() for number, scores in prompts.items()}


@pytest.mark.parametrize(
    ("kv", "depth"), [("paged", 1), ("paged", 2), ("virtual", 1), ("virtual", 2)]
)
def test_samples_of_a_request_have_their_own(model: Path, kv: str, depth: int) -> None:
    """The prompt's are the first sample's; a neighbour that asked for none has none."""
    params = SamplingParams(
        temperature=1.5, repetition_penalty=1.2, min_tokens=2, logprobs=2, prompt_logprobs=1
    )
    prompt, stops = int_array(range(3, 25)), tuple(range(40, 80))
    neighbour = Request(100, prompt, SamplingParams(), 12, 1, stop_token_ids=stops)
    core, _ = build(model, kv=kv, attention="auto", depth=depth, max_num_batched_tokens=9)
    together = Request(10, prompt, params, 9, 50, stop_token_ids=stops, n=3)
    tokens, prompts = collect(core, [neighbour, together])
    core, _ = build(model, depth=1)
    single = [Request(10 + i, prompt, params, 9, 50 + i, stop_token_ids=stops) for i in range(3)]
    expected, expected_prompts = collect(core, single)
    assert set(tokens) == {10, 11, 12}
    assert set(prompts) == {10}
    assert len(prompts[10]) == 22
    for number, values in expected.items():
        same_tokens(tokens[number], values)
    same_tokens(prompts[10], expected_prompts[10])


def same_tokens(found: object, expected: object) -> None:
    """Up to rounding."""
    assert isinstance(found, list | tuple)
    assert isinstance(expected, list | tuple)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.token_id, a.rank) == (b.token_id, b.rank)
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
            assert [token_id for token_id, _ in a.top] == [token_id for token_id, _ in b.top]
