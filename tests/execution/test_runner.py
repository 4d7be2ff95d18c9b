"""The runner on a tiny real model, with plans made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from execution.models.reference_attention import greedy, logits_of
from execution.models.tiny_models import PROMPT, tiny_llama
from octavo.core.layout import KVLayout
from octavo.core.plan import (
    Batch,
    CopyBlocks,
    FanOut,
    RowForks,
    RowInit,
    StepPlan,
    TableDeltas,
    TokenScores,
    int_array,
)
from octavo.core.sampling_params import SamplingParams
from octavo.execution.arena import Arena
from octavo.execution.attention.cpu import CPUAttention
from octavo.execution.attention.gather import GatherAttention
from octavo.execution.attention.interface import StepAttention
from octavo.execution.models.decoder import Decoder
from octavo.execution.models.loading import load_model
from octavo.execution.runner import Runner
from octavo.execution.sampling import logprobs as logprobs_module
from octavo.memory.paged import PagedManager

SIZE, ROWS, BLOCKS = 4, 6, 40
LONG = [3, 17, 42, 5, 90, 11, 64, 28, 7, 8, 80, 33, 2, 19, 54, 21, 22]
OTHER = [50, 60, 70, 12, 13]
GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=1.5, top_k=40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(folder)
    return load_model(folder, dtype="float32")


class Recorder:
    """A model that keeps the logits of each step."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.seen: list[torch.Tensor] = []

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.model.forward(token_ids, positions, attention, wanted)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.model.logits(hidden))
        return self.seen[-1]


class Rig:
    """A runner; blocks are dealt out by hand, or by ``manager``."""

    def __init__(self, model: Decoder, kind: str) -> None:
        layout = KVLayout(2, model.num_kv_heads, model.head_dim, 4, SIZE)
        self.arena = Arena(layout, BLOCKS, torch.float32)
        # What was there before must not matter.
        self.arena.kv.fill_(7.0)
        backend = {"gather": GatherAttention, "compiled": CPUAttention}[kind]
        self.recorder = Recorder(model)
        self.runner = Runner(
            self.recorder,
            self.arena,
            backend(self.arena, model.num_heads, model.rope),
            max_num_seqs=ROWS,
            max_model_len=64,
        )
        self.manager = PagedManager(BLOCKS, SIZE, ROWS)
        self.step_id = 0

    def run(
        self,
        rows: Sequence[int],
        counts: Sequence[int],
        samples: Sequence[bool] | None = None,
        **parts: object,
    ) -> list[int]:
        """One step; the sampled tokens."""
        self.step_id += 1
        done = np.array(samples if samples is not None else [True] * len(rows), dtype=np.bool_)
        batch = Batch.of(int_array(list(rows)), int_array(list(counts)), done)
        result = self.runner.run(StepPlan(self.step_id, batch, **parts))  # type: ignore[arg-type]
        self.result = result
        assert result.step_id == self.step_id
        assert result.token_ids.dtype == np.int32
        return result.token_ids.tolist()

    def decode(self, rows: Sequence[int], count: int) -> list[list[int]]:
        """``count`` steps of one token each, growing through the manager; tokens a row."""
        found: list[list[int]] = [[] for _ in rows]
        for _ in range(count):
            for row in rows:
                position = int(self.runner.position[row])
                assert position < self.manager.writable[row] or self.manager.grow(row, position + 1)
            drained = self.manager.drain()
            tokens = self.run(
                rows,
                [1] * len(rows),
                commands=drained.commands,
                table_deltas=drained.table_deltas,
            )
            self.manager.commit(int_array(list(rows)), int_array([1] * len(rows)))
            self.manager.retire(drained.commands)
            self.manager.check()
            for tokens_of_row, token in zip(found, tokens, strict=True):
                tokens_of_row.append(token)
        return found

    def admit(self, row: int, tokens: Sequence[int]) -> np.ndarray:
        assert self.manager.admit(row, int_array(list(tokens))) is not None
        return self.manager.block_ids(row)


@pytest.fixture(params=["gather", "compiled"])
def rig(request: pytest.FixtureRequest, model: Decoder) -> Rig:
    return Rig(model, request.param)


