"""A step sends nothing that the device knows, and all else in one copy from pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.tiny_engine import run
from execution.gpu import test_gpu_engine, test_no_waiting
from execution.gpu.test_gpu_engine import ON_GPU, gpu_engine
from execution.models.tiny_models import tiny_qwen3
from octavo.core.plan import CopyBlocks, StepPlan, int_array
from octavo.core.request import FinishReason, Request
from octavo.core.sampling_params import SamplingParams
from octavo.execution.device import CUDADevice, Device, PlainDevice

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a step sends is the same for any number of layers."""
    folder = tmp_path_factory.mktemp("shallow")
    tiny_qwen3(head_dim=16, num_hidden_layers=1).save_pretrained(folder)
    return folder


class Copies(TorchDispatchMode):
    """Counts what PyTorch copies from pinned memory, whoever asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        # Kept, so that nothing else comes to lie where one was.
        self._pinned: dict[int, torch.Tensor] = {}

    def device(self) -> Device:
        base: Any = CUDADevice if ON_GPU else PlainDevice
        pinned = self._pinned

        class Counted(base):  # type: ignore[misc]
            def pinned(self, num_ints: int) -> torch.Tensor:
                memory: torch.Tensor = super().pinned(num_ints)
                pinned[memory.untyped_storage().data_ptr()] = memory
                return memory

        device: Device = Counted()
        return device

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        # Each operation, and where its source is.
        sources = {aten.copy_: 1, aten._to_copy: 0, aten.to: 0}
        kind = func.overloadpacket  # type: ignore[attr-defined]
        result = func(*args, **(kwargs or {}))
        if kind in sources:
            source, found = (
                tensor.untyped_storage().data_ptr() for tensor in (args[sources[kind]], result)
            )
            self.count += source in self._pinned and source != found
        return result


def what_steps_send(
    model: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, asked: list[Request]
) -> list[tuple[StepPlan, int]]:
    """Each plan, and how many copies its launch sends."""
    copies = Copies()
    name = "CUDADevice" if ON_GPU else "PlainDevice"
    monkeypatch.setattr(test_gpu_engine, name, copies.device)
    core = gpu_engine(model, num_blocks=30, depth=1, chunk=chunk)
    launch, found = core.executor.launch, []

    def noting(plan: StepPlan) -> None:
        before = copies.count
        with copies:
            launch(plan)
        found.append((plan, copies.count - before))

    monkeypatch.setattr(core.executor, "launch", noting)
    run(core, asked, beams={})
    core.close()
    return found


def test_copies_are_counted() -> None:
    copies = Copies()
    memory = copies.device().pinned(8)
    landing = torch.zeros(8, dtype=torch.int32)
    with torch.inference_mode(), copies:
        landing[:3].copy_(memory[2:5])
        landing[2:4] = memory[:2]
        memory.to(torch.int64)
        memory.copy_(landing)
    assert copies.count == 3


def test_steps_that_decode(shallow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing while nothing changes, one copy for all rows that go on in new blocks."""
    prompts = [int_array([3 + row] * 7) for row in range(3)]
    asked = [Request(row, prompt, GREEDY, 9, seed=0) for row, prompt in enumerate(prompts)]
    (_, first), *found = what_steps_send(shallow, monkeypatch, 32, asked)
    assert first == 1
    # The first also sends which rows decode. Blocks of four: all three cross at once.
    assert [(len(plan.table_deltas), sent) for plan, sent in found] == [
        (0, 1), (3, 1), (0, 0), (0, 0), (0, 0), (3, 1), (0, 0), (0, 0),
    ]  # fmt: skip


