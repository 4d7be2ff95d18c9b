"""``kv=virtual`` gives the tokens that ``kv=paged`` gives, on real mappings, and leaves none."""

from __future__ import annotations

import errno
import gc
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from engine.test_beams import alone as mixed_alone
from engine.test_beams import mixed, reference
from engine.test_equality import NEW_TOKENS, REQUESTS, alone
from engine.tiny_engine import TOKEN_BYTES, build, pool, run, save_gguf, save_llama
from octavo.cli import app
from octavo.config import ConfigError, ResourceError
from octavo.core.layout import KVLayout
from octavo.core.plan import MapBlocks, StepPlan, int_array
from octavo.core.request import FinishReason, Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.engine.slots import mappable_layout
from octavo.execution.pages import memfd
from octavo.execution.pages.interface import host_page_bytes
from octavo.execution.runner import Runner
from octavo.execution.virtual_arena import VirtualArena
from octavo.memory.virtual import VirtualManager

# The smallest block of the tiny model that can be mapped.
SIZE = host_page_bytes() // TOKEN_BYTES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the beam tests."""
    folder = tmp_path_factory.mktemp("flat")
    reference("llama").save_pretrained(folder)
    return folder


def build_virtual(model: Path, num_blocks: int, size: int = SIZE, **changes: Any) -> EngineCore:
    core, report = build(
        model,
        kv="virtual",
        attention="auto",
        block_size=size,
        kv_memory=pool(num_blocks, size),
        **changes,
    )
    assert (report.kv, report.attention) == ("virtual", "contiguous")
    assert report.capacity.block_size == size
    return core


def arena_of(core: EngineCore) -> VirtualArena:
    runner = core.executor._runner  # type: ignore[attr-defined]
    assert isinstance(runner, Runner)
    assert isinstance(runner.arena, VirtualArena)
    return runner.arena


def check(core: EngineCore, requests: list[Request], expected: dict[int, list[int]]) -> None:
    """All tokens, and then what is mapped is what the manager thinks."""
    assert run(core, requests) == expected
    manager, arena = core.scheduler.manager, arena_of(core)
    assert isinstance(manager, VirtualManager)
    assert manager.num_free_blocks == manager.num_usable_blocks
    assert arena.num_mapped_blocks == manager.num_mapped_blocks
    num_places = arena._slots.num_places
    for row in range(len(arena.slots)):
        slot = manager.slot(row)
        shown = [
            arena._slots.mapper._range.handles[(1 + row) * num_places + place]
            for place in range(len(slot))
        ]
        assert shown == slot.tolist()
    core.close()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("size", [SIZE, 2 * SIZE])
@pytest.mark.parametrize("chunk", [512, 7], ids=["whole", "chunks_of_7"])
def test_batched(model: Path, depth: int, size: int, chunk: int) -> None:
    core = build_virtual(
        model,
        1024 // size,
        size,
        depth=depth,
        max_num_batched_tokens=chunk,
        max_num_seqs=min(chunk, len(REQUESTS)),
    )
    check(core, REQUESTS, alone())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [False, True])
def test_preempted(model: Path, depth: int, preemption: str, caching: bool) -> None:
    core = build_virtual(
        model,
        9,
        depth=depth,
        max_num_seqs=7,
        prefix_caching=caching,
        preemption=preemption,
        swap_memory="0" if preemption == "recompute" else pool(100, SIZE),
    )
    check(core, REQUESTS, alone())
    assert core.scheduler.num_preemptions >= 5
    if preemption == "swap":
        assert core.scheduler.num_swaps == core.scheduler.num_preemptions


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [20, 200])
def test_cached_prefixes(model: Path, depth: int, num_blocks: int) -> None:
    core = build_virtual(model, num_blocks, depth=depth)
    assert core.scheduler.manager.prefix_caching
    assert run(core, REQUESTS) == alone()
    check(core, REQUESTS, alone())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [200, 24])
@pytest.mark.parametrize("how", ["recompute", "swap", "unshared"])
def test_samples_and_beams(flat: Path, depth: int, num_blocks: int, how: str) -> None:
    """Greedy, sampled, n > 1 and beams in the same steps, in room and preempted."""
    core = build_virtual(
        flat,
        num_blocks,
        depth=depth,
        max_num_seqs=10,
        sharing=how != "unshared",
        preemption="swap" if how == "swap" else "recompute",
        swap_memory=pool(100, SIZE) if how == "swap" else "0",
    )
    check(core, mixed(), mixed_alone("llama"))
    assert bool(core.scheduler.num_preemptions) == (num_blocks == 24)


def mapped_places(core: EngineCore) -> list[int]:
    """Gets, from now on, how many places each plan maps."""
    counts: list[int] = []
    launch: Callable[[StepPlan], None] = core.executor.launch

    def noting(plan: StepPlan) -> None:
        counts.append(
            sum(len(c) for c in plan.commands if isinstance(c, MapBlocks) and not c.is_ahead)
        )
        launch(plan)

    core.executor.launch = noting  # type: ignore[method-assign]
    return counts


