"""Options of the workload that several benches share. Light: typer only."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo.config import ConfigError
from octavo.workload.items import MOST_TOKENS

PANEL = "Workload"
Trace = Annotated[
    str | None,
    typer.Option(
        help="A trace (Azure, BurstGPT, Mooncake) or a table of lengths (ShareGPT, Vidur); "
        "without one lengths are fixed.",
        rich_help_panel=PANEL,
    ),
]
_MOST_REQUESTS = 1_000_000
NumRequests = Annotated[
    int, typer.Option(max=_MOST_REQUESTS, help="How many requests.", rich_help_panel=PANEL)
]
InputLen = Annotated[
    int,
    typer.Option(max=MOST_TOKENS, help="Prompt tokens, without a trace.", rich_help_panel=PANEL),
]
OutputLen = Annotated[
    int,
    typer.Option(max=MOST_TOKENS, help="Output tokens, without a trace.", rich_help_panel=PANEL),
]
MaxTotalLen = Annotated[
    int | None,
    typer.Option(min=1, help="Leave out longer requests of a trace.", rich_help_panel=PANEL),
]
Seed = Annotated[
    int, typer.Option(min=0, help="Makes the workload repeatable.", rich_help_panel=PANEL)
]


def check_lengths(context: typer.Context, trace: str | None) -> None:
    """Refuse what would change nothing: lengths beside a trace's, a limit without a trace.

    Raises:
        ConfigError: such an option was given.
    """
    names = ("input_len", "output_len") if trace is not None else ("max_total_len",)
    for name in names:
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        option = "--" + name.replace("_", "-")
        if trace is not None:
            raise ConfigError(f"{option} is for fixed lengths: leave it out, or --trace")
        raise ConfigError(f"{option} leaves out requests of a trace: give --trace, or leave it out")
