"""Every figure that can be measured, by its number in Kwon et al. (SOSP 2023)."""

from __future__ import annotations

from collections.abc import Callable

from octavo.bench.paper import (
    figure02,
    figure12,
    figure13,
    figure14,
    figure15,
    figure16,
    figure18,
    figure19,
)
from octavo.bench.paper.report import PaperOptions, PaperReport

FIGURES: dict[str, Callable[[PaperOptions], PaperReport]] = {
    "2": figure02.measure,
    "12": figure12.measure,
    "13": figure13.measure,
    "14": figure14.measure,
    "15": figure15.measure,
    "16": figure16.measure,
    "18": figure18.measure,
    "19": figure19.measure,
}
