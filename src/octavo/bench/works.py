"""Whole works on a GPU, token ids in and out: each figure beside its floor in the same run.

::

    decode N       N prompts of 128 random tokens: time of 257 outputs less that of 1, a step
    sharegpt       1000 requests with ShareGPT's lengths, all submitted at once
    shared-prefix  512 requests with 2048 tokens in common, 64 of their own and 64 out
    prefill N      one prompt of N tokens
    startup        from the start of a process to its first token
    load           the same, reading a checkpoint (written before) from the page cache, with no
                   kernel compiled and again
    sampling       decode 64 again, every row with penalties, or with log probabilities
    swap           blocks to host memory and back, and beside decode steps
    graphs         what captured steps take of the memory kept for them: after decoding at every
                   number of rows, and prompts of every length to which steps are padded
    deterministic  decode, with the same bits whatever the batch

Floors are those of `floors`, at the rates of `ceilings`.

Run it as ``octavo bench gpu`` or, with PyTorch alone, ``python -m octavo.bench.works``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.bench.floors import Cost, Floors
from octavo.config import ConfigError
from octavo.core.sampling_params import SamplingParams
from octavo.engine.heap import frozen_meanwhile
from octavo.workload.traces import load_trace

if TYPE_CHECKING:
    from octavo.bench.ceilings import Ceilings
    from octavo.engine.llm import LLM

SHAPES = ("llama-3.1-8b", "llama-3.2-1b")
WORKS = (
    "startup",
    "load",
    "swap",
    "decode",
    "sampling",
    "sharegpt",
    "prefill",
    "graphs",
    "shared-prefix",
    "deterministic",
)
DECODE_ROWS = (1, 8, 32, 64, 128, 256, 512)
PREFILL_TOKENS = (8192, 32768, 65536, 122880)
DETERMINISTIC_ROWS = (1, 32, 256)
_PROMPT, _STEPS, _WARM_STEPS = 128, 256, 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """``figure`` and ``floor`` in ``unit``; ``share`` of the floor reached, 1 at best."""

    work: str
    unit: str
    figure: float
    floor: float | None = None
    share: float | None = None
    notes: str = ""


def shape(name: str) -> str:
    """Path of a model's shape, to be run with random weights."""
    return str(resources.files("octavo.bench") / "shapes" / f"{name}.json")


def check_shape(model: str, device: str) -> None:
    """Raises `ConfigError` where one of `SHAPES` would run on a CPU that nobody asked for: where
    ``device``, as asked for, is not ``cpu`` and there is no GPU."""
    from octavo.engine.build import choose_device

    if model in SHAPES and device != "cpu" and choose_device(device) == "cpu":
        raise ConfigError(
            f"PyTorch finds no CUDA device here, which {model} is a shape for: its random weights "
            "take gigabytes, and each engine of it minutes; name a smaller model, or say "
            "--device cpu"
        )


def open_llm(name: str, **options: Any) -> LLM:
    """An engine of random weights of one of `SHAPES`, or of any other ``config.json``."""
    from octavo.engine.llm import LLM

    path = shape(name) if name in SHAPES else name
    return LLM(path, **{"load_format": "dummy", "max_queued_requests": 100_000} | options)


def generate(
    llm: LLM, lengths: Sequence[tuple[int, int]], seed: int, prefix: int = 0, **asked: Any
) -> float:
    """Seconds for requests of (prompt, output) random tokens, ``prefix`` tokens in common.
    ``asked`` are further sampling parameters."""
    random = np.random.default_rng(seed)
    common = random.integers(0, llm.report.vocab_size, prefix).tolist()
    prompts = [
        common + random.integers(0, llm.report.vocab_size, prompt).tolist() for prompt, _ in lengths
    ]
    params = [
        SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, **asked)
        for _, output in lengths
    ]
    gc.collect()
    with frozen_meanwhile():
        started = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - started


def decode(llm: LLM, rows: int, ceilings: Ceilings, steps: int = _STEPS, **asked: Any) -> Figure:
    # Long enough for every row to decode at once: steps of all the sizes that come are captured.
    generate(llm, [(_PROMPT, _WARM_STEPS)] * rows, 1, **asked)
    one = min(generate(llm, [(_PROMPT, 1)] * rows, seed, **asked) for seed in (2, 3))
    floors = Floors(llm, ceilings)
    with floors.counted():
        many = generate(llm, [(_PROMPT, steps + 1)] * rows, 4, **asked)
    step_ms = (many - one) / steps * 1e3
    floor_s = Cost.of(llm).step_s(rows, rows, rows * (_PROMPT + steps / 2), ceilings)
    return _timed(f"decode {rows}", "ms a step", step_ms, floor_s * 1e3, floors.host(many))


