"""What the driver refuses while an engine serves: its requests fail with the reason, the others and
the engine go on, and nothing is left behind. In driver pages on a GPU; in memory files elsewhere,
with ``--long``: Triton's interpreter takes a minute, and `engine.test_virtual` has a CPU's own.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.tiny_engine import run
from execution.gpu.test_gpu_engine import MAX_NUM_SEQS, gpu_engine
from execution.models.tiny_models import tiny_qwen3
from execution.pages.fake_driver import PAGE, FakeDriver
from octavo.core.plan import int_array
from octavo.core.request import Finished, FinishReason, PoolBusyError, Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.engine.pool import run_resize
from octavo.execution import slots as slots_room
from octavo.execution.pages.cuda import CudaPages
from octavo.execution.pages.interface import PageError, Pages
from octavo.execution.slots import Slots
from octavo.memory.virtual import VirtualManager

ON_GPU = torch.cuda.is_available()
NUM_BLOCKS, MAX_BLOCKS = 24, 2048
NUM_REQUESTS = MAX_NUM_SEQS + 2
# The driver's calls, and what makes them.
CALLS = {"cuMemMap": "map", "cuMemSetAccess": "set_access", "cuMemCreate": "create"}


class Refusing:
    """A driver, one of whose calls finds no memory from the n-th time on, counted from 0."""

    def __init__(self, driver: Any, name: str, first: int) -> None:
        self._driver, self._name, self._left = driver, name, first

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._driver, name)
        return self._refused(real) if name == self._name else real

    def _refused(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._left -= 1
            if self._left >= 0:
                return real(*arguments)
            return (self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)

        return call


@contextlib.contextmanager
def refusing(pages: Pages, name: str, first: int = 0) -> Iterator[None]:
    """While inside, the driver refuses its call ``name``."""
    if isinstance(pages, CudaPages):
        real = pages._driver
        pages._driver = Refusing(real, name, first)
        try:
            yield
        finally:
            pages._driver = real
        return

    def refuse(*_: Any) -> None:
        raise PageError(f"{name}() failed: CUDA_ERROR_OUT_OF_MEMORY")

    setattr(pages, CALLS[name], refuse)
    try:
        yield
    finally:
        delattr(pages, CALLS[name])


@contextlib.contextmanager
def broken_thread(slots: Slots) -> Iterator[None]:
    """While inside, the mapping thread meets what nobody thought of."""

    def broken(slot: int, wanted: dict[int, int]) -> None:
        raise ZeroDivisionError("nobody thought of it")

    slots.mapper._map = broken  # type: ignore[method-assign]
    try:
        yield
    finally:
        del slots.mapper._map


def slots_of(core: EngineCore) -> Slots:
    found = core.executor.runner.arena.slots  # type: ignore[attr-defined]
    assert isinstance(found, Slots)
    return found


def pages_of(core: EngineCore) -> Pages:
    pages: Pages = core.executor.runner.arena.pages  # type: ignore[attr-defined]
    return pages


def request(number: int) -> Request:
    prompt = int_array([3 + (7 * number + i) % 90 for i in range(3 + 2 * number)])
    return Request(number, prompt, SamplingParams(temperature=0.0, ignore_eos=True), 4, seed=0)


def requests() -> list[Request]:
    return [request(number) for number in range(NUM_REQUESTS)]


def serve(
    core: EngineCore, before_step: Callable[[list[Finished]], None] = lambda _: None
) -> tuple[dict[int, list[int]], dict[int, Finished]]:
    """Run all `requests`: their tokens, and how they ended. ``before_step`` gets what has ended."""
    tokens: dict[int, list[int]] = {number: [] for number in range(NUM_REQUESTS)}
    ended: list[Finished] = []
    for each in requests():
        core.scheduler.add(each)
    while core.has_work:
        before_step(ended)
        outputs = core.step()
        core.scheduler.check()
        for number, token in zip(outputs.numbers.tolist(), outputs.token_ids.tolist(), strict=True):
            tokens[number].append(token)
        ended += outputs.finished
    assert len(ended) == NUM_REQUESTS
    return tokens, {finished.number: finished for finished in ended}


def forget(core: EngineCore) -> tuple[int, int]:
    """Unmap what slots still show and drop what is cached: mappings and handles that remain."""
    manager, slots, pages = core.scheduler.manager, slots_of(core), pages_of(core)
    assert isinstance(manager, VirtualManager)
    core.scheduler.reset_prefix_cache()
    if (command := manager.forget_places()) is not None:
        slots.order(command)
    slots.mapper.wait()
    assert slots.num_mapped_blocks == manager.num_mapped_blocks == 0
    assert manager.num_free_blocks == manager.num_usable_blocks
    return pages.num_mappings, pages.num_handles


def make_core(folder: Path) -> EngineCore:
    # On a GPU a page of 2 MiB then holds 128 tokens.
    wide = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    tiny_qwen3(**(wide if ON_GPU else {"head_dim": 16})).save_pretrained(folder)
    return gpu_engine(
        folder, num_blocks=NUM_BLOCKS, depth=2, chunk=64, kv="virtual", max_blocks=MAX_BLOCKS
    )


@pytest.fixture(scope="module")
def core(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[EngineCore]:
    """One engine for all faults, each of which leaves it as it was."""
    if not ON_GPU and not pytestconfig.getoption("--long"):
        pytest.skip("needs a GPU, or --long")
    core = make_core(tmp_path_factory.mktemp("tiny"))
    yield core
    # What pytest keeps of logged errors has frames that hold the arena: that all of it is given
    # back has a test of its own.
    core.close()


@pytest.fixture(scope="module")
def alone(core: EngineCore) -> dict[int, list[int]]:
    return {number: run(core, [request(number)])[number] for number in range(NUM_REQUESTS)}


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["cuMemMap", "cuMemSetAccess", "thread"])
def test_a_mapping_that_fails_ends_nobody(
    core: EngineCore, alone: dict[int, list[int]], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows are read through their tables while their slots cannot be mapped; they are mapped once
    they can be."""
    at_start = forget(core)
    slots_of(core)._tell_after_s = 0.0
    faults = contextlib.ExitStack()
    faults.enter_context(
        broken_thread(slots_of(core)) if fault == "thread" else refusing(pages_of(core), fault)
    )

    def mend(ended: list[Finished]) -> None:
        if ended:
            faults.close()

    with faults:
        tokens, ended = serve(core, mend)
    assert tokens == alone
    assert not [e for e in ended.values() if e.reason is FinishReason.ERROR]
    reason = "ZeroDivisionError: nobody thought of it" if fault == "thread" else fault
    assert "cannot be mapped" in caplog.text
    assert reason in caplog.text
    assert ("CUDA_ERROR_OUT_OF_MEMORY" in caplog.text) == (fault != "thread")
    assert serve(core)[0] == alone
    assert forget(core) == at_start


