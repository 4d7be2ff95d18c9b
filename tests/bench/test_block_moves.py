"""What moving blocks takes is found whatever else a plan takes, and however many are moved."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import pytest

from engine.test_beams import reference
from engine.test_virtual import SIZE
from engine.tiny_engine import build, pool
from octavo.bench import block_moves
from octavo.bench.block_moves import measure_mapping, measure_moves
from octavo.config import ConfigError
from octavo.core.plan import (
    NULL_BLOCK,
    CopyBlocks,
    KVCapacity,
    MapBlocks,
    StepPlan,
    StepResult,
    SwapIn,
    SwapOut,
    int_array,
)

PLAN_S, READ_S, UNMAP_S = 50e-6, 3e-6, 20e-6
COPY_STEP_S, COPY_S = 200e-6, 1e-6
SWAP_STEP_S, SWAP_S = 30e-6, 40e-6
MAP_STEP_S, MAP_S = 120e-6, 30e-6


class Machine:
    """An executor with a clock of its own. Mappings are made by a thread beside it, in order; a
    step waits for those of the places that it reads, as the engine's."""

    def __init__(self, capacity: KVCapacity) -> None:
        self.capacity = capacity
        self.now_s = 0.0
        self.shown: set[int] = set()
        self._plans: deque[StepPlan] = deque()
        self._thread_s = 0.0
        self._ordered: set[int] = set()

    def clock(self) -> float:
        return self.now_s

    def launch(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self.now_s += PLAN_S
        for command in plan.commands:
            if isinstance(command, CopyBlocks):
                assert not set(command.sources.tolist()) & set(command.destinations.tolist())
                assert command.destinations.max() < self.capacity.num_blocks
                self.now_s += COPY_STEP_S + len(command.sources) * COPY_S
            elif isinstance(command, SwapOut | SwapIn):
                assert command.host_block_ids.max() < self.capacity.num_host_blocks
                self.now_s += SWAP_STEP_S + len(command.block_ids) * SWAP_S
            elif isinstance(command, MapBlocks):
                self._map(command)
        for init in plan.row_inits:
            assert plan.batch.num_tokens == 1
            num_read = len(init.token_ids) // self.capacity.block_size
            if self._ordered & set(range(num_read)):
                self.now_s = max(self.now_s, self._thread_s)
            assert self.shown >= set(range(num_read)), "read before it is mapped"
            self.now_s += num_read * READ_S

    def _map(self, command: MapBlocks) -> None:
        is_shown = command.block_ids != NULL_BLOCK
        assert is_shown.tolist() == sorted(is_shown.tolist()), "those that are unmapped come first"
        new, old = (set(command.places[kind].tolist()) for kind in (is_shown, ~is_shown))
        taken_s = len(old & self.shown) * UNMAP_S
        if new - self.shown:
            taken_s += MAP_STEP_S + len(new - self.shown) * MAP_S
        self.shown = (self.shown | new) - old
        self._ordered = new | old
        self._thread_s = max(self._thread_s, self.now_s) + taken_s

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        arrived = tuple(c.transfer_id for c in plan.commands if isinstance(c, SwapIn))
        return StepResult(plan.step_id, int_array([0] * len(plan.batch.sampled_rows)), arrived)

    def close(self) -> None:
        pass


@pytest.fixture(params=[2048, 40])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(KVCapacity(request.param, 4, 1000, num_host_blocks=request.param // 2))
    monkeypatch.setattr(block_moves.time, "perf_counter", made.clock)
    return made


def test_rates_and_what_is_there_without_blocks_are_told_apart(machine: Machine) -> None:
    found = measure_moves(machine)
    assert found == {
        "copy_rate": pytest.approx(1000 / COPY_S),
        "copy_step_s": pytest.approx(COPY_STEP_S),
        "swap_rate": pytest.approx(1000 / SWAP_S),
    }


def test_mapping_is_neither_unmapping_nor_reading(machine: Machine) -> None:
    found = measure_mapping(machine, 4096)
    assert found == {"map_s": pytest.approx(MAP_S), "map_step_s": pytest.approx(MAP_STEP_S)}


def test_too_few_blocks_are_refused() -> None:
    small, large = (Machine(KVCapacity(num_blocks, 4, 1000)) for num_blocks in (4, 100))
    with pytest.raises(ConfigError, match="1 at a time are too few; give more --kv-memory"):
        measure_moves(small)
    for machine, longest in ((small, 8), (large, 11)):
        with pytest.raises(ConfigError, match=r"too few; .* or a larger --max-model-len"):
            measure_mapping(machine, longest)


def test_a_real_engine_is_left_as_it_was(tmp_path: Path) -> None:
    """Blocks are moved and mapped in truth, and what mapping is waited for is the slots' own."""
    reference("llama").save_pretrained(tmp_path)
    size = {"block_size": SIZE, "kv_memory": pool(20, SIZE), "max_model_len": 8 * SIZE}
    swap = {"preemption": "swap", "swap_memory": pool(12, SIZE)}
    core, report = build(tmp_path, kv="virtual", attention="auto", **size, **swap)
    executor = core.executor
    plans: list[StepPlan] = []
    launch = executor.launch

    def noting(plan: StepPlan) -> None:
        plans.append(plan)
        launch(plan)

    executor.launch = noting  # type: ignore[method-assign]
    moves = measure_moves(executor, rounds=2)
    assert all(np.isfinite(value) for value in moves.values())
    assert min(moves["copy_rate"], moves["swap_rate"]) > 0
    found = measure_mapping(executor, report.max_model_len, rounds=2)
    assert set(found) == {"map_s", "map_step_s"}
    assert min(found.values()) >= 0
    kinds = {type(command) for plan in plans for command in plan.commands}
    assert kinds == {CopyBlocks, SwapOut, SwapIn, MapBlocks}
    # Seven beside the first of a longest sequence of eight blocks.
    assert max(len(c) for p in plans for c in p.commands if isinstance(c, MapBlocks)) == 8
    core.close()
