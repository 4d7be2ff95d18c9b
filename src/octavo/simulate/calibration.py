"""Calibrations: what was measured on a machine, the coefficients that fit it, and where it is from.

A calibration is one small JSON file. Those of `available` ship with Octavo; `octavo calibrate`
makes others. It keeps its measured points, so that a fit can be checked and repeated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from octavo.simulate.fitting import Fit, Point, errors, fit
from octavo.simulate.latency import INFINITE, Coefficients, LatencyModel
from octavo.simulate.load import StepLoad
from octavo.simulate.shape import ModelShape

FORMAT = 2
# Files of format 1 have no ramp, no padded sizes and no host's seconds: these cost nothing there.
_READABLE = (1, FORMAT)


_HOST = ("host_s", "hidden_s")
_NUM_COLUMNS = 3 + len(StepLoad.__slots__)


class CalibrationError(ValueError):
    """There is no such calibration, or its file is broken; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """``points`` were measured with the first of ``shapes`` unless they say otherwise. ``machine``,
    ``versions``, ``commit`` and ``date`` say on what, ``source`` how they were measured, ``engine``
    with which options."""

    name: str
    device: str
    source: str
    coefficients: Coefficients
    shapes: tuple[ModelShape, ...]
    points: tuple[Point, ...] = ()
    machine: str = ""
    commit: str = ""
    date: str = ""
    versions: dict[str, str]
    engine: dict[str, Any]
    block_size: int = 16

    @property
    def shape(self) -> ModelShape:
        return self.shapes[0]

    def latency(self) -> LatencyModel:
        """Of the model that was measured; `LatencyModel.for_shape` gives another's."""
        return LatencyModel(self.shape, self.coefficients, self.block_size)

    def fit_errors(self) -> Fit:
        """How well the coefficients predict the points."""
        return Fit(self.coefficients, errors(self.coefficients, self.points))

    def refitted(self, fixed: str) -> Calibration:
        """Its own points, fitted again; padded sizes and what moves blocks cost are kept."""
        at = self.coefficients
        found = fit(
            self.points, fixed=fixed, padded_sizes=at.padded_sizes, few_rows=at.few_rows
        ).coefficients
        kept = ("copy_rate", "copy_step_s", "swap_rate", "map_s", "map_step_s", "swaps_beside")
        kept += ("link_rate", "link_s")
        values = {each.name: getattr(found, each.name) for each in fields(Coefficients)}
        values |= {name: getattr(self.coefficients, name) for name in kept}
        mine = {each.name: getattr(self, each.name) for each in fields(Calibration)}
        return Calibration(**mine | {"coefficients": Coefficients(**values)})

    def save(self, path: str | Path) -> None:
        Path(path).write_text(dumps(self), encoding="utf-8")


def available() -> list[str]:
    """Names of the calibrations that ship."""
    folder = resources.files("octavo.simulate") / "calibrations"
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith("json"))


def load_calibration(name: str) -> Calibration:
    """A shipped calibration by its name, or a file's.

    Raises:
        CalibrationError: there is none, or it is broken.
    """
    if name in available():
        folder = resources.files("octavo.simulate") / "calibrations"
        return loads(folder.joinpath(f"{name}.json").read_text(encoding="utf-8"), name)
    path = Path(name)
    if not path.is_file():
        raise CalibrationError(
            f"no calibration {name!r}: give a file that octavo calibrate wrote, or one of "
            f"{', '.join(available())}"
        )
    return loads(path.read_text(encoding="utf-8"), name)


def dumps(calibration: Calibration) -> str:
    """As JSON: a point a line. What costs nothing has the rate null."""
    num_shapes = {shape.name: index for index, shape in enumerate(calibration.shapes)}
    coefficients = {
        name: None if value == INFINITE else value
        for name, value in asdict(calibration.coefficients).items()
    }
    summary = {}
    if calibration.points:
        found = calibration.fit_errors()
        summary = {
            "num_points": len(calibration.points),
            "mean_error": round(found.mean_error, 4),
            "p90_error": round(found.p90_error, 4),
            "worst_error": round(found.worst_error, 4),
        }
    document = {
        "format": FORMAT,
        "name": calibration.name,
        "device": calibration.device,
        "machine": calibration.machine,
        "source": calibration.source,
        "date": calibration.date,
        "commit": calibration.commit,
        "versions": calibration.versions,
        "engine": calibration.engine,
        "block_size": calibration.block_size,
        "coefficients": coefficients,
        "fit": summary,
        "shapes": [asdict(shape) for shape in calibration.shapes],
        "point_columns": ["shape", "num_steps", "seconds", *StepLoad.__slots__, *_HOST],
    }
    lines = [
        json.dumps(
            [
                num_shapes[point.shape.name],
                point.num_steps,
                float(f"{point.seconds:.6g}"),
                *[getattr(point.load, name) for name in StepLoad.__slots__],
                float(f"{point.host_s:.6g}"),
                None if point.hidden_s == INFINITE else float(f"{point.hidden_s:.6g}"),
            ]
        )
        for point in calibration.points
    ]
    head = json.dumps(document, indent=1)[:-2]
    return head + ',\n "points": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


def loads(text: str, name: str) -> Calibration:
    """From `dumps`; ``name`` is for messages.

    Raises:
        CalibrationError: it is no calibration of this format.
    """
    try:
        document = json.loads(text)
        if document["format"] not in _READABLE:
            raise CalibrationError(
                f"calibration {name} has format {document['format']}, and this Octavo reads "
                f"{' and '.join(map(str, _READABLE))}; make it again with octavo calibrate"
            )
        shapes = tuple(ModelShape(**shape) for shape in document["shapes"])
        rates: dict[str, Any] = {
            key: INFINITE if value is None else value
            for key, value in document["coefficients"].items()
        }
        rates["padded_sizes"] = tuple(rates.get("padded_sizes", ()))
        check_numbers("padded_sizes", rates["padded_sizes"])
        for key, value in rates.items():
            if key != "padded_sizes" and value != INFINITE:
                check_numbers(key, (value,))
        kept = ("name", "device", "machine", "source", "date", "commit", "versions", "engine")
        return Calibration(
            **{key: document[key] for key in kept},
            block_size=document["block_size"],
            coefficients=Coefficients(**rates),
            shapes=shapes,
            points=_points(document["points"], shapes),
        )
    except CalibrationError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CalibrationError(
            f"calibration {name} is broken ({error!r}); make it again with octavo calibrate"
        ) from error


def check_numbers(what: str, values: Iterable[object]) -> None:
    """Counts, times and rates are numbers, finite and not below 0.

    Raises:
        ValueError: one of ``values`` is not.
    """
    for value in values:
        if not isinstance(value, int | float) or not 0 <= value < INFINITE:
            raise ValueError(f"{what}: {value!r} is no finite number of at least 0")


def _points(rows: Sequence[Sequence[Any]], shapes: Sequence[ModelShape]) -> tuple[Point, ...]:
    """Format 1 ends with the load."""
    points = []
    for number, row in enumerate(rows):
        check_numbers(f"point {number}", row[:-1] if row[-1] is None else row)
        host_s, hidden_s = row[_NUM_COLUMNS:] or (0.0, None)
        points.append(
            Point(
                shapes[int(row[0])],
                StepLoad(*row[3:_NUM_COLUMNS]),
                float(row[2]),
                int(row[1]),
                host_s,
                INFINITE if hidden_s is None else hidden_s,
            )
        )
    return tuple(points)
