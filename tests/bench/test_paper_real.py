"""The papers' figures on the real engine, over a tiny model."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import octavo.engine.build
from engine.tiny_engine import TOKEN_BYTES, save_gguf, save_llama
from octavo.bench.paper import block_kernels, figure19, real
from octavo.bench.paper.engines import ALL_MANAGERS, engines_of, plain_request
from octavo.bench.paper.managers import MANAGERS
from octavo.bench.paper.report import PaperOptions
from octavo.bench.works import SHAPES
from octavo.cli import app
from octavo.workload.items import WorkItem


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def figure(number: str, model: Path | str, *arguments: str) -> str:
    common = ["--model", str(model), "--device", "cpu", "--threads", "1", "--max-model-len", "64"]
    result = CliRunner().invoke(app, ["bench", "paper", "--figure", number, *common, *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_figure_2_splits_the_real_pool(gguf: Path) -> None:
    small = ("--num-requests", "40", "--num-blocks", "32", "--block-size", "4")
    # Four tokens of this model are no whole pages.
    names = tuple(name for name in MANAGERS if name != "virtual")
    found = json.loads(figure("2", gguf, *small, "--managers", ",".join(names), "--json"))
    assert list(found) == list(names)
    for parts in found.values():
        assert sum(parts.values()) == pytest.approx(1, abs=1e-9)
        assert min(parts.values()) >= 0
    assert found["orca-max"]["live"] < found["orca-oracle"]["live"] < found["paged"]["live"]
    assert found["orca-max"]["internal"] > 0.3


def test_figure_12_serves_all_that_arrive(gguf: Path, tmp_path: Path) -> None:
    table = tmp_path / "12.csv"
    work = ("--rates", "40,80", "--duration", "0.25", "--managers", "orca-max,paged")
    text = figure("12", gguf, *work, "--csv", str(table))
    assert "ShareGPT lengths (times 0.03125), Poisson arrivals for 0.25 s" in text
    assert "31 blocks of 16 tokens, sequences of at most 64. The engine itself" in text
    lines = table.read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    by_manager = {name: [r for r in rows if r["manager"] == name] for name in ("orca-max", "paged")}
    for found in by_manager.values():
        assert [row["rate"] for row in found] == ["40.0", "80.0"]
        assert all(float(row["normalized_latency_s"]) > 0 for row in found)
        assert all(float(row["mean_running"]) >= 1 for row in found)
    # The same requests come to each, and all of them end.
    counts = [[row["num_requests"] for row in found] for found in by_manager.values()]
    assert counts[0] == counts[1]
    assert 1 < int(counts[0][0]) < int(counts[0][1]) < 60


def test_samples_and_beams(gguf: Path) -> None:
    small = ("--rates", "100", "--duration", "0.05", "--managers", "orca-oracle,paged")
    found = json.loads(figure("14", gguf, "--widths", "2", *small, "--json"))
    assert {kind: list(rates) for kind, rates in found.items()} == {
        "parallel 2": ["orca-oracle", "paged"],
        "beam 2": ["orca-oracle", "paged"],
    }


def test_figure_15_saves_blocks(gguf: Path, tmp_path: Path) -> None:
    trace = tmp_path / "lengths.csv"
    # A real trace's lengths are scaled down to 64 of 2048.
    trace.write_text("prompt_tokens,output_tokens\n" + "1100,300\n700,600\n" * 3)
    found = json.loads(figure("15", gguf, "--trace", str(trace), "--widths", "2,3", "--json"))
    for by_width in found.values():
        assert list(by_width) == ["2", "3"]
        assert 0 < by_width["2"] < by_width["3"] < 100


def test_block_sizes_in_a_real_service(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(real._BLOCK_SIZES, "cpu", (4, 32))
    monkeypatch.setattr(block_kernels, "_CONTEXT", 40)
    found = json.loads(figure("18", gguf, "--rates", "60", "--duration", "0.2", "--json"))
    assert list(found) == ["4", "32"]
    for values in found.values():
        assert all(value > 0 for value in values.values())
        assert values["kernel_ratio"] == values["scattered_ms"] / values["consecutive_ms"]


def test_swapping_and_recomputing_on_a_real_engine(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(real._BLOCK_SIZES, "cpu", (4,))
    trace = tmp_path / "lengths.csv"
    # A real trace's lengths are scaled down to 64 of 2048.
    trace.write_text("prompt_tokens,output_tokens\n" + "300,1500\n" * 3)
    work = ("--trace", str(trace), "--rates", "2000", "--duration", "0.02")
    text = figure("19", gguf, *work)
    assert "63 tokens out and in again, or computed again; the least of 5" in text
    assert "the last of 123 blocks of 4 tokens, sequences of at most 64" in text
    (line,) = (line.split() for line in text.splitlines() if line.split()[:1] == ["4"])
    _, recompute, swap, layered, *service, preemptions = line
    assert layered == "–", "a layout that the engine does not have"
    assert all(float(value) > 0 for value in (recompute, *service))
    assert float(swap) >= 0
    assert min(map(int, preemptions.split("/"))) > 0, "the pool was too small for what came"


def test_what_is_swapped_comes_back(gguf: Path) -> None:
    """The engine that is timed holds as much in the host's memory as in its pool."""
    options = PaperOptions(model=str(gguf), device="cpu", threads=1, max_model_len=64)
    with engines_of(options, ("paged",), preemption="swap").open("paged") as engine:
        arena = engine.core.executor._runner.arena  # type: ignore[attr-defined]
        assert len(arena.host) - 1 >= engine.pool.num_blocks
        arena.kv.normal_()
        before = arena.kv.clone()
        figure19._swap(engine)
        assert arena.kv.equal(before)
        assert not arena.host[1:].equal(torch.zeros_like(arena.host[1:]))