def sampling(llm: LLM, ceilings: Ceilings, rows: int = 64) -> list[Figure]:
    """What rows ask for beside the likeliest token; the floor is that of a plain step."""
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
    asked: dict[str, dict[str, Any]] = {
        "penalties": penalties,
        "logprobs 20": {"logprobs": 20},
        "both": {**penalties, "logprobs": 20},
    }
    return [
        replace(decode(llm, rows, ceilings, **params), work=f"{name}, {rows} rows")
        for name, params in asked.items()
    ]


def sharegpt(llm: LLM, ceilings: Ceilings) -> list[Figure]:
    """Twice: the first run also captures the steps of every batch size it passes."""
    path = resources.files("octavo.bench") / "data" / "sharegpt_lengths_1000.csv"
    items = load_trace(str(path))
    lengths = [(item.num_prompt_tokens, item.num_output_tokens) for item in items]
    figures = []
    for name in ("sharegpt, first run", "sharegpt"):
        floors = Floors(llm, ceilings)
        with floors.counted():
            seconds = generate(llm, lengths, 5)
        num_tokens = sum(output for _, output in lengths)
        figures.append(_rate(name, num_tokens, seconds, floors))
    return figures


def shared_prefix(llm: LLM, ceilings: Ceilings) -> Figure:
    """With a prefix cache that is empty at first."""
    lengths = [(64, 64)] * 512
    generate(llm, lengths, 6, prefix=2048)
    llm._core.scheduler.reset_prefix_cache()
    floors = Floors(llm, ceilings)
    with floors.counted():
        seconds = generate(llm, lengths, 7, prefix=2048)
    return _rate("shared-prefix", 512 * 64, seconds, floors)


def prefill(llm: LLM, num_tokens: int, ceilings: Ceilings) -> Figure:
    generate(llm, [(num_tokens, 1)], 8)
    seconds = generate(llm, [(num_tokens, 1)], 9)
    cost = Cost.of(llm)
    attention_s = 2 * cost.attention_width * num_tokens**2 / ceilings.matmul_flops
    floor_ms = (cost.step_s(num_tokens, 1, 0, ceilings) + attention_s) * 1e3
    return _timed(f"prefill {num_tokens}", "ms", seconds * 1e3, floor_ms)


def startup(name: str, *, cache: str | None = None, **options: Any) -> Figure:
    """A process of its own, with caches as they are, or with ``cache`` for compiled kernels."""
    code = (
        "import sys; from octavo.bench import works; from octavo.core.sampling_params import "
        "SamplingParams; import json; "
        "llm = works.open_llm(sys.argv[1], **json.loads(sys.argv[2])); "
        "llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1)); "
        "print(llm.report.phases())"
    )
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, name, json.dumps(options)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | ({} if cache is None else {"TRITON_CACHE_DIR": cache}),
    )
    if done.returncode:
        raise RuntimeError(f"the engine did not start: {done.stderr[-2000:]}")
    seconds = time.perf_counter() - started
    return Figure(work="startup", unit="s", figure=seconds, notes=done.stdout.strip())


def load(name: str) -> list[Figure]:
    """`startup` from a checkpoint that was just written: with nothing compiled, and again."""
    from octavo.bench.checkpoint import write_checkpoint

    with (
        tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="octavo-cache-") as cache,
    ):
        num_bytes = write_checkpoint(shape(name) if name in SHAPES else name, folder)
        figures = []
        for work in ("load, nothing compiled", "load"):
            figure = startup(folder, cache=cache, load_format="safetensors")
            notes = f"{num_bytes / 1e9:.1f} GB; {figure.notes}"
            figures.append(replace(figure, work=work, notes=notes))
        return figures


