"""Public traces and length tables, read by what their first line says they are.

=================  ===========================================================  ==========
format             columns                                                      arrivals
=================  ===========================================================  ==========
Azure LLM 2023/24  TIMESTAMP, ContextTokens, GeneratedTokens                    yes
BurstGPT           Timestamp, Model, Request tokens, Response tokens, …         yes (s)
Mooncake           one JSON object a line: timestamp (ms), input_length,        yes
                   output_length, hash_ids
ShareGPT lengths   prompt_tokens, output_tokens                                 no
Vidur lengths      num_prefill_tokens, num_decode_tokens                        no
=================  ===========================================================  ==========
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from octavo.workload.items import MOST_TOKENS, WorkItem, WorkloadError

# More than any calendar; beyond it seconds have no fractions left.
_MOST_SECONDS = 1e12
_Row = dict[str, str]


def load_trace(path: str | Path) -> list[WorkItem]:
    """All requests of a trace, in order of arrival, the first at 0 s.

    Length tables have no arrivals: every item arrives at 0 s. Requests without a prompt or an
    output token (failures, in some traces) are left out.

    Raises:
        WorkloadError: the file is absent, of no known format, broken, or empty.
    """
    path = Path(path)
    try:
        # Spreadsheets write a byte order mark, which is no part of the first column's name.
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            items = list(_read(path, first, file))
    except OSError as error:
        raise WorkloadError(f"cannot read the trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path} is not a text file: {error}") from error
    items = [item for item in items if item.num_prompt_tokens > 0 and item.num_output_tokens > 0]
    if not items:
        raise WorkloadError(f"{path} holds no request with both a prompt and an output")
    items.sort(key=lambda item: item.arrival_s)
    start = items[0].arrival_s
    return [
        WorkItem(i.arrival_s - start, i.num_prompt_tokens, i.num_output_tokens, i.prefix_hashes)
        for i in items
    ]


def _read(path: Path, first: str, lines: Iterable[str]) -> Iterator[WorkItem]:
    if first.lstrip().startswith("{"):
        yield from _read_mooncake(path, lines)
        return
    columns = {name.strip() for name in first.split(",")}
    for needed, parse in _TABLES:
        if needed <= columns:
            yield from _read_table(path, lines, parse)
            return
    if not first.strip():
        raise WorkloadError(f"{path} is empty: its first line would name its columns")
    known = "; ".join(", ".join(sorted(needed)) for needed, _ in _TABLES)
    raise WorkloadError(
        f"{path} is of no known format: its first line names {', '.join(sorted(columns))}; known "
        f"are tables with the columns {known}, and Mooncake's JSON lines"
    )


def _read_table(
    path: Path, lines: Iterable[str], parse: Callable[[_Row], WorkItem]
) -> Iterator[WorkItem]:
    number = 1
    try:
        for number, row in enumerate(csv.DictReader(lines, skipinitialspace=True), start=2):
            try:
                yield _checked(parse(row))
            except (ValueError, TypeError, KeyError, OverflowError) as error:
                raise WorkloadError(f"{path}, line {number}: {error}") from error
    except csv.Error as error:
        raise WorkloadError(f"{path}, after line {number}: {error}") from error


def _read_mooncake(path: Path, lines: Iterable[str]) -> Iterator[WorkItem]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            yield _checked(
                WorkItem(
                    arrival_s=float(record["timestamp"]) / 1e3,
                    num_prompt_tokens=int(record["input_length"]),
                    num_output_tokens=int(record["output_length"]),
                    prefix_hashes=tuple(int(value) for value in record.get("hash_ids", ())),
                )
            )
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise WorkloadError(f"{path}, line {number}: {error!r}") from error


def _checked(item: WorkItem) -> WorkItem:
    """``item``, unless it could be neither sent nor waited for."""
    if not abs(item.arrival_s) <= _MOST_SECONDS:
        raise ValueError(
            f"it arrives at {item.arrival_s:g} s; a time is at most {_MOST_SECONDS:g} s from 0"
        )
    if min(item.num_prompt_tokens, item.num_output_tokens) < 0:
        raise ValueError("a number of tokens is below 0")
    longest = max(item.num_prompt_tokens, item.num_output_tokens)
    if longest > MOST_TOKENS:
        shown = f"{longest:,}" if longest < 10**30 else "absurdly many"
        raise ValueError(
            f"{shown} tokens are more than the {MOST_TOKENS:,} that a request may have"
        )
    return item


def _azure(row: _Row) -> WorkItem:
    # Seven digits of fraction are one more than Python reads.
    stamp = row["TIMESTAMP"].strip().removesuffix("Z").split("+")[0]
    whole, _, fraction = stamp.partition(".")
    # As if of Greenwich: a clock that is changed at night would move what comes after it.
    whole_s = datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp()
    seconds = whole_s + float(f"0.{fraction or 0}")
    return WorkItem(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _burst_gpt(row: _Row) -> WorkItem:
    return WorkItem(
        float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"])
    )


def _share_gpt(row: _Row) -> WorkItem:
    return WorkItem(0.0, int(row["prompt_tokens"]), int(row["output_tokens"]))


def _vidur(row: _Row) -> WorkItem:
    return WorkItem(0.0, int(row["num_prefill_tokens"]), int(row["num_decode_tokens"]))


_TABLES: tuple[tuple[set[str], Callable[[_Row], WorkItem]], ...] = (
    ({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}, _azure),
    ({"Timestamp", "Request tokens", "Response tokens"}, _burst_gpt),
    ({"prompt_tokens", "output_tokens"}, _share_gpt),
    ({"num_prefill_tokens", "num_decode_tokens"}, _vidur),
)