@pytest.mark.parametrize("fault", ["cuMemMap", "thread"])
def test_what_was_refused_keeps_nothing_of_a_closed_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Its memory goes at once, not with some later collection."""
    core = make_core(tmp_path)
    pages = pages_of(core)
    # Records of the log, which tests keep, know the error.
    monkeypatch.setattr(slots_room.logger, "disabled", True)
    gc.collect()
    gc.disable()
    try:
        with broken_thread(slots_of(core)) if fault == "thread" else refusing(pages, fault):
            core.scheduler.add(request(1))
            finished: list[Finished] = []
            while core.has_work:
                finished += core.step().finished
        assert [each.reason for each in finished] == [FinishReason.LENGTH]
        assert pages.num_handles == NUM_BLOCKS
        core.close()
        assert pages.num_handles == 0
    finally:
        gc.enable()


def check_growth_that_fails(core: EngineCore, alone: dict[int, list[int]], match: str) -> None:
    """Idle and while requests run; nothing has changed afterwards but what was answered."""
    at_start, resizing = forget(core), core.scheduler.resizing
    with pytest.raises(PoolBusyError, match=match):
        run_resize(core, lambda: resizing.resize(MAX_BLOCKS - 1))
    assert core.scheduler.manager.num_usable_blocks == NUM_BLOCKS - 1
    assert forget(core) == at_start
    waiting = [2, 1, 0]

    def resize(_: list[Finished]) -> None:
        if waiting and not waiting.pop():
            resizing.resize(MAX_BLOCKS - 1)

    tokens, ended = serve(core, resize)
    assert tokens == alone
    assert all(finished.reason is FinishReason.LENGTH for finished in ended.values())
    result = resizing.take_ended()
    assert result is not None
    assert result.error is not None
    assert result.num_blocks == NUM_BLOCKS - 1
    assert forget(core) == at_start


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_pool_that_cannot_grow_stays_as_it_was(
    core: EngineCore, alone: dict[int, list[int]], name: str
) -> None:
    """Refused half-way: at the third block where memory is created one by one."""
    resizing, before = core.scheduler.resizing, pages_of(core).num_handles
    with (
        refusing(pages_of(core), name, 2 if name == "cuMemCreate" else 0),
        pytest.raises(PoolBusyError, match=rf"{name}\(.*CUDA_ERROR_OUT_OF_MEMORY"),
    ):
        run_resize(core, lambda: resizing.resize(NUM_BLOCKS + 9))
    assert core.scheduler.manager.num_usable_blocks == NUM_BLOCKS - 1
    assert pages_of(core).num_handles == before
    run_resize(core, lambda: resizing.resize(NUM_BLOCKS + 9))
    assert serve(core)[0] == alone
    run_resize(core, lambda: resizing.resize(NUM_BLOCKS - 1))
    assert forget(core)[1] == before


@pytest.mark.gpu
def test_a_pool_that_no_memory_is_left_for(core: EngineCore, alone: dict[int, list[int]]) -> None:
    """As the system tells it before anything is taken."""
    pages = pages_of(core)
    pages.num_available = lambda: 100  # type: ignore[method-assign]
    try:
        check_growth_that_fails(core, alone, "bytes are needed for")
    finally:
        del pages.num_available


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("is_told", [True, False])
def test_a_gpu_whose_memory_is_taken(
    core: EngineCore, alone: dict[int, list[int]], is_told: bool
) -> None:
    """By somebody else, before the driver is asked what is free or just after: then it creates some
    of the blocks, and the rest not."""
    pages, spare = pages_of(core), 512 << 20
    assert (MAX_BLOCKS - NUM_BLOCKS) * pages.block_bytes > 2 * spare
    # Steps are captured and kernels loaded before memory is short.
    for _ in range(3):
        assert serve(core)[0] == alone
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    filler = torch.empty(torch.cuda.mem_get_info()[0] - spare, dtype=torch.uint8, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    assert free <= spare
    if not is_told:
        pages.num_available = lambda: 1 << 62  # type: ignore[method-assign]
    match = "bytes are needed for" if is_told else r"cuMemCreate\(.*CUDA_ERROR_OUT_OF_MEMORY"
    try:
        check_growth_that_fails(core, alone, match)
        # Steps may have taken a little for themselves, nothing like what was asked for.
        assert torch.cuda.mem_get_info()[0] >= free - (64 << 20)
    finally:
        del filler
        torch.cuda.empty_cache()
        if not is_told:
            del pages.num_available  # type: ignore[attr-defined]
    before = pages.num_handles
    resizing = core.scheduler.resizing
    large = NUM_BLOCKS + spare // pages.block_bytes
    assert run_resize(core, lambda: resizing.resize(large)) == large
    assert serve(core)[0] == alone
    run_resize(core, lambda: resizing.resize(NUM_BLOCKS - 1))
    assert pages.num_handles == before


def test_the_driver_that_refuses_is_like_one_that_does() -> None:
    """The stand-in for its errors, on the driver of plain Python."""
    driver = FakeDriver()
    pages = CudaPages(PAGE, driver=driver)
    with refusing(pages, "cuMemCreate", 2), pytest.raises(PageError) as caught:
        pages.create(4)
    assert "cuMemCreate(0x200000, 0x0) failed: CUDA_ERROR_OUT_OF_MEMORY; 2,097,152 bytes" in str(
        caught.value
    )
    assert caught.value.__notes__ == ["block 3 of 4; the others were released"]
    assert driver.used_bytes == pages.num_handles == 0
    addresses, handles = pages.reserve(2), pages.create(2)
    with refusing(pages, "cuMemMap", 1), pytest.raises(PageError, match=r"cuMemMap\(.*were asked"):
        pages.map(addresses, 0, handles)
    assert not driver.mapped
    pages.map(addresses, 0, handles)
