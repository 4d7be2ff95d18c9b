from __future__ import annotations

import json

from typer.testing import CliRunner

from octavo.bench import simulator
from octavo.cli import app

NO_RATES = ("0", "-1", "nan", "inf", "1e300", "1e-300")
HUGE = str(10**30)


def test_every_row_count_is_reported() -> None:
    figure = simulator.measure(4, steps=40, rounds=2)
    assert figure.rows == 4
    assert 0 < figure.plan_us < figure.step_us
    assert 0 < figure.update_us < figure.step_us
    assert figure.tokens_per_second > 0


def test_a_cluster_is_simulated_from_one_command() -> None:
    arguments = ["bench", "simulator", "--replicas", "3", "--rate", "50", "--num-requests", "40"]
    found = CliRunner().invoke(app, [*arguments, "--json"])
    assert found.exit_code == 0, found.output
    figures = json.loads(found.output)
    assert (figures["num_replicas"], figures["num_requests"], figures["rate"]) == (3, 40, 50.0)
    assert figures["num_steps"] > 40
    assert figures["span_s"] > 0.5
    again = simulator.measure_cluster(3, 50.0, 40)
    assert (again.num_steps, again.span_s) == (figures["num_steps"], figures["span_s"])
    assert "3 replicas, 40 requests at 50 a second" in CliRunner().invoke(app, arguments).output


def test_a_cluster_that_cannot_be() -> None:
    for arguments, message in (
        *[(["--replicas", "2", "--rate", rate], "--rate must be from 1e-06") for rate in NO_RATES],
        (["--replicas", HUGE], "--replicas"),
        (["--replicas", "2", "--num-requests", HUGE], "--num-requests"),
        (["--compare", "--rounds", HUGE], "--rounds"),
        (["--replicas", "2", "--compare"], "--compare runs one engine"),
        (["--rate", "nan"], "--rate is for --replicas"),
        (["--compare", "--num-requests", "1"], "--num-requests is for --replicas"),
        (["--calibration", "x.json"], "--calibration is for --compare"),
        (["--replicas", "2", "--model", "x"], "--model is for --compare"),
        (["--rounds", "3"], "--rounds is for --compare"),
        (["--replicas", "2", "--device", "cpu"], "--device is for --compare"),
        (["--threads", "1"], "--threads is for --compare"),
    ):
        found = CliRunner().invoke(app, ["bench", "simulator", *arguments])
        assert found.exit_code == 2
        assert message in found.output
