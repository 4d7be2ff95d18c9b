"""docs/simulator.md is true: its commands run, at a small size, and so does its Python."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.bench import calibrate, prediction, simulator
from octavo.cli import app
from octavo.simulate.calibration import load_calibration

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
