"""docs/evidence.md says what the tables in docs/figures hold."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from octavo.bench.paper.curves import all_curves_of, curves_of
from octavo.bench.paper.serving import Served, shown_rate, shown_ratio, sustained_rate

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


STATIC = {"fastertransformer": ("FasterTransformer",)}
ENGINES = LABELS | STATIC | {"paged": ("paged", "paged / virtual")}


@pytest.mark.parametrize(
    "path", sorted((DOCS / "figures").glob("*figure-1[246]*.csv")), ids=lambda path: path.stem
)
def test_rates_are_of_what_came(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    seconds = float(re.findall(r"Poisson arrivals for ([\d.]+) s", lines[1])[0])
    for found in csv.DictReader(line for line in lines if line[0] != "#"):
        came = int(found["num_requests"]) / seconds
        assert float(found["rate"]) == pytest.approx(came, rel=1e-3), found


def test_latency_against_rate() -> None:
    curves = curves_of("manager", table("", 12))
    for name, curve in curves.items():
        told = row(part("", 12), *ENGINES[name])
        if name == "virtual":
            assert told[0].endswith(f" / {shown_rate(curve, 0.1)}")
        elif name == "paged":
            assert told[0].split("**")[0] == shown_rate(curve, 0.1)
        else:
            assert told[:2] == [shown_rate(curve, 0.1), shown_ratio(curves, "paged", name, 0.1)]


@pytest.mark.parametrize(("kind", "bounds_s"), [("cpu-", (0.1,)), ("gpu-", (0.01, 0.02))])
def test_latency_against_rate_of_a_real_engine(kind: str, bounds_s: tuple[float, ...]) -> None:
    curves = curves_of("manager", table(kind, 12))
    simulated = curves_of("manager", table("", 12))
    for name, curve in curves.items():
        told = row(part(kind, 12), *ENGINES[name])
        for place, bound_s in enumerate(bounds_s):
            rate, ratio = told[2 * place : 2 * place + 2]
            sustained = sustained_rate(curve, bound_s)
            if sustained == 0:
                lowest = min(curve)
                most = sustained_rate(curves["paged"], bound_s) / lowest
                assert (rate, ratio) == (f"< {lowest:.1f}", f"> {most:.1f}×"), name
                continue
            assert rate == f"{sustained:.1f}", name
            if name != "paged":
                assert ratio == shown_ratio(curves, "paged", name, bound_s), name
        if name != "paged":
            assert told[2 * len(bounds_s)] == shown_ratio(simulated, "paged", name, 0.1), name


@pytest.mark.parametrize("kind", ["", "cpu-"])
def test_samples_and_beams(kind: str) -> None:
    found = all_curves_of("decoding", table(kind, 14))
    for decoding, name in (("parallel", "samples"), ("beam", "beams")):
        mine = {label: curves for label, curves in found.items() if label.startswith(decoding)}
        widths = " / ".join(label.split()[1] for label in mine)
        told = row(part(kind, 14), f"{widths} {name}")
        for place, manager in enumerate(("orca-max", "orca-oracle", "paged")):
            assert told[place] == _rates([curves[manager] for curves in mine.values()], 1)
        ratios = [shown_ratio(curves, "paged", "orca-oracle", 0.1) for curves in mine.values()]
        assert told[3] == " / ".join(ratio.removesuffix("×") for ratio in ratios) + "×"


def test_samples_and_beams_on_a_gpu() -> None:
    found = all_curves_of("decoding", table("gpu-", 14))
    for label, name in (("parallel 6", "6 samples"), ("beam 6", "6 beams")):
        for bound_s, place in ((0.01, ", at 0.01 s"), (0.1, ", at 0.1 s")):
            told, curves = row(part("gpu-", 14), name + place), found[label]
            for manager, cell in zip(("orca-max", "orca-oracle", "paged"), told, strict=False):
                rate = _rates([curves[manager]], 0, bound_s)
                assert cell == ("–" if rate == "0" else rate), (name, manager)
            if told[3]:
                assert told[3] == shown_ratio(curves, "paged", "orca-oracle", bound_s)


@pytest.mark.parametrize("kind", ["", "cpu-"])
def test_a_shared_prefix(kind: str) -> None:
    for label, curves in all_curves_of("prefix", table(kind, 16)).items():
        told = row(part(kind, 16), "80 tokens" if label == "1-shot" else "341 tokens")
        for place, manager in enumerate(("orca-oracle", "paged", "paged-shared")):
            assert told[place] == _rates([curves[manager]], 1), (label, manager)
        shown = shown_ratio(curves, "paged-shared", "orca-oracle", 0.1)
        assert _number(told[3]) == pytest.approx(_number(shown), abs=0.051)


def _number(text: str) -> float:
    return float(text.strip("≥ ×"))


def _rates(curves: list[dict[float, Served]], places: int, bound_s: float = 0.1) -> str:
    """As the page has them: ``≥`` where the highest rate measured was not enough."""
    return " / ".join(
        f"{'≥ ' if shown_rate(curve, bound_s)[0] == '≥' else ''}"
        f"{sustained_rate(curve, bound_s):.{places}f}"
        for curve in curves
    )