def test_the_same_requests_again_cost_no_mapping(model: Path) -> None:
    core = build_virtual(model, 200, prefix_caching=False)
    greedy = [request for request in REQUESTS if request.params.is_greedy]
    for request in greedy[:4]:
        run(core, [request])
    counts = mapped_places(core)
    for request in [greedy[2], greedy[0], greedy[3], greedy[1]]:
        assert run(core, [request]) == {request.number: alone()[request.number]}
    assert sum(counts) == 0
    core.close()


def test_few_mappings_are_enough(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever could need one too many waits; what is stale goes."""
    # Two for the pool's view and what it may grow to, one for the slots and for each slot's end.
    monkeypatch.setattr(memfd, "_remaining_mappings", lambda: 3 + 7 + 2 * 128 // SIZE)
    core = build_virtual(model, 200, max_num_seqs=7)
    assert core.scheduler.manager.max_mapped_blocks == 2 * 128 // SIZE
    check(core, REQUESTS, alone())


def test_too_few_mappings_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfd, "_remaining_mappings", lambda: 3 + 4 + 128 // SIZE - 1)
    with pytest.raises(ResourceError, match="a sequence of 128 tokens needs 16 mapped blocks and"):
        build_virtual(model, 200)
    monkeypatch.setattr(memfd, "_remaining_mappings", lambda: 1)
    with pytest.raises(ResourceError, match=r"kv=virtual: .* or use kv=paged"):
        build_virtual(model, 200)


def test_a_host_that_refuses_is_not_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_gguf(tmp_path / "model.gguf")

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", refuse)
    arguments = ["generate", str(model), "a", "--kv", "virtual", "--max-num-seqs", "2"]
    result = CliRunner().invoke(app, [*arguments, "--kv-memory", "1MiB", "--device", "cpu"])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        "octavo: kv=virtual: memfd_create failed: Too many open files; or use kv=paged"
    )


def test_another_system_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ConfigError, match="kv=virtual needs Linux"):
        build_virtual(model, 200)


def test_the_translation_and_the_backend_must_agree(model: Path) -> None:
    match = r"attention=contiguous does not go with kv=paged: .* use attention=auto"
    with pytest.raises(ConfigError, match=match):
        build(model, kv="paged", attention="contiguous")


@pytest.mark.parametrize("attention", ["compiled", "gather"])
def test_kernels_over_tables_read_the_pool_view(model: Path, attention: str) -> None:
    """While slots are mapped as ever."""
    core, report = build(
        model,
        kv="virtual",
        attention=attention,
        block_size=SIZE,
        kv_memory=pool(9, SIZE),
        max_num_seqs=7,
        preemption="swap",
        swap_memory=pool(100, SIZE),
    )
    assert report.attention == attention
    check(core, REQUESTS, alone())
    assert core.scheduler.num_swaps >= 5


@pytest.mark.parametrize("attention", ["compiled", "gather"])
def test_kernels_over_tables_score_as_without_slots(model: Path, attention: str) -> None:
    """To the last bit: log probabilities of prompts and of what is generated, of the same rows in
    the same steps."""
    asked = [
        replace(request, params=replace(request.params, logprobs=0, prompt_logprobs=0))
        for request in REQUESTS[:12]
    ]
    found = []
    for kv in ("paged", "virtual"):
        core, _ = build(
            model, kv=kv, attention=attention, block_size=SIZE, kv_memory=pool(100, SIZE),
            max_num_seqs=len(asked), max_num_batched_tokens=29,
        )  # fmt: skip
        for request in asked:
            core.scheduler.add(request)
        told: list[tuple[int, int, bytes]] = []
        while core.has_work:
            outputs = core.step()
            for piece in outputs.prompt_logprobs:
                told.append((piece.owner, piece.start, piece.scores.logprobs.tobytes()))
            if outputs.logprobs is not None:
                scores = outputs.logprobs.scores.logprobs
                places = zip(outputs.numbers, outputs.token_ids, scores, strict=True)
                told += [(int(n), int(token), score.tobytes()) for n, token, score in places]
        core.close()
        found.append(told)
    assert found[0] == found[1]
    assert len(found[0]) > 12 * NEW_TOKENS


@pytest.mark.parametrize("depth", [1, 2])
def test_a_mapping_that_fails_ends_nobody(
    model: Path, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The host allows fewer mappings than it said, for a while: rows are read through their tables
    and slots are mapped as soon as they can be."""
    core = build_virtual(model, 200, depth=depth, prefix_caching=False)
    arena = arena_of(core)
    pages = arena.pages
    allowed, pages._max_mappings = pages._max_mappings, 0  # type: ignore[attr-defined]
    half, steps = len(REQUESTS) // 2, 0
    for request in REQUESTS[:half]:
        core.scheduler.add(request)
    while steps < 4:
        core.step()
        steps += 1
    assert re.search(r"slot \d cannot be mapped", caplog.text)
    assert "raise vm.max_map_count" in caplog.text
    assert caplog.text.count("through their block tables meanwhile") == 1
    pages._max_mappings = allowed  # type: ignore[attr-defined]
    while core.has_work:
        assert all(e.reason is not FinishReason.ERROR for e in core.step().finished)
    pages._max_mappings = 0  # type: ignore[attr-defined]
    assert run(core, REQUESTS) == alone()
    pages._max_mappings = allowed  # type: ignore[attr-defined]
    check(core, REQUESTS, alone())


def test_a_slot_that_nobody_ordered_is_a_failed_step(model: Path) -> None:
    """It would be a bug, and not to be read around."""
    core = build_virtual(model, 200, prefix_caching=False)
    arena_of(core)._slots.order = lambda command: None  # type: ignore[method-assign]
    core.scheduler.add(REQUESTS[7])
    finished = []
    while core.has_work:
        finished += core.step().finished
    assert [end.reason for end in finished] == [FinishReason.ERROR]
    assert "shows nothing at place" in str(finished[0].error)


def test_a_block_that_cannot_be_mapped_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=rf"sizes that can: .*any multiple of {SIZE}\)"):
        build_virtual(model, 40, SIZE - 1)
    core, report = build(model, kv="virtual", attention="contiguous")
    core.close()
    assert report.capacity.block_size % SIZE == 0
    assert report.capacity.block_size >= 16


