"""How well the simulator predicts: the same requests through the real engine and the simulated one.

Both get the same arrivals; tokens are timed where the engine's steps end, by the same code. Three
works: one that decodes, one that computes prompts, and ShareGPT's lengths at a rate.

Run it as ``octavo bench simulator --compare`` or, with PyTorch alone, ``python -m
octavo.bench.prediction``.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.config import EngineConfig
from octavo.core.plan import int_array
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.simulate.calibration import Calibration, load_calibration
from octavo.simulate.cluster import Cluster
from octavo.simulate.latency import LatencyModel
from octavo.simulate.outcome import Outcome, TokenTimes
from octavo.simulate.recording import TimedStep
from octavo.simulate.replica import ReplicaConfig
from octavo.workload.items import WorkItem
from octavo.workload.workload import make_workload

if TYPE_CHECKING:
    from octavo.engine.core import EngineCore
    from octavo.engine.report import EngineReport

CALIBRATIONS = {"cpu": "cpu-smollm2-135m", "cuda": "h200-llama-3.1-8b"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the three works: numbers of requests, their tokens, requests a second."""

    decode: tuple[int, int, int]
    prefill: tuple[int, int, int]
    prefill_rate: float
    sharegpt: int
    sharegpt_rate: float
    max_total_len: int


