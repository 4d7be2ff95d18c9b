"""Many requests with samples, beams, swaps, hits, aborts and resizes leave no mapping and no memory
behind: in memory files here, in driver pages on a GPU, where there are more of them, and thousands
with ``--long``. There the driver is asked, too, what is free before and after."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.tiny_engine import run
from execution.gpu.test_gpu_engine import MAX_NUM_SEQS, gpu_engine
from execution.models.tiny_models import tiny_qwen3
from octavo.core.plan import int_array
from octavo.core.request import FinishReason, Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.execution.pages.interface import Pages
from octavo.memory.virtual import VirtualManager

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
ON_GPU = torch.cuda.is_available()
NUM_REQUESTS = 120 if ON_GPU else 4
# After a first engine has loaded kernels, what a later one may leave: kernels of batches that the
# first did not meet, hundreds of KB each, and page tables, which the driver takes 2 MiB at a time.
# A block is 2 MiB: one lost at each of the resizes (a fifth of the requests, 24) would be 48 MiB.
MOST_LEFT_BYTES = 32 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    # On a GPU a page of 2 MiB then holds 128 tokens.
    wide = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    changes = wide if ON_GPU else {"head_dim": 16}
    tiny_qwen3(max_position_embeddings=1024, **changes).save_pretrained(folder)
    return folder


def request(number: int, unit: int) -> Request:
    """Of lengths around multiples of ``unit``; every third begins like another."""
    random = np.random.default_rng(number)
    kind = number // 8 % 4
    params = SamplingParams(temperature=float(kind % 2), use_beam_search=kind == 2, max_tokens=9)
    common = 3 + np.arange(unit * (number // 8 % 3)) % 90
    prompt = [*common.tolist(), *random.integers(3, 24, 1 + number % 13)]
    made = Request(number, int_array(prompt), params, 3 + number % 7, seed=number)
    if kind == 2:
        return replace(made, n=2, beam_width=2)
    return replace(made, n=3) if kind == 3 else made


def free_bytes() -> int:
    """Memory of the GPU that nobody has, PyTorch's allocator and cuBLAS included."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


@pytest.mark.alone
@pytest.mark.parametrize("maps_forks", [False, True] if ON_GPU else [True])
def test_churn_leaves_nothing_behind(
    model: Path, maps_forks: bool, pytestconfig: pytest.Config
) -> None:
    is_long = ON_GPU and pytestconfig.getoption("--long")
    free = 0
    if ON_GPU:
        churned_pages(model, maps_forks, NUM_REQUESTS // 4)
        free = free_bytes()
    pages = churned_pages(model, maps_forks, 2000 if is_long else NUM_REQUESTS)
    # All but what is held here went with the engine.
    assert pages.num_handles == 0
    if ON_GPU:
        left = free - free_bytes()
        print(f"{left:,} bytes fewer are free than before")
        assert left <= MOST_LEFT_BYTES


def churned_pages(model: Path, maps_forks: bool, num_requests: int) -> Pages:
    """Pages whose engine has served, and is closed."""
    core = gpu_engine(
        model, num_blocks=8, depth=2, chunk=64, num_host_blocks=16, kv="virtual",
        maps_forks=maps_forks, max_blocks=10,
    )  # fmt: skip
    runner = core.executor.runner  # type: ignore[attr-defined]
    arena, slots, manager = runner.arena, runner.arena.slots, core.scheduler.manager
    pages: Pages = arena.pages
    assert isinstance(manager, VirtualManager)
    slots.mapper.wait()
    at_start = (pages.num_mappings, pages.num_handles)
    churn(core, num_requests)
    assert slots.num_mapped_blocks == manager.num_mapped_blocks > 0
    command = manager.forget_places()
    assert command is not None
    slots.order(command)
    slots.mapper.wait()
    assert (pages.num_mappings, pages.num_handles) == at_start
    assert manager.num_free_blocks == manager.num_usable_blocks
    core.close()
    return pages


def churn(core: EngineCore, num_requests: int) -> None:
    unit = 122 if ON_GPU else 6  # decoding crosses into new blocks
    sizes, num_resizes = np.random.default_rng(1), 0
    for number in range(0, 8 * num_requests, 8):
        core.scheduler.add(request(number, unit))
        if number % 40 == 16:
            core.scheduler.resizing.resize(int(sizes.integers(7, 9)))
            num_resizes += 1
        for _ in range(number // 8 % 3):
            core.step()
        if number % 40 == 32:
            core.scheduler.abort(number - 8)
        core.scheduler.check()
        while core.scheduler.num_waiting > 8:
            core.step()
    core.scheduler.resizing.resize(7)
    while core.has_work:
        assert all(f.reason is not FinishReason.ERROR for f in core.step().finished)
    assert num_resizes >= num_requests // 5
    assert core.scheduler.num_swaps or num_requests < 120


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_bfloat16_tokens_are_the_same_in_tables_slots_and_runs(model: Path) -> None:
    """To the bit by the same kernel; of stock kernels, which round elsewhere, near ties differ."""
    asked = [
        Request(
            number, int_array(np.random.default_rng(number).integers(3, 96, 40 + 31 * number)),
            SamplingParams(temperature=0.0, max_tokens=24), 24, seed=0,
        )
        for number in range(MAX_NUM_SEQS)
    ]  # fmt: skip
    found = {}
    for kv, attention in (
        ("paged", "triton"), ("virtual", "triton"), ("contiguous", "triton"),
        ("virtual", "stock"), ("contiguous", "stock"),
    ):  # fmt: skip
        core = gpu_engine(
            model, num_blocks=600, depth=2, chunk=128, dtype="bfloat16", kv=kv, attention=attention
        )
        found[kv, attention] = run(core, asked)
        core.close()
    tables, slots, runs, *stock = found.values()
    assert slots == runs == tables
    for other in stock:
        pairs = [(a, b) for n in tables for a, b in zip(tables[n], other[n], strict=True)]
        first = [(tables[n][0], other[n][0]) for n in tables]
        print("stock kernels: equal tokens", np.mean([a == b for a, b in pairs]))
        assert np.mean([a == b for a, b in first]) >= 0.75
