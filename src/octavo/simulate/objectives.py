"""What a service promises: percentiles of latencies, and that it keeps up with what comes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from octavo.simulate.outcome import PERCENTILES, Outcome

FIGURES = ("ttft", "itl", "e2el")
# As it was called here before, and is in outcomes.
_OTHER_NAMES = {"e2e": "e2el"}
_SERIES = {"ttft": "ttft_s", "itl": "itl_s", "e2el": "e2e_s"}
_POINTS = ("mean", *(f"p{p}" for p in PERCENTILES))
_UNITS = {"ms": 1e-3, "s": 1.0}
_MOST_S = 1e6


class ObjectiveError(ValueError):
    """An objective cannot be read, or cannot be met; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Objective:
    """``figure`` at ``point`` takes ``limit_s`` seconds at most."""

    figure: str
    point: str
    limit_s: float

    @property
    def name(self) -> str:
        return f"{self.figure}_{self.point}"

    def value_s(self, outcome: Outcome) -> float:
        found: dict[str, float] = getattr(outcome, _SERIES[self.figure])
        return found[self.point]


def parse_objectives(text: str) -> tuple[Objective, ...]:
    """``ttft_p99=200ms,itl_p99=50ms``: time to the first token, between tokens (``itl``), or of a
    whole request (``e2el``, or ``e2e``); ``p50``, ``p90``, ``p99`` or ``mean``.

    Raises:
        ObjectiveError: anything else.
    """
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([a-z0-9]+)_([a-z0-9]+)\s*=\s*([0-9.]+)\s*(ms|s)\s*", part)
        figure = _OTHER_NAMES.get(match[1], match[1]) if match else ""
        if not match or figure not in FIGURES or match[2] not in _POINTS:
            raise ObjectiveError(
                f"an objective is a figure ({', '.join(FIGURES)}), a point ({', '.join(_POINTS)}) "
                f"and a time, such as ttft_p99=200ms, got {part.strip()!r}"
            )
        try:
            limit_s = float(match[3]) * _UNITS[match[4]]
        except ValueError:
            limit_s = 0.0
        if not 0 < limit_s <= _MOST_S:
            raise ObjectiveError(
                f"the time of {part.strip()!r} must be above 0 and at most {_MOST_S:,.0f} s"
            )
        found.append(Objective(figure, match[2], limit_s))
    names = [objective.name for objective in found]
    if len(set(names)) < len(names):
        raise ObjectiveError(f"{text!r} bounds a figure twice; give each once")
    return tuple(found)
