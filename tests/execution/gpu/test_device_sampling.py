"""Rows that change or score their logits on the device get what the host's sampler gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from execution.sampling.rows import edited, random_logits, start
from octavo.core.plan import NO_DELTAS, NO_FORKS, RowInit, int_array
from octavo.core.sampling_params import SamplingParams
from octavo.execution.device import CUDADevice, Device, PlainDevice
from octavo.execution.device_edits import DeviceEdits, most_bytes
from octavo.execution.device_rows import DeviceRows
from octavo.execution.device_scores import DeviceScores, packed_scores
from octavo.execution.sampling.logprobs import token_scores
from octavo.execution.sampling.prompts import ScoredPart
from octavo.execution.sampling.sampler import Sampler
from octavo.execution.staging import Staging

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
VOCAB = 50
STOPS = (3, 4, 60)  # one of them beyond the vocabulary

# Every change alone, and all at once; greedy and at random, so that tokens are equal to the last
# (filters choose in another order on the host: those rows' logits are compared, not their tokens).
KINDS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7, "temperature": 0.8},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.5, "temperature": 1.2},
    {"logit_bias": {5: 4.0, 6: -50.0, 49: 2.5}},
    {"allowed_token_ids": (1, 2, 7, 30, 49)},
    {"bad_words_token_ids": ((9,), (7, 8), (8, 7, 9), (1, 2, 1, 2))},
    {"min_tokens": 3},
    {
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "repetition_penalty": 1.2,
        "logit_bias": {1: 3.0, 2: -3.0, 3: 9.0},
        "allowed_token_ids": (1, 2, 3, 7),
        "bad_words_token_ids": ((7,), (1, 1), (2, 1)),
        "min_tokens": 2,
        "temperature": 1.0,
    },
]


def make_device() -> Device:
    return CUDADevice() if torch.cuda.is_available() else PlainDevice()


def init_of(
    row: int, params: SamplingParams, prompt: list[int], output: list[int], seed: int
) -> RowInit:
    return RowInit(
        row=row,
        token_ids=int_array([*prompt, *output]),
        num_computed_tokens=len(prompt) + len(output) - 1,
        block_ids=int_array([]),
        params=params,
        seed=seed,
        num_prompt_tokens=len(prompt),
        stop_token_ids=STOPS,
    )


class Both:
    """The same rows on the device and under the host's sampler."""

    def __init__(self, num_rows: int) -> None:
        self.device = make_device()
        # Less than all rows start with: it goes in further copies.
        self.staging = Staging(self.device, 2, 1 << 12)
        self.edits = DeviceEdits(self.device, num_rows, VOCAB, self.staging)
        self.rows = DeviceRows(self.device, num_rows, 4)
        self.sampler = Sampler(num_rows)
        self.length = np.zeros(num_rows, dtype=np.int64)

    def start(self, row: int, kind: dict[str, Any], prompt: list[int], output: list[int]) -> None:
        params = SamplingParams(**{"temperature": 0.0, **kind})
        init = init_of(row, params, prompt, output, seed=row)
        self.edits.set_row(init)
        self.rows.apply((init,), NO_FORKS, NO_DELTAS, self.staging)
        start(self.sampler, row, params, prompt, output, seed=row, stops=STOPS[:2])
        self.length[row] = len(prompt) + len(output)

    def step(self, logits: torch.Tensor, rows: list[int]) -> tuple[list[int], list[int]]:
        """Tokens of the device and of the host; the edited logits are equal."""
        chosen = int_array(rows)
        indices = self.length[chosen]
        self.edits.put()
        needed = self.edits.needs(chosen, indices)
        places = np.flatnonzero(needed)
        place = self.device.torch_device
        out = torch.full((len(rows),), -7, dtype=torch.int32, device=place)
        own = logits.to(place)
        sample = self.edits.put_sampled(places, chosen[places], indices[places], is_random=True)
        self.staging.send()
        self.edits.sample(own, sample, self.rows, out)
        assert self.edits._logits is not None
        found = self.edits._logits[: len(places)].cpu()
        expected = edited(self.sampler, logits.float(), rows, indices.tolist())
        if len(places) <= 64:
            own_places = expected[torch.from_numpy(places)]
            # A GPU multiplies and adds in one rounding.
            atol = 1e-5 if torch.cuda.is_available() else 0.0
            torch.testing.assert_close(found, own_places, rtol=1e-6, atol=atol)
        tokens = self.sampler.sample(logits.float(), chosen, indices)
        self.length[chosen] += 1
        return out.cpu()[places].tolist(), tokens[places].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_change(dtype: torch.dtype) -> None:
    both = Both(len(KINDS) + 1)
    random = np.random.default_rng(0)
    both.start(len(KINDS), {}, [1, 2], [])  # changes nothing, and stands among the others
    for row, kind in enumerate(KINDS):
        prompt = random.integers(0, VOCAB, 6).tolist()
        both.start(row, kind, prompt, random.integers(1, 9, row % 3).tolist())
    rows = [4, len(KINDS), 0, 1, 2, 3, 5, 6, 7, 8]
    for number in range(6):
        # Few tokens are likely, so that they come again and complete what is forbidden.
        logits = random_logits(len(rows), VOCAB, seed=number).to(dtype)
        logits[:, [1, 2, 3, 7, 8, 9]] += 6
        device, host = both.step(logits, rows)
        assert device == host
        if number == 3:
            # One is resumed elsewhere in the middle, with what it generated; its slot is kept.
            both.start(0, KINDS[6], [7], [8, 7, 8, 7])
    last, host_rows = both.rows.last_token.cpu().tolist(), [r for r in rows if r not in (7, 9)]
    assert [last[row] for row in host_rows] == device


