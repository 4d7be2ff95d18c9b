"""What sharing saves: blocks, by the paper's definition, and prefill, with a prefix in common.

Blocks saved at an instant are what the sequences' tables hold in all, less the distinct blocks
among them, over the former; a figure is the mean over the steps of a run (Kwon et al., SOSP 2023,
section 6.3). That is the policy's doing, so the scheduler and the manager that serve are run over
a simulated executor. How much beams share depends on how they diverge, hence on the model: for
beams the simulated executor's log probabilities are drawn at random, and a real model is run, too.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from octavo.bench.shared_prefix import shared_prefix
from octavo.config import EngineConfig
from octavo.core.plan import FloatArray, IntArray, KVCapacity, int_array
from octavo.core.protocols import KVManager
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.memory.paged import PagedManager
from octavo.scheduling.scheduler import Scheduler, SchedulerConfig
from octavo.simulate.executor import SimulatedExecutor
from octavo.workload.arrivals import arrival_times
from octavo.workload.items import WorkItem, WorkloadError
from octavo.workload.workload import make_workload

WIDTHS = (2, 4, 6)
BLOCK_SIZE = 16
LENGTHS = "sharegpt_lengths_1000.csv"
# Percent, smallest and largest over n or width 2, 4, 6.
PAPER = {
    "ShareGPT": {"parallel": (16.2, 30.5), "beam": (44.3, 66.3)},
    "Alpaca": {"parallel": (6.1, 9.8), "beam": (37.6, 55.2)},
}
# The paper's own pool: 15.7 thousand tokens, OPT-13B on a GPU of 40 GB.
_POOL_BLOCKS = 981
_MAX_NUM_SEQS = 256
_MAX_BATCHED_TOKENS = 2560
_MAX_MODEL_LEN = 2048
_VOCAB = 32000
# Tables change by a block in 16 steps; looking at every fourth step loses nothing.
_LOOK_EVERY = 4
# Of the pool, on average, where requests arrive one by one: about as much as can be had without
# preemption.
LOAD = 0.6
# Requests for the real model are short, so that a CPU is done in minutes.
_MODEL_MAX_LEN = 640
_MODEL_REQUESTS_AT_ONCE = 8


def lengths_path() -> str:
    """1000 (prompt, output) lengths of ShareGPT."""
    return str(files("octavo.bench") / "data" / LENGTHS)


def run(
    model: str | None,
    *,
    trace: str | None = None,
    num_requests: int = 1000,
    model_requests: int = 16,
    rounds: int = 3,
    threads: int | None = 1,
    seed: int = 0,
) -> dict[str, Any]:
    """All figures, ready for JSON; savings are percent. ``model`` None: nothing that needs one."""
    items = make_workload(
        trace=trace or lengths_path(),
        num_requests=num_requests,
        input_len=1,
        output_len=1,
        max_total_len=_MAX_MODEL_LEN,
        seed=seed,
    )
    short = [item for item in items if item.num_prompt_tokens >= BLOCK_SIZE]
    short = [i for i in short if i.num_prompt_tokens + i.num_output_tokens <= _MODEL_MAX_LEN]
    if model is not None and not short:
        raise WorkloadError(
            f"none of the {num_requests} requests has a prompt of {BLOCK_SIZE} tokens or more and "
            f"{_MODEL_MAX_LEN} in all at most, which is what the model runs; ask for more with "
            "--num-requests, give another trace, or use --policy-only"
        )
    savings = [
        {
            "decoding": kind,
            "width": width,
            **policy_saving(items, width, kind == "beam", load=LOAD, seed=seed),
            "saturated": policy_saving(items, width, kind == "beam", seed=seed),
        }
        for kind in ("parallel", "beam")
        for width in WIDTHS
    ]
    report: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "pool_blocks": _POOL_BLOCKS,
        "load": LOAD,
        "num_requests": num_requests,
        "lengths": "ShareGPT" if trace is None else trace,
        "paper": PAPER,
        "policy": savings,
    }
    if model is not None:
        short = short[:model_requests]
        report["model"] = {
            "name": model,
            "num_requests": len(short),
            "mean_prompt_tokens": statistics.mean(i.num_prompt_tokens for i in short),
            "mean_output_tokens": statistics.mean(i.num_output_tokens for i in short),
            "savings": [
                {
                    "decoding": "beam",
                    "width": width,
                    **model_saving(model, short, width, threads=threads),
                    "policy_saved_percent": policy_saving(short, width, True, seed=seed)[
                        "saved_percent"
                    ],
                }
                for width in WIDTHS
            ],
        }
        report["shared_prefix"] = shared_prefix(model, rounds=rounds, threads=threads, seed=seed)
    return report


# ── blocks ───────────────────────────────────────────────────────────────────────────────────────


def blocks_held(manager: KVManager, rows: Sequence[int]) -> tuple[int, int]:
    """Blocks in the tables of ``rows``, counted in each, and the distinct ones among them."""
    tables = [manager.block_ids(row) for row in rows]
    block_ids = np.concatenate(tables) if tables else int_array([])
    return len(block_ids), len(np.unique(block_ids))


class SavingMeter:
    """Looks at the tables between steps."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._num_steps = 0
        self._saved: list[float] = []
        self._held: list[int] = []

    def look(self) -> None:
        """After a step."""
        self._num_steps += 1
        if self._num_steps % _LOOK_EVERY:
            return
        rows = np.flatnonzero(self._scheduler.rows.is_wanted).tolist()
        held, distinct = blocks_held(self._scheduler.manager, rows)
        if held:
            self._saved.append((held - distinct) / held)
            self._held.append(held)

    def figures(self) -> dict[str, Any]:
        return {
            "saved_percent": 100 * statistics.mean(self._saved),
            "mean_blocks_without_sharing": statistics.mean(self._held),
            "num_steps": self._num_steps,
            "num_preemptions": self._scheduler.num_preemptions,
        }


