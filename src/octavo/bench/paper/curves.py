"""Curves of normalized latency against request rate, as a table, rows and a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def rows_of(what: str, curves: Curves) -> list[dict[str, Any]]:
    return [
        {
            what: name,
            "rate": rate,
            "normalized_latency_s": f"{served.normalized_latency_s:.6f}",
            "mean_running": f"{served.mean_running:.3f}",
            "num_preemptions": served.num_preemptions,
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
        places = [place + 0.26 * (index - 1) for place in range(len(rates))]
        axes.bar(places, [by_name[name] for by_name in rates.values()], 0.24, label=name)
    axes.set_xticks(range(len(rates)), list(rates))
    axes.set_ylabel(f"requests a second at {bound_s} s a token")
    axes.legend(frameon=False, fontsize=8)


def rates_of(found: dict[str, Curves], bound_s: float) -> dict[str, dict[str, float]]:
    """The sustained rate of every curve."""
    return {
        label: {name: sustained_rate(curve, bound_s) for name, curve in curves.items()}
        for label, curves in found.items()
    }


def rows_of_all(what: str, found: dict[str, Curves]) -> list[dict[str, Any]]:
    return [
        {what: label, **row}
        for label, curves in found.items()
        for row in rows_of("manager", curves)
    ]
