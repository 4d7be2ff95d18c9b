"""docs/simulator.md is true: its commands run, at a small size, and so does its Python."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.bench import calibrate, prediction, simulator
from octavo.capacity_commands import model_shape
from octavo.cli import app
from octavo.simulate.calibration import load_calibration
from octavo.simulate.capacity import Planner
from octavo.simulate.capacity_plan import Setup
from octavo.simulate.gpus import gpu_named
from octavo.simulate.load import StepLoad
from octavo.simulate.objectives import parse_objectives
from octavo.workload.traces import load_trace

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "simulator.md").read_text()
SMALL = [
    "--span",
    "1",
    "--num-requests",
    "50",
    "--verify-requests",
    "200",
    "--max-total-len",
    "100",
]
SMALL += ["--tensor-parallel", "1"]
runner = CliRunner()


def commands() -> list[str]:
    found = "\n".join(re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL))
    return [line for line in found.replace("\\\n", " ").splitlines() if line.strip()]


def test_the_page_has_commands() -> None:
    assert {command.split()[1] for command in commands()} == {"calibrate", "bench", "plan"}


@pytest.mark.parametrize("command", commands(), ids=lambda text: " ".join(text.split()[:3]))
def test_commands_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes a model for minutes is run small in test_capacity_commands.py: here only its
    arguments arrive."""
    called: list[tuple[Any, ...]] = []

    def calibrated(*given: Any, **options: Any) -> Any:
        called.append((given, options))
        return load_calibration("cpu-smollm2-135m")

    def compared(*given: Any, **options: Any) -> dict[str, str]:
        called.append((given, options))
        return {"calibration": "cpu-smollm2-135m", "engine": ""}

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(calibrate, "run", calibrated)
    monkeypatch.setattr(prediction, "run", compared)
    monkeypatch.setattr(simulator.run, "__defaults__", ((4, 256), 20))
    arguments = shlex.split(command)
    assert arguments.pop(0) == "octavo"
    result = runner.invoke(app, arguments + (SMALL if arguments[0] == "plan" else []))
    assert result.exit_code == 0, result.stderr
    assert bool(called) == ("calibrate" in arguments or "--compare" in arguments)


def test_the_module_takes_the_documented_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = re.findall(r"`python -m octavo\.bench\.calibrate (.*?)`", PAGE)
    called: list[Any] = []
    monkeypatch.setattr("sys.argv", ["calibrate", *shlex.split(command)])
    monkeypatch.setattr(calibrate, "run", lambda *given, **options: called.append((given, options)))
    calibrate.main()
    ((given, options),) = called
    assert given == (["llama-3.1-8b", "llama-3.2-1b"],)
    assert options["out"] == "mine.json"


def test_the_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(code, {})
    assert "num_tokens=6400" in capsys.readouterr().out


def test_the_table_of_calibrations_is_theirs() -> None:
    for name, _, count, mean in re.findall(
        r"\| `([a-z0-9.-]+)` \|(.*)\| (\d+) \| ([\d.]+) %", PAGE
    ):
        found = load_calibration(name)
        assert len(found.points) == int(count)
        assert found.fit_errors().mean_error * 100 == pytest.approx(float(mean), abs=0.06)


def number(pattern: str) -> list[float]:
    """What the page says, where its words are as in ``pattern``."""
    found = re.search(pattern.replace(" ", r"\s+"), PAGE, flags=re.DOTALL)
    assert found is not None, pattern
    return [float(text.replace(",", "")) for text in found.groups()]


H200 = load_calibration("h200-llama-3.1-8b")
NEW = "the calibration or the model changed: make docs/simulator.md and plan.png anew"


def test_the_h200s_coefficients_are_the_shipped_ones() -> None:
    at = H200.coefficients
    weights, products, attention, layer, kv, mixed, ramp = number(
        r"([\d.]+) TB/s for weights .*?, (\d+) TFLOP/s for products, (\d+) for attention, (\d+) "
        r"µs a layer; ([\d.]+) TB/s for keys and values, ([\d.]+) beside chunks, and up to (\d+) "
        r"µs a layer"
    )
    beside = 1 / (1 / at.kv_rate + 1 / at.mixed_kv_rate)
    found = [at.byte_rate / 1e12, at.flop_rate / 1e12, at.attention_rate / 1e12, at.layer_s * 1e6]
    found += [at.kv_rate / 1e12, beside / 1e12, at.ramp_s * 1e6]
    said = [weights, products, attention, layer, kv, mixed, ramp]
    assert said == pytest.approx(found, rel=0.03), NEW
    host = number(
        r"host's part is ([\d.]+) ms a step, ([\d.]+) µs a row, ([\d.]+) ms for having chunks and "
        r"([\d.]+) ms a layer"
    )
    times = [at.host_s * 1e3, at.host_row_s * 1e6, at.host_mixed_s * 1e3, at.host_layer_s * 1e3]
    assert host == pytest.approx(times, rel=0.04), NEW
    moves = number(
        r"On the H200 a block is copied at ([\d.,]+) GB/s .*? with ([\d.]+) ms for copying at all, "
        r"swapped at (\d+) GB/s, and mapped in ([\d.]+) µs with ([\d.]+) ms for mapping at all"
    )
    times = [at.copy_rate / 1e9, at.copy_step_s * 1e3, at.swap_rate / 1e9, at.map_s * 1e6]
    assert moves == pytest.approx([*times, at.map_step_s * 1e3], rel=0.04), NEW


