"""`octavo bench paper`. Loads nothing heavy until it runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo import options
from octavo.terminal import print_json, readable_errors


def paper(
    figure: Annotated[
        str, typer.Option(help="Of Kwon et al., SOSP 2023: 2, 12, 13, 14, 15, 16, 18 or 19.")
    ],
    scale: Annotated[
        str,
        typer.Option(
            help="Whose keys and values fill 12 GiB: opt-13b, as in the paper, or llama-3.1-8b."
        ),
    ] = "opt-13b",
    trace: Annotated[
        str | None,
        typer.Option(help="A trace or a table of lengths [default: 1000 pairs of ShareGPT]."),
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option(help="Of the trace [default: up to 1000].")
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the pool [default: the scale's].")
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens in a block [default: 16].")] = None,
    simulated: Annotated[
        bool,
        typer.Option(
            "--simulated",
            help="Run the simulator at the paper's scale; these figures always do.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Also write figure-N.png and figure-N.csv (needs the extra plots)."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Makes the workload repeatable.")] = 0,
    as_json: options.AsJSON = False,
) -> None:
    """A figure of the papers, measured with the managers and the scheduler of this engine."""
    with readable_errors():
        from octavo.bench.paper import output as files
        from octavo.bench.paper.registry import FIGURES
        from octavo.bench.paper.report import PaperOptions

        if figure not in FIGURES:
            raise ValueError(f"figure must be one of {', '.join(FIGURES)}, got {figure!r}")
        if output is not None:
            files.require_plots()
        report = FIGURES[figure](
            PaperOptions(
                scale=scale,
                trace=trace,
                num_requests=num_requests,
                num_blocks=num_blocks,
                block_size=block_size,
                seed=seed,
            )
        )
        written = ()
        if output is not None:
            command = shlex.join(["octavo", *sys.argv[1:]])
            written = files.write(report, figure, output, command)
        if as_json:
            print_json(report.values)
            return
        typer.echo("\n".join([report.title, report.conditions, "", report.text]))
        for path in written:
            typer.echo(f"written: {path}")