def test_rows_that_go_on_in_new_blocks_as_others_end(
    shallow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another batch and other blocks are one copy, and the batch stays where it is after it."""
    asked = [
        Request(row, int_array([3 + row] * 7), GREEDY, count, seed=0)
        for row, count in enumerate((2, 9, 9))
    ]
    found = what_steps_send(shallow, monkeypatch, 32, asked)
    rows = [(len(plan.batch.rows), len(plan.table_deltas), sent) for plan, sent in found[1:]]
    assert rows == [
        (3, 0, 1), (2, 2, 1), (2, 0, 0), (2, 0, 0), (2, 0, 0), (2, 2, 1), (2, 0, 0), (2, 0, 0),
    ]  # fmt: skip


def test_steps_with_prompts(shallow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy, whatever they start and continue, and whoever samples."""
    lengths = [14, 3, 5, 9]
    asked = [
        Request(row, int_array([3 + row] * length), GREEDY, 7, seed=0)
        for row, length in enumerate(lengths)
    ]
    found = what_steps_send(shallow, monkeypatch, 8, asked)
    mixed = [(plan, sent) for plan, sent in found if plan.batch.num_tokens > len(plan.batch.rows)]
    counts = [len(plan.batch.sampled_rows) for plan, _ in mixed]
    assert (min(counts), max(counts)) == (0, 4)
    assert {sent for _, sent in mixed} == {1}


def test_steps_of_every_kind(shallow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties, biases, masks, scores of what is sampled and of prompts, samples of one prompt,
    copied blocks, beams that go on where others were: one copy each."""
    asked = test_no_waiting.requests()
    params = SamplingParams(temperature=0.9, presence_penalty=0.5)
    prompt = int_array(np.arange(3, 12))
    asked.append(Request(90, prompt, params, 6, seed=1, stop_token_ids=(), n=2))
    found = what_steps_send(shallow, monkeypatch, 8, asked)
    kinds: dict[str, Callable[[StepPlan], bool]] = {
        "penalties": lambda plan: any(init.params.presence_penalty for init in plan.row_inits),
        "masks": lambda plan: any(init.params.allowed_token_ids for init in plan.row_inits),
        "fan-outs": lambda plan: bool(plan.fan_outs),
        "forks": lambda plan: bool(len(plan.row_forks)),
        "forks and tables": lambda plan: bool(len(plan.row_forks) and len(plan.table_deltas)),
        "copies": lambda plan: any(isinstance(command, CopyBlocks) for command in plan.commands),
    }
    for name, is_one in kinds.items():
        assert {sent for plan, sent in found if is_one(plan)} == {1}, name
    assert {sent for _, sent in found} <= {0, 1}


@pytest.mark.skipif(ON_GPU, reason="steps are captured there in other tests too")
def test_captured_steps_find_what_is_sent(shallow: Path) -> None:
    """At the addresses where it was when they were captured, whatever other steps sent since."""
    edits = replace(GREEDY, presence_penalty=0.5)
    works = [
        [Request(0, int_array([3, 4]), GREEDY, 2, seed=0)],
        [
            Request(row, int_array([3 + row] * (4 - row)), (GREEDY, edits)[row], 3 + row, seed=0)
            for row in range(2)
        ],
    ]
    core = gpu_engine(shallow, num_blocks=30, depth=2, chunk=8)
    expected = [run(core, asked) for asked in works]

    class Replays(PlainDevice):
        def capture(self, work: Any, pool: Any) -> Any:
            """As a graph, it reads the tensors of the step that was captured."""
            return work

    graphs = core.executor.runner.graphs  # type: ignore[attr-defined]
    graphs._device, graphs._captures = Replays(), True
    for _ in range(3):
        assert [run(core, asked) for asked in works] == expected
    captured = [key for key, replay in graphs._graphs.items() if replay is not None]
    assert {key[0] for key in captured} == {"decode", "forward", "head"}
    core.close()


def test_what_changes_of_rows_is_sent_where_the_step_fails(
    shallow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plans behind it do not say it again."""
    core = gpu_engine(shallow, num_blocks=30, depth=1, chunk=16)
    runner = core.executor.runner  # type: ignore[attr-defined]
    asked = [Request(row, int_array([3 + row] * 7), GREEDY, 4, seed=0) for row in range(2)]
    expected = run(core, asked)
    launch, plans = core.executor.launch, []

    def noting(plan: StepPlan) -> None:
        plans.append(plan)
        launch(plan)

    def failing(*args: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(core.executor, "launch", noting)
        patch.setattr(runner.graphs, "put_head", failing)
        core.scheduler.add(Request(0, int_array([5] * 11), GREEDY, 4, seed=0))
        outputs = core.step()
        assert [finished.reason for finished in outputs.finished] == [FinishReason.ERROR]
    (init,) = plans[0].row_inits
    runner.device.synchronize()
    table = runner.rows.tables[init.row, : len(init.block_ids)]
    assert table.tolist() == init.block_ids.tolist()
    assert run(core, asked) == expected
    core.close()