def test_long_outputs_and_long_phrases() -> None:
    """The ring of recent tokens turns over."""
    both = Both(1)
    phrase = tuple(range(1, 14)) * 2
    output = [1 + number % 13 for number in range(60)]
    both.start(0, {"bad_words_token_ids": (phrase[:15], (5, 6, 9))}, [5, 6], output)
    for number in range(60, 72):
        logits = torch.zeros(1, VOCAB)
        logits[0, 1 + number % 13] = 5.0
        device, host = both.step(logits, [0])
        assert device == host
        # Fifteen tokens in a row would be complete with the second token of a round.
        assert (device[0] == 1 + number % 13) == (number != 66)


def test_slots_are_shared_and_grow() -> None:
    """More rows than the state begins with, and more than a slice; rows that end give theirs."""
    count = 66
    both = Both(count)
    assert both.edits.nbytes == 0
    for row in range(3):
        both.start(row, KINDS[0], [1, 2], [3])
    assert both.step(random_logits(3, VOCAB), [0, 1, 2])[0]
    small = both.edits.nbytes
    for row in range(2):
        both.start(row, {}, [1], [])
    for row in range(2, count):
        both.start(row, KINDS[row % 2], [1, 2], [2, 3])
    device, host = both.step(random_logits(count, VOCAB), list(range(count)))
    assert len(device) == count - 2
    assert device == host
    assert small < both.edits.nbytes <= most_bytes(count, VOCAB)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores(dtype: torch.dtype) -> None:
    """In three widths, in more than one slice, of sampled tokens and of a prompt's."""
    if dtype == torch.bfloat16 and torch.cuda.is_available():
        pytest.skip("of equal logits, which are the last to be kept is the library's choice")
    device = make_device()
    count, vocab = 150, 90
    staging = Staging(device, 2)
    scores = DeviceScores(device, count, 100, vocab, 2, staging)
    asked = [(None, 0, 3, 20, 64)[row % 5] for row in range(count)]
    for row, num in enumerate(asked):
        scores.set_row(row, num)
    rows = int_array(np.random.default_rng(0).permutation(count))
    logits = random_logits(count, vocab).to(dtype)
    head = random_logits(8, vocab, seed=1)
    tokens = torch.randint(0, vocab, (count,), dtype=torch.int32)
    prompt = int_array(np.arange(70) % vocab)
    states = random_logits(80, 8, seed=2)
    place = device.torch_device
    at = head.to(place)
    for _ in range(4):  # memory is used again
        scores.start()
        part = ScoredPart(row=7, first=1, token_ids=prompt, offset=5, num_top=2)
        scores.put_prompts([part])
        places = scores.places(rows)
        scores.put_sampled(rows, places)
        staging.send()
        scores.score_prompts(states.to(place), lambda own: own @ at)
        scores.score_sampled(logits.to(place), tokens.to(place))
        pending = scores.finish()
        assert pending is not None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        sampled, prompts = pending.read()
    assert sampled is not None
    wanted = np.array([-1 if num is None else num for num in asked], dtype=np.int32)[rows]
    assert sampled.places.tolist() == np.flatnonzero(wanted >= 0).tolist()
    own = logits.float()[torch.from_numpy(places)]
    expected = token_scores(own, tokens.numpy()[places].astype(np.int64), wanted[places])
    assert_equal(sampled.scores, expected)
    (piece,) = prompts
    assert (piece.owner, piece.start, piece.token_ids.tolist()) == (7, 1, prompt.tolist())
    expected = token_scores(states[5:75] @ head, prompt.astype(np.int64), np.full(70, 2, np.int32))
    assert_equal(piece.scores, expected)
    assert scores.finish() is None


def assert_equal(found: Any, expected: Any) -> None:
    """Products of other numbers of rows may differ in the last bits."""
    tolerance = 1e-5 if torch.cuda.is_available() else 1e-6
    for name in ("ranks", "top_ids", "num_top", "logprobs", "top_logprobs"):
        one, two = getattr(found, name), getattr(expected, name)
        assert one.dtype == two.dtype
        if one.dtype.kind == "i":
            np.testing.assert_array_equal(one, two, err_msg=name)
        else:
            np.testing.assert_allclose(one, two, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("vocab", [VOCAB, 32001])
def test_scores_do_not_depend_on_a_rows_place(vocab: int) -> None:
    """Libraries add the numbers of a row in an order that follows where it lies."""
    place = make_device().torch_device
    logits = random_logits(9, vocab).to(place)
    tokens = torch.arange(9, dtype=torch.int32, device=place)
    together = packed_scores(logits, tokens, 3)
    for row in range(9):
        alone = packed_scores(logits[row : row + 1].clone(), tokens[row : row + 1], 3)
        assert torch.equal(alone, together[row : row + 1])
    wanted = torch.log_softmax(logits.double(), dim=-1)[range(9), range(9)]
    torch.testing.assert_close(together[:, 0].view(torch.float32).double(), wanted)
