"""Calibrates a machine: engines are measured, one after the other, and their steps fitted.

`designed_steps` runs the batches and `block_moves` moves blocks; here is what a calibration says of
the machine beside that.

Run it as ``octavo calibrate`` or, with PyTorch alone, ``python -m octavo.bench.calibrate``.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.bench.block_moves import measure_mapping, measure_moves
from octavo.bench.calibration_designs import CPU, CUDA, Designs
from octavo.bench.designed_steps import measure_steps
from octavo.bench.recorded_steps import RecordedStep, fitted, load_steps, save_steps
from octavo.config import ConfigError
from octavo.core.request import ContextLengthError
from octavo.output_files import check_writable
from octavo.simulate.calibration import Calibration
from octavo.simulate.latency import INFINITE, Coefficients
from octavo.simulate.shape import ModelShape

if TYPE_CHECKING:
    from octavo.engine.core import EngineCore
    from octavo.engine.report import EngineReport


def calibrate(
    models: Sequence[str],
    *,
    name: str,
    tell: Callable[[str], None],
    designs: Designs | None = None,
    steps_out: str | None = None,
    **options: Any,
) -> Calibration:
    """Measure engines of ``models``, the first the calibration's own, and fit. ``steps_out`` is a
    file for every step that was timed (`octavo.bench.recorded_steps`).

    ``options`` are the engine's (`octavo.config.EngineConfig`).
    """
    engines = [
        _measure_engine(index, model, designs, tell, options) for index, model in enumerate(models)
    ]
    first = engines[0]
    moves = dict(first.moves)
    if sys.platform == "linux":
        moves |= _measure_mapping(models[-1], options)
        tell("blocks moved")
    recorded = [step for engine in engines for step in engine.steps]
    measured = Calibration(
        name=name,
        device="cuda" if first.is_gpu else "cpu",
        source=f"measured by octavo calibrate: the least disturbed of {first.rounds} round(s)",
        coefficients=replace(
            _NOT_FITTED,
            swaps_beside=first.is_gpu,
            padded_sizes=first.padded_sizes,
            few_rows=first.few_rows,
            **moves,
        ),
        shapes=tuple(engine.shape for engine in engines),
        machine=_machine(first.is_gpu),
        commit=_commit(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        versions=_versions(),
        engine={"summary": first.summary, **{key: str(value) for key, value in options.items()}},
        block_size=first.block_size,
    )
    if steps_out is not None:
        # Before the fit, so that nothing measured is lost where it fails.
        save_steps(steps_out, measured, recorded)
    return fitted(measured, recorded)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """What was measured with an engine that is gone."""

    shape: ModelShape
    steps: list[RecordedStep]
    padded_sizes: tuple[int, ...]
    few_rows: int
    moves: dict[str, float]
    is_gpu: bool
    rounds: int
    block_size: int
    summary: str


_OPTIONS = {"prefix_caching": False, "max_queued_requests": 100_000}
# Copies to the host are measured, too.
_SWAPPING = {"preemption": "swap", "swap_memory": "256MiB"}


# Stands for what is fitted to the steps.
_NOT_FITTED = Coefficients(
    byte_rate=INFINITE, flop_rate=INFINITE, blend=1.0, kv_rate=INFINITE, attention_rate=INFINITE
)


def _measure_engine(
    index: int,
    model: str,
    designs: Designs | None,
    tell: Callable[[str], None],
    options: Mapping[str, Any],
) -> _Engine:
    """Its memory is free afterwards: the next engine takes what there is."""
    from octavo.config import EngineConfig
    from octavo.engine.build import build_engine

    core, report = build_engine(EngineConfig(**_OPTIONS | _SWAPPING | options | {"model": model}))
    is_gpu = not report.device.startswith("cpu")
    chosen = designs or (CUDA if is_gpu else CPU)
    shape = _shape(model, report)
    moves = measure_moves(core.executor)
    # The engine's own executor: what times the steps stands before it later.
    graphs = getattr(getattr(core.executor, "runner", None), "graphs", None)
    padded_sizes, few_rows = (), 0
    if graphs is not None:
        from octavo.execution.kernels.linear import FEW_ROWS

        padded_sizes, few_rows = graphs.padded_sizes, FEW_ROWS
    tell(f"{report.model}: {chosen.warm_rounds + chosen.rounds} rounds of steps, a while each")
    try:
        steps = measure_steps(core, report, chosen, tell, index)
    except ContextLengthError as error:
        raise ConfigError(
            f"{report.model}: the engine is too small to be measured: {error}; give more "
            "--kv-memory, or a larger --max-model-len"
        ) from error
    finally:
        _close(core)
    return _Engine(
        shape=shape,
        steps=steps,
        padded_sizes=padded_sizes,
        few_rows=few_rows,
        moves=moves,
        is_gpu=is_gpu,
        rounds=chosen.rounds,
        block_size=report.capacity.block_size,
        summary=str(report),
    )


def _measure_mapping(model: str, options: Mapping[str, Any]) -> dict[str, float]:
    from octavo.config import EngineConfig
    from octavo.engine.build import build_engine

    small = {"kv": "virtual", "attention": "auto", "kv_memory": "1GiB"}
    core, report = build_engine(EngineConfig(**_OPTIONS | options | small | {"model": model}))
    found = measure_mapping(core.executor, report.max_model_len)
    _close(core)
    return found


def _shape(model: str, report: EngineReport) -> ModelShape:
    from octavo.execution.models.loading import load_config
    from octavo.model_store import resolve_model

    shape = ModelShape.of(_short(model), load_config(resolve_model(model)))
    weights = shape.layer_weights + shape.head_weights
    return replace(
        shape,
        weight_bytes=(report.weight_bytes - shape.other_bytes) / weights,
        token_bytes=report.capacity.block_bytes / report.capacity.block_size,
    )


def _short(model: str) -> str:
    return Path(model).stem


def _close(core: EngineCore) -> None:
    """Give the memory back before the next engine takes what there is."""
    import torch

    core.executor.close()
    core.executor = None  # type: ignore[assignment]
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _machine(is_gpu: bool) -> str:
    import torch

    if is_gpu:
        return torch.cuda.get_device_name()
    found = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                found = line.split(":", 1)[1].strip()
                break
    return f"{found}, {torch.get_num_threads()} compute thread(s)"


def _commit() -> str:
    folder = Path(__file__).parent
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    import torch

    from octavo import __version__

    return {
        "octavo": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a machine's steps and fit them.")
    parser.add_argument("--model", action="append", help="a shape's name, or any model; repeatable")
    parser.add_argument("--name", default="calibration")
    parser.add_argument("--out", required=True, help="the file to write")
    parser.add_argument("--points", help="write every step that was timed to this file")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    check_writable("--out", Path(given.out))
    run(
        given.model or ["smollm2-135m"],
        name=given.name,
        out=given.out,
        points=given.points,
        tell=lambda text: print(text, file=sys.stderr, flush=True),
        device=given.device,
        threads=given.threads,
    )


def run(
    models: Sequence[str],
    *,
    name: str,
    out: str | None,
    tell: Callable[[str], None],
    points: str | None = None,
    **options: Any,
) -> Calibration:
    """`calibrate`, with the shapes of `octavo.bench.works` run on random weights; ``out`` is the
    file to write, ``points`` one for every step that was timed."""
    from octavo.bench.works import SHAPES, check_shape, shape

    for model in models:
        check_shape(model, options.get("device", "auto"))
    if models[0] in SHAPES:
        options["load_format"] = "dummy"
    paths = [shape(model) if model in SHAPES else model for model in models]
    calibration = calibrate(paths, name=name, tell=tell, steps_out=points, **options)
    if out is not None:
        calibration.save(out)
    tell(summary(calibration))
    return calibration


def refit(points: str, *, out: str | None, tell: Callable[[str], None]) -> Calibration:
    """Fit again to the steps in the file ``points``; ``out`` is the file to write.

    Raises:
        CalibrationError: ``points`` holds no recorded steps.
        FitError: they are too few or too much alike.
    """
    calibration = fitted(*load_steps(points))
    if out is not None:
        calibration.save(out)
    tell(summary(calibration))
    return calibration


def summary(calibration: Calibration) -> str:
    """Coefficients and residuals, as text."""
    found, at = calibration.fit_errors(), calibration.coefficients
    # Neither rate is bounded where steps as short as a small model's show none.
    beside_s = 1 / at.kv_rate + 1 / at.mixed_kv_rate
    beside_rate = 1 / beside_s if beside_s else INFINITE
    lines = [
        f"{calibration.name}: {calibration.machine}, {calibration.date}",
        f"weights {at.byte_rate / 1e9:.1f} GB/s, products {at.flop_rate / 1e12:.3f} TFLOP/s, blend "
        f"{at.blend:g}; keys and values {at.kv_rate / 1e9:.1f} GB/s and {at.ramp_s * 1e6:.1f} µs a "
        f"layer, half of it at {at.ramp_bytes / 1e6:g} MB; attention of chunks "
        f"{at.attention_rate / 1e12:.3f} TFLOP/s; beside chunks "
        f"{beside_rate / 1e9:.1f} GB/s of them",
        f"a step {at.step_s * 1e6:.0f} µs, a layer {at.layer_s * 1e6:.1f} µs, a row "
        f"{at.row_s * 1e6:.1f} µs, a chunk {at.chunk_s * 1e6:.1f} µs, having chunks "
        f"{at.mixed_s * 1e6:.0f} µs",
        f"host: a step {at.host_s * 1e6:.0f} µs, a row {at.host_row_s * 1e6:.1f} µs, having chunks "
        f"{at.host_mixed_s * 1e6:.0f} µs, a layer launched by kernels {at.host_layer_s * 1e6:.0f} "
        f"µs; {len(at.padded_sizes)} padded sizes",
        f"copies {at.copy_rate / 1e9:.1f} GB/s and {at.copy_step_s * 1e6:.0f} µs, swaps "
        f"{at.swap_rate / 1e9:.1f} GB/s, mapping {at.map_s * 1e6:.1f} µs a block and "
        f"{at.map_step_s * 1e6:.0f} µs",
        f"error over {len(calibration.points)} points: mean {found.mean_error:.1%}, P90 "
        f"{found.p90_error:.1%}, worst {found.worst_error:.1%}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
