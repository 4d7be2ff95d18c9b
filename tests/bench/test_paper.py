"""The papers' figures: shares by hand on small pools, their order on the paper's lengths, and the
command."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo import output_files
from octavo.bench.paper import figure15, output
from octavo.bench.paper.managers import (
    LLAMA_8B,
    MANAGERS,
    OPT_13B,
    SCALES,
    Pool,
    driver_block,
    pool_of,
)
from octavo.bench.paper.registry import FIGURES
from octavo.bench.paper.report import PaperOptions, lengths
from octavo.bench.paper.saturation import saturate
from octavo.bench.paper.simulated import SimulatedEngines
from octavo.cli import app
from octavo.workload.items import WorkItem, WorkloadError

# Eight blocks of four tokens; the longest sequence takes half of them.
SMALL = Pool(num_blocks=8, block_size=4, max_model_len=16, token_bytes=10)
PARTS = ["live", "reserved", "internal", "external", "free"]


@pytest.mark.parametrize(
    ("name", "num_output", "running", "used", "internal", "external"),
    [
        # 4 + 8 slots of 16.
        ("orca-max", 9, 2, 24, 8, 0),
        # 4 + 16 are more than the longest.
        ("orca-pow2", 9, 2, 24, 8, 0),
        # 4 + 4 slots, in two blocks.
        ("orca-pow2", 4, 4, 28, 4, 0),
        # 12 slots in three blocks, in runs of four.
        ("orca-oracle", 9, 2, 24, 0, 8),
        ("orca-oracle", 5, 4, 32, 0, 0),
    ],
)
def test_reservations_by_hand(
    name: str, num_output: int, running: int, used: int, internal: int, external: int
) -> None:
    found = saturate(SimulatedEngines(SMALL), name, [WorkItem(0.0, 4, num_output)] * 30)
    assert found.mean_running == running
    assert found.pool_bytes == 320
    mean = found.mean_bytes
    assert mean["live"] + mean["reserved"] == 10 * used
    assert (mean["internal_waste"], mean["external_waste"]) == (10 * internal, 10 * external)
    assert mean["free"] == mean["cached"] == 0
    # A prompt is reserved in the step that computes it; then 4, 5, … tokens are live.
    live = sum(range(4, 4 + num_output - 1)) / num_output
    assert mean["live"] == pytest.approx(10 * running * live, rel=0.1)
    assert found.num_preemptions == 0


@pytest.mark.parametrize("name", MANAGERS)
def test_shares_sum_to_one_and_runs_repeat(name: str) -> None:
    items = lengths(PaperOptions(num_requests=40), 256)
    pool = Pool(num_blocks=100, max_model_len=256)
    found = saturate(SimulatedEngines(pool), name, items)
    assert sum(found.shares.values()) == pytest.approx(1, abs=1e-12)
    assert found == saturate(SimulatedEngines(pool), name, items)


def test_what_does_not_fill_the_pool_is_refused() -> None:
    with pytest.raises(WorkloadError, match="do not saturate 8 blocks under paged"):
        saturate(SimulatedEngines(SMALL), "paged", [WorkItem(0.0, 4, 4)] * 2)


def test_the_scales_are_the_papers() -> None:
    """12 GiB hold 15.7 thousand tokens of OPT-13B; an 8B's 16 tokens are a driver's page."""
    assert OPT_13B.token_bytes == 800 * 1024
    assert SCALES["opt-13b"].num_blocks * 16 == 15728
    assert driver_block(LLAMA_8B) == 16
    assert driver_block(OPT_13B) == 64
    assert pool_of("opt-13b", block_size=64).num_blocks == 245
    for arguments, message in (
        (("opt-7b",), "scale must be one of opt-13b, llama-3.1-8b"),
        (("opt-13b", 100), "no run of 128, which 2048 tokens need"),
    ):
        with pytest.raises(WorkloadError, match=message):
            pool_of(*arguments)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", "paper", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


SHORT = ("--num-requests", "60", "--num-blocks", "400")


def test_figure_2_has_the_papers_order() -> None:
    found = json.loads(run("--figure", "2", *SHORT, "--json"))
    assert list(found) == list(MANAGERS)
    for parts in found.values():
        assert list(parts) == PARTS
        assert sum(parts.values()) == pytest.approx(1, abs=1e-9)
        assert min(parts.values()) >= 0
    live = [found[name]["live"] for name in MANAGERS]
    assert live[0] < live[1] < live[2] < 0.5 < 0.85 < live[3]
    assert live[4] == pytest.approx(live[3], abs=0.01)
    assert found["orca-max"]["internal"] > 0.4
    assert found["orca-oracle"]["internal"] < 0.02
    assert found["orca-oracle"]["external"] > 0.2


def test_a_figure_is_written_with_what_it_depends_on(tmp_path: Path) -> None:
    text = run("--figure", "13", *SHORT, "--output", str(tmp_path))
    assert "written: " in text
    assert (tmp_path / "figure-13.png").read_bytes().startswith(b"\x89PNG")
    lines = (tmp_path / "figure-13.csv").read_text().splitlines()
    caption = [line for line in lines if line.startswith("#")]
    assert "60 requests of ShareGPT lengths" in caption[1]
    assert "octavo" in caption[2]
    assert output.machine() in caption[2]
    assert output.commit() in caption[2]
    rows = list(csv.DictReader(lines[len(caption) :]))
    assert [row["manager"] for row in rows] == list(MANAGERS)
    running = {row["manager"]: float(row["mean_running"]) for row in rows}
    assert running["orca-max"] < running["orca-pow2"] < running["orca-oracle"] < running["paged"]


def test_figure_15_saves_more_with_beams(tmp_path: Path) -> None:
    trace = tmp_path / "lengths.csv"
    trace.write_text("prompt_tokens,output_tokens\n" + "100,20\n60,30\n" * 4)
    found = json.loads(run("--figure", "15", "--trace", str(trace), "--json"))
    assert list(found) == ["parallel", "beam"]
    for by_width in found.values():
        assert list(by_width) == ["2", "4", "6"]
        assert 0 < by_width["2"] < by_width["6"] < 100
    assert found["beam"]["4"] > found["parallel"]["4"]


def test_every_figure_says_what_it_can_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["bench", "paper", "--figure", "7"])
    assert result.exit_code == 2
    assert f"figure must be one of {', '.join(FIGURES)}" in result.stderr
    monkeypatch.setattr(output_files, "find_spec", lambda name: None)
    arguments = ["bench", "paper", "--figure", "2", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "pip install 'matplotlib>=3.10'" in result.stderr


def test_a_table_is_drawn_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured where nothing can be drawn, drawn where nothing is measured."""
    table = tmp_path / "some-13.csv"
    with monkeypatch.context() as patched:
        patched.setattr(output_files, "find_spec", lambda name: None)
        run("--figure", "13", *SHORT, "--managers", "orca-max,paged", "--csv", str(table))
    caption, rows = output.read_table(table)
    assert [row["manager"] for row in rows] == ["orca-max", "paged"]
    assert "written: " in run("--figure", "13", "--redraw", str(table))
    assert (tmp_path / "some-13.png").read_bytes().startswith(b"\x89PNG")
    assert output.read_table(table) == (caption, rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["13", "--rates", "1,2"], "--rates changes nothing in figure 13"),
        (["2", "--duration", "5"], "--duration changes nothing in figure 2"),
        (["16", "--trace", "x.csv"], "--trace changes nothing in figure 16"),
        (["18", "--block-size", "16"], "--block-size changes nothing in figure 18"),
        (["12", "--threads", "1"], "--threads is for a real engine: give --model"),
        (["12", "--model", "m", "--scale", "opt-13b"], "--scale is the simulator's"),
        (["12", "--model", "m", "--simulated"], "--simulated runs no model"),
        (["18", "--rates", "2"], "--rates changes nothing in figure 18"),
        (["18", "--model", "m"], "serves a real engine at one rate: give --rates"),
        (["19", "--model", "m", "--rates", "1,2"], "at one rate: give --rates"),
        (["2", "--managers", "paged,slab"], "among fastertransformer, orca-max, .*, got 'slab'"),
        (["2", "--managers", "paged-shared"], "in this figure, got 'paged-shared'"),
        (["12", "--rates", "1,,2"], "rates must be numbers, separated by commas, got '1,,2'"),
        (["12", "--rates", ""], "rates must be numbers, separated by commas, got ''"),
        (["12", "--managers", ""], "managers must be separated by single commas, got ''"),
        (["14", "--widths", ""], "widths must be numbers, separated by commas, got ''"),
        (["12", "--rates", "0,1"], "rates must be above 0 and finite, got 0"),
        (["12", "--rates", "1,-2"], "rates must be above 0 and finite, got -2"),
        (["12", "--rates", "1,inf"], "rates must be above 0 and finite, got inf"),
        (["12", "--rates", "1,nan"], "rates must be above 0 and finite, got nan"),
        (["12", "--rates", "1,1.0"], "rates must name each once"),
        (["12", "--duration", "nan"], "duration must be above 0 and finite, got nan"),
        (["12", "--duration", "0"], "duration must be above 0 and finite, got 0"),
        (["12", "--managers", "paged,paged"], "managers must name each once, got 'paged,paged'"),
        (["12", "--trace", "no.csv"], "no.csv"),
        (["14", "--widths", "2,2"], "widths must name each once"),
        (["14", "--widths", "33"], "widths must be from 1 to 32"),
        (["14", "--widths", "2,0"], "widths must be"),
        (["12", "--model", "no-such-model"], "no model 'no-such-model'"),
        (["12", "--redraw", "no.csv"], "cannot read no.csv"),
        (["12", "--redraw", __file__], "is not a table that octavo bench paper wrote"),
        (["12", "--redraw", "no.csv", "--rates", "1"], "--redraw measures nothing"),
        (["12", "--redraw", "no.csv", "--seed", "1"], "--redraw measures nothing"),
        (["12", "--redraw", "no.csv", "--json"], "--redraw measures nothing"),
        (["2", "--block-size", "99999"], "0 blocks of 99999 tokens.*: give smaller blocks"),
    ],
)
def test_what_has_no_effect_or_no_sense_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "paper", "--figure", *arguments])
    assert result.exit_code == 2, result.output
    assert re.search(message, result.stderr), result.stderr
    assert len(result.stderr.splitlines()) == 1