def row_init(
    row: int,
    tokens: Sequence[int],
    block_ids: object,
    *,
    computed: int = 0,
    params: SamplingParams = GREEDY,
    seed: int = 0,
    num_prompt: int | None = None,
    stops: tuple[int, ...] = (),
    num_logprobs: int | None = None,
) -> RowInit:
    return RowInit(
        row,
        int_array(list(tokens)),
        computed,
        int_array(block_ids),
        params,
        seed,
        num_prompt_tokens=num_prompt,
        stop_token_ids=stops,
        num_logprobs=params.logprobs if num_logprobs is None else num_logprobs,
    )


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    # These logits reach 12: rounding in another order moves them by up to 1e-5.
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [17, 1, 3, 4, 5, 8, 16])
def test_chunks_of_a_prompt_equal_the_whole(rig: Rig, model: Decoder, chunk: int) -> None:
    inits = (row_init(2, LONG, [9, 3, 30, 1, 22]),)
    for first in range(0, len(LONG), chunk):
        count = min(chunk, len(LONG) - first)
        is_last = first + count == len(LONG)
        tokens = rig.run([2], [count], [is_last], row_inits=inits)
        assert bool(tokens) == is_last
        inits = ()
    assert len(rig.recorder.seen) == 1, "a chunk that ends early needs no logits"
    close(rig.recorder.seen[0], logits_of(model, LONG)[-1:])
    assert tokens + rig_tokens(rig, 2, 3) == greedy(model, LONG, 4)


def rig_tokens(rig: Rig, row: int, count: int) -> list[int]:
    """Decode one row within the blocks it has."""
    return [token for _ in range(count) for token in rig.run([row], [1])]


def test_prompts_chunks_and_decoding_rows_in_one_step(rig: Rig, model: Decoder) -> None:
    expected = greedy(model, PROMPT, 6)
    found = rig.run([4], [9], row_inits=(row_init(4, PROMPT, [5, 4, 8, 15]),))
    # Row 4 decodes; row 0 begins a prompt that it does not finish; row 1 runs a whole one.
    inits = (row_init(0, LONG, [1, 2, 3, 20, 21]), row_init(1, OTHER, [10, 11]))
    tokens = rig.run([4, 0, 1], [1, 6, 5], [True, False, True], row_inits=inits)
    assert tokens == [expected[1], greedy(model, OTHER, 1)[0]]
    close(rig.recorder.seen[-1][0:1], logits_of(model, [*PROMPT, expected[0]])[-1:])
    close(rig.recorder.seen[-1][1:2], logits_of(model, OTHER)[-1:])
    tokens += rig.run([1, 4, 0], [1, 1, 11])
    assert tokens[2:] == [greedy(model, OTHER, 2)[1], expected[2], greedy(model, LONG, 1)[0]]
    # Rows come and go: the same row later serves another sequence.
    tokens = rig.run([1, 4], [9, 1], row_inits=(row_init(1, PROMPT, [10, 11, 12]),))
    assert tokens == [expected[0], expected[3]]
    assert found == expected[:1]


def test_a_step_that_samples_nothing(rig: Rig) -> None:
    assert rig.run([0], [3], [False], row_inits=(row_init(0, LONG, [1, 2, 3, 4, 5]),)) == []
    assert rig.recorder.seen == []


def test_a_table_grows_by_deltas(rig: Rig, model: Decoder) -> None:
    tokens = rig.run([3], [9], row_inits=(row_init(3, PROMPT, [7, 6, 5]),))
    tokens += rig_tokens(rig, 3, 3)
    for index, block_id in ((3, 31), (4, 2)):
        deltas = TableDeltas(int_array([3]), int_array([index]), int_array([block_id]))
        tokens += rig.run([3], [1], table_deltas=deltas)
        tokens += rig_tokens(rig, 3, 3)
    assert tokens == greedy(model, PROMPT, 12)


def test_blocks_are_copied_before_the_step_writes(rig: Rig, model: Decoder) -> None:
    """The row's last block is replaced by a copy in the step that writes into it."""
    tokens = rig.run([0], [9], row_inits=(row_init(0, PROMPT, [1, 2, 3]),))
    tokens += rig.run(
        [0],
        [1],
        commands=(CopyBlocks(int_array([3, 2]), int_array([12, 13])),),
        table_deltas=TableDeltas(int_array([0, 0]), int_array([2, 1]), int_array([12, 13])),
    )
    before = rig.arena.kv[[1, 2, 3]].clone()
    rig.arena.kv[[2, 3]] = torch.nan  # no longer read
    tokens += rig_tokens(rig, 0, 2)
    assert tokens == greedy(model, PROMPT, 4)
    assert torch.equal(rig.arena.kv[1], before[0])


