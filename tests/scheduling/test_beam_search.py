"""The choice of candidates, without scheduler or model: against a search that is written down
plainly, over whole sequences and the whole vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.scheduling.beam_search import BeamSearch, closest_before, common_length
from toy_executor import VOCAB, as_ids, token_logprobs, top_tokens

Found = tuple[list[int], float, float]


def plain_search(
    prompt: list[int],
    width: int,
    max_tokens: int,
    *,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    stops: tuple[int, ...] = (),
    min_tokens: int = 0,
) -> list[Found]:
    """Tokens, total and score of the best ``width``, best first."""
    running: list[tuple[np.float32, list[int]]] = [(np.float32(0), [])]
    ended: list[Found] = []
    for length in range(1, max_tokens + 1):
        scale = np.float32(length**length_penalty)
        candidates = []
        for rank, (total, tokens) in enumerate(running):
            logprobs = token_logprobs(prompt + tokens)
            for token in range(VOCAB):
                if not (token in stops and length <= min_tokens):
                    candidates.append((-(total + logprobs[token]), rank, token))
        candidates.sort()
        nodes = [(np.float32(-cost), running[rank][1] + [t]) for cost, rank, t in candidates]
        for total, tokens in nodes[:width]:
            if tokens[-1] in stops or length == max_tokens:
                ended.append((tokens, float(total), float(total / scale)))
        ended.sort(key=lambda found: -found[2])
        del ended[width:]
        running = [node for node in nodes if node[1][-1] not in stops][:width]
        if len(ended) == width:
            if early_stopping is True:
                break
            if early_stopping == "never" and length_penalty > 0:
                scale = np.float32(max_tokens**length_penalty)
            if running[0][0] / scale <= np.float32(ended[-1][2]):
                break
    return ended


def engine_search(prompt: list[int], width: int, max_tokens: int, **options: Any) -> list[Found]:
    stops = options.pop("stops", ())
    search = BeamSearch(width, max_tokens, stop_token_ids=stops, **options)
    sequences: list[list[int]] = [[]]
    while True:
        tops = [top_tokens(prompt + tokens, search.num_top) for tokens in sequences]
        survivors = search.advance(np.stack([t[0] for t in tops]), np.stack([t[1] for t in tops]))
        if survivors is None:
            break
        pairs = zip(survivors.parents.tolist(), survivors.token_ids.tolist(), strict=True)
        sequences = [[*sequences[parent], token] for parent, token in pairs]
        assert [search.token_ids(i).tolist() for i in range(width)] == sequences
    return [(h.token_ids().tolist(), h.total, h.score) for h in search.finished]


@given(
    prompt=st.lists(st.integers(0, 96), min_size=1, max_size=3),
    width=st.integers(1, 7),
    max_tokens=st.integers(1, 9),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
    num_stops=st.sampled_from([0, 1, 5, 40, 85]),
    min_tokens=st.integers(0, 4),
)
def test_it_is_the_plain_search(
    prompt: list[int], width: int, max_tokens: int, num_stops: int, **options: Any
) -> None:
    options["stops"] = tuple(range(num_stops))
    found = engine_search(prompt, width, max_tokens, **options)
    assert found == plain_search(prompt, width, max_tokens, **options)
    assert len(found) == width


def test_an_ended_candidate_leaves_its_place_to_the_next() -> None:
    search = BeamSearch(2, 10, stop_token_ids=(9,))
    ids = as_ids([[9, 4, 5]])
    survivors = search.advance(ids, np.array([[-0.5, -1, -2]], dtype=np.float32))
    assert survivors is not None
    assert survivors.token_ids.tolist() == [4, 5]
    assert [h.token_ids().tolist() for h in search.finished] == [[9]]
    assert search.finished[0].is_stopped


def test_only_the_best_may_end() -> None:
    """The third of two best is there to go on with, not to end."""
    search = BeamSearch(2, 10, stop_token_ids=(9,))
    survivors = search.advance(as_ids([[4, 5, 9]]), np.array([[-0.5, -1, -2]], dtype=np.float32))
    assert survivors is not None
    assert not search.finished


def test_equal_candidates_go_by_rank_and_token() -> None:
    search = BeamSearch(2, 10)
    search.advance(as_ids([[3, 7]]), np.array([[-1, -1]], dtype=np.float32))
    ids, values = as_ids([[5, 8], [1, 2]]), np.full((2, 2), -1, dtype=np.float32)
    survivors = search.advance(ids, values)
    assert survivors is not None
    assert survivors.parents.tolist() == [0, 0]
    assert survivors.token_ids.tolist() == [5, 8]


@pytest.mark.parametrize(("early_stopping", "num_steps"), [(True, 2), (False, 3), ("never", 6)])
def test_when_it_stops(early_stopping: Any, num_steps: int) -> None:
    """Two have ended after the second step; in the third the candidates fall behind at their
    present length, but six tokens might still be better."""
    search = BeamSearch(2, 6, stop_token_ids=(9,), early_stopping=early_stopping)
    ids = as_ids([[9, 4, 5]])
    steps = [
        (ids, [[-1.0, -1.1, -1.2]]),
        (as_ids([[9, 4, 5], [4, 5, 9]]), [[-0.1, -0.4, -5], [-0.5, -5, -6]]),
        (as_ids([[4, 5, 9]] * 2), [[-1.8, -1.9, -9]] * 2),
        *[(as_ids([[4, 5, 9]] * 2), [[-0.1, -0.2, -9]] * 2)] * 3,
    ]
    ended = [search.advance(ids, np.array(v, dtype=np.float32)) is None for ids, v in steps]
    assert ended.index(True) + 1 == num_steps


def test_log_probabilities_follow_the_chosen_path() -> None:
    search = BeamSearch(2, 3, num_logprobs=1)
    prompt, sequences = [5], [[]]  # type: ignore[var-annotated]
    while True:
        tops = [top_tokens(prompt + tokens, search.num_top) for tokens in sequences]
        survivors = search.advance(np.stack([t[0] for t in tops]), np.stack([t[1] for t in tops]))
        if survivors is None:
            break
        pairs = zip(survivors.parents.tolist(), survivors.token_ids.tolist(), strict=True)
        sequences = [[*sequences[parent], token] for parent, token in pairs]
    for found in search.finished:
        tokens, scores = found.token_ids().tolist(), found.logprobs()
        assert scores is not None
        for index, token in enumerate(tokens):
            logprobs = token_logprobs(prompt + tokens[:index])
            assert scores.logprobs[index] == logprobs[token]
            assert scores.ranks[index] == (logprobs > logprobs[token]).sum() + 1
            assert scores.top_ids[index].tolist() == [int(np.argmax(logprobs))]
            assert scores.top_logprobs[index].tolist() == [logprobs.max()]
        assert found.total == pytest.approx(float(scores.logprobs.sum()))


def test_what_sequences_have_in_common() -> None:
    assert common_length(as_ids([1, 2, 3]), as_ids([1, 2, 4, 5])) == 2
    assert common_length(as_ids([1, 2]), as_ids([1, 2, 4])) == 2
    rows = [as_ids(r) for r in ([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 7], [0, 0, 0, 0])]
    assert list(closest_before(rows)) == [(0, 2), (1, 3), (0, 0)]