def redrawn(figure: str, table: Path) -> str:
    """The one line that refuses to draw it."""
    result = CliRunner().invoke(app, ["bench", "paper", "--figure", figure, "--redraw", str(table)])
    assert result.exit_code == 2, result.output
    assert not table.with_suffix(".png").exists()
    (line,) = result.stderr.splitlines()
    return line


def test_what_is_no_table_of_the_figure_is_not_drawn(tmp_path: Path) -> None:
    table = tmp_path / "13.csv"
    run("--figure", "13", *SHORT, "--managers", "paged", "--csv", str(table))
    assert "holds 'Figure 13': give it with the --figure" in redrawn("12", table)
    whole = table.read_text()
    name, caption, columns, row = "x.csv", *_parts_of(whole)
    broken = tmp_path / name
    for text, word in (
        (caption, "is not a table"),
        (f"{caption}{columns}\n", "is not a table"),
        (f"{columns}\n{row}\n", "is not a table"),
        (f"{caption}{columns}\n{row},1,2\n", "as many values"),
        (f"{caption}{columns}\npaged\n", "as many values"),
        (f"{caption}manager,other\npaged,1\n", "is damaged"),
        (f"{caption}{columns}\npaged,lots,\n", "is damaged"),
        (f"{caption}{columns}\n" + "1" * 200_000 + ",1,1\n", "is no table"),
    ):
        broken.write_text(text)
        assert word in redrawn("13", broken), text[-80:]
    broken.write_bytes(b"\xff\xfe\x00")
    assert "cannot read" in redrawn("13", broken)


def _parts_of(text: str) -> tuple[str, str, str]:
    lines = text.splitlines()
    return "".join(f"{line}\n" for line in lines[:3]), lines[3], lines[4]


def test_what_an_interrupt_left_of_figure_15_stays_in_its_columns() -> None:
    whole, cut = {"2": 1.0, "4": 2.0, "6": 3.0}, {"2": 4.0}
    head, first, second = figure15._table({"parallel": whole, "beam": cut}).splitlines()
    place = head.index("paper")
    assert [line[:place].split()[-1] for line in (first, second)] == ["3.0", "4.0"]
    assert all(line[place - 3 : place] == "   " and line[place] != " " for line in (first, second))