def test_every_manager_is_the_engines_own(tmp_path: Path) -> None:
    """As it is built to serve, over pools of the same tokens; random weights get random tokens."""
    folder = save_llama(tmp_path)
    names = (*ALL_MANAGERS, "paged-shared")
    options = PaperOptions(
        model=str(folder / "config.json"), device="cpu", threads=1, max_model_len=128
    )
    engines = engines_of(options, names)
    assert engines.pool.token_bytes == TOKEN_BYTES
    assert engines.length_scale == 1 / 16
    for name in names:
        with engines.open(name) as engine:
            scheduler = engine.core.scheduler
            kind = type(scheduler.manager).__name__
            base = name.removesuffix("-shared")
            assert kind == {"paged": "PagedManager", "virtual": "VirtualManager"}.get(
                base, "ContiguousManager"
            )
            assert scheduler.config.is_static == (name == "fastertransformer")
            assert engine.pool.num_tokens == pytest.approx(engines.pool.num_tokens, rel=0.05)
            assert scheduler.usage().capacity == engine.pool.num_tokens
            request = plain_request(engine, 3, WorkItem(0.0, 40, 3))
            assert len(set(request.prompt_token_ids.tolist())) > 20
            engine.warm_up([request])
            for _ in range(2):
                scheduler.add(request)
                while engine.core.has_work:
                    (*_, last) = [engine.core.step()]
                cached = last.finished[0].num_cached_tokens
            assert (cached > 0) == name.endswith("-shared")
            engine.start()
            assert engine.now_s >= 0
            engine.wait_until(0.01)
            assert engine.now_s >= 0.01
    assert "config.json (random weights) in float32 on this CPU, 1 thread" in engines.conditions


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["12", "--model", "no-such-model"], "no model 'no-such-model'"),
        (["12", "--model", "EMPTY"], "config.json"),
        (["12", "--model", "MODEL", "--device", "tpu"], "device must be one of auto, cpu, cuda"),
        (["12", "--model", "MODEL", "--rates", "-1"], "rates must be above 0"),
        (["12", "--model", "MODEL", "--managers", "slab"], "managers must be among"),
        (["12", "--model", "MODEL", "--duration", "-3"], "duration must be above 0"),
        (["12", "--model", "MODEL", "--max-model-len", "10000000"], "than the model's own limit"),
        (["2", "--model", "MODEL", "--trace", "no.csv"], "no.csv"),
    ],
)
def test_what_cannot_be_measured_is_told_before_torch_is_loaded(
    gguf: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    names = {"MODEL": str(gguf), "EMPTY": str(tmp_path)}
    command = ["octavo", "bench", "paper", "--figure", *(names.get(a, a) for a in arguments)]
    # Whoever imports torch meets an ImportError, which is none of the expected errors.
    code = f"import sys; sys.modules['torch'] = None; sys.argv = {command!r}\n"
    code += "from octavo.cli import main; main()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 2, found.stderr
    (line,) = found.stderr.splitlines()
    assert message in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpus_shape_runs_on_a_cpu_only_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def build(*_: object) -> None:
        raise AssertionError("an engine is built")

    monkeypatch.setattr(octavo.engine.build, "build_engine", build)
    for name in SHAPES:
        for command in (
            ["bench", "paper", "--figure", "12"],
            ["bench", "paper", "--figure", "12", "--device", "auto"],
            ["bench", "simulator", "--compare"],
            ["calibrate", "--out", str(tmp_path / "mine.json")],
        ):
            result = CliRunner().invoke(app, [*command, "--model", name])
            assert result.exit_code in (1, 2), result.output
            (line,) = result.stderr.splitlines()
            assert "PyTorch finds no CUDA device here" in line
            assert line.endswith("name a smaller model, or say --device cpu")
        engines = engines_of(PaperOptions(model=name, device="cpu"), ("paged",))
        assert engines.device == "cpu"


def test_a_manager_that_cannot_run_is_told_before_another_has(gguf: Path) -> None:
    """Four tokens of this model are no whole pages."""
    for number, managers in (("2", ["--managers", "paged,virtual"]), ("13", [])):
        arguments = ["--figure", number, "--model", str(gguf), "--block-size", "4", *managers]
        arguments += ["--device", "cpu", "--max-model-len", "64"]
        result = CliRunner().invoke(app, ["bench", "paper", *arguments])
        assert result.exit_code == 2, result.output
        assert "the manager virtual cannot run here: block_size 4" in result.stderr
        assert len(result.stderr.splitlines()) == 1
