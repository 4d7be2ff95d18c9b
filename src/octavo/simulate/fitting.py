"""Fits a machine's coefficients to measured steps: non-negative least squares of relative errors.

All terms of `latency` are linear in one over a rate or in an overhead, but for how bytes and
operations of weights blend, how long one takes against the other, and how many keys it takes to
fill the memory's pipe. These are searched on grids, the ratio finer where the best one was. Steps
that are alike count as one, so that no kind fits better for having been measured more often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2

import numpy as np
from numpy.typing import NDArray

from octavo.simulate.latency import INFINITE, Coefficients, LatencyModel
from octavo.simulate.load import StepLoad
from octavo.simulate.shape import ModelShape

Vector = NDArray[np.float64]
BLENDS = (1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
# Bytes that are read while one operation is made: 1/10 (a CPU) to 1/1000 (a large GPU).
_RATIOS = np.geomspace(1e-4, 1.0, 33)
# Of keys and values in a layer, where a GPU reads them: up to what all of a GPU's multiprocessors
# read in 10 microseconds. Beyond that the ramp would be a second rate.
_RAMP_BYTES = (2.5e6, 5e6, 1e7, 2e7, 4e7)


class FitError(ValueError):
    """The measured steps do not tell what is asked of them; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Point:
    """``load`` took ``seconds``. Of more than one step the load is their sum, as its terms add up
    where all are of the same number of tokens and rows, ``num_steps`` of them.

    The host took ``host_s`` for a step (0: not measured), ``hidden_s`` of them behind the step
    before."""

    shape: ModelShape
    load: StepLoad
    seconds: float
    num_steps: int = 1
    host_s: float = 0.0
    hidden_s: float = INFINITE


@dataclass(frozen=True, slots=True)
class Fit:
    """``errors[i]`` is what is predicted for point i over what was measured, less 1."""

    coefficients: Coefficients
    errors: Vector

    @property
    def mean_error(self) -> float:
        return float(np.abs(self.errors).mean())

    @property
    def p90_error(self) -> float:
        return float(np.percentile(np.abs(self.errors), 90))

    @property
    def worst_error(self) -> float:
        return float(np.abs(self.errors).max())


def fit(
    points: Sequence[Point],
    *,
    fixed: str = "step_s",
    padded_sizes: tuple[int, ...] = (),
    few_rows: int = 0,
) -> Fit:
    """Coefficients of steps without moves. ``fixed`` names what a step's own seconds belong to:
    ``step_s``, or ``layer_s`` for a device whose host works ahead: there the host's seconds are
    fitted too, and the ramp of reading keys. ``padded_sizes`` and ``few_rows`` are known, not
    fitted.

    Raises:
        FitError: fewer points than coefficients, or no decoding or no chunks among them.
    """
    if len(points) < 8:
        raise FitError(f"a fit needs at least 8 measured steps, got {len(points)}")
    if not any(p.load.kv_tokens for p in points) or not any(p.load.num_chunks for p in points):
        raise FitError("a fit needs steps that decode and steps with chunks of prompts")
    at = Coefficients(
        byte_rate=1.0,
        flop_rate=1.0,
        blend=1.0,
        kv_rate=1.0,
        attention_rate=1.0,
        padded_sizes=padded_sizes,
        few_rows=few_rows,
        **(_host(points, padded_sizes) if fixed == "layer_s" else {}),
    )
    seconds = np.array([_device_s(point, at) for point in points])
    counted = _counted(points)
    best: tuple[float, _Bend, Vector] | None = None
    ratios = _RATIOS
    ramps = _RAMP_BYTES if fixed == "layer_s" else (0.0,)
    for _ in range(3):
        for blend in BLENDS if best is None else (best[1].blend,):
            for ratio in ratios.tolist():
                for ramp_bytes in ramps:
                    bend = _Bend(blend, ratio, ramp_bytes)
                    terms = np.array([_terms(point, bend, fixed, at) for point in points])
                    weights, error = _solve(terms, seconds, counted)
                    if best is None or error < best[0]:
                        best = (error, bend, weights)
        assert best is not None
        width = float(ratios[1] / ratios[0])
        ratios = np.geomspace(best[1].ratio / width, best[1].ratio * width, 9)
    assert best is not None
    coefficients = _coefficients(best[2], best[1], fixed, at)
    return Fit(coefficients, errors(coefficients, points))


@dataclass(frozen=True, slots=True)
class _Bend:
    """What the terms are not linear in. Without ``ramp_bytes`` there is no ramp."""

    blend: float
    ratio: float
    ramp_bytes: float


def errors(coefficients: Coefficients, points: Sequence[Point]) -> Vector:
    """Predicted over measured, less 1."""
    predicted = [predicted_s(coefficients, point) for point in points]
    return np.array([p / point.seconds - 1 for p, point in zip(predicted, points, strict=True)])


def predicted_s(coefficients: Coefficients, point: Point) -> float:
    """The seconds of all of a point's steps."""
    model = LatencyModel(point.shape, coefficients)
    load = divided(point.load, point.num_steps) if point.num_steps > 1 else point.load
    step_s = model.with_host(model.seconds(load), load, point.hidden_s)
    return step_s * point.num_steps


def divided(load: StepLoad, count: int) -> StepLoad:
    """The mean step of ``count``."""
    return StepLoad(*[getattr(load, name) / count for name in StepLoad.__slots__])


def _device_s(point: Point, at: Coefficients) -> float:
    """The seconds that the device itself took for a point's steps."""
    if not at.is_captured(point.load.num_tokens / point.num_steps):
        return point.seconds
    exposed_s = max(point.host_s - point.hidden_s, 0.0) * point.num_steps
    # A host that was held up while the device computed exposes less than it took.
    return max(point.seconds - exposed_s, point.seconds / 2)