SIZES = {
    "cpu": Sizes(
        decode=(16, 32, 160),
        prefill=(20, 512, 4),
        prefill_rate=1.2,
        sharegpt=24,
        sharegpt_rate=0.6,
        max_total_len=700,
    ),
    "cuda": Sizes(
        decode=(256, 128, 512),
        prefill=(64, 4096, 16),
        prefill_rate=6.0,
        sharegpt=300,
        sharegpt_rate=20.0,
        max_total_len=2048,
    ),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """``errors`` are predicted over measured, less 1, by figure. ``steps`` are those of the real
    engine against the same steps predicted, by kind (`StepErrors`)."""

    work: str
    measured: Outcome
    predicted: Outcome
    errors: dict[str, float]
    steps: dict[str, StepErrors]

    @classmethod
    def of(
        cls, work: str, measured: Outcome, predicted: Outcome, steps: dict[str, StepErrors]
    ) -> Comparison:
        pairs = {"tokens_per_s": (predicted.tokens_per_s, measured.tokens_per_s)}
        for name in ("ttft_s", "itl_s"):
            for point in ("p50", "p90", "p99"):
                found = getattr(predicted, name)[point], getattr(measured, name)[point]
                pairs[f"{name.removesuffix('_s')}_{point}"] = found
        errors = {key: a / b - 1 for key, (a, b) in pairs.items()}
        return cls(work, measured, predicted, errors, steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepErrors:
    """Of ``num_steps`` real steps: seconds in all, ``host_s`` of them a GPU waiting for the host,
    and what is predicted for the same steps; ``p50`` and ``p90`` are percentiles of predicted over
    measured, less 1, of single steps. What disturbs a machine makes steps longer, never shorter, so
    where ``p90`` is near 0 the model is right about the undisturbed ones."""

    num_steps: int
    measured_s: float
    predicted_s: float
    host_s: float
    p50: float
    p90: float

    @classmethod
    def of(cls, steps: Sequence[TimedStep], latency: LatencyModel) -> StepErrors:
        predicted = np.array(
            [latency.with_host(latency.seconds(s.load), s.load, s.hidden_s) for s in steps]
        )
        measured = np.array([step.seconds for step in steps])
        p50, p90 = np.percentile(predicted / measured - 1, (50, 90)).tolist()
        return cls(
            num_steps=len(steps),
            measured_s=float(measured.sum()),
            predicted_s=float(predicted.sum()),
            host_s=sum(step.seconds - step.device_s for step in steps),
            p50=p50,
            p90=p90,
        )


def step_errors(steps: Sequence[TimedStep], latency: LatencyModel) -> dict[str, StepErrors]:
    """Of steps that only decode (``decode``) and of those with chunks of prompts (``chunks``)."""
    kinds = {
        "decode": [s for s in steps if s.load.num_tokens and not s.load.num_chunks],
        "chunks": [s for s in steps if s.load.num_chunks],
    }
    return {kind: StepErrors.of(found, latency) for kind, found in kinds.items() if found}


def works(sizes: Sizes, seed: int = 0) -> dict[str, list[WorkItem]]:
    """The three works, by name."""
    trace = str(resources.files("octavo.bench") / "data" / "sharegpt_lengths_1000.csv")

    def fixed(lengths: tuple[int, int, int], **arrivals: Any) -> list[WorkItem]:
        count, num_prompt, num_output = lengths
        return make_workload(
            trace=None,
            num_requests=count,
            input_len=num_prompt,
            output_len=num_output,
            seed=seed,
            **arrivals,
        )

    return {
        "decode-heavy": fixed(sizes.decode),
        "prefill-heavy": fixed(sizes.prefill, arrivals="poisson", rate=sizes.prefill_rate),
        "sharegpt": make_workload(
            trace=trace,
            num_requests=sizes.sharegpt,
            input_len=1,
            output_len=1,
            arrivals="poisson",
            rate=sizes.sharegpt_rate,
            max_total_len=sizes.max_total_len,
            seed=seed,
        ),
    }


def measured(
    core: EngineCore,
    vocab_size: int,
    items: Sequence[WorkItem],
    resume: Callable[[], None] = lambda: None,
) -> TokenTimes:
    """Serve ``items`` with the real engine, each when it arrives. ``resume`` is called when the
    engine begins to work after a rest."""
    random = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    requests = [
        Request(
            index,
            int_array(random.integers(0, vocab_size, item.num_prompt_tokens)),
            params,
            item.num_output_tokens,
            0,
        )
        for index, item in enumerate(items)
    ]
    times = TokenTimes(items)
    arrived = 0
    gc.collect()
    gc.freeze()
    resume()
    started = time.perf_counter()
    while arrived < len(items) or core.has_work:
        now_s = time.perf_counter() - started
        while arrived < len(items) and items[arrived].arrival_s <= now_s:
            core.scheduler.add(requests[arrived])
            arrived += 1
        if not core.has_work:
            time.sleep(max(items[arrived].arrival_s - now_s, 0.0))
            resume()
            continue
        outputs = core.step()
        times.note(time.perf_counter() - started, outputs)
    gc.unfreeze()
    return times


def replica_config(report: EngineReport) -> ReplicaConfig:
    """The simulated twin of a real engine without prefix caching."""
    capacity = report.capacity
    return ReplicaConfig(
        num_blocks=capacity.num_blocks,
        kv=report.kv,
        block_size=capacity.block_size,
        block_bytes=capacity.block_bytes,
        max_num_seqs=report.max_num_seqs,
        max_num_batched_tokens=report.max_num_batched_tokens,
        max_model_len=report.max_model_len,
        depth=report.depth,
    )


def run(
    model: str,
    *,
    calibration: str | None = None,
    sizes: Sizes | None = None,
    rounds: int = 3,
    tell: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> dict[str, Any]:
    """All comparisons, ready for JSON: of each work the round in which requests took least, since
    what else a machine does only adds. ``options`` are the engine's."""
    from octavo.bench.designed_steps import timed
    from octavo.bench.works import SHAPES, check_shape, shape
    from octavo.engine.build import build_engine

    check_shape(model, options.get("device", "auto"))
    if model in SHAPES:
        model, options = shape(model), {"load_format": "dummy"} | options
    given: dict[str, Any] = {"prefix_caching": False, "max_queued_requests": 100_000} | options
    core, report = build_engine(EngineConfig(model=model, **given))
    device = "cpu" if report.device.startswith("cpu") else "cuda"
    found: Calibration = load_calibration(calibration or CALIBRATIONS[device])
    latency, config = found.latency(), replica_config(report)
    asked = works(sizes or SIZES[device])
    runs: dict[str, list[tuple[Outcome, list[TimedStep]]]] = {name: [] for name in asked}
    timing = timed(core.executor)
    core.executor = timing
    # Once before, with few requests: the first steps of a kind capture or compile.
    for items in works(_few(sizes or SIZES[device])).values():
        measured(core, report.vocab_size, items)
    for _ in range(rounds):
        for name, items in asked.items():
            timing.steps = []
            outcome = measured(core, report.vocab_size, items, timing.resume).outcome()
            runs[name].append((outcome, timing.steps))
            if outcome.num_failed:
                raise RuntimeError(f"requests of {name} failed; see the log")
    comparisons = []
    for name, items in asked.items():
        real, steps = min(runs[name], key=lambda run: run[0].e2e_s["mean"])
        simulated = Cluster(config, latency).run(items).outcome()
        comparisons.append(Comparison.of(name, real, simulated, step_errors(steps, latency)))
        tell(line(comparisons[-1]))
        tell(steps_line(comparisons[-1]))
    core.close()
    return {
        "engine": str(report),
        "calibration": found.name,
        "works": [asdict(each) for each in comparisons],
        "worst_error": max(abs(e) for each in comparisons for e in each.errors.values()),
    }


def _few(sizes: Sizes) -> Sizes:
    decode, prefill = sizes.decode, sizes.prefill
    return Sizes(
        decode=(decode[0], decode[1], 8),
        prefill=(2, *prefill[1:]),
        prefill_rate=1000.0,
        sharegpt=2,
        sharegpt_rate=1000.0,
        max_total_len=min(sizes.max_total_len, 200),
    )


HEADER = (
    f"{'work':<14} {'tokens/s':>20} {'TTFT ms, P50':>20} {'P90':>18} {'P99':>18} "
    f"{'ITL ms, P50':>20} {'P90':>18} {'P99':>18}"
)


def line(comparison: Comparison) -> str:
    """Predicted, measured and error of each figure, under `HEADER`."""
    real, simulated = comparison.measured, comparison.predicted
    cells = [f"{simulated.tokens_per_s:.0f}/{real.tokens_per_s:.0f}"]
    for name in ("ttft_s", "itl_s"):
        for point in ("p50", "p90", "p99"):
            values = getattr(simulated, name)[point] * 1e3, getattr(real, name)[point] * 1e3
            cells.append("{:.1f}/{:.1f}".format(*values))
    widths = (20, 20, 18, 18, 20, 18, 18)
    found = [
        f"{cell} {error:+.1%}".rjust(width)
        for cell, error, width in zip(cells, comparison.errors.values(), widths, strict=True)
    ]
    return f"{comparison.work:<14} " + " ".join(found)


def steps_line(comparison: Comparison) -> str:
    """Where an error comes from: the steps of the real engine against the same steps predicted."""
    parts = [
        f"{found.num_steps} steps {kind}: {found.predicted_s:.2f}/{found.measured_s:.2f} s "
        f"{found.predicted_s / found.measured_s - 1:+.1%} (P50 {found.p50:+.1%}, P90 "
        f"{found.p90:+.1%}; device idle for the host {found.host_s:.2f} s)"
        for kind, found in comparison.steps.items()
    ]
    return f"{'':<14} " + "; ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the simulator with the engine.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--calibration", help="a name or a file")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(HEADER, file=sys.stderr, flush=True)
    report = run(
        given.model,
        calibration=given.calibration,
        tell=lambda text: print(text, file=sys.stderr, flush=True),
        threads=given.threads,
        rounds=given.rounds,
    )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