def policy_saving(
    items: Sequence[WorkItem],
    width: int,
    is_beam: bool,
    *,
    num_blocks: int = _POOL_BLOCKS,
    load: float | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Run the items through the scheduler and the paged manager over a simulated executor:
    ``width`` samples of each, or a beam search.

    They arrive as a Poisson process that needs the share ``load`` of the pool for samples (beams
    take less); None: all at once, so that the pool is full and requests are preempted.
    """
    longest = max(i.num_prompt_tokens + i.num_output_tokens for i in items)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=_MAX_NUM_SEQS,
            max_num_batched_tokens=_MAX_BATCHED_TOKENS,
            max_model_len=max(_MAX_MODEL_LEN, longest),
            max_queued_requests=len(items),
        ),
        PagedManager(num_blocks + 1, BLOCK_SIZE, _MAX_NUM_SEQS),
    )
    random = np.random.default_rng([seed, width])
    executor = SimulatedExecutor(
        KVCapacity(num_blocks + 1, BLOCK_SIZE, 1),
        tops=lambda plan, rows, k: made_up_tops(random, rows, k),
    )
    core = EngineCore(scheduler, executor, depth=1)
    requests = []
    for index, item in enumerate(items):
        prompt = random.integers(0, _VOCAB, item.num_prompt_tokens, dtype=np.int32)
        requests.append(request_of(index, prompt, item.num_output_tokens, width, is_beam))
    if load is None:
        return _measured(core, requests)
    return paced_saving(core, requests, num_blocks=num_blocks, load=load, seed=seed)


def paced_saving(
    core: EngineCore,
    requests: Sequence[Request],
    *,
    num_blocks: int,
    block_size: int = BLOCK_SIZE,
    load: float,
    seed: int = 0,
) -> dict[str, Any]:
    """Run ``requests`` through any engine, arriving as a Poisson process in steps that needs the
    share ``load`` of its ``num_blocks`` blocks for samples."""
    # By Little's law, in requests a step.
    block_steps = statistics.mean(_block_steps(request, block_size) for request in requests)
    rate = load * num_blocks / block_steps
    times = arrival_times("poisson", len(requests), rate=rate, seed=seed)
    return _measured(core, requests, times.tolist())


def _block_steps(request: Request, block_size: int) -> float:
    """Blocks that as many samples hold, summed over their steps."""
    num_prompt = len(request.prompt_token_ids)
    shared = num_prompt // block_size
    lengths = num_prompt + np.arange(1, request.max_tokens + 1)
    own = -(-lengths // block_size) - shared
    return float((shared + request.num_sequences * own).sum())


def made_up_tops(
    random: np.random.Generator, rows: IntArray, k: int
) -> tuple[IntArray, FloatArray]:
    """``k`` likeliest tokens of each row, their probabilities the largest parts of a unit stick
    that is broken at uniform places again and again: a Poisson-Dirichlet distribution, whose mean
    entropy is 1 nat and whose likeliest token has 0.62 on average."""
    breaks = random.random((len(rows), 4 * k + 8))
    left = np.cumprod(1 - breaks, axis=1)
    parts = breaks * np.concatenate([np.ones((len(rows), 1)), left[:, :-1]], axis=1)
    top = -np.sort(-parts, axis=1)[:, :k]
    first = random.integers(0, _VOCAB - k, (len(rows), 1))
    ids = (first + np.arange(k)).astype(np.int32)
    return ids, np.log(np.maximum(top, 1e-30)).astype(np.float32)


def model_saving(
    model: str, items: Sequence[WorkItem], width: int, *, threads: int | None = 1
) -> dict[str, Any]:
    """Run the items as beam searches of a real model, which goes on from pieces of a novel."""
    from octavo.engine.build import build_engine
    from octavo.model_store import ensure_model
    from octavo.text.tokenizer import load_tokenizer

    path = ensure_model(model)
    text = (files("octavo.bench") / "data" / "alice.txt").read_text(encoding="utf-8")
    novel = np.asarray(load_tokenizer(path).encode(text), dtype=np.int32)
    longest = max(i.num_prompt_tokens + i.num_output_tokens for i in items)
    core, _ = build_engine(
        EngineConfig(
            model=str(path),
            block_size=BLOCK_SIZE,
            prefix_caching=False,
            max_model_len=longest,
            max_num_seqs=_MODEL_REQUESTS_AT_ONCE * width,
            threads=threads,
        )
    )
    start = time.perf_counter()
    try:
        place = 0
        requests = []
        for index, item in enumerate(items):
            prompt = np.take(novel, range(place, place + item.num_prompt_tokens), mode="wrap")
            place += item.num_prompt_tokens
            requests.append(request_of(index, prompt, item.num_output_tokens, width, True))
        return _measured(core, requests) | {"seconds": time.perf_counter() - start}
    finally:
        core.close()


def request_of(
    number: int, prompt: IntArray, max_tokens: int, width: int, is_beam: bool
) -> Request:
    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        use_beam_search=is_beam,
        beam_width=width if is_beam else None,
    )
    return Request(
        number=number * max(WIDTHS),
        prompt_token_ids=prompt,
        params=params,
        max_tokens=max_tokens,
        seed=number,
        n=width,
        beam_width=width if is_beam else 0,
    )


def _measured(
    core: EngineCore, requests: Sequence[Request], arrivals: Sequence[float] | None = None
) -> dict[str, Any]:
    """``arrivals`` count in steps; None: all at once."""
    meter = SavingMeter(core.scheduler)
    pending = deque(zip(arrivals or [0.0] * len(requests), requests, strict=True))
    now = 0.0
    while core.has_work or pending:
        if not core.has_work:
            now = max(now, pending[0][0])
        while pending and pending[0][0] <= now:
            core.scheduler.add(pending.popleft()[1])
        core.step()
        meter.look()
        now += 1
    return meter.figures()


# ── what is printed ──────────────────────────────────────────────────────────────────────────────


def table(report: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [
        f"blocks of {report['block_size']} saved by sharing, {report['num_requests']} requests of "
        f"{report['lengths']} lengths, scheduler and manager over a simulated executor:",
        f"saved: arriving one by one, at which samples need {100 * report['load']:.0f} % of the "
        f"pool of {report['pool_blocks']} blocks; at once: all submitted together, with their "
        "preemptions; paper: its range for widths 2 to 6",
        f"{'decoding':<10} {'width':>5} {'saved, %':>9} {'at once, %':>11} {'preemptions':>12}   "
        "paper, %",
    ]
    for figure in report["policy"]:
        low, high = report["paper"]["ShareGPT"][figure["decoding"]]
        lines.append(
            f"{figure['decoding']:<10} {figure['width']:>5} {figure['saved_percent']:>9.1f} "
            f"{figure['saturated']['saved_percent']:>11.1f} "
            f"{figure['saturated']['num_preemptions']:>12}   "
            f"{low} to {high} on ShareGPT"
        )
    if (model := report.get("model")) is not None:
        lines.append(
            f"beams of {model['name']} itself, {model['num_requests']} requests of "
            f"{model['mean_prompt_tokens']:.0f} + {model['mean_output_tokens']:.0f} tokens:"
        )
        lines += [
            f"{'beam':<10} {f['width']:>5} {f['saved_percent']:>9.1f}   (the same lengths with "
            f"made-up probabilities: {f['policy_saved_percent']:.1f})"
            for f in model["savings"]
        ]
        prefix = report["shared_prefix"]
        lines.append(
            f"{prefix['num_requests']} prompts of {prefix['prefix_tokens']} shared and "
            f"{prefix['own_tokens']} own tokens, {prefix['output_tokens']} out, median s: "
            + ", ".join(f"{f['caching']} {f['seconds']:.2f}" for f in prefix["figures"])
        )
        lines += [
            f"  {f['caching']}: {f['speedup']:.2f} times as fast as without, "
            f"{f['cached_tokens']} tokens cached"
            for f in prefix["figures"][1:]
        ]
    return "\n".join(lines)


def plot(report: dict[str, Any], path: Path) -> None:
    """The savings as bars, with the paper's range for ShareGPT behind them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.0), dpi=110, layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, kind in zip(axes, ("parallel", "beam"), strict=True):
        values = [f["saved_percent"] for f in report["policy"] if f["decoding"] == kind]
        low, high = report["paper"]["ShareGPT"][kind]
        axis.axhspan(low, high, color="0.88", label="paper, ShareGPT, 2 to 6")
        places = np.arange(len(WIDTHS))
        is_both = kind == "beam" and "model" in report
        axis.bar(places - 0.2 * is_both, values, 0.4, color="#4878a8", label="policy, simulated")
        if is_both:
            real = [f["saved_percent"] for f in report["model"]["savings"]]
            name = f"{report['model']['name']}, short requests"
            axis.bar(places + 0.2, real, 0.4, color="#c08040", label=name)
        axis.set_xticks(places, [str(width) for width in WIDTHS])
        axis.set_xlabel("samples" if kind == "parallel" else "beams")
        axis.set_title("parallel sampling" if kind == "parallel" else "beam search", fontsize=10)
        axis.set_axisbelow(True)
    axes[0].set_ylabel("blocks saved, %")
    axes[0].set_ylim(0, 100)
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    figure.savefig(path)
