"""`octavo bench serve` as a person types it."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from octavo import output_files
from octavo.bench.serve.sweep import UNLIMITED, Work, parse_rates, rates_of
from octavo.cli import app
from octavo.config import ConfigError
from octavo.workload.items import WorkloadError

from .fake_server import FakeServer

SMALL = ["--input-len", "5", "--output-len", "3", "--num-requests", "4"]


def bench(fake: FakeServer, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "serve", "--url", fake.url, *SMALL, *arguments])


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_one_rate(fake: FakeServer) -> None:
    result = bench(fake, "--rate", "100", "--goodput", "ttft=60s,e2e=1us")
    assert result.exit_code == 0, result.output
    assert "4 of 4 requests" in result.stdout
    assert "goodput 0.00 requests/s: 0.0% of all requests within" in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines()[2:6]] == [
        "TTFT",
        "TPOT",
        "ITL",
        "E2EL",
    ]


def test_the_key_of_the_environment_is_sent(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.needs = "Bearer one"
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    refused = bench(fake)
    assert refused.exit_code == 1
    assert "401 Unauthorized; give its key with --api-key, or in $OCTAVO_API_KEY" in refused.stderr
    monkeypatch.setenv("OCTAVO_API_KEY", "one,two")
    assert bench(fake, "--rate", "inf").exit_code == 0
    assert bench(fake, "--api-key", "three", "--model", "m", "--rate", "inf").exit_code == 0
    assert fake.keys == {"Bearer one", "Bearer three"}


def test_json_has_vllms_names(fake: FakeServer) -> None:
    report = json.loads(bench(fake, "--rate", "inf", "--goodput", "ttft=60s", "--json").stdout)
    assert report["completed"] == 4
    assert report["request_rate"] == "inf"
    assert report["goodput_share"] == 1.0
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "std", "p90", "p99"):
            assert report[f"{statistic}_{metric}_ms"] >= 0
    for name in ("request", "output", "total_token"):
        assert report[f"{name}_throughput"] > 0


def test_a_sweep_in_every_form(fake: FakeServer, tmp_path: Path) -> None:
    table, requests, picture = (tmp_path / name for name in ("a.csv", "b.csv", "c.png"))
    outputs = ["--csv", str(table), "--requests-csv", str(requests), "--plot", str(picture)]
    result = bench(fake, "--rates", "100,200", "--goodput", "ttft=60s,tpot=1s", *outputs)
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[2:]] == ["100.0", "200.0"]
    assert [(row["request_rate"], row["completed"]) for row in rows(table)] == [
        ("100.0", "4"),
        ("200.0", "4"),
    ]
    assert all(float(row["median_ttft_ms"]) > 0 for row in rows(table))
    assert [row["goodput_share"] for row in rows(table)] == ["1.0", "1.0"]
    each = rows(requests)
    assert [(row["run"], row["request"]) for row in each] == [
        (str(run), str(number)) for run in range(2) for number in range(4)
    ]
    assert all(float(row["ttft_ms"]) <= float(row["e2el_ms"]) for row in each)
    assert {row["output_tokens"] for row in each} == {"3"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    prompts = [tuple(body["prompt"]) for body in fake.bodies]
    assert len(set(prompts)) == 8, "a prefix cache must not answer for the run before"


def test_a_sweep_finds_its_rates(fake: FakeServer) -> None:
    reports = json.loads(bench(fake, "--sweep", "2", "--json").stdout)["runs"]
    assert reports[0]["request_rate"] == "inf"
    capacity = reports[0]["request_throughput"]
    assert [report["request_rate"] for report in reports[1:]] == pytest.approx(
        [capacity / 2, capacity], rel=0.01
    )


def test_warmups_are_sent_and_not_counted(fake: FakeServer) -> None:
    report = json.loads(bench(fake, "--rate", "inf", "--num-warmups", "5", "--json").stdout)
    assert report["completed"] == 4
    assert len(fake.bodies) == 9
    assert len({tuple(body["prompt"]) for body in fake.bodies}) == 9


@pytest.mark.parametrize("form", ["text", "json"])
def test_ctrl_c_keeps_the_runs_that_are_whole(fake: FakeServer, tmp_path: Path, form: str) -> None:
    table, requests = tmp_path / "a.csv", tmp_path / "b.csv"
    # The second rate brings a request now and the next in an hour.
    arguments = ["--rates", "1000,0.0003", "--csv", str(table), "--requests-csv", str(requests)]
    arguments += ["--json"] if form == "json" else []
    code, out, errors = interrupted_bench(fake, 5, *arguments)
    assert code == 130, errors
    assert "interrupted; whole runs that count: 1" in errors
    assert "Traceback" not in errors
    assert [row["request_rate"] for row in rows(table)] == ["1000.0"]
    assert len(rows(requests)) == 4
    if form == "json":
        assert [run["completed"] for run in json.loads(out)["runs"]] == [4]
    else:
        assert out.splitlines()[-1].split()[0] == "1000.0"


def test_ctrl_c_before_any_run_is_whole_writes_nothing(fake: FakeServer, tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    code, _, errors = interrupted_bench(fake, 1, "--rate", "0.0003", "--csv", str(table))
    assert code == 130
    assert "interrupted; whole runs that count: 0" in errors
    assert not table.exists()


def interrupted_bench(fake: FakeServer, count: int, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a bench that gets Ctrl-C once it has sent ``count``
    requests."""
    with subprocess.Popen(
        [sys.executable, "-m", "octavo", "bench", "serve", "--url", fake.url, *SMALL, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            while len(fake.bodies) < count:
                assert process.poll() is None, process.communicate()
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=60)
        finally:
            process.kill()  # where it is still there
    return process.returncode, out, errors


def test_where_nothing_is_served_the_exit_code_says_so(fake: FakeServer) -> None:
    result = bench(fake, "--rate", "inf", "--input-len", "13", "--plot", "/nowhere/x.png")
    assert result.exit_code == 2
    assert not fake.bodies, "what cannot be written is found before anything is sent"
    result = bench(fake, "--rate", "inf", "--input-len", "13")
    assert result.exit_code == 1
    assert "0 of 4 requests" in result.stdout
    assert "failed: 400" in result.stdout
    result = bench(fake, "--sweep", "2", "--input-len", "13")
    assert result.exit_code == 1
    assert "no rate to sweep up to: 400" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rates", "1,x"], "rates are numbers above 0"),
        (["--rates", "1", "--rate", "2"], "either rate or rates"),
        (["--sweep", "2", "--rate", "2"], "--sweep finds its own rates"),
        (["--sweep", "0"], "--sweep must be at least 1"),
        (["--max-concurrency", "0"], "--max-concurrency must be at least 1"),
        (["--num-warmups", "-1"], "--num-warmups must be at least 0"),
        (["--rate", "-1"], "rate must be above 0"),
        (["--arrivals", "trace", "--rate", "inf"], "--arrivals trace changes nothing at a rate"),
        (["--arrivals", "gamma", "--cv", "2", "--rates", "inf,inf"], "--arrivals gamma changes"),
        (["--arrivals", "poisson", "--rate", "inf"], "--arrivals poisson changes nothing"),
        (["--arrivals", "often", "--rate", "inf"], "arrivals must be one of"),
        (["--trace", "x.csv", "--max-total-len", "0"], "--max-total-len"),
        (["--cv", "2"], "cv 2 needs gamma arrivals"),
        (["--goodput", "speed=1s"], "an objective is one of"),
        (["--slo", ""], "'' names no objective"),
        (["--goodput", ","], "',' names no objective"),
        (["--arrivals", "gamma", "--cv", "1e300"], "cv must be from 0.001 to 1000"),
        (["--rate", "1e-300"], "rate must be from 1e-06 to 1e+09"),
        (["--rates", "1,1e300"], "rate must be from 1e-06 to 1e+09"),
        (["--num-requests", "9" * 18], "--num-requests"),
        (["--input-len", "9999999999"], "--input-len"),
        (["--output-len", "9" * 20], "--output-len"),
        (["--highest-token-id", "9" * 20], "--highest-token-id"),
        (["--arrivals", "trace"], "arrivals=trace needs a trace"),
        (["--arrivals", "sometimes"], "arrivals must be one of"),
        (["--arrivals", "all-at-once", "--rate", "2"], "have no rate"),
        (["--csv", "/nowhere/x.csv"], "/nowhere does not exist"),
        (["--plot", "x.doc"], "the name must end in"),
        (["--csv", "x.csv", "--requests-csv", "x.csv"], "name the same file"),
    ],
)
def test_a_mistake_is_found_before_anything_is_sent(
    fake: FakeServer, arguments: list[str], message: str
) -> None:
    result = bench(fake, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not fake.bodies


def test_without_matplotlib_it_is_told_how_to_get_it(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_files, "find_spec", lambda name: None)
    result = bench(fake, "--plot", "x.png")
    assert result.exit_code == 2
    assert "-m pip install 'matplotlib>=3.10'" in result.stderr
    assert not fake.bodies


def test_rates() -> None:
    assert parse_rates("1,2.5 inf") == [1.0, 2.5, UNLIMITED]
    assert rates_of(None, None, "poisson") == [1.0]
    assert rates_of(None, None, "trace") == [None]
    assert rates_of(None, None, "all-at-once") == [UNLIMITED]
    assert rates_of(3.0, None, "gamma") == [3.0]
    for bad in ("", "0", "-1", "nan"):
        with pytest.raises(WorkloadError):
            parse_rates(bad)


def test_burstiness_changes_the_gaps_and_nothing_else() -> None:
    def gaps(**fields: Any) -> list[float]:
        items = Work(num_requests=2000, **fields).items(10.0)
        times = [item.arrival_s for item in items]
        return [b - a for a, b in pairwise(times)]

    for cv in (0.5, 2.0):
        found = gaps(arrivals="gamma", cv=cv)
        mean = sum(found) / len(found)
        deviation = (sum((gap - mean) ** 2 for gap in found) / len(found)) ** 0.5
        assert mean == pytest.approx(0.1, rel=0.15)
        assert deviation / mean == pytest.approx(cv, rel=0.15)
    with pytest.raises(ConfigError, match="needs gamma"):
        Work(cv=2.0)


def test_a_traces_own_times_are_kept_or_scaled(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": t, "input_length": 5, "output_length": 2} for t in (0, 500, 2000)]
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    work = Work(trace=str(trace), num_requests=3, arrivals="trace")
    assert [item.arrival_s for item in work.items(None)] == [0.0, 0.5, 2.0]
    assert [item.arrival_s for item in work.items(2.0)] == [0.0, 0.25, 1.0]
    assert [item.arrival_s for item in work.items(UNLIMITED)] == [0.0, 0.0, 0.0]