def test_the_ramp_is_as_long_as_it_says() -> None:
    at, layer_bytes = H200.coefficients, H200.shape.token_bytes / H200.shape.num_layers
    said = number(r"of 8K tokens takes ([\d.]+) µs a layer .*? of 1K tokens ([\d.]+)\. A")
    for us, tokens in zip(said, (8192, 1024), strict=True):
        num_bytes = tokens * layer_bytes
        found = at.ramp_s * num_bytes / (num_bytes + at.ramp_bytes)
        assert us == pytest.approx(found * 1e6, rel=0.02), NEW


def test_steps_measured_by_themselves_are_as_near_as_it_says() -> None:
    text = (ROOT / "docs" / "benchmarks-gpu.md").read_text()
    (near,) = number(r"within ([\d.]+) % at 1 to 512 rows")
    few, many = number(r"within (\d+) % up to 64 rows and (\d+) % too slow at 128 and 256")
    work, both = text.index("| decode, 128-token prompts"), text.index("| rows | paged |")
    short = re.findall(
        r"(\d+) rows? \| \*\*([\d.]+)\*\*", text[work : text.index("with penalties")]
    )
    long = re.findall(r"\| (\d+) \| ([\d.]+) \(", text[both : text.index("CPU time a step")])
    assert (len(short), len(long)) == (7, 6)
    errors = [
        {int(rows): 100 * (_decode_ms(int(rows), context) / float(ms) - 1) for rows, ms in table}
        for table, context in ((short, 256), (long, 1056))
    ]
    assert max(map(abs, errors[0].values())) == pytest.approx(near, abs=0.1), NEW
    assert max(abs(errors[1][rows]) for rows in (1, 8, 32, 64)) == pytest.approx(few, abs=0.6), NEW
    assert errors[1][128] == pytest.approx(many, abs=1), NEW
    assert errors[1][256] == pytest.approx(many, abs=1), NEW


def _decode_ms(rows: int, context: int) -> float:
    load = StepLoad(rows, rows, rows, 0, rows * context)
    return H200.latency().seconds(load) * 1e3


def test_what_is_simulated_at_once_is_what_it_says() -> None:
    (said,) = number(r"are simulated at ([\d,]+) output tokens a second")
    items = load_trace(str(simulator.sharegpt()))
    found = simulator.measure_work("sharegpt", items, 1024, rounds=1)
    assert said == pytest.approx(found.predicted_tokens_per_s, rel=0.005), NEW


def test_a_small_cluster_is_as_fast_as_the_large_one() -> None:
    """As many requests for each replica: percentiles are near those of a thousand."""
    replicas, rate, count = number(r"--replicas (\d+) --rate (\d+) --num-requests (\d+)`")
    said = number(r"simulated time: ([\d.]+) ms to the first token and ([\d.]+) ms between")
    small = [round(each * 5 / replicas) for each in (replicas, rate, count)]
    found = simulator.measure_cluster(*small)
    assert said == pytest.approx([found.ttft_p99_s * 1e3, found.itl_p99_s * 1e3], rel=0.08), NEW


def test_the_planned_replica_sustains_what_it_says() -> None:
    """Its rate less a twentieth meets the objectives, a tenth more does not; the rest follows."""
    replicas, rate, size, budget, cents = number(
        r"(\d+) replicas at ([\d.]+) requests a second each, blocks of (\d+), ([\d,]+) tokens a "
        r"step, ([\d.]+) cents"
    )
    planner = Planner(
        gpu=gpu_named("h200"),
        shape=model_shape("8b"),
        objectives=parse_objectives("ttft_p99=200ms,itl_p99=50ms"),
        items=load_trace(str(simulator.sharegpt())),
        span_s=30.0,
    )
    setup = Setup(tensor_parallel=1, block_size=int(size), max_num_batched_tokens=int(budget))
    assert planner._trial(setup, 0.95 * rate).meets(planner.objectives), NEW
    assert not planner._trial(setup, 1.1 * rate).meets(planner.objectives), NEW
    assert replicas == pytest.approx(10_000 / rate, rel=0.01)
    output = sum(item.num_output_tokens for item in planner.items) / len(planner.items)
    an_hour = 10_000 * output * 3600
    assert cents == pytest.approx(replicas * 3.5 / an_hour * 1e8, rel=0.02)
