"""Recorded steps: what becomes a point of a fit, and that files keep what a GPU's fit needs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.bench.prediction import StepErrors, step_errors
from octavo.bench.recorded_steps import (
    RecordedStep,
    fitted,
    load_steps,
    points_of,
    save_steps,
)
from octavo.simulate.calibration import CalibrationError, load_calibration
from octavo.simulate.load import StepLoad
from octavo.simulate.recording import TimedStep

GPU = load_calibration("h200-llama-3.1-8b")
DECODE = StepLoad(num_tokens=2, num_rows=2, num_sampled=2, kv_tokens=20)
CHUNK = StepLoad(num_tokens=9, num_rows=1, num_sampled=1, num_chunks=1, attention_pairs=45)


def recorded(turn: int, index: int, load: StepLoad, *times: float) -> RecordedStep:
    return RecordedStep(0, turn, 0, index, TimedStep(load, *times))


def test_equal_steps_are_one_point_of_the_least_disturbed_turn() -> None:
    steps = [
        recorded(0, 0, CHUNK, 9.0, 0.5, 0.0),
        # Pays for what came before.
        recorded(0, 1, DECODE, 100.0),
        recorded(0, 2, DECODE, 3.0),
        recorded(0, 3, replace(DECODE, kv_tokens=22), 5.0),
        recorded(1, 0, CHUNK, 8.0, 0.25, 0.125),
        recorded(1, 2, replace(DECODE, kv_tokens=30), 2.0, 0.5, 8.0),
        recorded(1, 3, replace(DECODE, kv_tokens=32), 2.0, 0.75, 8.0),
        recorded(1, 4, StepLoad(), 1.0),
    ]
    chunk, decode = points_of(steps, GPU.shapes, has_host=True)
    assert (chunk.load, chunk.seconds, chunk.host_s, chunk.hidden_s) == (CHUNK, 8.0, 0.25, 0.125)
    assert decode.load == replace(DECODE, kv_tokens=31)
    assert (decode.seconds, decode.host_s, decode.hidden_s) == (2.0, 0.625, 8.0)
    chunk, decode = points_of(steps, GPU.shapes, has_host=False)
    assert (decode.seconds, decode.host_s, decode.hidden_s) == (2.0, 0.0, float("inf"))


def test_a_gpus_steps_are_fitted_again_from_a_file(tmp_path: Path) -> None:
    """The points that ship, as if each had been a step; the host is told from them too."""
    steps = [
        RecordedStep(
            GPU.shapes.index(point.shape),
            0,
            number,
            2,
            TimedStep(point.load, point.seconds, round(5e-4 + 2e-6 * point.load.num_rows, 8), 0.0),
        )
        for number, point in enumerate(GPU.points)
        if point.load.num_tokens <= 1024
    ]
    path = tmp_path / "steps.json"
    save_steps(path, GPU, steps)
    calibration, found = load_steps(path)
    assert calibration == replace(GPU, points=())
    assert found == steps
    again = fitted(calibration, found)
    assert len(again.points) == len(steps)
    at = again.coefficients
    assert at.padded_sizes == GPU.coefficients.padded_sizes != ()
    assert abs(at.host_s / 5e-4 - 1) < 0.01
    assert abs(at.host_row_s / 2e-6 - 1) < 0.01
    assert again.fit_errors().mean_error < 0.1


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("seconds", float("nan"), "step 1: nan is no finite number"),
        ("seconds", float("inf"), "step 1: inf is no finite number"),
        ("seconds", 0.0, "step 1 took no time"),
        ("seconds", "x", "step 1: 'x' is no finite number"),
        ("num_tokens", -5, "step 1: -5 is no finite number"),
        ("mapped_blocks", None, "step 1: None is no finite number"),
        ("shape", 7, "step 1 has shape 7 of 1"),
        ("turn", -1, "step 1: -1 is no finite number"),
        (None, 1, "step 1 has 17 columns of 16"),
    ],
)
def test_what_no_step_can_be_is_refused(
    tmp_path: Path, column: str | None, value: object, message: str
) -> None:
    path = tmp_path / "steps.json"
    save_steps(path, replace(GPU, shapes=GPU.shapes[:1]), [recorded(0, 0, CHUNK, 9.0)] * 2)
    document = json.loads(path.read_text())
    row = document["steps"][1]
    if column is None:
        row.append(value)
    else:
        row[document["columns"].index(column)] = value
    path.write_text(json.dumps(document))
    with pytest.raises(CalibrationError, match=message):
        load_steps(path)


def test_columns_in_another_order_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    save_steps(path, GPU, [recorded(0, 0, CHUNK, 9.0)])
    document = json.loads(path.read_text())
    document["columns"].reverse()
    path.write_text(json.dumps(document))
    with pytest.raises(CalibrationError, match="its columns are not shape, turn, work"):
        load_steps(path)


def test_errors_of_steps_are_told_by_kind() -> None:
    model = GPU.latency()
    decode_s, chunk_s = model.seconds(DECODE), model.seconds(CHUNK)
    steps = [
        TimedStep(DECODE, decode_s, 0.0, 0.0),
        TimedStep(DECODE, 2 * decode_s, decode_s, 0.0),
        TimedStep(CHUNK, chunk_s / 2, 0.0, 0.0),
        TimedStep(StepLoad(), 1.0, 0.0, 0.0),
    ]
    model = replace(model, at=replace(model.at, host_s=0.0, host_row_s=0.0, host_mixed_s=0.0))
    found = step_errors(steps, model)
    assert set(found) == {"decode", "chunks"}
    decode = found["decode"]
    assert decode.num_steps == 2
    assert abs(decode.measured_s - 3 * decode_s) < 1e-9
    assert abs(decode.predicted_s - 2 * decode_s) < 1e-9
    assert abs(decode.host_s - decode_s) < 1e-9
    assert abs(decode.p50 + 0.25) < 1e-6
    assert isinstance(found["chunks"], StepErrors)
    assert abs(found["chunks"].p90 - 1.0) < 1e-6