def _host(points: Sequence[Point], padded_sizes: tuple[int, ...]) -> dict[str, float]:
    """The host's seconds of a step."""
    known = [point for point in points if point.host_s > 0]
    if not known:
        return {}
    last = padded_sizes[-1] if padded_sizes else 0
    terms = [
        [
            1.0,
            point.load.num_rows / point.num_steps,
            1.0 if point.load.num_chunks else 0.0,
            point.shape.num_layers if point.load.num_tokens / point.num_steps > last else 0.0,
        ]
        for point in known
    ]
    seconds = np.array([point.host_s for point in known])
    found, _ = _solve(np.array(terms), seconds, _counted(known))
    names = ("host_s", "host_row_s", "host_mixed_s", "host_layer_s")
    return dict(zip(names, found.tolist(), strict=True))


def _counted(points: Sequence[Point]) -> Vector:
    """What each point's error is multiplied by: those that are alike count as much as one."""
    alike = [_kind(point) for point in points]
    counts = Counter(alike)
    return np.array([counts[kind] ** -0.5 for kind in alike])


def _kind(point: Point) -> tuple[str, int, int, int]:
    """Of as many tokens within 1.4 times, and as many chunks, or keys, within twice."""
    load, count = point.load, point.num_steps
    tokens = int(2 * log2(max(load.num_tokens / count, 1)))
    if load.num_chunks:
        return point.shape.name, tokens, int(log2(max(load.num_chunks / count, 1))), -1
    return point.shape.name, tokens, -1, int(log2(max(load.kv_tokens / count, 1)))


def _solve(terms: Vector, seconds: Vector, counted: Vector) -> tuple[Vector, float]:
    """Least squares of relative errors: what a unit of each term takes, and their squares."""
    scaled = terms / seconds[:, None] * counted[:, None]
    # Columns of one size: the solver's tolerances are absolute.
    sizes = np.maximum(np.linalg.norm(scaled, axis=0), 1e-300)
    solution = non_negative_least_squares(scaled / sizes, counted)
    residual = scaled / sizes @ solution - counted
    return solution / sizes, float(residual @ residual)


def _terms(point: Point, bend: _Bend, fixed: str, at: Coefficients) -> list[float]:
    shape, count, blend = point.shape, point.num_steps, bend.blend
    load = divided(point.load, count) if count > 1 else point.load

    def blended(weights: float, rows: float) -> float:
        if not rows:
            return 0.0
        num_bytes, rows = weights * shape.weight_bytes, at.padded(rows)
        if rows <= at.few_rows:
            return float(num_bytes)
        operations = 2 * weights * rows * bend.ratio
        return float((num_bytes**blend + operations**blend) ** (1 / blend))

    kv_bytes = load.kv_tokens * shape.token_bytes
    # Of one layer, what it reads over as much and ``ramp_bytes``.
    ramp = kv_bytes / (kv_bytes / shape.num_layers + bend.ramp_bytes) if bend.ramp_bytes else 0.0
    step = [
        blended(shape.layer_weights, load.num_tokens)
        + blended(shape.head_weights, load.num_sampled),
        kv_bytes,
        load.attention_pairs * 4 * shape.attention_width,
        1.0 if fixed == "step_s" else float(shape.num_layers),
        load.num_rows,
        load.num_chunks,
        1.0 if load.num_chunks else 0.0,
        ramp,
        kv_bytes if load.num_chunks and fixed == "layer_s" else 0.0,
    ]
    return [term * count for term in step]


def _coefficients(found: Vector, bend: _Bend, fixed: str, at: Coefficients) -> Coefficients:
    weights, kv, pairs, own, row, chunk, mixed, ramp, mixed_kv = found.tolist()
    byte_rate = 1 / weights if weights else INFINITE
    return replace(
        at,
        byte_rate=byte_rate,
        flop_rate=byte_rate / bend.ratio,
        blend=bend.blend,
        kv_rate=1 / kv if kv else INFINITE,
        attention_rate=1 / pairs if pairs else INFINITE,
        step_s=own if fixed == "step_s" else 0.0,
        layer_s=own if fixed == "layer_s" else 0.0,
        row_s=row,
        chunk_s=chunk,
        mixed_s=mixed,
        mixed_kv_rate=1 / mixed_kv if mixed_kv else INFINITE,
        ramp_s=ramp,
        ramp_bytes=bend.ramp_bytes or 1.0,
    )


def non_negative_least_squares(a: Vector, b: Vector) -> Vector:
    """The ``x >= 0`` that minimises ``|a x - b|``, ``a [m, n]`` and ``b [m]`` (Lawson and Hanson,
    Solving Least Squares Problems, chapter 23)."""
    num_columns = a.shape[1]
    x = np.zeros(num_columns)
    active = np.zeros(num_columns, dtype=bool)
    gradient = a.T @ b
    for _ in range(3 * num_columns):
        candidates = np.where(active, -np.inf, gradient)
        if candidates.max() <= 1e-10:
            break
        active[int(candidates.argmax())] = True
        while True:
            solution = np.zeros(num_columns)
            solution[active] = np.linalg.lstsq(a[:, active], b, rcond=None)[0]
            if (solution[active] > 0).all():
                break
            falling = active & (solution <= 0)
            steps = x[falling] / np.maximum(x[falling] - solution[falling], 1e-300)
            x = x + float(steps.min()) * (solution - x)
            active &= x > 1e-15
            if not active.any():
                break
        x = solution
        gradient = a.T @ (b - a @ x)
    return x
