"""Every figure that can be measured, by its number in Kwon et al. (SOSP 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from octavo.bench.paper import (
    figure02,
    figure12,
    figure13,
    figure14,
    figure15,
    figure16,
    figure18,
    figure19,
    one_rate,
)
from octavo.bench.paper.report import PaperOptions, PaperReport, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class PaperFigure(Protocol):
    """``TAKES`` are the fields of `PaperOptions` that change it, beside model, scale and seed."""

    TAKES: frozenset[str]

    def measure(self, options: PaperOptions) -> PaperReport: ...

    def draw(self, figure: Figure, rows: Sequence[Row]) -> None:
        """Plot a report's rows, or a CSV's, which are texts."""


FIGURES: dict[str, PaperFigure] = {
    "2": figure02,
    "12": figure12,
    "13": figure13,
    "14": figure14,
    "15": figure15,
    "16": figure16,
    "18": figure18,
    "19": figure19,
}
REAL_TAKES: dict[str, frozenset[str]] = {"18": one_rate.REAL_TAKES, "19": one_rate.REAL_TAKES}
"""``TAKES`` of a real engine, where they are others."""
