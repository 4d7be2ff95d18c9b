"""A sweep drawn: latencies, throughput and goodput against the rate of requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.bench.serve.report import objectives_text
from octavo.config import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
_LINES = {"median": "-o", "p90": "--s", "p99": ":^"}


def plot(reports: Sequence[dict[str, Any]], path: Path, caption: str) -> None:
    """Write the figure to ``path``. A run of all requests at once stands at the rate it reached.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    ordered = sorted(reports, key=_rate)
    rates = [_rate(report) for report in ordered]
    figure = Figure(figsize=(9.6, 5.4), dpi=110, layout="constrained")
    axes = figure.subplots(2, 3)
    places = (axes[0, 0], axes[0, 1], axes[1, 0], axes[1, 1])
    for axis, (name, title) in zip(places, _LATENCIES.items(), strict=True):
        _draw_latency(axis, rates, ordered, name)
        axis.set_title(title, fontsize=10)
        axis.set_ylabel("ms")
    _draw_tokens(axes[0, 2], rates, ordered)
    _draw_requests(axes[1, 2], rates, ordered)
    for axis in axes.flat:
        axis.set_xlabel("requests/s asked for")
        axis.set_ylim(bottom=0)
        axis.grid(color="0.9")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    if "request_goodput" in ordered[0]:
        caption += f"; goodput: {objectives_text(ordered[0])}"
    figure.suptitle(caption, fontsize=9)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _rate(report: dict[str, Any]) -> float:
    rate = report["request_rate"]
    return float(rate) if isinstance(rate, float | int) else float(report["request_throughput"])


def _draw_latency(
    axis: Axes, rates: Sequence[float], reports: Sequence[dict[str, Any]], name: str
) -> None:
    for statistic, line in _LINES.items():
        values = [report[f"{statistic}_{name}_ms"] for report in reports]
        points = [(x, y) for x, y in zip(rates, values, strict=True) if y is not None]
        axis.plot([x for x, _ in points], [y for _, y in points], line, ms=4, label=statistic)
    bound = reports[0].get("goodput_objectives_s", {}).get(name)
    # An objective on ITL is one on a request's longest gap, which is not drawn here.
    if bound is not None and name != "itl":
        axis.axhline(1e3 * bound, color="0.5", lw=1, label="objective")


def _draw_tokens(axis: Axes, rates: Sequence[float], reports: Sequence[dict[str, Any]]) -> None:
    axis.set_title("token throughput", fontsize=10)
    axis.set_ylabel("tokens/s")
    axis.plot(rates, [r["output_throughput"] for r in reports], "-o", ms=4, label="output")
    axis.plot(rates, [r["total_token_throughput"] for r in reports], "--s", ms=4, label="in all")


def _draw_requests(axis: Axes, rates: Sequence[float], reports: Sequence[dict[str, Any]]) -> None:
    axis.set_title("request throughput", fontsize=10)
    axis.set_ylabel("requests/s")
    axis.plot(rates, rates, color="0.8", lw=1, label="asked for")
    axis.plot(rates, [r["request_throughput"] for r in reports], "-o", ms=4, label="served")
    if "request_goodput" in reports[0]:
        axis.plot(rates, [r["request_goodput"] for r in reports], "--s", ms=4, label="goodput")
