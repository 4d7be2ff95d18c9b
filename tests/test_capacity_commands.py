"""`octavo plan` and `octavo calibrate`, in process, at a small size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from engine.tiny_engine import TOKEN_BYTES, options, save_gguf
from octavo.bench import calibrate, prediction
from octavo.bench.simulator import sharegpt
from octavo.capacity_commands import serve_options
from octavo.cli import app
from octavo.config import EngineConfig, parse_size
from octavo.execution.executors.in_process import InProcessExecutor
from octavo.server import run
from octavo.simulate.calibration import load_calibration
from octavo.simulate.capacity_plan import Setup
from test_imports import HEAVY, modules_after

runner = CliRunner()
SMALL = ["--span", "1", "--verify-requests", "300"]
LENGTHS = ["--input-len", "200", "--output-len", "20"]
NO_RATES = ("0", "-1", "nan", "inf", "1e300", "1e-300")
HUGE = str(10**30)
TABLE = str(sharegpt())
SLO = ["--slo", "ttft_p99=300ms,itl_p99=60ms"]


def test_a_plan_as_json_and_as_a_plot(tmp_path: Path) -> None:
    plot = tmp_path / "plan.png"
    arguments = ["plan", *SLO, "--rate", "900", "--tensor-parallel", "1", *SMALL, *LENGTHS]
    result = runner.invoke(app, [*arguments, "--json", "--plot", str(plot)])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["model"] == "llama-3.1-8b"
    assert found["num_replicas"] >= 900 / found["replica_rate"] > 1
    assert found["num_gpus"] == found["num_replicas"] * found["setup"]["tensor_parallel"]
    assert found["setup"]["kv"] in ("paged", "virtual")
    assert found["outcome"]["ttft_s"]["p99"] <= 0.3
    assert found["outcome"]["itl_s"]["p99"] <= 0.06
    dollars = found["num_gpus"] * 3.5 / (900 * 20 * 3600) * 1e6
    assert found["cost_per_million_tokens"] == pytest.approx(dollars)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_plan_as_a_table_from_a_trace(tmp_path: Path) -> None:
    """A trace with prefix hashes, at its own arrivals, on ranks that share a 70B."""
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 50 * i, "input_length": 600, "output_length": 8, "hash_ids": [i % 5, 50 + i]}
        for i in range(100)
    ]
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    arguments = ["plan", "--model", "70b", "--rate", "4", "--slo", "ttft_p90=2s"]
    # All of the trace, since nobody said how many.
    arguments += ["--span", "1", "--verify-requests", "300"]
    arguments += ["--trace", str(trace), "--arrivals", "trace", "--price", "2"]
    result = runner.invoke(app, [*arguments, "--tensor-parallel", "4"])
    assert result.exit_code == 0, result.stderr
    assert "llama-3.1-70b on h200, 4 requests/s: 1 replica(s) of 4 rank(s)" in result.stdout
    assert "router prefix-aware" in result.stdout
    assert "at 2.00 a GPU hour" in result.stdout
    assert "ttft_p90: " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h300"], "gpu must be one of h200, a100-40gb"),
        (["--model", "no-such-model"], "no model 'no-such-model'"),
        (["--calibration", "mine"], "no calibration 'mine'"),
        (["--trace", "no-such-file"], "cannot read the trace"),
        (["--router", "random"], "router must be one of round-robin, least-loaded, prefix-aware"),
        *[(["--rate", rate], "--rate must be from 1e-06 to 1,000,000,000") for rate in NO_RATES],
        (["--rate", "1e8"], "lower the rate"),
        (["--span", "0"], "--span must be from 1 to 86,400, got 0"),
        (["--span", "nan"], "--span must be"),
        (["--price", "-1"], "--price must be"),
        (["--price", "1e300"], "--price must be from 1e-06 to 1,000,000, got 1e+300"),
        (["--verify-requests", "0"], "--verify-requests must be from 1 to 1,000,000"),
        (["--verify-requests", HUGE], "--verify-requests must be"),
        (["--num-requests", HUGE], "--num-requests must be"),
        (["--num-requests", "0"], "--num-requests must be"),
        (["--num-requests", "9"], "--num-requests takes requests from a trace: give --trace"),
        (["--swap-memory", "900000TiB"], "--swap-memory must be from 0 to"),
        (["--input-len", "1000000"], "ask for 1000020 tokens, and llama-3.1-8b has 131072"),
        (["--output-len", HUGE], "--output-len must be"),
        (["--input-len", "-1"], "--input-len must be"),
        (["--trace", TABLE, "--max-total-len", "0"], "--max-total-len must be"),
        (["--trace", TABLE, "--max-total-len", "200000"], "--max-total-len ask for 200000"),
        (["--tensor-parallel", "0"], "greater than or equal to 1"),
        (["--tensor-parallel", "1", "--tensor-parallel", "-1"], "greater than or equal to 1"),
        (["--tensor-parallel", HUGE], "a host has 8"),
        (["--slo", f"itl_p99={'9' * 400}s"], "must be above 0 and at most 1,000,000 s"),
        (["--arrivals", "gamma"], "arrivals must be poisson or trace"),
        (["--slo", "ttft=1s"], "an objective is a figure"),
        (["--slo", "itl_p99=1ms"], "itl_p99 is"),
        (["--tensor-parallel", "3"], "8 key-value heads, which 3 ranks cannot share"),
        (["--gpu", "a100-40gb", "--model", "70b"], "use more ranks"),
    ],
)
def test_mistakes_are_one_readable_line(arguments: list[str], message: str) -> None:
    base = ["plan", *SLO, "--rate", "5", "--tensor-parallel", "1", *SMALL]
    base += [] if "--trace" in arguments else LENGTHS
    if "--tensor-parallel" in arguments:
        del base[base.index("--tensor-parallel") : base.index("--tensor-parallel") + 2]
    result = runner.invoke(app, [*base, *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_planning_needs_no_torch() -> None:
    statement = "import octavo.simulate.capacity, octavo.simulate.gpus, octavo.simulate.recording"
    assert not modules_after(statement) & set(HEAVY)


TINY = calibrate.Designs(
    rows=(1, 2, 4),
    contexts=(8, 24),
    max_tokens=128,
    prompts=(4, 16, 48),
    beside=(8,),
    beside_rows=2,
    decode_steps=6,
    rounds=2,
)


def test_a_calibration_measures_fits_and_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way with a tiny model: measure, write, read, predict."""
    model = save_gguf(tmp_path / "tiny.gguf")
    given = options(model, max_num_seqs=4, max_model_len=128)
    names = ("dtype", "threads", "max_num_seqs", "max_model_len", "attention")
    kept = {name: given[name] for name in names}
    monkeypatch.setattr(calibrate, "CPU", TINY)
    # As a GPU's runner has them.
    runner_of_gpu = SimpleNamespace(graphs=SimpleNamespace(padded_sizes=(1, 2, 4, 64)))
    monkeypatch.setattr(InProcessExecutor, "runner", runner_of_gpu, raising=False)
    out, steps = tmp_path / "mine.json", tmp_path / "steps.json"
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in kept.items()]
    arguments += ["--kv-memory", str(80 * 16 * TOKEN_BYTES), "--device", "cpu"]
    arguments += ["--points", str(steps)]
    result = runner.invoke(
        app,
        ["calibrate", "--model", str(model), "--out", str(out), *arguments, "--json"],
    )
    assert result.exit_code == 0, result.stderr
    found = load_calibration(str(out))
    assert result.stdout == out.read_text()
    assert found.name == "tiny"
    assert found.device == "cpu"
    assert found.shape.num_layers == 2
    assert found.shape.token_bytes == TOKEN_BYTES
    assert len(found.points) > 15
    loads = [point.load for point in found.points]
    assert {load.num_rows for load in loads if not load.num_chunks} >= {1, 2, 4}
    most = max(load.kv_tokens for load in loads if load.num_rows == 4 and not load.num_chunks)
    assert most > 4 * 24, "rows whose prompts take several steps decode together"
    assert any(load.num_chunks and load.kv_tokens for load in loads), "chunks beside decoding rows"
    at = found.coefficients
    assert at.padded_sizes == (1, 2, 4, 64)
    assert 0 < at.copy_rate < float("inf")
    assert 0 < at.swap_rate < float("inf")
    assert "error over" in result.stderr

    again = tmp_path / "again.json"
    result = runner.invoke(app, ["calibrate", "--refit", str(steps), "--out", str(again)])
    assert result.exit_code == 0, result.stderr
    assert "error over" in result.stdout
    refitted = load_calibration(str(again))
    assert refitted.machine == found.machine
    assert [p.load for p in refitted.points] == [p.load for p in found.points]
    assert refitted.coefficients.copy_rate == found.coefficients.copy_rate
    assert refitted.fit_errors().mean_error == pytest.approx(
        found.fit_errors().mean_error, abs=1e-3
    )

    sizes = prediction.Sizes(
        decode=(4, 8, 12),
        prefill=(4, 40, 2),
        prefill_rate=200.0,
        sharegpt=4,
        sharegpt_rate=200.0,
        max_total_len=80,
    )
    report = prediction.run(
        str(model), calibration=str(out), sizes=sizes, rounds=2, device="cpu", **kept
    )
    assert [work["work"] for work in report["works"]] == [
        "decode-heavy",
        "prefill-heavy",
        "sharegpt",
    ]
    for work in report["works"]:
        assert work["measured"]["num_tokens"] == work["predicted"]["num_tokens"] > 0
        measured, predicted = work["measured"]["tokens_per_s"], work["predicted"]["tokens_per_s"]
        assert work["errors"]["tokens_per_s"] == pytest.approx(predicted / measured - 1)
        assert set(work["steps"]) == {"decode", "chunks"}
        for kind in work["steps"].values():
            assert kind["num_steps"] > 0
            assert 0 < kind["measured_s"] <= work["measured"]["span_s"]
            assert kind["predicted_s"] > 0


