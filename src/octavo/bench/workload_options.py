"""Options of the workload that several benches share. Light: typer only."""

from __future__ import annotations

from typing import Annotated

import typer

PANEL = "Workload"
Trace = Annotated[
    str | None,
    typer.Option(
        help="A trace (Azure, BurstGPT, Mooncake) or a table of lengths (ShareGPT, Vidur); "
        "without one lengths are fixed.",
        rich_help_panel=PANEL,
    ),
]
NumRequests = Annotated[int, typer.Option(help="How many requests.", rich_help_panel=PANEL)]
InputLen = Annotated[
    int, typer.Option(help="Prompt tokens, without a trace.", rich_help_panel=PANEL)
]
OutputLen = Annotated[
    int, typer.Option(help="Output tokens, without a trace.", rich_help_panel=PANEL)
]
MaxTotalLen = Annotated[
    int | None,
    typer.Option(help="Leave out longer requests of a trace.", rich_help_panel=PANEL),
]
Seed = Annotated[int, typer.Option(help="Makes the workload repeatable.", rich_help_panel=PANEL)]
