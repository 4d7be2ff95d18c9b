"""Which mappings of a plan wait for the step that runs: those of what that step may read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from execution.gpu.test_gpu_engine import BLOCK_SIZE, gpu_engine
from execution.models.tiny_models import tiny_qwen3
from octavo.core.plan import (
    NULL_BLOCK,
    Batch,
    CopyBlocks,
    KVCommand,
    MapBlocks,
    RowInit,
    StepPlan,
    int_array,
)
from octavo.core.sampling_params import SamplingParams
from octavo.execution.gpu_runner import GPURunner
from octavo.execution.staging import Staging


class Running:
    """The step before: what happens while it may run is noted."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def record(self) -> None:
        raise AssertionError("it was recorded long ago")

    def synchronize(self) -> None:
        self.told.append("waits")

    def query(self) -> bool:
        return False


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GPURunner]:
    """Rows 0 to 3 have 0, 8, 9 and 6 tokens; a block has 4."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_qwen3(head_dim=16).save_pretrained(folder)
    core = gpu_engine(folder, num_blocks=9, depth=2, chunk=16)
    runner = core.executor.runner  # type: ignore[attr-defined]
    assert isinstance(runner, GPURunner)
    yield runner
    core.close()


def shows(*places: tuple[int, int, int], is_ahead: bool = False) -> MapBlocks:
    """``places`` are slot, place and block."""
    return MapBlocks(*int_array(places).T, is_ahead=is_ahead)


def starts(row: int) -> RowInit:
    return RowInit(row, int_array([7] * 9), 8, int_array([1, 2, 3]), SamplingParams(), seed=0)


def told(
    runner: GPURunner,
    monkeypatch: pytest.MonkeyPatch,
    commands: Sequence[KVCommand],
    row_inits: tuple[RowInit, ...] = (),
    *,
    is_first: bool = False,
) -> list[str]:
    """What was done, in order, when a plan with these commands was launched."""
    events: list[str] = []

    def obey(commands: Sequence[KVCommand], staging: Staging) -> tuple[int, ...]:
        events.append("maps")
        return ()

    monkeypatch.setattr(runner.arena, "obey", obey)
    runner.position[:] = [0, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1, BLOCK_SIZE + 2]
    runner._last_event = None if is_first else Running(events)
    runner.launch(StepPlan(1, Batch.empty(), row_inits=row_inits, commands=tuple(commands)))
    return events


@pytest.mark.parametrize(
    "places",
    [
        [(1, 0, 5)],
        [(1, 1, 5)],
        [(2, 2, 5)],
        [(3, 1, 5)],
        # Among others, of which none would wait.
        [(1, 2, NULL_BLOCK), (0, 0, 4), (2, 3, 6), (1, 1, 5), (3, 2, 7)],
    ],
)
def test_a_place_below_a_rows_position_waits(
    runner: GPURunner, monkeypatch: pytest.MonkeyPatch, places: list[tuple[int, int, int]]
) -> None:
    """As when a block that rows share is copied for one of them."""
    found = told(runner, monkeypatch, [shows(*places)])
    assert found == ["waits", "maps"]


def test_it_waits_whichever_command_it_is(
    runner: GPURunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = CopyBlocks(int_array([1]), int_array([5]))
    commands = [shows((1, 0, 3), is_ahead=True), shows((1, 2, 4)), shows((1, 1, 5)), copy]
    assert told(runner, monkeypatch, commands) == ["waits", "maps"]


@pytest.mark.parametrize(
    "command",
    [
        shows((0, 0, 5)),
        shows((1, 2, 5), (1, 3, 6)),
        shows((2, 3, 5), (3, 2, 6)),
        shows((1, 0, NULL_BLOCK), (2, 2, NULL_BLOCK)),
        shows((1, 0, 5), (2, 2, 6), is_ahead=True),
        CopyBlocks(int_array([1]), int_array([5])),
    ],
    ids=["no tokens", "its next", "behind others", "unmapped", "ahead", "no mapping"],
)
def test_what_no_step_reads_waits_for_nobody(
    runner: GPURunner, monkeypatch: pytest.MonkeyPatch, command: KVCommand
) -> None:
    assert told(runner, monkeypatch, [command]) == ["maps"]


def test_a_row_that_starts_waits_for_nobody(
    runner: GPURunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others in its plan do."""
    assert told(runner, monkeypatch, [shows((2, 0, 5), (2, 1, 6))], (starts(2),)) == ["maps"]
    found = told(runner, monkeypatch, [shows((2, 0, 5), (1, 0, 6))], (starts(2),))
    assert found == ["waits", "maps"]


def test_there_is_nothing_to_wait_for_at_first(
    runner: GPURunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(runner, monkeypatch, [shows((1, 0, 5))], is_first=True) == ["maps"]
