"""`octavo calibrate` and `octavo plan`: measure a machine's steps; find what serves a workload.

Loads nothing heavy until one runs; a plan needs neither torch nor a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo import options
from octavo.bench.workload_options import check_lengths
from octavo.config import DEFAULT_MODEL, ConfigError, parse_size
from octavo.layout_command import load_config
from octavo.options import DEFAULTS
from octavo.output_files import check_plot, check_writable
from octavo.terminal import print_json, readable_errors

if TYPE_CHECKING:
    from octavo.simulate.capacity_plan import Plan, Setup
    from octavo.simulate.shape import ModelShape

_SHORT = {"8b": "llama-3.1-8b", "1b": "llama-3.2-1b", "70b": "llama-3.1-70b"}
_TOKENS = "Workload"
_NUM_REQUESTS = 5000
# Wider than any machine or patience; beyond them a plan would not end, or say nothing.
_RANGES: dict[str, tuple[float, float]] = {
    "rate": (1e-6, 1e9),
    "price": (1e-6, 1e6),
    "span": (1, 86400),
    "num_requests": (1, 1_000_000),
    "verify_requests": (1, 1_000_000),
    "max_total_len": (1, 1 << 31),
    "input_len": (1, 1 << 31),
    "output_len": (1, 1 << 31),
    "swap_memory": (0, 8 * 2**40),
}


def calibrate(
    context: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A model, or a shape of bench gpu with random weights; may be repeated, the first "
            f"is the calibration's own [default: {DEFAULT_MODEL}]."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the calibration to this file.")] = None,
    points: Annotated[
        Path | None, typer.Option(help="Write every step that was timed to this file.")
    ] = None,
    refit: Annotated[
        Path | None,
        typer.Option(help="Measure nothing: fit again to what --points wrote to this file."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Its name [default: the model's].")] = None,
    device: options.Device = DEFAULTS.device,
    threads: options.Threads = None,
    dtype: options.Dtype = DEFAULTS.dtype,
    weights: options.Weights = DEFAULTS.weights,
    kv_memory: options.KVMemory = DEFAULTS.kv_memory,
    max_num_seqs: options.MaxNumSeqs = DEFAULTS.max_num_seqs,
    max_model_len: options.MaxModelLen = None,
    attention: options.Attention = DEFAULTS.attention,
    as_json: options.AsJSON = False,
) -> None:
    """Measure the steps of this machine and fit the simulator's latency model to them."""
    with readable_errors():
        for option, path in (("--out", out), ("--points", points)):
            check_writable(option, path)
        if refit is not None:
            _check_refit(options.given_options(context))
        from octavo.bench import calibrate
        from octavo.simulate.calibration import dumps

        written = None if out is None else str(out)

        def tell(text: str) -> None:
            typer.echo(text, err=as_json)

        if refit is not None:
            found = calibrate.refit(str(refit), out=written, tell=tell)
            if as_json:
                typer.echo(dumps(found), nl=False)
            return
        models = model or [DEFAULT_MODEL]
        found = calibrate.run(
            models,
            name=name or Path(models[0]).stem,
            out=written,
            points=None if points is None else str(points),
            tell=tell,
            device=device,
            threads=threads,
            dtype=dtype,
            weights=weights,
            kv_memory=kv_memory,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            attention=attention,
        )
        if as_json:
            typer.echo(dumps(found), nl=False)


def _check_refit(given: Sequence[str]) -> None:
    """Refuse options of what is measured, beside steps that were measured before."""
    unused = [name for name in given if name not in ("refit", "out", "as_json")]
    if unused:
        names = ", ".join("--" + name.replace("_", "-") for name in unused)
        raise ConfigError(f"--refit measures nothing, and names nothing anew: leave out {names}")


