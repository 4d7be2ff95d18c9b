"""Every figure that can be measured, by its number in Kwon et al. (SOSP 2023)."""

from __future__ import annotations

from collections.abc import Callable

from octavo.bench.paper import figure02, figure13, figure15
from octavo.bench.paper.report import PaperOptions, PaperReport

FIGURES: dict[str, Callable[[PaperOptions], PaperReport]] = {
    "2": figure02.measure,
    "13": figure13.measure,
    "15": figure15.measure,
}
