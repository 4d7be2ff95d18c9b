"""Fits a machine's coefficients to measured steps: non-negative least squares of relative errors.

All terms of `latency` are linear in one over a rate or in an overhead, but for how bytes and
operations of weights blend, and how long one takes against the other. These two are searched on a
grid, finer where the best one was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.simulate.latency import INFINITE, Coefficients, LatencyModel
from octavo.simulate.load import StepLoad
from octavo.simulate.shape import ModelShape

Vector = NDArray[np.float64]
BLENDS = (1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
# Bytes that are read while one operation is made: 1/10 (a CPU) to 1/1000 (a large GPU).
_RATIOS = np.geomspace(1e-4, 1.0, 33)


class FitError(ValueError):
    """The measured steps do not tell what is asked of them; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Point:
    """``load`` took ``seconds``. Of more than one step the load is their sum, as its terms add up
    where all are of the same number of tokens and rows, ``num_steps`` of them."""

    shape: ModelShape
    load: StepLoad
    seconds: float
    num_steps: int = 1


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


def fit(points: Sequence[Point], *, fixed: str = "step_s") -> Fit:
    """Coefficients of steps without moves. ``fixed`` names what a step's own seconds belong to:
    ``step_s``, or ``layer_s`` where launching layers is what takes them.

    Raises:
        FitError: fewer points than coefficients, or no decoding or no chunks among them.
    """
    if len(points) < 8:
        raise FitError(f"a fit needs at least 8 measured steps, got {len(points)}")
    if not any(p.load.kv_tokens for p in points) or not any(p.load.num_chunks for p in points):
        raise FitError("a fit needs steps that decode and steps with chunks of prompts")
    best: tuple[float, float, float, Vector] | None = None
    ratios = _RATIOS
    for _ in range(3):
        for blend in BLENDS:
            for ratio in ratios.tolist():
                weights, error = _solve(points, blend, ratio, fixed)
                if best is None or error < best[0]:
                    best = (error, blend, ratio, weights)
        assert best is not None
        width = float(ratios[1] / ratios[0])
        ratios = np.geomspace(best[2] / width, best[2] * width, 9)
    assert best is not None
    _, blend, ratio, found = best
    coefficients = _coefficients(found, blend, ratio, fixed)
    return Fit(coefficients, errors(coefficients, points))


def errors(coefficients: Coefficients, points: Sequence[Point]) -> Vector:
    """Predicted over measured, less 1."""
    predicted = [predicted_s(coefficients, point) for point in points]
    return np.array([p / point.seconds - 1 for p, point in zip(predicted, points, strict=True)])


def predicted_s(coefficients: Coefficients, point: Point) -> float:
    """The seconds of all of a point's steps."""
    model = LatencyModel(point.shape, coefficients)
    if point.num_steps == 1:
        return model.seconds(point.load)
    return model.seconds(divided(point.load, point.num_steps)) * point.num_steps


def divided(load: StepLoad, count: int) -> StepLoad:
    """The mean step of ``count``."""
    return StepLoad(*[getattr(load, name) / count for name in StepLoad.__slots__])


def _solve(points: Sequence[Point], blend: float, ratio: float, fixed: str) -> tuple[Vector, float]:
    terms = np.array([_terms(point, blend, ratio, fixed) for point in points])
    seconds = np.array([point.seconds for point in points])
    scaled = terms / seconds[:, None]
    # Columns of one size: the solver's tolerances are absolute.
    sizes = np.maximum(np.linalg.norm(scaled, axis=0), 1e-300)
    solution = non_negative_least_squares(scaled / sizes, np.ones(len(points)))
    residual = scaled / sizes @ solution - 1
    return solution / sizes, float(residual @ residual)


def _terms(point: Point, blend: float, ratio: float, fixed: str) -> list[float]:
    shape, count = point.shape, point.num_steps
    load = divided(point.load, count) if count > 1 else point.load

    def blended(weights: float, rows: float) -> float:
        if not rows:
            return 0.0
        num_bytes = weights * shape.weight_bytes
        operations = 2 * weights * rows * ratio
        return float((num_bytes**blend + operations**blend) ** (1 / blend))

    step = [
        blended(shape.layer_weights, load.num_tokens)
        + blended(shape.head_weights, load.num_sampled),
        load.kv_tokens * shape.token_bytes,
        load.attention_pairs * 4 * shape.attention_width,
        1.0 if fixed == "step_s" else float(shape.num_layers),
        load.num_rows,
        load.num_chunks,
        1.0 if load.num_chunks else 0.0,
    ]
    return [term * count for term in step]


def _coefficients(found: Vector, blend: float, ratio: float, fixed: str) -> Coefficients:
    weights, kv, pairs, own, row, chunk, mixed = found.tolist()
    byte_rate = 1 / weights if weights else INFINITE
    return Coefficients(
        byte_rate=byte_rate,
        flop_rate=byte_rate / ratio,
        blend=blend,
        kv_rate=1 / kv if kv else INFINITE,
        attention_rate=1 / pairs if pairs else INFINITE,
        step_s=own if fixed == "step_s" else 0.0,
        layer_s=own if fixed == "layer_s" else 0.0,
        row_s=row,
        chunk_s=chunk,
        mixed_s=mixed,
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
