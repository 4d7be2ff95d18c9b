"""`octavo bench paper`. Loads nothing heavy until it runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from octavo import options
from octavo.config import ConfigError
from octavo.core.sampling_params import MAX_BEAM_WIDTH
from octavo.output_files import check_directory, check_plot, check_writable
from octavo.terminal import INTERRUPTED, print_json, readable_errors

_REAL = "With --model"


def paper(
    context: typer.Context,
    figure: Annotated[
        str, typer.Option(help="Of Kwon et al., SOSP 2023: 2, 12, 13, 14, 15, 16, 18 or 19.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="Run this model, instead of the simulator: one that serves, or llama-3.1-8b, "
            "llama-3.2-1b (on a GPU) or a config.json with random weights."
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(help="A trace or a table of lengths [default: 1000 pairs of ShareGPT]."),
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option(
            min=1, help="Of the trace [default: up to 1000]; with rates, at most, of each."
        ),
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Blocks of the pool [default: the scale's, or for 7.7 longest sequences]."
        ),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a block [default: 16].")
    ] = None,
    managers: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Of fastertransformer, orca-max, orca-pow2, …: the figure's."
        ),
    ] = None,
    rates: Annotated[
        str | None, typer.Option(metavar="R,R", help="Requests a second: the figure's.")
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            help="Seconds in which requests arrive at each rate: the figure's, of the simulated "
            "clock, or 20."
        ),
    ] = None,
    widths: Annotated[
        str | None, typer.Option(metavar="N,N", help="Samples and beams [default: 2,4,6].")
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            help="Simulated: whose keys and values fill 12 GiB: opt-13b, as in the paper (the "
            "default), or llama-3.1-8b."
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            rich_help_panel=_REAL,
            help="Longest sequence; a trace's lengths are scaled to it [default: 512 on a CPU, "
            "2048 on a GPU].",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(rich_help_panel=_REAL, help="cpu, cuda or auto [default: auto].")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(rich_help_panel=_REAL, help="Compute threads [default: cores less one]."),
    ] = None,
    simulated: Annotated[
        bool,
        typer.Option("--simulated", help="Run the simulator at the paper's scale: the default."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also write figure-N.png and figure-N.csv there (needs the extra plots).",
        ),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Also write the table, which needs no extra."),
    ] = None,
    redraw: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Measure nothing: draw a table of --csv as a PNG beside it."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Makes the workload repeatable.")] = 0,
    as_json: options.AsJSON = False,
) -> None:
    """A figure of the papers, measured with the managers and the scheduler of this engine."""

    with readable_errors():
        from octavo.bench.paper import output as files
        from octavo.bench.paper.registry import FIGURES
        from octavo.bench.paper.report import PaperOptions
        from octavo.workload.traces import load_trace

        if figure not in FIGURES:
            raise ConfigError(f"figure must be one of {', '.join(FIGURES)}, got {figure!r}")
        given = {
            "model": model,
            "trace": trace,
            "num_requests": num_requests,
            "num_blocks": num_blocks,
            "block_size": block_size,
            "managers": None if managers is None else tuple(_parts("managers", managers, str)),
            "rates": None if rates is None else tuple(_parts("rates", rates, float)),
            "duration_s": duration,
            "widths": None if widths is None else tuple(_parts("widths", widths, int)),
            "scale": scale,
            "max_model_len": max_model_len,
            "device": device,
            "threads": threads,
        }
        given = {name: value for name, value in given.items() if value is not None}
        drawn = FIGURES[figure]
        if redraw is not None:
            if set(options.given_options(context)) - {"figure", "redraw"}:
                raise ConfigError("--redraw measures nothing: give it with --figure alone")
            typer.echo(f"written: {files.redraw(figure, drawn, redraw)}")
            return
        if simulated and model is not None:
            raise ConfigError("--simulated runs no model: leave out --model, or --simulated")
        check_effect(figure, drawn.TAKES, given)
        plotted: list[Path] = []
        if output is not None:
            check_directory("--output", output)
            plotted = [output / f"figure-{figure}.png", output / f"figure-{figure}.csv"]
            check_plot("--output", plotted[0])
            check_writable("--output", plotted[1])
        check_writable("--csv", table)
        if trace is not None:
            load_trace(trace)
        try:
            report = drawn.measure(PaperOptions(**given, seed=seed))
        except KeyboardInterrupt:
            typer.echo("octavo: interrupted; nothing that counts was measured yet", err=True)
            raise typer.Exit(INTERRUPTED) from None
        if report.is_cut:
            typer.echo(
                f"octavo: interrupted; rows of the table that are whole: {len(report.rows)}",
                err=True,
            )
        caption = files.caption_of(report, shlex.join(["octavo", *sys.argv[1:]]))
        written = list(plotted)
        if plotted:
            files.write_table(plotted[1], caption, report.rows)
            files.plot(drawn, plotted[0], caption, report.rows)
        if table is not None:
            files.write_table(table, caption, report.rows)
            written.append(table)
        if as_json:
            print_json(report.values)
        else:
            typer.echo("\n".join([*caption[:2], "", report.text]))
            for place in written:
                typer.echo(f"written: {place}")
        if report.is_cut:
            raise typer.Exit(INTERRUPTED)


def check_effect(figure: str, takes: frozenset[str], given: Collection[str]) -> None:
    """Refuse what would change nothing.

    Raises:
        ConfigError: an option does not go with the figure, or with what runs it.
    """
    from octavo.bench.paper.registry import REAL_TAKES

    is_real = "model" in given
    if is_real:
        takes = REAL_TAKES.get(figure, takes)
    only_real = {"max_model_len", "device", "threads"}
    takes = takes | {"model"} | (only_real if is_real else {"scale"})
    for name in given:
        if name in takes:
            continue
        option = "--" + name.removesuffix("_s").replace("_", "-")
        if name in only_real:
            raise ConfigError(f"{option} is for a real engine: give --model with it, or leave it")
        if name == "scale":
            raise ConfigError("--scale is the simulator's: leave it out with --model")
        raise ConfigError(f"{option} changes nothing in figure {figure}: leave it out")


_Part = TypeVar("_Part", str, int, float)


def _parts(name: str, text: str, kind: Callable[[str], _Part]) -> list[_Part]:
    """What is between commas.

    Raises:
        ConfigError: a part is no number, or none is there.
    """
    try:
        parts = [kind(part.strip()) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{name} must be numbers, separated by commas, got {text!r}") from error
    if any(part == "" for part in parts):
        raise ConfigError(f"{name} must be separated by single commas, got {text!r}")
    if len(set(parts)) < len(parts):
        raise ConfigError(f"{name} must name each once, got {text!r}")
    if name == "widths" and not all(1 <= part <= MAX_BEAM_WIDTH for part in parts):  # type: ignore[operator]
        raise ConfigError(f"widths must be from 1 to {MAX_BEAM_WIDTH}, got {text!r}")
    return parts
