"""Every step that a calibration timed, in a file, and the points of a fit that are made of them.

A calibration keeps one point for equal steps. With all steps a fit can be made again without the
machine, also by a later model of latency that groups them otherwise.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from octavo.simulate.calibration import (
    Calibration,
    CalibrationError,
    check_numbers,
    dumps,
    loads,
)
from octavo.simulate.fitting import Point, divided
from octavo.simulate.load import StepLoad
from octavo.simulate.recording import TimedStep
from octavo.simulate.shape import ModelShape

FORMAT = 1
_COLUMNS = ("shape", "turn", "work", "index", "seconds", "host_s", "hidden_s", *StepLoad.__slots__)
_NUM_BEFORE_LOAD = len(_COLUMNS) - len(StepLoad.__slots__)
# Shape, work, the step's index in it or -1, and the rows that decode.
_Key: TypeAlias = tuple[int, int, int, float]


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Step ``index`` of a ``work``, run for the ``turn``-th time on the model ``shape`` names."""

    shape: int
    turn: int
    work: int
    index: int
    step: TimedStep


def points_of(
    recorded: Sequence[RecordedStep], shapes: Sequence[ModelShape], *, has_host: bool
) -> list[Point]:
    """Steps with a chunk each for itself, those that decode together where they have as many rows;
    of several turns the one that was disturbed least. ``has_host``: the host worked beside its
    device, and its seconds count."""
    found: dict[_Key, dict[int, list[TimedStep]]] = {}
    for each in recorded:
        load = each.step.load
        if load.num_chunks:
            key: _Key = (each.shape, each.work, each.index, 0)
        elif load.num_tokens and each.index > 1:
            # The first steps of a work also pay for what the one before left behind.
            key = (each.shape, each.work, -1, load.num_rows)
        else:
            continue
        found.setdefault(key, {}).setdefault(each.turn, []).append(each.step)
    return [
        _point(shapes[key[0]], list(turns.values()), has_host=has_host)
        for key, turns in found.items()
    ]


def _point(shape: ModelShape, turns: Sequence[Sequence[TimedStep]], *, has_host: bool) -> Point:
    """The median of its steps, their mean load."""
    medians = [statistics.median(step.seconds for step in steps) for steps in turns]
    steps = turns[int(np.argmin(medians))]
    total = StepLoad(
        *[sum(getattr(step.load, name) for step in steps) for name in StepLoad.__slots__]
    )
    point = Point(shape, divided(total, len(steps)), min(medians))
    if not has_host:
        return point
    return replace(
        point,
        host_s=statistics.median(step.host_s for step in steps),
        hidden_s=statistics.median(step.hidden_s for step in steps),
    )


def save_steps(
    path: str | Path, calibration: Calibration, recorded: Sequence[RecordedStep]
) -> None:
    """``calibration`` without its points, and all steps, one a line."""
    head = json.loads(dumps(replace(calibration, points=())))
    lines = [
        json.dumps(
            [
                each.shape,
                each.turn,
                each.work,
                each.index,
                *[
                    float(f"{value:.6g}")
                    for value in (each.step.seconds, each.step.host_s, each.step.hidden_s)
                ],
                *[getattr(each.step.load, name) for name in StepLoad.__slots__],
            ]
        )
        for each in recorded
    ]
    document = {"steps_format": FORMAT, "calibration": head, "columns": _COLUMNS}
    text = json.dumps(document, indent=1)[:-2]
    Path(path).write_text(text + ',\n "steps": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")


def load_steps(path: str | Path) -> tuple[Calibration, list[RecordedStep]]:
    """What `save_steps` wrote.

    Raises:
        CalibrationError: there is no such file, or it is none of this format.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if document["steps_format"] != FORMAT:
            raise CalibrationError(
                f"steps in {path} have format {document['steps_format']}, and this Octavo reads "
                f"{FORMAT}; record them again with octavo calibrate --points"
            )
        calibration = loads(json.dumps(document["calibration"]), str(path))
        if document["columns"] != list(_COLUMNS):
            raise ValueError(f"its columns are not {', '.join(_COLUMNS)}")
        recorded = [
            _recorded(number, row, len(calibration.shapes))
            for number, row in enumerate(document["steps"])
        ]
    except OSError as error:
        raise CalibrationError(f"cannot read recorded steps: {error}") from error
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, CalibrationError):
            raise
        raise CalibrationError(
            f"{path} holds no steps ({error!r}); octavo calibrate --points writes such a file"
        ) from error
    return calibration, recorded


def _recorded(number: int, row: Sequence[float], num_shapes: int) -> RecordedStep:
    """Raises ValueError for what no step can be."""
    if len(row) != len(_COLUMNS):
        raise ValueError(f"step {number} has {len(row)} columns of {len(_COLUMNS)}")
    check_numbers(f"step {number}", row)
    shape, turn, work, index = (int(value) for value in row[:4])
    if shape >= num_shapes:
        raise ValueError(f"step {number} has shape {shape} of {num_shapes}")
    timed = TimedStep(StepLoad(*row[_NUM_BEFORE_LOAD:]), *row[4:_NUM_BEFORE_LOAD])
    if not timed.seconds:
        raise ValueError(f"step {number} took no time")
    return RecordedStep(shape, turn, work, index, timed)


def fitted(calibration: Calibration, recorded: Sequence[RecordedStep]) -> Calibration:
    """``calibration`` with the points of ``recorded``, fitted to them.

    Raises:
        octavo.simulate.fitting.FitError: the steps are too few or too much alike.
    """
    is_gpu = calibration.device == "cuda"
    points = points_of(recorded, calibration.shapes, has_host=is_gpu)
    return replace(calibration, points=tuple(points)).refitted("layer_s" if is_gpu else "step_s")
