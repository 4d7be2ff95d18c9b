"""The pool of a real engine on the host's pages: memory goes and comes while it serves."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.test_beams import alone as mixed_alone
from engine.test_beams import mixed, reference
from engine.test_virtual import SIZE, arena_of, build_virtual, num_files, num_maps
from engine.tiny_engine import TOKEN_BYTES, is_idle, make_llm, pool, run, save_gguf
from octavo import SamplingParams
from octavo.core.plan import StepPlan, int_array
from octavo.core.request import (
    AsleepError,
    ContextLengthError,
    FinishReason,
    PoolBusyError,
    PoolSizeError,
    Request,
)
from octavo.engine.core import EngineCore
from octavo.engine.llm import LLM
from octavo.execution import host
from octavo.execution.pages.memfd import MemfdPages

BLOCK = SIZE * TOKEN_BYTES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the beam tests."""
    folder = tmp_path_factory.mktemp("flat")
    reference("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer."""
    return save_gguf(tmp_path_factory.mktemp("chatty") / "tiny.gguf")


def pages_of(core: EngineCore) -> MemfdPages:
    pages = arena_of(core).pages
    assert isinstance(pages, MemfdPages)
    return pages


def virtual_llm(model: Path, num_blocks: int = 32) -> LLM:
    return make_llm(
        model, kv="virtual", attention="auto", block_size=SIZE, kv_memory=pool(num_blocks, SIZE)
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_samples_and_beams_while_the_pool_changes(model: Path, depth: int) -> None:
    core = build_virtual(
        model, 200, depth=depth, max_num_seqs=10, preemption="swap", swap_memory=pool(100, SIZE)
    )
    resizing, pages = core.scheduler.resizing, pages_of(core)
    sizes = [24, 90, 30, 300, 25, 60]
    step = core.step

    def resizing_step():  # type: ignore[no-untyped-def]
        outputs = step()
        if core.scheduler.state.step_id % 9 == 0 and sizes:
            resizing.resize(sizes.pop())
        return outputs

    core.step = resizing_step  # type: ignore[method-assign]
    assert run(core, mixed()) == mixed_alone("llama")
    assert not sizes
    assert core.scheduler.manager.num_usable_blocks == 24
    assert pages.num_handles == 25
    assert pages.resident_bytes <= 25 * BLOCK
    core.close()


def test_memory_really_goes_back(chatty: Path) -> None:
    llm = virtual_llm(chatty)
    core, params = llm._core, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [[3 + i, 5, 7] * 12 for i in range(4)]
    expected = [c.token_ids for c in llm.generate(prompts, params)]
    pages = pages_of(core)
    used = pages.resident_bytes
    assert used > 20 * BLOCK
    size = llm.resize_kv(11 * BLOCK)
    assert (size.num_blocks, size.num_tokens, size.num_bytes) == (10, 10 * SIZE, 11 * BLOCK)
    assert pages.resident_bytes <= 11 * BLOCK
    assert llm.report.kv_bytes == 11 * BLOCK
    assert [c.token_ids for c in llm.generate(prompts, params)] == expected
    with pytest.raises(ContextLengthError, match=f"holds {10 * SIZE} tokens"):
        llm.generate([[3] * 10 * SIZE], params)
    assert llm.resize_kv(str(51 * BLOCK)).num_blocks == 50
    assert [c.token_ids for c in llm.generate(prompts, params)] == expected
    with pytest.raises(ValueError, match="level must be 1"):
        llm.sleep(level=2)
    llm.sleep()
    assert llm.is_sleeping
    assert pages.num_handles == 1, "the null block"
    assert pages.resident_bytes <= BLOCK
    llm.sleep()
    with pytest.raises(AsleepError, match="wake it up"):
        llm.generate([[3, 4]], params)
    llm.wake_up()
    assert not llm.is_sleeping
    assert [c.token_ids for c in llm.generate(prompts, params)] == expected
    assert is_idle(llm)
    llm.close()


def test_what_the_machine_has_not_is_refused(chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = virtual_llm(chatty)
    params = SamplingParams(temperature=0, max_tokens=8)
    (before,) = llm.generate([[3, 4, 5]], params)
    monkeypatch.setattr(host, "available_bytes", lambda: 40 * BLOCK)
    with pytest.raises(PoolBusyError, match=r"bytes are needed for .* there is memory for"):
        llm.resize_kv(100 * BLOCK)
    assert llm.report.capacity.num_blocks == 33
    llm.sleep()
    monkeypatch.setattr(host, "available_bytes", lambda: 10 * BLOCK)
    with pytest.raises(PoolBusyError, match="there is memory for"):
        llm.wake_up()
    assert llm.is_sleeping
    monkeypatch.undo()
    llm.wake_up()
    (after,) = llm.generate([[3, 4, 5]], params)
    assert after.token_ids == before.token_ids
    for size, match in (
        ("5 apples", "a size such as"),
        (True, "a number of bytes"),
        (BLOCK, "less than two blocks"),
        (0, "put the engine to sleep"),
        (1 << 59, "can have from 1 to"),
        (1 << 60, "more than any machine"),
    ):
        with pytest.raises(PoolSizeError, match=match):
            llm.resize_kv(size)  # type: ignore[arg-type]
    llm.close()


def test_a_pool_that_is_one_allocation_stays(chatty: Path) -> None:
    llm = make_llm(chatty)
    for call in (lambda: llm.resize_kv("1MiB"), llm.sleep):
        with pytest.raises(PoolSizeError, match="start the engine with --kv virtual"):
            call()
    llm.wake_up()
    assert not llm.is_sleeping
    llm.close()


def test_registered_prefixes_go_to_sleep_for_good(chatty: Path) -> None:
    llm = virtual_llm(chatty)
    prefix = llm.register_prefix([3, 4, 5, 6] * SIZE)
    with pytest.raises(PoolSizeError, match="registered prefixes keep 4 blocks"):
        llm.resize_kv(6 * BLOCK)
    llm.resize_kv(24 * BLOCK)
    params = SamplingParams(temperature=0, max_tokens=2)
    (hit,) = llm.generate([[*[3, 4, 5, 6] * SIZE, 7]], params)
    assert hit.num_cached_tokens == 4 * SIZE
    llm.sleep()
    llm.wake_up()
    assert not llm.drop_prefix(prefix)
    (missed,) = llm.generate([[*[3, 4, 5, 6] * SIZE, 7]], params)
    assert missed.num_cached_tokens == 0
    assert missed.token_ids == hit.token_ids
    llm.close()


def counted_forks(core: EngineCore) -> list[int]:
    """Gets, from now on, how many sequences each plan forks."""
    counts: list[int] = []
    launch: Callable[[StepPlan], None] = core.executor.launch

    def noting(plan: StepPlan) -> None:
        counts.append(len(plan.row_forks) + len(plan.fan_outs))
        launch(plan)

    core.executor.launch = noting  # type: ignore[method-assign]
    return counts


def test_churn_with_resizes_leaves_nothing_behind(
    model: Path, request: pytest.FixtureRequest
) -> None:
    """Hundreds of requests, ``--long`` thousands, with samples, beams, swaps and hits, while the
    pool changes and sleeps."""
    gc.collect()
    before = (num_maps(), num_files())
    core = build_virtual(
        model, 20, depth=2, max_num_seqs=8, preemption="swap", swap_memory=pool(40, SIZE)
    )
    pages = pages_of(core)
    at_start = pages.num_handles
    generator = np.random.default_rng(0)
    resizing = core.scheduler.resizing
    forks = counted_forks(core)
    num_requests = 2000 if request.config.getoption("--long") else 200
    for number in range(0, 8 * num_requests, 8):
        kind = number // 8 % 4
        params = SamplingParams(
            temperature=float(kind % 2), ignore_eos=True, use_beam_search=kind == 2
        )
        prompt = [*range(3, 3 + 8 * (number % 3)), *generator.integers(3, 24, 1 + number % 13)]
        made = Request(number, int_array(prompt), params, 3 + number % 17, number)
        if kind >= 2:
            made = replace(made, n=2, beam_width=2 * (kind == 2))
        core.scheduler.add(made)
        if number // 8 % 2:  # they come faster than they end
            core.step()
        if number % 40 == 32:
            resizing.resize(int(generator.integers(14, 24)))
        if number % 400 == 392:
            while core.has_work:
                assert all(f.reason is not FinishReason.ERROR for f in core.step().finished)
            resizing.sleep()
            while core.has_work:
                core.step()
            assert pages.num_handles == 1
            resizing.wake_up()
            while core.has_work:
                core.step()
        core.scheduler.check()
    resizing.resize(20)
    while core.has_work:
        assert all(f.reason is not FinishReason.ERROR for f in core.step().finished)
    assert sum(forks) > num_requests // 4
    assert core.scheduler.num_swaps > num_requests // 20
    assert pages.num_handles == at_start
    assert pages.resident_bytes <= pages.num_handles * pages.block_bytes
    core.close()
    del pages, core, resizing
    gc.collect()
    assert (num_maps(), num_files()) == before
