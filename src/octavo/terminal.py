"""How commands speak: errors in one line, results as JSON. Light: typer only."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

INTERRUPTED = 130
"""The exit code that shells show of a process that Ctrl-C ended."""


@contextmanager
def readable_errors() -> Iterator[None]:
    """Expected errors are one line on standard error, without a traceback, and exit code 1; where
    what was asked for is at fault (a `ValueError`), 2, as for an unknown option."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for chatty in ("uvicorn.error", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        yield
    except (ValueError, MemoryError, OSError, RuntimeError) as error:
        if isinstance(error, typer.Exit):
            raise
        says_why = str(error) or (
            "out of memory" if isinstance(error, MemoryError) else repr(error)
        )
        typer.echo(f"octavo: {says_why}", err=True)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from error


def print_json(value: Any) -> None:
    """One JSON object on standard output."""
    typer.echo(json.dumps(value, ensure_ascii=False))
