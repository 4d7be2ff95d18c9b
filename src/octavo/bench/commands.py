"""`octavo bench …`: each command measures one thing. Loads nothing heavy until it runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo import options
from octavo.bench import gpu_commands
from octavo.bench.paper.command import paper
from octavo.bench.serve import command as serve_command
from octavo.bench.workload_options import (
    InputLen,
    MaxTotalLen,
    NumRequests,
    OutputLen,
    Seed,
    Trace,
    check_lengths,
)
from octavo.config import DEFAULT_MODEL, ConfigError, EngineConfig
from octavo.options import DEFAULTS
from octavo.output_files import check_plot
from octavo.terminal import print_json, readable_errors

bench_app = typer.Typer(
    help="Measure, and print each figure beside its goal.", no_args_is_help=True
)

gpu_commands.add_to(bench_app)
bench_app.command("paper")(paper)
serve_command.add_to(bench_app)


_OF_COMPARE = ("model", "calibration", "rounds", "device", "threads")


@bench_app.command("simulator")
def simulator(
    context: typer.Context,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Instead, run three works on a model and predict their latencies."
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="For --compare: a model, or a shape of bench gpu with random weights "
            f"[default: {DEFAULT_MODEL}]."
        ),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(help="For --compare: a calibration's name or file [default: the device's]."),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(
            min=1, max=1000, help="For --compare: the least disturbed of so many runs counts."
        ),
    ] = 3,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1000,
            help="Instead, simulate a cluster of so many replicas of an 8B on an H200 each.",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="For --replicas: requests a second, of ShareGPT's lengths [default: 10000]."
        ),
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option(
            min=1, max=1_000_000, help="For --replicas: how many requests come [default: 20000]."
        ),
    ] = None,
    device: options.Device = DEFAULTS.device,
    threads: options.OneThread = 1,
    as_json: options.AsJSON = False,
) -> None:
    """How fast the simulator is and what the policy costs, or how well the simulator predicts."""
    with readable_errors():
        if compare and replicas is not None:
            raise ConfigError("--compare runs one engine: leave out --replicas, or --compare")
        for name in options.given_options(context):
            option = "--" + name.replace("_", "-")
            if name in ("rate", "num_requests") and replicas is None:
                raise ConfigError(f"{option} is for --replicas: give it, or leave {option} out")
            if name in _OF_COMPARE and not compare:
                raise ConfigError(f"{option} is for --compare: give it, or leave {option} out")
        if compare:
            _compare(model or DEFAULT_MODEL, calibration, rounds, device, threads, as_json)
            return
        from octavo.bench import simulator

        if replicas is not None:
            rate = 10_000.0 if rate is None else rate
            if not 1e-6 <= rate <= 1e9:
                raise ConfigError(f"--rate must be from 1e-06 to 1,000,000,000, got {rate:g}")
            found = simulator.measure_cluster(replicas, rate, num_requests or 20_000)
            if as_json:
                print_json(asdict(found))
                return
            typer.echo(simulator.cluster_line(found))
            return
        report: Any = simulator.run()
        if as_json:
            print_json(report)
            return
        for work in report["works"]:
            typer.echo(
                f"{work['work']}: {work['tokens_per_second']:,.0f} tokens/s, "
                f"{work['requests_per_minute']:,.0f} requests/min simulated, of an engine that "
                f"makes {work['predicted_tokens_per_s']:,.0f} tokens/s"
            )
        typer.echo(f"{'rows':>6} {'plan µs':>9} {'update µs':>10} {'step µs':>9} {'tokens/s':>12}")
        for figure in report["rows"]:
            typer.echo(
                f"{figure['rows']:>6} {figure['plan_us']:>9.1f} {figure['update_us']:>10.1f} "
                f"{figure['step_us']:>9.1f} {figure['tokens_per_second']:>12,.0f}"
            )
        typer.echo(
            f"step at 256 rows: {report['share_of_goal']:.2f} of the goal of "
            f"{report['goal_step_us']:.0f} µs"
        )


def _compare(
    model: str,
    calibration: str | None,
    rounds: int,
    device: str,
    threads: int | None,
    as_json: bool,
) -> None:
    from octavo.bench import prediction

    if not as_json:
        typer.echo(f"predicted/measured and error\n{prediction.HEADER}")
    report = prediction.run(
        model,
        calibration=calibration,
        rounds=rounds,
        tell=lambda text: None if as_json else typer.echo(text),
        device=device,
        threads=threads,
    )
    if as_json:
        print_json(report)
    else:
        typer.echo(f"calibration {report['calibration']}; {report['engine']}")


@bench_app.command("attention")
def attention(as_json: options.AsJSON = False, threads: options.OneThread = 1) -> None:
    """The attention backends of this machine against each other, on SmolLM2-135M's shape."""
    with readable_errors():
        num_threads = EngineConfig(threads=threads).threads or 1
        from octavo.bench import attention

        figures = attention.run(num_threads)
        if as_json:
            print_json(figures)
            return
        typer.echo(attention.table(figures))


@bench_app.command("decode")
def decode(
    model: options.Model = DEFAULT_MODEL,
    dtype: options.Dtype = DEFAULTS.dtype,
    weights: options.Weights = DEFAULTS.weights,
    threads: options.Threads = None,
    depth: options.Depth = None,
    as_json: options.AsJSON = False,
) -> None:
    """Decode and prefill speed in process, beside the machine's memory rate in the same run."""
    with readable_errors():
        from octavo.bench import decode

        report = decode.run(model, dtype=dtype, weights=weights, threads=threads, depth=depth)
        if as_json:
            print_json(report)
            return
        typer.echo(decode.table(report))


