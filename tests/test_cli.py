"""The command line, in process; `generate` and `bench` run for real in tests/e2e."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from octavo import __version__
from octavo.bench import simulator
from octavo.cli import app
from octavo.spellings import ELSEWHERE
from octavo.terminal import readable_errors

runner = CliRunner()
SHAPE = Path(simulator.__file__).with_name("shapes") / "llama-3.1-8b.json"


def test_version() -> None:
    assert runner.invoke(app, ["--version"]).output.strip() == f"octavo {__version__}"


@pytest.mark.parametrize("command", [[], ["serve"], ["generate"], ["pull"], ["bench"]])
def test_every_command_explains_itself(command: list[str]) -> None:
    result = runner.invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, below in command.commands.items():
        yield from _commands(below, (*path, name))


def test_help_gives_each_option_one_default() -> None:
    for path, command in _commands(typer.main.get_command(app)):
        context = command.make_context(" ".join(path), [], resilient_parsing=True)
        for parameter in command.params:
            _, text = parameter.get_help_record(context) or ("", "")
            assert text.count("[default") <= 1, f"{path}: {text}"


@pytest.mark.parametrize("option", sorted(ELSEWHERE))
@pytest.mark.parametrize("command", [["serve"], ["generate", "x", "hi"]])
def test_other_engines_options_are_answered_with_ours(command: list[str], option: str) -> None:
    result = runner.invoke(app, [*command, option, "5"])
    assert result.exit_code == 2
    (line,) = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert line == f"Error: No such option: {option}; {ELSEWHERE[option]}"
    known = dict(_commands(typer.main.get_command(app)))[command[0],]
    ours = {spelling for parameter in known.params for spelling in parameter.opts}
    assert set(re.findall(r"--[a-z-]+", ELSEWHERE[option])) <= ours
    assert option not in ours


def test_what_a_command_does_not_have_is_not_suggested() -> None:
    known = runner.invoke(app, ["chat", "--ctx-size", "5"])
    assert "No such option: --ctx-size; it is --max-model-len here" in known.output
    unknown = runner.invoke(app, ["chat", "--attention-backend", "5"])
    assert "No such option: --attention-backend" in unknown.output
    assert "--attention here" not in unknown.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "no-such-model", "hi"], "no model 'no-such-model'"),
        (["generate", "x", "hi", "--temperature", "-1"], "temperature must be in [0, 100]"),
        (["generate", "x", "hi", "--beam-width", "0"], "beam_width must be between 1 and 32"),
        (["generate", "x", "hi", "--length-penalty", "2"], "--length-penalty needs --beam-width"),
        (
            ["generate", "x", "hi", "--early-stopping", "true"],
            "--early-stopping needs --beam-width",
        ),
        (
            ["generate", "x", "hi", "--beam-width", "2", "--early-stopping", "always"],
            "--early-stopping must be one of true, false, never, got 'always'",
        ),
        (["chat", "--url", "http://127.0.0.1:9"], "no server can be reached at http://127.0.0.1:9"),
        (
            ["chat", "--url", "http://127.0.0.1:9", "--kv-memory", "1GiB"],
            "--kv-memory is for a model in this process",
        ),
        (
            ["chat", "--url", "http://127.0.0.1:9", "--api-key", "a\nb"],
            "the server's key, from --api-key or $OCTAVO_API_KEY, has a space, or a character",
        ),
        (
            ["bench", "serve", "--url", "http://127.0.0.1:9", "--api-key", "a\nb"],
            "the server's key, from --api-key or $OCTAVO_API_KEY, has a space, or a character",
        ),
        (["chat", "x", "--api-key", "secret"], "--api-key is a server's; give --url with it"),
        (
            ["serve", "x", "--kv", "contiguous", "--prefix-caching"],
            "leave out prefix_caching, or use kv=paged",
        ),
        (["serve", "x", "--swap-memory", "1GiB"], "set preemption to swap or auto"),
        (["generate", "x", "hi", "--block-size", "0"], "block_size must be an integer from 1"),
        (["generate", "x", "hi", "--kv-memory", "much"], "kv_memory must be auto, a size"),
        (["serve", "x", "--port", "99999"], "port must be an integer from 0 to 65535"),
        (["serve", "no-such-model"], "no model 'no-such-model'"),
        (["pull", "gpt-9"], "no model 'gpt-9'"),
    ],
)
def test_a_mistake_is_one_readable_line(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, arguments)
    # What is at fault: what was asked for, or the world.
    assert result.exit_code == (1 if "can be reached" in message else 2)
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("module", "code"), [("typer", -signal.SIGINT), ("uvicorn", 130)])
def test_an_interrupt_while_it_is_being_imported_leaves_no_traceback(
    tmp_path: Path, module: str, code: int
) -> None:
    """The module interrupts whoever imports it."""
    text = "import os, signal, sys\nos.kill(os.getpid(), signal.SIGINT)\nsys.exit('went on')\n"
    (tmp_path / f"{module}.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "serve"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code
    assert done.stderr == ""


def test_an_interrupt_while_the_command_line_is_made_leaves_no_traceback(tmp_path: Path) -> None:
    """Between the imports and typer's own care."""
    text = """
import os, signal, sys
import typer.main

def make(*_):
    os.kill(os.getpid(), signal.SIGINT)
    sys.exit('went on')

typer.main.get_command = make
from octavo.__main__ import main
main()
"""
    (tmp_path / "begin.py").write_text(text)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "begin.py"), "--help"], capture_output=True, text=True
    )
    assert done.returncode == 130
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["layout", str(SHAPE)]])
def test_output_that_cannot_be_written_is_one_line(arguments: list[str], is_buffered: bool) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, *([] if is_buffered else ["-u"]), "-m", "octavo", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("octavo: ")


def test_bench_simulator_prints_one_json_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "ROWS", (1, 4))
    monkeypatch.setattr(simulator.run, "__defaults__", ((1, 4), 20))
    result = runner.invoke(app, ["bench", "simulator", "--json"])
    report = json.loads(result.stdout)
    assert [figure["rows"] for figure in report["rows"]] == [1, 4]
    assert report["tokens_per_second"] > 0
    assert report["requests_per_minute"] > 0
    assert [work["work"] for work in report["works"]] == ["decode-heavy", "sharegpt"]


def test_an_error_without_words_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for error, said in ((MemoryError(), "out of memory"), (RuntimeError(), "RuntimeError()")):
        with pytest.raises(typer.Exit) as caught, readable_errors():
            raise error
        assert caught.value.exit_code == 1
        assert capsys.readouterr().err == f"octavo: {said}\n"