def test_rates_that_nothing_bounds_are_told() -> None:
    """Steps of a tiny model may show no time for keys and values."""
    known = load_calibration("cpu-smollm2-135m")
    at = replace(known.coefficients, kv_rate=float("inf"), mixed_kv_rate=float("inf"))
    told = calibrate.summary(replace(known, coefficients=at))
    assert "beside chunks inf GB/s of them" in told


@pytest.mark.parametrize("option", ["--out", "--points"])
def test_a_calibration_has_somewhere_to_go(option: str) -> None:
    result = runner.invoke(app, ["calibrate", option, "/no/such/folder/mine.json"])
    assert result.exit_code == 2
    assert option in result.stderr
    assert "the directory /no/such/folder does not exist" in result.stderr


@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(80, 32), (4, 128)])
def test_an_engine_too_small_to_be_measured_says_what_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_blocks: int, max_model_len: int
) -> None:
    model = save_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(calibrate, "CPU", TINY)
    arguments = ["--dtype", "float32", "--threads", "1", "--max-num-seqs", "4", "--device", "cpu"]
    arguments += ["--kv-memory", str(num_blocks * 16 * TOKEN_BYTES)]
    arguments += ["--max-model-len", str(max_model_len)]
    result = runner.invoke(app, ["calibrate", "--model", str(model), *arguments])
    assert result.exit_code == 2, result.output
    assert "give more --kv-memory, or a larger --max-model-len" in result.stderr