def plan(
    context: typer.Context,
    slo: Annotated[
        str,
        typer.Option(
            help="Objectives: ttft, itl or e2el at p50, p90, p99 or mean, such as "
            "ttft_p99=200ms,itl_p99=50ms."
        ),
    ],
    rate: Annotated[float, typer.Option(help="Requests a second that all replicas serve.")],
    model: Annotated[
        str, typer.Option(help="1b, 8b or 70b (Llama 3), opt-13b, or a model's name or path.")
    ] = "8b",
    gpu: Annotated[str, typer.Option(help="h200 or a100-40gb.")] = "h200",
    calibration: Annotated[
        str | None,
        typer.Option(help="Rates that octavo calibrate measured, a name or file, for the GPU's."),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            help="A trace or a table of lengths, as bench throughput takes; without one lengths "
            "are fixed.",
            rich_help_panel=_TOKENS,
        ),
    ] = None,
    input_len: Annotated[
        int, typer.Option(help="Prompt tokens, without a trace.", rich_help_panel=_TOKENS)
    ] = 512,
    output_len: Annotated[
        int, typer.Option(help="Output tokens, without a trace.", rich_help_panel=_TOKENS)
    ] = 128,
    num_requests: Annotated[
        int | None,
        typer.Option(
            help="How many requests to take from the trace [default: 5000, or what it has].",
            rich_help_panel=_TOKENS,
        ),
    ] = None,
    max_total_len: Annotated[
        int | None,
        typer.Option(help="Leave out longer requests of a trace.", rich_help_panel=_TOKENS),
    ] = None,
    arrivals: Annotated[
        str,
        typer.Option(
            help="poisson, or trace: the trace's own, scaled to the rate.", rich_help_panel=_TOKENS
        ),
    ] = "poisson",
    tensor_parallel: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Ranks that may share a model; may be repeated [default: 1, 2, 4, 8]."
        ),
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(
            help="round-robin, least-loaded or prefix-aware [default: prefix-aware where prompts "
            "share prefixes, else least-loaded]."
        ),
    ] = None,
    swap_memory: Annotated[
        str, typer.Option(help="Host memory that a replica may swap to: 0 or a size.")
    ] = "32GiB",
    price: Annotated[
        float | None, typer.Option(help="Dollars a GPU hour [default: h200 3.50, a100-40gb 1.30].")
    ] = None,
    span: Annotated[
        float,
        typer.Option(
            help="Seconds of arrivals that are simulated for each rate, of 20,000 requests at most."
        ),
    ] = 60.0,
    verify_requests: Annotated[
        int, typer.Option(help="Requests that the whole cluster is simulated with at most.")
    ] = 20_000,
    seed: Annotated[int, typer.Option(min=0, help="Makes the plan repeatable.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw latency by rate (needs the extra plots).")
    ] = None,
    as_json: options.AsJSON = False,
) -> None:
    """Find the replicas that serve a workload within its objectives, and what they cost."""
    with readable_errors():
        check_lengths(context, trace)
        swap_bytes = parse_size("swap_memory", swap_memory)
        for name in _RANGES:
            _check_range(name, swap_bytes if name == "swap_memory" else context.params[name])
        if num_requests is not None and trace is None:
            raise ConfigError(
                "--num-requests takes requests from a trace: give --trace, or leave it out"
            )
        check_plot("--plot", plot)
        from octavo.simulate.calibration import load_calibration
        from octavo.simulate.capacity import Planner
        from octavo.simulate.gpus import gpu_named, with_price
        from octavo.simulate.objectives import parse_objectives
        from octavo.simulate.routing import ROUTERS
        from octavo.workload.workload import make_workload, num_fitting

        chosen = with_price(gpu_named(gpu), price)
        if calibration is not None:
            coefficients = load_calibration(calibration).coefficients
            chosen = replace(chosen, coefficients=lambda: coefficients)
        objectives = parse_objectives(slo)
        if router is not None and router not in ROUTERS:
            raise ConfigError(f"router must be one of {', '.join(ROUTERS)}, got {router!r}")
        if arrivals not in ("poisson", "trace"):
            raise ConfigError(f"arrivals must be poisson or trace, got {arrivals!r}")
        shape = model_shape(model)
        longest = max_total_len or shape.max_position_embeddings
        asked = longest if trace is not None else input_len + output_len
        if asked > shape.max_position_embeddings:
            option = "--max-total-len" if trace is not None else "--input-len and --output-len"
            raise ConfigError(
                f"{option} ask for {asked} tokens, and {shape.name} has "
                f"{shape.max_position_embeddings} positions; ask for at most that"
            )
        if num_requests is None:
            num_requests = _NUM_REQUESTS
            if trace is not None:
                num_requests = min(num_requests, max(num_fitting(trace, longest), 1))
        items = make_workload(
            trace=trace,
            num_requests=num_requests,
            input_len=input_len,
            output_len=output_len,
            arrivals="trace" if arrivals == "trace" else "all-at-once",
            max_total_len=longest,
            seed=seed,
        )
        shares = any(item.prefix_hashes for item in items)
        found = Planner(
            gpu=chosen,
            shape=shape,
            objectives=objectives,
            items=items,
            keeps_arrivals=arrivals == "trace",
            ranks=tuple(tensor_parallel or (1, 2, 4, 8)),
            router=router or ("prefix-aware" if shares else "least-loaded"),
            span_s=span,
            num_verified=verify_requests,
            swap_bytes=swap_bytes,
            seed=seed,
            tell=lambda text: typer.echo(text, err=True),
        ).plan(rate)
        if plot is not None:
            draw(found, plot)
        if as_json:
            print_json(report(found))
        else:
            typer.echo(table(found))


