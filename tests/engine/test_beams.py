"""Beam search on random models in float32: the sequences and scores of Transformers', whatever runs
beside it and whatever happens to it, through block tables and through slots."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine.tiny_engine import TOKEN_BYTES, build, is_idle, make_llm, pool, run, save_gguf
from execution.models.tiny_models import tiny_llama, tiny_qwen2
from octavo.core.plan import int_array
from octavo.core.request import BeamResult, Request, RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.execution.pages.interface import host_page_bytes
from text.tiny_tokenizers import byte_level_metadata

# Few and flat enough that beams end now and then.
SHAPE: dict[str, Any] = {"vocab_size": 24, "initializer_range": 0.15}
MODELS = {"llama": tiny_llama, "qwen2": tiny_qwen2}
NEW_TOKENS = 12
STOPS = (2, 7)
PROMPTS = [[3], [5, 9, 11, 4, 20], list(range(3, 22)), [8, 1] * 8]
CASES = [
    (width, length_penalty, early_stopping)
    for width in (2, 4, 6)
    for length_penalty in (0.5, 1.0, 2.0)
    for early_stopping in (True, False, "never")
]

# Tokens of a block; under ``virtual`` of the smallest that can be mapped.
SIZES = {"paged": 4, "virtual": host_page_bytes() // TOKEN_BYTES}
KERNELS = {"paged": ["gather", "compiled"], "virtual": ["contiguous", "compiled"]}

Beams = list[tuple[list[int], float]]


@cache
def reference(kind: str) -> PreTrainedModel:
    return MODELS[kind](**SHAPE)


def generated(
    model: PreTrainedModel,
    prompt: int,
    width: int,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    stops: tuple[int, ...] = STOPS,
) -> Beams:
    """Transformers' tokens and scores."""
    ids = torch.tensor([PROMPTS[prompt]])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=NEW_TOKENS,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        eos_token_id=list(stops),
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    beams = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        tokens = row[len(PROMPTS[prompt]) :]
        ends = [index for index, token in enumerate(tokens) if token in stops]
        beams.append((tokens[: ends[0] + 1] if ends else tokens, score))
    return beams


@cache
def expected(kind: str, prompt: int, width: int, *options: Any, **more: Any) -> Beams:
    return generated(reference(kind), prompt, width, *options, **more)


def search(
    number: int, prompt: int, width: int, *, stops: tuple[int, ...] = STOPS, **params: Any
) -> Request:
    return Request(
        number=number,
        prompt_token_ids=int_array(PROMPTS[prompt]),
        params=SamplingParams(use_beam_search=True, **params),
        max_tokens=NEW_TOKENS,
        seed=0,
        stop_token_ids=stops,
        n=width,
        beam_width=width,
    )


def check(found: dict[int, BeamResult], number: int, beams: Beams) -> None:
    for index, (tokens, score) in enumerate(beams):
        beam = found[number + index]
        assert beam.token_ids.tolist() == tokens
        assert beam.score == pytest.approx(score, abs=2e-5)


def build_over(
    kv: str, model: Path, num_blocks: int, attention: str | None = None, **changes: Any
) -> EngineCore:
    size = SIZES[kv]
    core, report = build(
        model,
        kv=kv,
        attention=attention or KERNELS[kv][0],
        block_size=size,
        kv_memory=pool(num_blocks, size),
        **changes,
    )
    assert (report.kv, report.capacity.block_size) == (kv, size)
    assert report.sharing == changes.get("sharing", True)
    return core