@bench_app.command("quality")
def quality(model: options.Model = DEFAULT_MODEL, as_json: options.AsJSON = False) -> None:
    """What bf16, 8- and 4-bit weights cost: perplexity on a text that ships with Octavo."""
    with readable_errors():
        from octavo.bench import quality

        figures = quality.run(model)
        if as_json:
            print_json(figures)
            return
        typer.echo(quality.table(figures))


@bench_app.command("sharing")
def sharing(
    context: typer.Context,
    model: options.Model = DEFAULT_MODEL,
    policy_only: Annotated[
        bool, typer.Option("--policy-only", help="Run no model: savings of the policy alone.")
    ] = False,
    trace: Annotated[
        str | None,
        typer.Option(help="Lengths instead of ShareGPT's; see bench throughput."),
    ] = None,
    num_requests: NumRequests = 1000,
    model_requests: Annotated[
        int, typer.Option(help="Requests that the model runs as beam searches.")
    ] = 16,
    rounds: Annotated[int, typer.Option(help="Rounds with a shared prefix.")] = 3,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the savings (needs the extra plots).")
    ] = None,
    threads: options.OneThread = 1,
    seed: Seed = 0,
    as_json: options.AsJSON = False,
) -> None:
    """Blocks that samples and beams share, and what a prefix in common saves."""
    with readable_errors():
        from octavo.bench import sharing

        for name, value in (("--model-requests", model_requests), ("--rounds", rounds)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        for name in options.given_options(context):
            if policy_only and name in ("model", "model_requests", "rounds", "threads"):
                what = "the model" if name == "model" else "--" + name.replace("_", "-")
                raise ConfigError(f"--policy-only runs no model: leave it, or {what}, out")
        check_plot("--plot", plot)
        report = sharing.run(
            None if policy_only else model,
            trace=trace,
            num_requests=num_requests,
            model_requests=model_requests,
            rounds=rounds,
            threads=threads,
            seed=seed,
        )
        if plot is not None:
            sharing.plot(report, plot)
        if as_json:
            print_json(report)
            return
        typer.echo(sharing.table(report))


@bench_app.command("throughput")
def throughput(
    context: typer.Context,
    model: options.Model = DEFAULT_MODEL,
    trace: Trace = None,
    num_requests: NumRequests = 64,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    max_total_len: MaxTotalLen = None,
    seed: Seed = 0,
    load_format: options.LoadFormat = DEFAULTS.load_format,
    dtype: options.Dtype = DEFAULTS.dtype,
    weights: options.Weights = DEFAULTS.weights,
    kv: options.KV = DEFAULTS.kv,
    reserve: options.Reserve = DEFAULTS.reserve,
    scheduler: options.SchedulerMode = DEFAULTS.scheduler,
    attention: options.Attention = DEFAULTS.attention,
    max_model_len: options.MaxModelLen = None,
    kv_memory: options.KVMemory = DEFAULTS.kv_memory,
    sharing: options.Sharing = DEFAULTS.sharing,
    max_num_seqs: options.MaxNumSeqs = DEFAULTS.max_num_seqs,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    threads: options.Threads = None,
    device: options.Device = DEFAULTS.device,
    deterministic: options.Deterministic = DEFAULTS.deterministic,
    depth: options.Depth = None,
    as_json: options.AsJSON = False,
) -> None:
    """Offline throughput: every request of the workload submitted at once, in process."""
    with readable_errors():
        check_lengths(context, trace)
        from octavo.bench.throughput import throughput
        from octavo.engine.llm import LLM
        from octavo.workload.workload import make_workload

        with LLM(**options.engine_options(context)) as llm:
            items = make_workload(
                trace=trace,
                num_requests=num_requests,
                input_len=input_len,
                output_len=output_len,
                max_total_len=max_total_len or llm.report.limits.max_length,
                seed=seed,
            )
            report = throughput(llm, items, seed=seed)
        if as_json:
            print_json(report)
            return
        typer.echo(
            f"{report['num_requests']} requests in {report['seconds']:.2f} s: "
            f"{report['requests_per_second']:.2f} requests/s, "
            f"{report['output_tokens_per_second']:.1f} output tokens/s, "
            f"{report['total_tokens_per_second']:.1f} tokens/s in all"
        )


@bench_app.command("latency")
def latency(
    context: typer.Context,
    model: options.Model = DEFAULT_MODEL,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests in the batch.")] = 1,
    input_len: InputLen = 32,
    output_len: OutputLen = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Counted runs of the batch.")] = 5,
    warmups: Annotated[int, typer.Option(min=0, help="Runs before that.")] = 1,
    seed: Seed = 0,
    load_format: options.LoadFormat = DEFAULTS.load_format,
    dtype: options.Dtype = DEFAULTS.dtype,
    weights: options.Weights = DEFAULTS.weights,
    threads: options.Threads = None,
    device: options.Device = DEFAULTS.device,
    depth: options.Depth = None,
    as_json: options.AsJSON = False,
) -> None:
    """How long one batch takes from submission to its last token, in process."""
    with readable_errors():
        from octavo.bench.throughput import latency
        from octavo.engine.llm import LLM
        from octavo.workload.workload import make_workload

        items = make_workload(
            trace=None, num_requests=batch_size, input_len=input_len, output_len=output_len
        )
        # Every round runs the same prompts.
        with LLM(
            **options.engine_options(context),
            max_num_seqs=batch_size,
            prefix_caching=False,
        ) as llm:
            report = latency(llm, items, rounds=rounds, warmups=warmups, seed=seed)
        if as_json:
            print_json(report)
            return
        figures = report["latency_ms"]
        typer.echo(
            f"batch of {batch_size}: mean {figures['mean']:.1f} ms, p50 {figures['p50']:.1f}, "
            f"p99 {figures['p99']:.1f}; {report['output_tokens_per_second']:.1f} output tokens/s"
        )