def test_layers_are_padded_where_they_must_be(tmp_path: Path) -> None:
    """15 layers of one head: a block of 16 tokens is a whole number of pages with a 16th."""
    page = host_page_bytes()
    layout = KVLayout(num_layers=15, num_kv_heads=1, head_dim=16, dtype_bytes=4, block_size=16)
    assert layout.block_bytes % page
    assert mappable_layout(layout, 16, 128, page).num_layers == 16
    assert mappable_layout(layout, None, 128, page).block_bytes % page == 0
    odd = save_llama(tmp_path, num_hidden_layers=15, num_key_value_heads=1)
    found = []
    for kv, attention in (("paged", "auto"), ("virtual", "auto"), ("virtual", "compiled")):
        core, report = build(
            odd, kv=kv, attention=attention, block_size=16, kv_memory="2MiB", max_num_seqs=9
        )
        assert report.capacity.block_bytes % page == 0 or kv == "paged"
        found.append(run(core, REQUESTS[:9]))
        core.close()
    assert found[0] == found[1] == found[2]


def num_maps() -> int:
    return sum(1 for line in Path("/proc/self/maps").open() if "octavo-blocks" in line)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("depth", [1, 2])
def test_churn_leaves_nothing_behind(
    flat: Path, depth: int, request: pytest.FixtureRequest
) -> None:
    """Hundreds of requests, ``--long`` thousands, with samples, beams, swaps, hits and aborts."""
    gc.collect()
    before = (num_maps(), num_files())
    core = build_virtual(
        flat,
        20,
        depth=depth,
        max_num_seqs=12,
        preemption="swap",
        swap_memory=pool(40, SIZE),
    )
    arena = arena_of(core)
    pages = arena.pages
    assert isinstance(pages, memfd.MemfdPages)
    at_start = (pages.num_mappings, pages.num_handles)
    generator = np.random.default_rng(depth)
    num_requests = 4000 if request.config.getoption("--long") else 200
    for number in range(0, 8 * num_requests, 8):
        kind = number // 8 % 4
        params = SamplingParams(temperature=float(kind % 2), use_beam_search=kind == 2)
        prompt = [*range(3, 3 + 8 * (number % 3)), *generator.integers(3, 24, 1 + number % 13)]
        made = Request(number, int_array(prompt), params, 3 + number % 17, seed=number)
        if kind == 2:
            made = replace(made, n=2, beam_width=3)
        if kind == 3:
            made = replace(made, n=3)
        core.scheduler.add(made)
        # Faster than they end.
        for _ in range(number // 8 % 2):
            core.step()
        if number % 40 == 32:
            core.scheduler.abort(number - 16)
        core.scheduler.check()
        while core.scheduler.num_waiting > 200:
            core.step()
    while core.has_work:
        assert all(f.reason is not FinishReason.ERROR for f in core.step().finished)
    assert core.scheduler.num_swaps > num_requests // 20
    manager = core.scheduler.manager
    assert isinstance(manager, VirtualManager)
    assert arena.num_mapped_blocks == manager.num_mapped_blocks > 0
    assert pages.num_handles == at_start[1]
    assert pages.resident_bytes <= pages.num_handles * pages.block_bytes
    # Unmap what is stale: exactly what was there at the start remains.
    for row in range(12):
        count = len(manager.slot(row))
        places = int_array(range(count))
        arena.obey((MapBlocks(0 * places + row, places, 0 * places),))
    arena.settle()
    assert (pages.num_mappings, pages.num_handles) == at_start
    core.close()
    del arena, pages, core
    gc.collect()
    assert (num_maps(), num_files()) == before