def _check_range(name: str, value: float | None) -> None:
    """Refuse a number that no plan can be made for; None: it was left out."""
    least, most = _RANGES[name]
    if value is not None and not least <= value <= most:
        raise ConfigError(
            f"--{name.replace('_', '-')} must be from {least:,g} to {most:,.10g}, got {value:.10g}"
        )


def model_shape(name: str) -> ModelShape:
    """Of a short name, a shape that ships, or a model's configuration."""
    from octavo.simulate.gpus import OPT_13B
    from octavo.simulate.shape import ModelShape

    if name == OPT_13B.name:
        return OPT_13B
    name = _SHORT.get(name, name)
    shipped = resources.files("octavo.bench") / "shapes" / f"{name}.json"
    return ModelShape.of(
        Path(name).stem if Path(name).exists() else name,
        load_config(str(shipped) if shipped.is_file() else name),
    )


def report(plan: Plan) -> dict[str, Any]:
    """A plan ready for JSON: the candidates by what they sustain, without their trials."""
    found = asdict(plan)
    for candidate in found["candidates"]:
        candidate["num_trials"] = len(candidate.pop("trials"))
    return found


def table(plan: Plan) -> str:
    """A plan as text."""
    setup, outcome = plan.setup, plan.outcome
    lines = [
        f"{'ranks':>5} {'manager':<8} {'block':>5} {'tokens a step':>13} {'swap GiB':>8} "
        f"{'requests/s':>10}"
    ]
    for candidate in plan.candidates:
        tried = candidate.setup
        mark = "*" if tried == setup else " "
        lines.append(
            f"{tried.tensor_parallel:>5} {tried.kv:<8} {tried.block_size:>5} "
            f"{tried.max_num_batched_tokens:>13} {tried.swap_bytes / 2**30:>8.0f} "
            f"{candidate.rate:>10.2f} {mark}"
        )
    settled = "" if plan.is_settled else " (shorter than two requests take: the load still rises)"
    lines += [
        "",
        f"{plan.model} on {plan.gpu}, {plan.rate:g} requests/s: {plan.num_replicas} replica(s) of "
        f"{setup.tensor_parallel} rank(s), {plan.num_gpus} GPU(s)",
        f"{serve_options(setup)}; {plan.num_blocks} blocks a replica; router {plan.router}",
        f"{plan.cost_per_million_tokens:.3f} dollars a million output tokens at "
        f"{plan.price_per_hour:.2f} a GPU hour",
        f"simulated with {plan.num_settled_replicas} replica(s): {outcome.num_requests} of "
        f"{plan.num_simulated} requests in {outcome.span_s:.1f} s{settled}, "
        f"{outcome.tokens_per_s:,.0f} tokens/s, {plan.num_preemptions} preemptions",
    ]
    for objective in plan.objectives:
        lines.append(
            f"{objective.name}: {objective.value_s(outcome) * 1e3:.1f} ms, of "
            f"{objective.limit_s * 1e3:g} allowed"
        )
    return "\n".join(lines)


def serve_options(setup: Setup) -> str:
    """What `octavo serve` is given for it."""
    options = (
        f"--kv {setup.kv} --block-size {setup.block_size} --max-num-batched-tokens "
        f"{setup.max_num_batched_tokens}"
    )
    if not setup.swap_bytes:
        return options
    return f"{options} --preemption swap --swap-memory {setup.swap_bytes / 2**30:.0f}GiB"


def draw(plan: Plan, path: Path) -> None:
    """What one replica of each setup does by rate: a panel for each objective."""
    from matplotlib.figure import Figure

    count = len(plan.objectives)
    figure = Figure(figsize=(4.2 * count, 3.4), dpi=110, layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    for panel, objective in zip(panels, plan.objectives, strict=True):
        for candidate in plan.candidates:
            setup = candidate.setup
            trials = [trial for trial in candidate.trials if trial.keeps_up]
            panel.plot(
                [trial.rate for trial in trials],
                [objective.value_s(trial.outcome) * 1e3 for trial in trials],
                marker=".",
                label=f"{setup.tensor_parallel} rank(s), {setup.kv} {setup.block_size}, "
                f"{setup.max_num_batched_tokens}",
            )
        panel.axhline(objective.limit_s * 1e3, color="0.5", linestyle="--")
        panel.set_ylim(0, objective.limit_s * 2e3)
        panel.set_xlabel("requests/s of one replica")
        panel.set_ylabel(f"{objective.name}, ms")
    panels[0].legend(fontsize=7, frameon=False)
    figure.suptitle(f"{plan.model} on {plan.gpu}, simulated", fontsize=9)
    figure.savefig(path)