def run(
    name: str,
    works: Sequence[str],
    emit: Callable[[Figure], None],
    *,
    profile: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Run ``works`` on a model's shape, telling each figure as it comes; returns the report.
    ``options`` are the engine's.

    ``profile`` is a file for a trace of the works in this process. Tracing costs time.
    """
    if profile is None:
        return _run(name, works, emit, options)
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as tracing

    with tracing(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        report = _run(name, works, emit, options)
    trace.export_chrome_trace(profile)
    return report


def _run(
    name: str, works: Sequence[str], emit: Callable[[Figure], None], options: dict[str, Any]
) -> dict[str, Any]:
    from octavo.bench import captures
    from octavo.bench.ceilings import Ceilings

    figures: list[Figure] = []

    def tell(*found: Figure) -> None:
        for figure in found:
            figures.append(figure)
            emit(figure)

    if "startup" in works:
        tell(startup(name, **options))
    if "load" in works:
        tell(*load(name))
    ceilings = Ceilings.measure()
    hosting = {"preemption": "swap", "swap_memory": "1GiB"} if "swap" in works else {}
    with open_llm(name, prefix_caching=False, **hosting, **options) as llm:
        engine = str(llm.report)
        if "swap" in works:
            from octavo.bench import swapping

            tell(*swapping.alone(llm, ceilings), swapping.beside_decode(llm, ceilings))
        for rows in DECODE_ROWS if "decode" in works else ():
            tell(decode(llm, rows, ceilings))
        if "sampling" in works:
            tell(*sampling(llm, ceilings))
        if "sharegpt" in works:
            tell(*sharegpt(llm, ceilings))
        for num_tokens in PREFILL_TOKENS if "prefill" in works else ():
            tell(prefill(llm, num_tokens, ceilings))
        # After all that this engine did.
        if "graphs" in works:
            captures.capture_all(llm)
            tell(captures.figure(captures.captured_bytes(llm)))
        captured = captures.captured_bytes(llm)
    if "shared-prefix" in works:
        forget(llm)
        with open_llm(name, **options) as llm:
            tell(shared_prefix(llm, ceilings))
    if "deterministic" in works:
        forget(llm)
        # Of all kernels for attention only ours are.
        options = {**options, "attention": "triton"}
        with open_llm(name, prefix_caching=False, deterministic=True, **options) as llm:
            for rows in DETERMINISTIC_ROWS:
                figure = decode(llm, rows, ceilings, steps=64)
                tell(replace(figure, work=f"deterministic {rows}"))
    return {
        "model": name,
        "engine": engine,
        "versions": versions(),
        "graphs": captured,
        "ceilings": {field: getattr(ceilings, field) for field in ceilings.__slots__},
        "figures": [
            {field: getattr(figure, field) for field in figure.__slots__} for figure in figures
        ],
    }


def load_library(path: str | None) -> None:
    """Load an operator library before engines look for what is installed."""
    if path is not None:
        import torch

        torch.ops.load_library(path)


def forget(llm: LLM) -> None:
    """Give an engine's memory back, before the next one takes what there is."""
    import torch

    llm._core.executor.close()
    llm._core = None  # type: ignore[assignment]
    gc.collect()
    torch.cuda.empty_cache()


def versions() -> dict[str, str]:
    """What the figures depend on, optional kernels included."""
    import torch
    import triton

    from octavo.execution.attention.flash3 import find_flash3
    from octavo.execution.attention.flashinfer import find_flashinfer

    flashinfer = find_flashinfer()
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "gpu": torch.cuda.get_device_name(),
        "flash-attention 3": "none" if find_flash3() is None else "installed",
        "flashinfer": "none" if flashinfer is None else flashinfer.__version__,
    }


HEADER = f"{'work':<20} {'figure':>10} {'unit':<10} {'floor':>10} {'share':>8}"


def line(figure: Figure) -> str:
    """A figure as text, under `HEADER`."""
    floor = "" if figure.floor is None else f"{figure.floor:>10.2f} {figure.share:>8.2f}"
    return f"{figure.work:<20} {figure.figure:>10.2f} {figure.unit:<10} {floor:<19} {figure.notes}"


def summary(report: dict[str, Any]) -> str:
    """What the figures of a report were measured with."""
    at = report["ceilings"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [
        report["engine"],
        f"Ceilings: read {at['read_bytes'] / 1e12:.2f} TB/s, product "
        f"{at['matmul_flops'] / 1e12:.0f} TFLOP/s, to host {at['to_host_bytes'] / 1e9:.1f} GB/s, "
        f"from host {at['from_host_bytes'] / 1e9:.1f} GB/s",
        f"Versions: {versions}",
    ]
    return "\n".join(lines)


def _timed(work: str, unit: str, figure: float, floor: float, notes: str = "") -> Figure:
    share = floor / figure
    return Figure(work=work, unit=unit, figure=figure, floor=floor, share=share, notes=notes)


def _rate(work: str, num_tokens: int, seconds: float, floors: Floors) -> Figure:
    return Figure(
        work=work,
        unit="tokens/s",
        figure=num_tokens / seconds,
        floor=num_tokens / floors.seconds,
        share=floors.seconds / seconds,
        notes=f"{seconds:.2f} s, {floors.num_steps} steps, {floors.host(seconds)}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure works on a GPU.")
    parser.add_argument("works", nargs="*", default=list(WORKS), help=", ".join(WORKS))
    parser.add_argument("--model", default=SHAPES[0], help="a shape's name or a config.json")
    parser.add_argument("--weights", default="auto", help="auto, bf16 or fp8")
    parser.add_argument("--kv-dtype", default="auto", help="auto, bf16, fp16 or fp8")
    parser.add_argument("--attention", default="auto", help="auto, triton, flash3 or flashinfer")
    parser.add_argument("--library", help="of FlashAttention-3, to be loaded first")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    load_library(given.library)
    unknown = set(given.works) - set(WORKS)
    if unknown:
        parser.error(f"unknown works {', '.join(sorted(unknown))}; choose from {', '.join(WORKS)}")
    emit: Callable[[Figure], None] = (
        (lambda figure: None) if given.json else (lambda figure: print(line(figure), flush=True))
    )
    if not given.json:
        print(HEADER, flush=True)
    report = run(
        given.model,
        given.works,
        emit,
        weights=given.weights,
        kv_dtype=given.kv_dtype,
        attention=given.attention,
    )
    print(json.dumps(report) if given.json else summary(report))


if __name__ == "__main__":
    main()
