"""What the GPU's benches compute and refuse where there is no GPU; the rest runs on one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from octavo.bench import captures, floors, works
from octavo.bench.ceilings import Ceilings
from octavo.bench.floors import Cost, Floors
from octavo.cli import app

AT = Ceilings(
    read_bytes=100.0, matmul_flops=1000.0, fp8_flops=2000.0, to_host_bytes=1.0, from_host_bytes=1.0
)


def test_the_floor_of_a_step() -> None:
    """Reading binds at few rows, multiplying at many; keys are always read."""
    cost = Cost(layer_bytes=200, head_bytes=100, token_bytes=10)
    few = cost.step_s(num_tokens=1, num_sampled=1, num_keys=0, at=AT)
    assert few == pytest.approx(200 / 100 + 100 / 100)
    many = cost.step_s(num_tokens=100, num_sampled=1, num_keys=30, at=AT)
    assert many == pytest.approx(200 * 100 / 1000 + 100 / 100 + 30 * 10 / 100)
    narrow = Cost(layer_bytes=100, head_bytes=100, token_bytes=5, layer_element=1)
    many = narrow.step_s(num_tokens=100, num_sampled=1, num_keys=30, at=AT)
    assert many == pytest.approx(2 * 100 * 100 / 2000 + 100 / 100 + 30 * 5 / 100)
    assert cost.step_s(num_tokens=1, num_sampled=0, num_keys=0, at=AT) == pytest.approx(2.0)


def test_shapes_and_lengths_are_in_the_package() -> None:
    from octavo.core.model_config import ModelConfig
    from octavo.execution.models.loading import load_config

    for name in works.SHAPES:
        assert isinstance(load_config(works.shape(name)), ModelConfig)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
@pytest.mark.parametrize("arguments", [["gpu"], ["gpu", "decode"], ["kernels"]])
def test_without_a_gpu(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert "no CUDA device" in result.output


def test_a_figure_as_text() -> None:
    figure = works.Figure(work="decode 8", unit="ms a step", figure=4.0, floor=3.0, share=0.75)
    assert works.line(figure).split() == ["decode", "8", "4.00", "ms", "a", "step", "3.00", "0.75"]
    assert "startup" in works.line(works.Figure(work="startup", unit="s", figure=5.0))


def test_every_captured_size_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as a capture needs, and nothing that the engine would refuse."""
    llm: Any = SimpleNamespace(
        report=SimpleNamespace(
            max_num_seqs=5, max_num_batched_tokens=256, max_model_len=400,
            memory=SimpleNamespace(graph_bytes=2**30),
        ),
        _core=SimpleNamespace(
            executor=SimpleNamespace(
                runner=SimpleNamespace(
                    graphs=SimpleNamespace(
                        padded_sizes=(1, 2, 16, 64, 128, 256, 384),
                        captured_bytes=3 * 2**20, num_captured=7,
                    )
                )
            )
        ),
    )  # fmt: skip
    asked: list[list[tuple[int, int]]] = []
    monkeypatch.setattr(works, "generate", lambda _, lengths, seed: asked.append(lengths))
    captures.capture_all(llm)
    decoded, *prompts = asked
    for rows in range(1, 6):
        steps = sorted(output for _, output in decoded)
        ends = [0, *steps]
        assert ends[-rows] - ends[-rows - 1] >= 2
    for size in (64, 128, 256):
        assert prompts.count([(size, 1)]) >= 2
    for size in (64, 128):
        assert prompts.count([(256, 4), (size - 1, 2)]) >= 2
    assert all(prompt + output <= 400 for lengths in asked for prompt, output in lengths)
    found = captures.captured_bytes(llm)
    assert found == {"captured_bytes": 3 * 2**20, "kept_bytes": 2**30, "num_captured": 7}
    assert works.line(captures.figure(found)).split(maxsplit=3) == [
        "graphs", "3.00", "MiB", "7 captured steps; 1024 MiB are kept for them",
    ]  # fmt: skip


def test_what_the_host_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its work counts as not hidden where it finds the device idle."""
    now = [0.0]
    idle = iter([False, True, False])

    class Executor:
        @property
        def is_idle(self) -> bool:
            return next(idle)

        def collect(self) -> None:
            now[0] += 1.0

    executor = Executor()
    core = SimpleNamespace(executor=executor, scheduler=SimpleNamespace(plan=lambda: None))
    monkeypatch.setattr(floors.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(Cost, "of", lambda llm: None)
    found = Floors(SimpleNamespace(_core=core), AT)  # type: ignore[arg-type]
    with found.counted():
        for work_s in (0.25, 0.5, 0.125):
            now[0] += work_s
            executor.collect()
    found.num_steps = 3
    assert (found.waited_s, found.exposed_s) == (3.0, 0.5)
    assert found.host(now[0]) == "host 291.67 ms a step (166.67 not hidden), waits 1000.00"


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Perfetto opens: a JSON object of events, with what ran among them."""

    def run(name: str, asked: object, emit: object, options: object) -> dict[str, Any]:
        torch.ones(3).add_(1)
        return {"model": name}

    monkeypatch.setattr(works, "_run", run)
    path = tmp_path / "trace.json"
    assert works.run("a model", ["decode"], print, profile=str(path)) == {"model": "a model"}
    events = json.loads(path.read_text())["traceEvents"]
    assert any("add_" in event["name"] for event in events)
    assert works.run("another", ["decode"], print) == {"model": "another"}