@pytest.fixture(scope="module", params=list(SIZES))
def kv(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=list(MODELS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(kind)
    reference(kind).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("depth", [1, 2])
def test_beams_equal_transformers(model: Path, kind: str, kv: str, depth: int) -> None:
    """Every width, length penalty and way to stop, all searches in one batch."""
    core = build_over(kv, model, 400, depth=depth, max_num_seqs=40)
    requests = [
        search(10 * i, i % len(PROMPTS), width, length_penalty=penalty, early_stopping=stopping)
        for i, (width, penalty, stopping) in enumerate(CASES)
    ]
    found: dict[int, BeamResult] = {}
    run(core, requests, found)
    num_stopped = 0
    for i, case in enumerate(CASES):
        check(found, 10 * i, expected(kind, i % len(PROMPTS), *case))
        num_stopped += sum(found[10 * i + j].token_ids[-1] in STOPS for j in range(case[0]))
    assert 20 < num_stopped < sum(width for width, _, _ in CASES), "some end early, not all"
    core.close()


@pytest.mark.parametrize("stops", [(), (2,), tuple(range(2, 8))])
def test_any_number_of_stop_tokens(model: Path, kind: str, kv: str, stops: tuple[int, ...]) -> None:
    core = build_over(kv, model, 128, max_num_seqs=6)
    for prompt in range(len(PROMPTS)):
        found: dict[int, BeamResult] = {}
        run(core, [search(0, prompt, 4, stops=stops)], found)
        if stops:
            check(found, 0, expected(kind, prompt, 4, stops=stops))
        else:  # Transformers takes the model's own where none are given
            assert all(len(beam.token_ids) == NEW_TOKENS for beam in found.values())
    core.close()


def mixed() -> list[Request]:
    """Greedy, sampled, several samples and searches."""
    generator = np.random.default_rng(0)
    requests = []
    for i in range(6):
        prompt = int_array(generator.integers(3, 24, 3 + 5 * i))
        params = SamplingParams(temperature=0.0 if i % 3 == 0 else 1.0, top_p=0.9 if i == 2 else 1)
        n = 3 if i % 3 == 1 else 1
        requests.append(Request(1000 + 10 * i, prompt, params, 20, seed=i, n=n))
        requests.append(search(10 * i, i % len(PROMPTS), (2, 4, 6)[i % 3], logprobs=2))
    return requests


@cache
def alone(kind: str) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    with TemporaryDirectory() as folder:
        reference(kind).save_pretrained(folder)
        core, _ = build(Path(folder), max_num_seqs=6)
        for request in mixed():
            found |= run(core, [request])
        core.close()
    return found


def check_mixed(core: EngineCore, kind: str) -> dict[int, BeamResult]:
    found: dict[int, BeamResult] = {}
    assert run(core, mixed(), found) == alone(kind)
    for i in range(6):
        check(found, 10 * i, expected(kind, i % len(PROMPTS), (2, 4, 6)[i % 3]))
    manager = core.scheduler.manager
    assert manager.num_free_blocks == manager.num_usable_blocks
    core.close()
    return found


@pytest.mark.parametrize("kernel", [0, 1])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [512, 9])
def test_mixed_decoding(
    model: Path, kind: str, kv: str, kernel: int, depth: int, chunk: int
) -> None:
    """Greedy, sampled, n > 1 and beams in the same steps."""
    core = build_over(
        kv,
        model,
        300,
        KERNELS[kv][kernel],
        depth=depth,
        max_num_batched_tokens=chunk,
        max_num_seqs=min(chunk, 30),
    )
    kinds = set()
    launch = core.executor.launch

    def noting(plan: Any) -> None:
        kinds.add(frozenset(core.scheduler.rows.is_beam[plan.batch.rows].tolist()))
        launch(plan)

    core.executor.launch = noting  # type: ignore[method-assign]
    check_mixed(core, kind)
    assert {True, False} in kinds
    assert core.scheduler.num_preemptions == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_again_and_again(
    model: Path, kind: str, kv: str, depth: int, caching: bool, preemption: str
) -> None:
    """A pool that hardly holds the widest search."""
    core = build_over(
        kv,
        model,
        {"paged": 32, "virtual": 18}[kv],
        depth=depth,
        max_num_seqs=10,
        prefix_caching=caching,
        preemption=preemption,
        swap_memory="0" if preemption == "recompute" else pool(80, SIZES[kv]),
    )
    check_mixed(core, kind)
    assert core.scheduler.num_preemptions >= 3
    if preemption == "swap":
        assert core.scheduler.num_swaps >= 1


@pytest.mark.parametrize("depth", [1, 2])
def test_cached_prompts_change_nothing(model: Path, kind: str, kv: str, depth: int) -> None:
    core = build_over(kv, model, 300, depth=depth, max_num_seqs=12)
    assert core.scheduler.manager.prefix_caching
    run(core, mixed())
    hits = []
    update = core.scheduler.update

    def noting(result: Any) -> Any:
        outputs = update(result)
        hits.extend(finished.num_cached_tokens for finished in outputs.finished)
        return outputs

    core.scheduler.update = noting  # type: ignore[method-assign]
    check_mixed(core, kind)
    assert sum(hit > 0 for hit in hits) > 10


@pytest.mark.parametrize("depth", [1, 2])
def test_without_sharing_the_same_comes_out(model: Path, kind: str, kv: str, depth: int) -> None:
    few = {"paged": 60, "virtual": 30}[kv]
    for num_blocks in (300, few):
        core = build_over(kv, model, num_blocks, depth=depth, max_num_seqs=12, sharing=False)
        assert not core.scheduler.manager.prefix_caching
        check_mixed(core, kind)
        assert bool(core.scheduler.num_preemptions) == (num_blocks == few)


def test_log_probabilities_are_those_of_the_path(model: Path, kind: str, kv: str) -> None:
    core = build_over(kv, model, 128, max_num_seqs=6)
    found: dict[int, BeamResult] = {}
    run(core, [search(0, 1, 4, logprobs=3)], found)
    core.close()
    for beam in found.values():
        whole = torch.tensor([PROMPTS[1] + beam.token_ids.tolist()])
        with torch.no_grad():
            logits = reference(kind)(whole).logits[0, len(PROMPTS[1]) - 1 : -1]
        table = torch.log_softmax(logits.float(), dim=-1)
        own = table.gather(1, torch.tensor(beam.token_ids)[:, None].long())[:, 0]
        assert beam.logprobs is not None
        np.testing.assert_allclose(beam.logprobs.logprobs, own.numpy(), atol=2e-5)
        top = torch.topk(table, 3).values.numpy()
        np.testing.assert_allclose(beam.logprobs.top_logprobs, top, atol=2e-5)
        ranks = (table > own[:, None]).sum(1).numpy() + 1
        assert beam.logprobs.ranks.tolist() == ranks.tolist()
        assert beam.cumulative_logprob == pytest.approx(float(own.sum()), abs=1e-4)


# ── LLM ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer; its tokens are too many for beams to end by chance."""
    return save_gguf(tmp_path_factory.mktemp("plain") / "model.gguf")


@cache
def plain_expected(prompt: int, width: int) -> Beams:
    size = len(byte_level_metadata()["tokenizer.ggml.tokens"])
    return generated(tiny_llama(vocab_size=size), prompt, width, stops=(0,))


@pytest.mark.parametrize("depth", [1, 2])
def test_generate(plain: Path, depth: int) -> None:
    params = SamplingParams(use_beam_search=True, beam_width=4, max_tokens=NEW_TOKENS, logprobs=1)
    with make_llm(plain, depth=depth, max_num_seqs=9) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=5)
        first, second, third = llm.generate(PROMPTS[:3], [params, greedy, params])
        for index, completion in ((0, first), (2, third)):
            beams = plain_expected(index, 4)
            assert [list(beam.token_ids) for beam in completion.beams] == [b[0] for b in beams]
            assert [beam.score for beam in completion.beams] == pytest.approx([b[1] for b in beams])
            assert completion.token_ids == completion.beams[0].token_ids
            assert completion.logprobs == completion.beams[0].logprobs
            for beam in completion.beams:
                assert beam.logprobs is not None
                total = sum(value.logprob for value in beam.logprobs)
                assert beam.cumulative_logprob == pytest.approx(total, abs=1e-5)
        assert second.beams == ()
        assert is_idle(llm)


def test_prompt_log_probabilities_go_with_beams(plain: Path) -> None:
    params = SamplingParams(use_beam_search=True, beam_width=3, max_tokens=1, prompt_logprobs=1)
    with make_llm(plain) as llm:
        (found,) = llm.generate(PROMPTS[1], params)
        (greedy,) = llm.generate(PROMPTS[1], SamplingParams(max_tokens=1, prompt_logprobs=1))
        assert found.prompt_logprobs == greedy.prompt_logprobs
        assert len(found.beams) == 3


def test_what_cannot_be_searched_is_refused(plain: Path) -> None:
    def refused(match: str, **params: Any) -> None:
        with pytest.raises(RequestError, match=match):
            llm.generate([1], SamplingParams(use_beam_search=True, **params))

    with make_llm(plain, kv_memory=pool(8), max_num_seqs=4) as llm:
        refused("beam_width is 5, but it must be from 1 to 4", beam_width=5)
        refused("4 beams of 1 prompt and 100 new tokens do not fit", beam_width=4, max_tokens=100)
        refused("stop tokens are too many", beam_width=4, stop_token_ids=tuple(range(1, 62)))
        assert is_idle(llm)