@pytest.mark.parametrize("computed", [1, 4, 8, 16])
def test_a_row_resumes_from_computed_tokens(rig: Rig, model: Decoder, computed: int) -> None:
    """As after a prefix hit: the blocks hold the first tokens' keys and values already."""
    rig.run([0], [17], row_inits=(row_init(0, LONG, [1, 2, 3, 4, 5]),))
    known = [*LONG[:computed], 70, 71, 72]
    shared = -(-computed // SIZE)
    init = row_init(5, known, [*range(1, shared + 1), *range(20, 25)], computed=computed)
    tokens = rig.run([5], [3], row_inits=(init,))
    close(rig.recorder.seen[-1], logits_of(model, known)[-1:])
    assert tokens + rig_tokens(rig, 5, 2) == greedy(model, known, 3)


def test_a_preempted_row_is_recomputed_elsewhere(rig: Rig) -> None:
    """Prompt and generated tokens become the known ones; noise goes on where it was."""
    init = row_init(0, PROMPT, [1, 2, 3, 4], params=RANDOM, seed=2**64 - 1)
    whole = rig.run([0], [9], row_inits=(init,)) + rig_tokens(rig, 0, 6)
    again = row_init(3, PROMPT + whole[:4], [30, 31, 32, 33], params=RANDOM, seed=2**64 - 1)
    assert rig.run([3], [5], [False], row_inits=(again,)) == []
    assert rig.run([3], [8]) + rig_tokens(rig, 3, 2) == whole[4:]


# ── fan-out ──────────────────────────────────────────────────────────────────────────────────

SAMPLES = (
    (SamplingParams(temperature=1.5), 11),
    (SamplingParams(temperature=1.5), 12),
    (SamplingParams(temperature=0.8, top_k=5), 2**63 + 5),
    (SamplingParams(temperature=0.0), 14),
)


def one_by_one(model: Decoder, kind: str, prompt: list[int], count: int) -> list[list[int]]:
    """Each sample as its own request."""
    found = []
    for params, seed in SAMPLES:
        rig = Rig(model, kind)
        init = row_init(1, prompt, rig.admit(1, prompt), params=params, seed=seed)
        first = rig.run([1], [len(prompt)], row_inits=(init,))
        found.append(first + rig.decode([1], count - 1)[0])
    return found


@pytest.mark.parametrize("kind", ["gather", "compiled"])
@pytest.mark.parametrize("length", [8, 9, 11], ids=["full_block", "one_in_it", "three_in_it"])
@pytest.mark.parametrize("chunk", [20, 5])
def test_fan_out_equals_separate_requests(
    model: Decoder, kind: str, length: int, chunk: int
) -> None:
    """One prefill, four samples; the forked tables are copied when they are written."""
    prompt, rig = LONG[:length], Rig(model, kind)
    rows = (4, 0, 2, 3)
    source, others = rows[0], rows[1:]
    blocks = rig.admit(source, prompt)
    params, seed = SAMPLES[0]
    inits: tuple[RowInit, ...] = (row_init(source, prompt, blocks, params=params, seed=seed),)
    first = 0
    if chunk < length:
        assert rig.run([source], [chunk], [False], row_inits=inits) == []
        inits, first = (), chunk
    for row, (params, seed) in zip(others, SAMPLES[1:], strict=True):
        rig.manager.fork(source, row, length)
        shared = rig.manager.block_ids(row)
        assert shared.tolist() == blocks.tolist()
        inits += (row_init(row, prompt, shared, computed=first, params=params, seed=seed),)
    num_logits = len(rig.recorder.seen)
    tokens = rig.run(
        [source], [length - first], row_inits=inits, fan_outs=(FanOut(source, others),)
    )
    assert [len(seen) for seen in rig.recorder.seen[num_logits:]] == [1], "one prefill"
    rig.manager.commit(int_array(list(rows)), int_array([length] * 4))
    found = [[token, *rest] for token, rest in zip(tokens, rig.decode(rows, 10), strict=True)]
    expected = one_by_one(model, kind, prompt, 11)
    assert found == expected
    assert len({tuple(sample) for sample in found}) == 4, "the samples differ"


def test_fan_outs_beside_other_rows(rig: Rig, model: Decoder) -> None:
    """Results come in the order of `StepPlan.sampled_rows`: the batch's, then the fan-outs'."""
    rig.run([5], [5], row_inits=(row_init(5, OTHER, [38, 39]),))
    inits = (
        row_init(0, PROMPT, [1, 2, 3, 4], params=RANDOM, seed=1),
        row_init(1, OTHER, [5, 6], params=RANDOM, seed=2),
        row_init(2, OTHER, [5, 6]),
        row_init(3, PROMPT, [1, 2, 3, 4]),
        row_init(4, PROMPT, [1, 2, 3, 4], params=RANDOM, seed=1),
    )
    fan_outs = (FanOut(1, (2,)), FanOut(0, (3, 4)))
    tokens = rig.run([5, 0, 1], [1, 9, 5], row_inits=inits, fan_outs=fan_outs)
    assert len(tokens) == 6
    assert tokens[0] == greedy(model, OTHER, 2)[1]
    assert tokens[3] == greedy(model, OTHER, 1)[0]
    assert tokens[4] == greedy(model, PROMPT, 1)[0]
    assert tokens[5] == tokens[1], "the same seed at the same place"


def test_rows_change_places_and_go_on_with_tokens_of_the_hosts(rig: Rig, model: Decoder) -> None:
    """Tables, positions and tokens follow the forks, all at once: two rows swap their pasts."""
    rig.run(
        [0, 1],
        [9, 5],
        row_inits=(row_init(0, PROMPT, [1, 2, 3, 4]), row_init(1, OTHER, [5, 6, 7])),
    )
    forks = RowForks(int_array([1, 0]), int_array([0, 1]), int_array([33, 44]))
    found = [rig.run([0, 1], [1, 1], row_forks=forks), rig.run([0, 1], [1, 1])]
    assert [tokens[0] for tokens in found] == greedy(model, [*OTHER, 44], 2)
    assert [tokens[1] for tokens in found] == greedy(model, [*PROMPT, 33], 2)
    alone = RowForks(int_array([1]), int_array([1]), int_array([55]))
    tokens = rig.run([0, 1], [1, 1], row_forks=alone)
    past = [*PROMPT, 33, found[0][1]]
    assert tokens[1] == greedy(model, [*past, 55], 1)[0]
    assert tokens[0] == greedy(model, [*OTHER, 44], 3)[2]


# ── what a row's own tokens do ───────────────────────────────────────────────────────────────

FEATURES = [
    SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5),
    SamplingParams(temperature=1.2, frequency_penalty=2.0, min_tokens=5),
    SamplingParams(
        temperature=0.0, bad_words_token_ids=((7,), (90, 90), (11, 3, 11)), min_tokens=3
    ),
]


