"""Curves of normalized latency against request rate, as a table, rows and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.bench.paper.report import Row
from octavo.bench.paper.serving import Served, sustained_rate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves = dict[str, dict[float, Served]]


def table_of(what: str, curves: Curves) -> str:
    """Normalized latency in seconds a token, a row a rate."""
    rates = sorted({rate for curve in curves.values() for rate in curve})
    lines = [f"{what:<8}" + "".join(f"{name:>18}" for name in curves), "req/s"]
    for rate in rates:
        cells = [
            f"{curve[rate].normalized_latency_s:>18.3f}" if rate in curve else " " * 18
            for curve in curves.values()
        ]
        lines.append(f"{rate:<8g}" + "".join(cells))
    return "\n".join(lines)


def rows_of(what: str, curves: Curves) -> list[Row]:
    return [
        {
            what: name,
            "rate": rate,
            "normalized_latency_s": f"{served.normalized_latency_s:.6f}",
            "mean_running": f"{served.mean_running:.3f}",
            "requests_per_s": f"{served.requests_per_s:.4f}",
            "num_preemptions": served.num_preemptions,
            "num_requests": served.num_requests,
        }
        for name, curve in curves.items()
        for rate, served in curve.items()
    ]


def draw_curves(figure: Figure, curves: Curves, bound_s: float) -> None:
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(
            list(curve),
            [served.normalized_latency_s for served in curve.values()],
            marker="o",
            markersize=3,
            label=name,
        )
    axes.axhline(bound_s, color="0.7", linewidth=0.8)
    axes.set_ylim(0, 5 * bound_s)
    axes.set_xlabel("requests a second")
    axes.set_ylabel("normalized latency, s a token")
    axes.legend(frameon=False, fontsize=8)


def draw_rates(figure: Figure, rates: dict[str, dict[str, float]], bound_s: float) -> None:
    """Sustained rates, by what was asked for and by manager, as bars."""
    axes = figure.subplots()
    names = list(next(iter(rates.values())))
    for index, name in enumerate(names):
        width = 0.78 / len(names)
        places = [place + width * (index - (len(names) - 1) / 2) for place in range(len(rates))]
        # An interrupt may have left some out.
        heights = [by_name.get(name, 0.0) for by_name in rates.values()]
        axes.bar(places, heights, 0.92 * width, label=name)
    axes.set_xticks(range(len(rates)), list(rates))
    axes.set_ylabel(f"requests a second at {bound_s} s a token")
    axes.legend(frameon=False, fontsize=8)


def rates_of(found: dict[str, Curves], bound_s: float) -> dict[str, dict[str, float]]:
    """The sustained rate of every curve."""
    return {
        label: {name: sustained_rate(curve, bound_s) for name, curve in curves.items()}
        for label, curves in found.items()
    }


def curves_of(what: str, rows: Sequence[Row]) -> Curves:
    """The curves of `rows_of`, or of a CSV's rows, which are texts."""
    curves: Curves = {}
    for row in rows:
        curves.setdefault(row[what], {})[float(row["rate"])] = Served(
            normalized_latency_s=float(row["normalized_latency_s"]),
            requests_per_s=float(row["requests_per_s"]),
            mean_running=float(row["mean_running"]),
            num_preemptions=int(row["num_preemptions"]),
            num_requests=int(row["num_requests"]),
        )
    return curves


def all_curves_of(what: str, rows: Sequence[Row]) -> dict[str, Curves]:
    """The curves of `rows_of_all`, or of a CSV's rows."""
    labels = dict.fromkeys(row[what] for row in rows)
    return {
        label: curves_of("manager", [row for row in rows if row[what] == label]) for label in labels
    }


def rows_of_all(what: str, found: dict[str, Curves]) -> list[Row]:
    return [
        {what: label, **row}
        for label, curves in found.items()
        for row in rows_of("manager", curves)
    ]
