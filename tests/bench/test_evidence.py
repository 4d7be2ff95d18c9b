"""docs/evidence.md says what the tables in docs/figures hold."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "evidence.md").read_text(encoding="utf-8")
SECTIONS = {"": TEXT.split("## The real engine, on a CPU")[0]}
SECTIONS["cpu-"], SECTIONS["gpu-"] = (
    TEXT.split(f"## The real engine, on a {device}")[1].split("\n## ")[0]
    for device in ("CPU", "GPU")
)


def table(kind: str, figure: int) -> list[dict[str, str]]:
    lines = (DOCS / "figures" / f"{kind}figure-{figure}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in lines.splitlines() if line[0] != "#"))


def part(kind: str, figure: int) -> str:
    """What the page says of a figure."""
    section = SECTIONS[kind]
    mark = r"## [^\n]*figure %d\)" if kind == "" else r"\*\*Figure %d\*\*"
    return re.split(r"\n## |\n\*\*Figure", re.split(mark % figure, section)[1])[0]


def cells(line: str) -> list[str]:
    return [cell.strip(" *") for cell in line.strip("|").split("|")]


def row(text: str, *names: str) -> list[str]:
    """The numbers of the row of a table whose first cell begins with one of ``names``."""
    found = [cells(line) for line in text.splitlines() if line.startswith("| ")]
    for name in names:
        for line in found:
            if line[0].startswith(name):
                return line[1:]
    raise AssertionError(f"no row for {names[0]}")


LABELS = {
    "orca-max": ("Orca, max",),
    "orca-pow2": ("Orca, pow2",),
    "orca-oracle": ("Orca, oracle",),
    "paged": ("paged",),
    "virtual": ("virtual", "paged / virtual"),
}


@pytest.mark.parametrize("kind", ["", "cpu-", "gpu-"])
def test_where_the_bytes_are(kind: str) -> None:
    for found in table(kind, 2):
        if found["manager"] not in LABELS:
            continue
        told = row(part(kind, 2), *LABELS[found["manager"]])
        parts = ("live", "reserved", "internal", "external", "free")
        assert told[:5] == [f"{100 * float(found[name]):.1f}" for name in parts], found["manager"]


@pytest.mark.parametrize("kind", ["", "cpu-"])
def test_requests_at_once(kind: str) -> None:
    for found in table(kind, 13):
        told = row(part(kind, 13), *LABELS[found["manager"]])
        assert told[0] == f"{float(found['mean_running']):.1f}", found["manager"]


def test_requests_at_once_on_a_gpu() -> None:
    numbers = [f"{float(found['mean_running']):.1f}" for found in table("gpu-", 13)]
    assert re.findall(r"\d+\.\d", part("gpu-", 13))[: len(numbers)] == numbers


@pytest.mark.parametrize("kind", ["", "cpu-"])
def test_what_sharing_saves(kind: str) -> None:
    for decoding, name in (("parallel", "parallel sampling"), ("beam", "beam search")):
        numbers = [
            f"{float(found['saved_percent']):.1f}"
            for found in table(kind, 15)
            if found["decoding"] == decoding
        ]
        assert row(part(kind, 15), name)[: len(numbers)] == numbers


def test_what_sharing_saves_on_a_gpu() -> None:
    numbers = [f"{float(found['saved_percent']):.1f}" for found in table("gpu-", 15)]
    assert re.findall(r"\d+\.\d", part("gpu-", 15))[: len(numbers)] == numbers


@pytest.mark.parametrize("kind", ["cpu-", "gpu-"])
def test_block_sizes(kind: str) -> None:
    found, text = table(kind, 18), part(kind, 18)
    for name, column, places in (
        ("scattered to consecutive", "kernel_ratio", 2),
        ("s a token in service", "normalized_latency_s", 3 if kind == "cpu-" else 4),
        ("requests at once", "mean_running", 1),
    ):
        numbers = [f"{float(each[column]):.{places}f}" for each in found]
        assert row(text, name) == numbers, name


@pytest.mark.parametrize("kind", ["cpu-", "gpu-"])
def test_swapping_and_recomputation(kind: str) -> None:
    found, text = table(kind, 19), part(kind, 19)
    places, digits = (0, 3) if kind == "cpu-" else (1, 4)
    assert row(text, "recompute") == [f"{float(e['recompute_ms']):.{places}f}" for e in found]
    assert row(text, "swap, one copy") == [f"{float(e['swap_one_ms']):.1f}" for e in found]
    recompute, swap = (
        [f"{float(e[f'{way}_normalized_latency_s']):.{digits}f}" for e in found]
        for way in ("recompute", "swap")
    )
    ways = [" / ".join(pair) for pair in zip(recompute, swap, strict=True)]
    assert row(text, "s a token in service") == ways