@pytest.mark.parametrize("params", FEATURES, ids=["penalties", "random", "words"])
@pytest.mark.parametrize("known", [1, 4, 6])
def test_a_preempted_row_goes_on_with_its_own_state(
    rig: Rig, params: SamplingParams, known: int
) -> None:
    """Resumed in another row from prompt and generated tokens, in chunks."""
    stops = tuple(range(60, 96))
    init = row_init(0, PROMPT, [1, 2, 3, 4], params=params, seed=9, num_prompt=9, stops=stops)
    whole = rig.run([0], [9], row_inits=(init,)) + rig_tokens(rig, 0, 6)
    assert not set(whole[: params.min_tokens]) & set(stops)
    again = row_init(
        3,
        PROMPT + whole[:known],
        [30, 31, 32, 33],
        params=params,
        seed=9,
        num_prompt=9,
        stops=stops,
    )
    assert rig.run([3], [5], [False], row_inits=(again,)) == []
    assert rig.run([3], [4 + known]) + rig_tokens(rig, 3, 6 - known) == whole[known:]


def test_samples_of_one_prefill_count_their_own_tokens(model: Decoder) -> None:
    """Each as its own request; the first token is counted where it was sampled."""
    params = SamplingParams(temperature=2.0, frequency_penalty=2.0, repetition_penalty=1.3)
    alone = []
    for seed in range(3):
        rig = Rig(model, "gather")
        init = row_init(1, PROMPT, [1, 2, 3, 4], params=params, seed=seed)
        alone.append(rig.run([1], [9], row_inits=(init,)) + rig_tokens(rig, 1, 6))
    rig = Rig(model, "gather")
    rig.admit(0, PROMPT)
    inits = [row_init(0, PROMPT, rig.manager.block_ids(0), params=params, seed=0)]
    for row in (1, 2):
        rig.manager.fork(0, row, 9)
        blocks = rig.manager.block_ids(row)
        inits.append(row_init(row, PROMPT, blocks, computed=9, params=params, seed=row))
    first = rig.run([0], [9], row_inits=tuple(inits), fan_outs=(FanOut(0, (1, 2)),))
    rig.manager.commit(int_array([0, 1, 2]), int_array([9] * 3))
    rest = rig.decode([0, 1, 2], 6)
    assert [[token, *others] for token, others in zip(first, rest, strict=True)] == alone


