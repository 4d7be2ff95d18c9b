"""The simulated executor: a virtual clock, made-up tokens, the real scheduler above."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.core.plan import Batch, IntArray, KVCapacity, MapBlocks, StepPlan, int_array
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.memory.paged import PagedManager
from octavo.memory.virtual import VirtualManager
from octavo.scheduling.scheduler import Scheduler, SchedulerConfig
from octavo.simulate.executor import FixedLatency, SimulatedExecutor, StepTime

CAPACITY = KVCapacity(num_blocks=17, block_size=4, block_bytes=64)


def chunk(step_id: int, *counts: int) -> StepPlan:
    rows = int_array(range(len(counts)))
    return StepPlan(step_id, Batch.of(rows, int_array(counts), rows >= 0))


def test_the_clock_moves_by_the_latency_of_collected_steps() -> None:
    executor = SimulatedExecutor(CAPACITY, FixedLatency(step_s=2.0, token_s=0.25))
    assert executor.now_s == 0.0
    executor.launch(chunk(1, 4))
    executor.launch(chunk(2, 1, 7))
    assert executor.now_s == 0.0, "launching takes no time"
    assert executor.collect().step_id == 1
    assert executor.now_s == 3.0
    assert executor.collect().step_id == 2
    assert executor.now_s == 7.0
    executor.launch(chunk(3, 1))
    executor.close()
    executor.close()
    assert executor.now_s == 7.0


class Times:
    """A latency that was written down."""

    def __init__(self, *times: StepTime) -> None:
        self._times = iter(times)

    def stepper(self) -> Callable[[StepPlan], StepTime]:
        return lambda plan: next(self._times)


def test_the_host_launches_while_the_device_computes() -> None:
    executor = SimulatedExecutor(
        CAPACITY, Times(StepTime(10.0, 2.0), StepTime(1.0, 3.0), StepTime(1.0, 4.0))
    )
    executor.launch(chunk(1, 4))
    executor.launch(chunk(2, 1))
    assert executor.now_s == 5.0
    executor.collect()
    assert executor.now_s == 12.0, "it began at 2, when its launch was over"
    # Launched while the second, which ends at 13, still ran: so late that the device waits.
    executor.launch(chunk(3, 1))
    executor.collect()
    assert executor.now_s == 16.0, "the host was busy until then, and sees the result late"
    executor.collect()
    assert executor.now_s == 17.0
    executor.restart()
    assert executor.now_s == 0.0


def test_kernels_of_a_long_step_run_while_others_are_launched() -> None:
    kernels = StepTime(10.0, 4.0, is_captured=False), StepTime(1.0, 6.0, is_captured=False)
    executor = SimulatedExecutor(CAPACITY, Times(*kernels))
    executor.launch(chunk(1, 4))
    executor.collect()
    assert executor.now_s == 10.0, "launching is part of it"
    executor.launch(chunk(2, 4))
    executor.collect()
    assert executor.now_s == 16.0, "it ends no sooner than its last launch"


def test_tokens_are_zero_or_the_sources() -> None:
    executor = SimulatedExecutor(CAPACITY)
    executor.launch(chunk(1, 1, 1, 1))
    assert executor.collect().token_ids.tolist() == [0, 0, 0]

    def row_plus_step(plan: StepPlan, rows: IntArray) -> IntArray:
        return rows + plan.step_id

    executor = SimulatedExecutor(CAPACITY, tokens=row_plus_step)
    executor.launch(chunk(10, 1, 1))
    assert executor.collect().token_ids.tolist() == [10, 11]


@pytest.mark.parametrize("virtual", [False, True])
def test_a_pool_that_changes_is_simulated_too(virtual: bool) -> None:
    sizes = (CAPACITY.num_blocks, CAPACITY.block_size, 4)
    manager = VirtualManager(*sizes, max_mapped_blocks=64) if virtual else PagedManager(*sizes)
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, max_queued_requests=8,
        max_blocks=100,
    )  # fmt: skip
    core = EngineCore(Scheduler(config, manager), SimulatedExecutor(CAPACITY), 2)
    for target, number in ((60, 0), (12, 100)):
        for index in range(4):
            params = SamplingParams(ignore_eos=True)
            core.scheduler.add(Request(number + index, int_array([1] * 9), params, 20, 0))
        core.step()
        core.scheduler.resizing.resize(target)
        while core.has_work:
            core.step()
            core.scheduler.check()
        assert manager.num_usable_blocks == target


def simulate(depth: int) -> tuple[float, dict[int, list[int]], int, int]:
    """Eight requests on a small pool: end of the clock, tokens, steps and preemptions."""
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, max_queued_requests=8
    )
    steps = []

    def tokens(plan: StepPlan, rows: IntArray) -> IntArray:
        steps.append(plan.step_id)
        return rows * 0 + 5

    executor = SimulatedExecutor(CAPACITY, FixedLatency(1.0, 0.5), tokens)
    scheduler = Scheduler(config, PagedManager(CAPACITY.num_blocks, CAPACITY.block_size, 4))
    core = EngineCore(scheduler, executor, depth)
    for number in range(8):
        prompt = int_array(range(3 + 2 * number))
        core.scheduler.add(Request(number, prompt, SamplingParams(max_tokens=20), 20, seed=0))
    found: dict[int, list[int]] = {number: [] for number in range(8)}
    while core.has_work:
        outputs = core.step()
        for number, token in zip(outputs.numbers.tolist(), outputs.token_ids.tolist(), strict=True):
            found[number].append(token)
        scheduler.check()
    return executor.now_s, found, len(steps), scheduler.num_preemptions


@pytest.mark.parametrize("depth", [1, 2])
def test_a_simulation_repeats_itself(depth: int) -> None:
    first = simulate(depth)
    assert first == simulate(depth)
    now_s, tokens, num_steps, num_preemptions = first
    assert tokens == {number: [5] * 20 for number in range(8)}
    assert num_preemptions > 0
    num_computed = sum(3 + 2 * number + 19 for number in range(8))
    assert now_s >= num_steps * 1.0 + num_computed * 0.5, "recomputation comes on top"


@pytest.mark.parametrize("depth", [1, 2])
def test_beams_are_simulated(depth: int) -> None:
    """Searches, samples and greedy rows on a small pool; the same every time."""

    def results() -> list[tuple[int, list[int], float]]:
        config = SchedulerConfig(
            max_num_seqs=6, max_num_batched_tokens=32, max_model_len=64, max_queued_requests=8
        )
        scheduler = Scheduler(config, PagedManager(CAPACITY.num_blocks, CAPACITY.block_size, 6))
        core = EngineCore(scheduler, SimulatedExecutor(CAPACITY), depth)
        beams = SamplingParams(use_beam_search=True, max_tokens=12)
        for number in range(0, 30, 10):
            prompt = int_array(range(5 + number))
            scheduler.add(Request(number, prompt[:9], beams, 12, seed=0, n=2, beam_width=3))
            scheduler.add(Request(100 + number, prompt, SamplingParams(), 20, seed=0))
        found = []
        while core.has_work:
            outputs = core.step()
            scheduler.check()
            found += [(b.number, b.token_ids.tolist(), b.score) for b in outputs.beams]
        assert scheduler.num_preemptions > 0
        return found

    first = results()
    assert sorted(number for number, _, _ in first) == [0, 1, 10, 11, 20, 21]
    assert all(len(tokens) == 12 for _, tokens, _ in first)
    assert first == results()


def test_mappings_are_checked_and_counted() -> None:
    """The simulator runs under either translation; a plan that maps nonsense is caught."""
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, max_queued_requests=8
    )
    executor = SimulatedExecutor(CAPACITY)
    manager = VirtualManager(CAPACITY.num_blocks, CAPACITY.block_size, 4, max_mapped_blocks=64)
    core = EngineCore(Scheduler(config, manager), executor, 2)
    for number in range(6):
        prompt = int_array(range(3 + number))
        core.scheduler.add(Request(number, prompt, SamplingParams(max_tokens=9), 9, seed=0))
    while core.has_work:
        core.step()
        core.scheduler.check()
    assert executor.num_mapped >= manager.num_mapped_blocks > 0
    twice = int_array([1, 1])
    for block_ids in (twice, twice + CAPACITY.num_blocks):
        slots = twice if block_ids is twice else int_array([1, 2])
        command = MapBlocks(slots, 0 * twice, block_ids)
        executor.launch(StepPlan(1, Batch.empty(), commands=(command,)))
        with pytest.raises(AssertionError, match=r"twice|no such block"):
            executor.collect()
