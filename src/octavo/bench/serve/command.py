"""The command `octavo bench serve`. Loads nothing heavy until it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from octavo import options
from octavo.bench.workload_options import (
    PANEL,
    InputLen,
    MaxTotalLen,
    NumRequests,
    OutputLen,
    Seed,
    Trace,
    check_lengths,
)
from octavo.output_files import check_plot, check_writable
from octavo.terminal import INTERRUPTED, print_json, readable_errors

_OUTPUT = "Results"


def add_to(app: typer.Typer) -> None:
    """Add the command to ``octavo bench``."""
    app.command("serve")(serve)


def serve(
    context: typer.Context,
    url: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")] = (
        "http://127.0.0.1:8000"
    ),
    model: Annotated[
        str | None, typer.Option(help="The model's name [default: the first it lists].")
    ] = None,
    api_key: options.APIKey = None,
    trace: Trace = None,
    num_requests: NumRequests = 64,
    input_len: InputLen = 64,
    output_len: OutputLen = 48,
    max_total_len: MaxTotalLen = None,
    arrivals: Annotated[
        str,
        typer.Option(
            help="poisson, gamma, constant, all-at-once, or trace: the trace's own, scaled where "
            "there is a rate.",
            rich_help_panel=PANEL,
        ),
    ] = "poisson",
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests a second; inf: all at once [default: 1, or the trace's own].",
            rich_help_panel=PANEL,
        ),
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            metavar="1,2,4",
            help="A run at each of these rates, num-requests each.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    sweep: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="A run of all requests at once, then at N rates evenly up to what that reached.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    cv: Annotated[
        float,
        typer.Option(
            help="Burstiness of gamma arrivals: the gaps' coefficient of variation; 1 is Poisson, "
            "more is burstier (vLLM's --burstiness is 1/cv²).",
            rich_help_panel=PANEL,
        ),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            help="Requests at once at most; a request that waits for a place starts when it has "
            "it, also for its latencies.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    num_warmups: Annotated[
        int,
        typer.Option(help="Requests before that, which are not counted.", rich_help_panel=PANEL),
    ] = 0,
    highest_token_id: Annotated[
        int,
        typer.Option(
            max=(1 << 31) - 1,
            help="Prompts are random token ids from 100 up to this.",
            rich_help_panel=PANEL,
        ),
    ] = 1000,
    goodput: Annotated[
        str | None,
        typer.Option(
            "--goodput",
            "--slo",
            metavar="ttft=200ms,itl=50ms,e2el=5s",
            help="Objectives: count requests that meet all, of ttft, tpot (mean time a token after "
            "the first), itl (longest gap) and e2el (the whole time).",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write a row a rate.", rich_help_panel=_OUTPUT)
    ] = None,
    requests_csv: Annotated[
        Path | None, typer.Option(help="Write a row a request.", rich_help_panel=_OUTPUT)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw latencies and throughput by rate (needs the extra plots).",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    seed: Seed = 0,
    as_json: options.AsJSON = False,
) -> None:
    """Load on a server: throughput, latencies and goodput, at one rate or several."""
    with readable_errors():
        check_lengths(context, trace)
        import asyncio

        from octavo.bench.serve import client as serve_client
        from octavo.bench.serve import plot as serve_plot
        from octavo.bench.serve import report as serve_report
        from octavo.bench.serve.objectives import parse_objectives
        from octavo.bench.serve.sweep import Sweep, Work, check_arrivals, rates_of
        from octavo.config import ConfigError, client_key

        for name, value, least in (
            ("sweep", sweep, 1),
            ("max-concurrency", max_concurrency, 1),
            ("num-warmups", num_warmups, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(f"--{name} must be at least {least}, got {value}")
        if sweep is not None and (rate is not None or rates is not None):
            raise ConfigError("--sweep finds its own rates; leave out --rate and --rates")
        objectives = {} if goodput is None else parse_objectives(goodput)
        asked = [] if sweep is not None else rates_of(rate, rates, arrivals)
        work = Work(
            trace=trace,
            num_requests=num_requests,
            input_len=input_len,
            output_len=output_len,
            max_total_len=max_total_len,
            arrivals=arrivals,
            cv=cv,
            seed=seed,
        )
        if "arrivals" in options.given_options(context):
            check_arrivals(arrivals, asked)
        # Whatever cannot work is found before anything is sent.
        for one in asked or [1.0]:
            work.items(one)
        if csv is not None and csv == requests_csv:
            raise ConfigError("--csv and --requests-csv name the same file; give each its own")
        check_writable("--csv", csv)
        check_writable("--requests-csv", requests_csv)
        check_plot("--plot", plot)
        is_sweep = sweep is not None or len(asked) > 1

        def show(report: dict[str, Any]) -> None:
            if is_sweep and not as_json:
                typer.echo(serve_report.sweep_row(report))

        started: list[Sweep] = []

        async def measure() -> None:
            async with serve_client.connected(
                url, model=model, api_key=client_key(api_key), highest_token_id=highest_token_id
            ) as client:
                runs = Sweep(client, work, objectives, max_concurrency, show)
                started.append(runs)
                await runs.warm_up(num_warmups)
                if is_sweep and not as_json:
                    typer.echo(serve_report.sweep_header(objectives))
                if sweep is not None:
                    await runs.run_up_to_capacity(sweep)
                for one in asked:
                    await runs.run(one)

        is_interrupted = False
        try:
            asyncio.run(measure())
        except KeyboardInterrupt:
            is_interrupted = True
            # Of a run that was cut short only the fast requests are there: no figures of it.
            num_runs = len(started[0].reports) if started else 0
            typer.echo(f"octavo: interrupted; whole runs that count: {num_runs}", err=True)
            if not num_runs:
                raise typer.Exit(INTERRUPTED) from None
        runs = started[0]
        reports = runs.reports
        if csv is not None:
            serve_report.write_csv(csv, reports)
        if requests_csv is not None:
            serve_report.write_requests_csv(requests_csv, reports, runs.loads)
        if plot is not None:
            caption = f"{reports[0]['model_id']}: {work.description()}"
            serve_plot.plot(reports, plot, caption)
        if as_json:
            print_json({"runs": reports} if is_sweep else reports[0])
        elif not is_sweep:
            typer.echo(serve_report.table(reports[0]))
        if is_interrupted:
            raise typer.Exit(INTERRUPTED)
        if not all(report["completed"] for report in reports):
            raise typer.Exit(1)