# ── log probabilities ────────────────────────────────────────────────────────────────────────


def check_scores(model: Decoder, tokens: list[int], start: int, scores: TokenScores) -> None:
    """Of ``tokens[start:]``, as far as the scores go."""
    table = logits_of(model, tokens).double().log_softmax(-1)
    for i in range(len(scores)):
        own, token = table[start + i - 1], tokens[start + i]
        assert scores.logprobs[i] == pytest.approx(float(own[token]), abs=1e-4)
        count = int(scores.num_top[i])
        np.testing.assert_allclose(scores.top_logprobs[i, :count], own.topk(count)[0], atol=1e-4)


def test_logprobs_of_the_rows_that_asked(rig: Rig, model: Decoder) -> None:
    inits = (
        row_init(0, PROMPT, [1, 2, 3, 4]),
        row_init(1, OTHER, [5, 6, 7], params=RANDOM, num_logprobs=64),
        row_init(2, LONG, [8, 9, 10, 11, 12], params=SamplingParams(temperature=0, logprobs=3)),
    )
    tokens = rig.run([2, 0, 1], [17, 9, 5], row_inits=inits)
    for known in ([], tokens):
        found = rig.result.logprobs
        assert found is not None
        assert found.places.tolist() == [0, 2]
        tokens = rig.result.token_ids.tolist()
        assert found.scores.num_top.tolist() == [3, 64]
        for i, (place, prompt) in enumerate(((0, LONG), (2, OTHER))):
            whole = [*prompt, *([known[place]] if known else []), tokens[place]]
            only = found.scores.only(np.arange(2) == i)
            check_scores(model, whole, len(whole) - 1, only)
        if not known:
            rig.run([2, 0, 1], [1, 1, 1])
    rig.run([0], [1])
    assert rig.result.logprobs is None


@pytest.mark.parametrize("chunk", [17, 1, 4, 5, 16])
def test_prompt_logprobs_in_chunks(rig: Rig, model: Decoder, chunk: int) -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    inits = [row_init(2, LONG, [9, 3, 30, 1, 22], params=params), row_init(0, OTHER, range(10, 16))]
    rig.run([0], [5], row_inits=inits[1:])
    pieces = []
    for first in range(0, 17, chunk):
        count = min(chunk, 17 - first)
        own = tuple(inits[:1]) if not first else ()
        rig.run([0, 2], [1, count], [True, first + count == 17], row_inits=own)
        assert rig.result.logprobs is None
        pieces += rig.result.prompt_logprobs
    position = 1
    for piece in pieces:
        assert piece.owner == 2
        assert piece.start == position
        assert piece.token_ids.tolist() == LONG[position : position + len(piece.token_ids)]
        assert len(piece.scores) == len(piece.token_ids)
        check_scores(model, LONG, position, piece.scores)
        position += len(piece.token_ids)
    assert position == 17
    rig.run([2], [1])
    assert rig.result.prompt_logprobs == ()


def test_a_long_prompts_logits_are_never_there_at_once(
    rig: Rig, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs_module, "PROMPT_SLICE", 8)
    prompt = [(7 * i) % 90 + 3 for i in range(60)]
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    rig.run([4], [60], row_inits=(row_init(4, prompt, range(1, 16), params=params),))
    (piece,) = rig.result.prompt_logprobs
    assert len(piece.scores) == 59
    check_scores(model, prompt, 1, piece.scores)
    assert max(len(seen) for seen in rig.recorder.seen) <= 8


def test_a_resumed_row_does_not_score_its_prompt_again(rig: Rig) -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    init = row_init(4, [*PROMPT, 5, 6], [1, 2, 3], params=params, num_prompt=9)
    rig.run([4], [11], row_inits=(init,))
    assert rig.result.prompt_logprobs == ()
