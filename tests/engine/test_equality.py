"""The same requests give the same tokens, whatever the engine does to them.

Alone or batched, in chunks, preempted again and again, in blocks of any size, pipelined or not,
with either attention: greedy and seeded requests on a random model in float32.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from engine.tiny_engine import build, pool, run, save_llama
from execution.models.tiny_models import tiny_llama
from octavo.core.plan import int_array
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import EngineCore

NEW_TOKENS = 24
LENGTHS = (1, 2, 5, 9, 16, 17, 33, 40)
PARAMS = [SamplingParams(temperature=0.0)] * 4 + [
    SamplingParams(temperature=1.2),
    SamplingParams(temperature=0.9, top_k=20),
    SamplingParams(temperature=1.5, top_p=0.9),
    SamplingParams(temperature=1.0, top_p=0.95, min_p=0.02),
]


# What depends on a row's own tokens, or on how many it has.
FEATURES = [
    SamplingParams(temperature=0.0, repetition_penalty=1.4),
    SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(temperature=1.3, repetition_penalty=0.9, frequency_penalty=2.0, top_p=0.9),
    SamplingParams(temperature=0.0, bad_words_token_ids=((17,), (5, 40), (80, 80), (3, 4, 5))),
    SamplingParams(
        temperature=1.0,
        bad_words_token_ids=tuple((a, b) for a in range(20, 40) for b in range(20, 40, 2)),
        allowed_token_ids=tuple(range(10, 60)),
    ),
    SamplingParams(temperature=2.0, min_tokens=15, presence_penalty=-1.0),
]
STOPS = tuple(range(60, 96))


def make_requests() -> list[Request]:
    """Greedy ones and seeded ones of every length, then one for each of `FEATURES`."""
    generator = np.random.default_rng(0)
    requests = []
    for number in range(2 * len(LENGTHS)):
        prompt = generator.integers(3, 96, LENGTHS[number % len(LENGTHS)])
        params = PARAMS[number % len(PARAMS)]
        if number >= len(LENGTHS):  # every length both greedy and random
            params = PARAMS[(number + 4) % len(PARAMS)]
        requests.append(
            Request(number, int_array(prompt), params, NEW_TOKENS, seed=number * 2**59 + number)
        )
    for params in FEATURES:
        number = len(requests)
        prompt = generator.integers(3, 96, LENGTHS[number % len(LENGTHS)])
        stops = STOPS if params.min_tokens else ()
        requests.append(
            Request(number, int_array(prompt), params, NEW_TOKENS, number, stop_token_ids=stops)
        )
    return requests


REQUESTS = make_requests()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("tiny"))


@cache
def alone() -> dict[int, list[int]]:
    """Each request by itself, in one chunk: what every other way must give."""
    found: dict[int, list[int]] = {}
    with TemporaryDirectory() as folder:
        core, _ = build(save_llama(Path(folder)))
        for request in REQUESTS:
            found |= run(core, [request])
        core.close()
    return found


def check(core: EngineCore) -> None:
    try:
        assert run(core, REQUESTS) == alone()
        manager = core.scheduler.manager
        assert manager.num_free_blocks == manager.num_usable_blocks
    finally:
        core.close()


def test_alone_equals_transformers() -> None:
    """Plain greedy requests, token for token."""
    reference = tiny_llama()
    reference.generation_config.eos_token_id = None
    for request in REQUESTS:
        if not request.params.is_greedy or request.params in FEATURES:
            continue
        prompt = torch.tensor([request.prompt_token_ids.tolist()])
        whole = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
        )
        assert alone()[request.number] == whole[0, prompt.shape[1] :].tolist()


def test_seeds_matter() -> None:
    """Else equal tokens would say nothing about random requests."""
    found = alone()
    assert len({tuple(tokens) for tokens in found.values()}) == len(REQUESTS)
    assert all(len(set(tokens)) > 3 for tokens in found.values()), "no request repeats one token"


def test_features_matter() -> None:
    for request in REQUESTS[-len(FEATURES) :]:
        found, params = alone()[request.number], request.params
        if params.min_tokens:
            assert params.min_tokens < len(found) < NEW_TOKENS
            assert [token in STOPS for token in found] == [False] * (len(found) - 1) + [True]
        for word in params.bad_words_token_ids:
            text = [tuple(found[i : i + len(word)]) for i in range(len(found))]
            assert word not in text
        if params.allowed_token_ids is not None:
            assert set(found) <= set(params.allowed_token_ids)


@pytest.mark.parametrize("attention", ["gather", "compiled"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [512, 7], ids=["whole", "chunks_of_7"])
def test_batched(model: Path, attention: str, depth: int, block_size: int, chunk: int) -> None:
    core, report = build(
        model,
        attention=attention,
        depth=depth,
        block_size=block_size,
        kv_memory=pool(1024 // block_size, block_size),
        max_num_batched_tokens=chunk,
        max_num_seqs=min(chunk, len(REQUESTS)),
    )
    assert (report.attention, report.depth) == (attention, depth)
    check(core)
    assert core.scheduler.num_preemptions == 0


@pytest.mark.parametrize("attention", ["gather", "compiled"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 64), (4, 17), (16, 5)])
@pytest.mark.parametrize("chunk", [512, 7], ids=["whole", "chunks_of_7"])
def test_preempted(
    model: Path, attention: str, depth: int, block_size: int, num_blocks: int, chunk: int
) -> None:
    """A pool that hardly holds the longest request."""
    core, report = build(
        model,
        attention=attention,
        depth=depth,
        block_size=block_size,
        kv_memory=pool(num_blocks, block_size),
        max_num_batched_tokens=chunk,
        max_num_seqs=7,
    )
    assert report.capacity.num_blocks == num_blocks + 1
    assert report.capacity.block_bytes * report.capacity.num_blocks == report.kv_bytes
    check(core)
    assert core.scheduler.num_preemptions >= 5


@pytest.mark.parametrize("depth", [1, 2])
def test_arriving_and_leaving_at_different_times(model: Path, depth: int) -> None:
    """A request a step, and others aborted between them, in a small pool."""
    core, _ = build(
        model,
        depth=depth,
        block_size=4,
        kv_memory=pool(24, 4),
        max_num_batched_tokens=9,
        max_num_seqs=5,
    )
    found: dict[int, list[int]] = {}
    for request in REQUESTS:
        found[request.number] = []
        core.scheduler.add(request)
        noise = Request(1000 + request.number, request.prompt_token_ids, PARAMS[4], 20, seed=1)
        core.scheduler.add(noise)
        for _ in range(4):
            outputs = core.step()
            _collect(found, outputs.numbers.tolist(), outputs.token_ids.tolist())
        core.scheduler.abort(noise.number)
        core.scheduler.check()
    while core.has_work:
        outputs = core.step()
        _collect(found, outputs.numbers.tolist(), outputs.token_ids.tolist())
        core.scheduler.check()
    core.close()
    assert found == alone()
    assert core.scheduler.num_preemptions > 0


def _collect(found: dict[int, list[int]], numbers: list[int], token_ids: list[int]) -> None:
    for number, token in zip(numbers, token_ids, strict=True):
        if number < 1000:
            found[number].append(token)


@pytest.mark.parametrize("attention", ["gather", "compiled"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [40, 400])
def test_cached_prefixes_change_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, attention: str, depth: int, num_blocks: int
) -> None:
    """The second time every prompt is hit as far as it is still cached."""
    core, _ = build(
        model,
        attention=attention,
        depth=depth,
        block_size=4,
        kv_memory=pool(num_blocks, 4),
        prefix_caching=True,
    )
    manager = core.scheduler.manager
    hits: list[int] = []
    admit = manager.admit

    def noting(*args: object, **options: object) -> object:
        admission = admit(*args, **options)  # type: ignore[arg-type]
        if admission is not None:
            hits.append(admission.num_cached_tokens)
        return admission

    monkeypatch.setattr(manager, "admit", noting)
    assert run(core, REQUESTS) == alone()
    hits.clear()
    check(core)
    assert sum(hits) > 0
    if num_blocks == 400:
        expected = [(len(r.prompt_token_ids) - 1) // 4 * 4 for r in REQUESTS]
        assert sorted(hits) == sorted(expected)


@pytest.mark.parametrize("attention", ["gather", "compiled"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preemption", ["swap", "auto"])
def test_swapping_changes_nothing(model: Path, attention: str, depth: int, preemption: str) -> None:
    core, report = build(
        model,
        attention=attention,
        depth=depth,
        block_size=4,
        kv_memory=pool(24, 4),
        prefix_caching=False,
        preemption=preemption,
        swap_memory="0" if preemption == "recompute" else pool(100, 4),
    )
    assert report.capacity.num_host_blocks == 101
    check(core)
    assert core.scheduler.num_preemptions >= 5
    if preemption == "swap":
        assert core.scheduler.num_swaps == core.scheduler.num_preemptions


def test_samples_of_one_request_equal_requests_of_their_own(model: Path) -> None:
    core, _ = build(model, block_size=4, kv_memory=pool(60, 4))
    request = REQUESTS[13]
    several = replace(request, number=100, n=3)
    alone = {}
    for index in range(3):
        alone |= run(core, [replace(request, number=100 + index, seed=request.seed + index)])
    assert run(core, [several]) == alone
    core.close()
