"""A run's figures as text and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.bench.serve.metrics import METRICS, Load
from octavo.config import ConfigError

_COLUMNS = ("mean", "median", "p90", "p99", "max")
_SWEEP_WIDTH = 15
# Lists and mappings have no place in a row.
_NOT_IN_CSV = ("errors", "goodput_objectives_s")


def table(report: dict[str, Any]) -> str:
    """One run as text."""
    lines = [
        f"{report['completed']} of {report['num_prompts']} requests in "
        f"{report['duration']:.1f} s, {report['max_concurrent_requests']} at once at most: "
        f"{report['request_throughput']:.2f} requests/s, "
        f"{report['output_throughput']:.1f} output tokens/s, "
        f"{report['total_token_throughput']:.1f} tokens/s in all",
        f"{'ms':<6}" + "".join(f"{column:>10}" for column in _COLUMNS),
    ]
    for name in METRICS:
        cells = [_ms(report[f"{column}_{name}_ms"]) for column in _COLUMNS]
        lines.append(f"{name.upper():<6}" + "".join(f"{cell:>10}" for cell in cells))
    if "request_goodput" in report:
        lines.append(
            f"goodput {report['request_goodput']:.2f} requests/s: "
            f"{report['goodput_share']:.1%} of all requests within {objectives_text(report)}"
        )
    if report["total_cached_tokens"]:
        lines.append(
            f"{report['total_cached_tokens']} of {report['total_input_tokens']} prompt tokens came "
            "from the server's prefix cache; another --seed makes other prompts"
        )
    lines += [f"failed: {error}" for error in report["errors"]]
    return "\n".join(lines)


def sweep_header(objectives: dict[str, float]) -> str:
    """The head over `sweep_row`'s lines."""
    columns = ["served", "requests/s", "tokens/s out", "in all"]
    columns += [f"{name.upper()} ms" for name in METRICS]
    if objectives:
        columns.append("goodput/s")
    return f"latencies: median / P99\n{'rate':>8}" + "".join(
        f"{column:>{_width(column)}}" for column in columns
    )


def sweep_row(report: dict[str, Any]) -> str:
    """A rate's run in one line."""
    rate = report["request_rate"]
    cells = [
        ("served", f"{report['completed']}/{report['num_prompts']}"),
        ("requests/s", f"{report['request_throughput']:.2f}"),
        ("tokens/s out", f"{report['output_throughput']:.1f}"),
        ("in all", f"{report['total_token_throughput']:.1f}"),
    ]
    for name in METRICS:
        median, p99 = report[f"median_{name}_ms"], report[f"p99_{name}_ms"]
        cells.append((f"{name} ms", f"{_short_ms(median)}/{_short_ms(p99)}"))
    if "request_goodput" in report:
        cells.append(
            ("goodput/s", f"{report['request_goodput']:.2f} {report['goodput_share']:>4.0%}")
        )
    row = f"{'own' if rate is None else rate:>8}"
    row += "".join(f"{cell:>{_width(column)}}" for column, cell in cells)
    return row + "".join(f"\n{'':>8} failed: {error}" for error in report["errors"])


def objectives_text(report: dict[str, Any]) -> str:
    """``ttft=200ms, itl=50ms``."""
    return ", ".join(
        f"{name}={1e3 * seconds:g}ms" for name, seconds in report["goodput_objectives_s"].items()
    )


def write_csv(path: Path, reports: Sequence[dict[str, Any]]) -> None:
    """A row a run. The columns are the figures' names; an empty cell is a figure that is not.

    Raises:
        ConfigError: the file cannot be written.
    """
    names = [name for name in reports[0] if name not in _NOT_IN_CSV]
    _write(path, names, [[report[name] for name in names] for report in reports])


def write_requests_csv(
    path: Path, reports: Sequence[dict[str, Any]], loads: Sequence[Load]
) -> None:
    """A row a request, failed ones too. Times are in milliseconds, ``start_s`` in seconds from the
    start of its run; ``max_itl_ms`` is the request's longest gap.

    Raises:
        ConfigError: the file cannot be written.
    """
    names = ("run", "request_rate", "request", "start_s", "input_tokens", "output_tokens")
    latencies = ("ttft_ms", "tpot_ms", "max_itl_ms", "e2el_ms")
    rows: list[list[Any]] = []
    for run, (report, load) in enumerate(zip(reports, loads, strict=True)):
        for number, sample in enumerate(load.samples):
            row: list[Any] = [run, report["request_rate"], number, sample.start_s]
            row += [sample.num_prompt_tokens, sample.num_output_tokens]
            if sample.error is None:
                values = sample.values()
                row += [1e3 * values[name] for name in METRICS]
            else:
                row += [None] * len(METRICS)
            rows.append([*row, sample.error])
    _write(path, [*names, *latencies, "error"], rows)


def _write(path: Path, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            writer.writerows(rows)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _width(column: str) -> int:
    return _SWEEP_WIDTH if column.endswith("ms") or column.startswith("goodput") else 13


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _short_ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"