def test_fitting_again_needs_recorded_steps(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    for text, message in (
        (None, "cannot read recorded steps"),
        ("{}", "holds no steps"),
        ("[", "holds no steps"),
        ('{"steps_format": 9}', "have format 9, and this Octavo reads 1"),
    ):
        if text is not None:
            other.write_text(text)
        result = runner.invoke(app, ["calibrate", "--refit", str(other)])
        assert result.exit_code == 2
        assert message in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model", "mine.gguf"),
        ("points", "p.json"),
        ("name", "mine"),
        ("device", "cpu"),
        ("dtype", "float32"),
        ("max-num-seqs", "4"),
    ],
)
def test_fitting_again_refuses_what_only_measuring_reads(option: str, value: str) -> None:
    result = runner.invoke(app, ["calibrate", "--refit", "no.json", f"--{option}", value])
    assert result.exit_code == 2
    assert "--refit measures nothing" in result.stderr
    assert f"leave out --{option}" in result.stderr


@pytest.mark.parametrize("swap_bytes", [0.0, 32.0 * 2**30])
def test_what_a_plan_prints_can_be_served(
    swap_bytes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[EngineConfig] = []
    monkeypatch.setattr(run, "serve", lambda engine, server: seen.append(engine) or 0)
    setup = Setup(block_size=16, max_num_batched_tokens=2048, swap_bytes=swap_bytes)
    result = runner.invoke(app, ["serve", "model", *serve_options(setup).split()])
    assert result.exit_code == 0, result.output
    assert (seen[0].kv, seen[0].block_size, seen[0].max_num_batched_tokens) == ("paged", 16, 2048)
    assert parse_size("swap_memory", seen[0].swap_memory) == swap_bytes
    assert seen[0].preemption == ("swap" if swap_bytes else "recompute")
