"""What a request must meet to count as goodput."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.config import ConfigError

NAMES = ("ttft", "tpot", "itl", "e2el")
# As it was called here before.
_OTHER_NAMES = {"e2e": "e2el"}
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_objectives(text: str) -> dict[str, float]:
    """``ttft=200ms,itl=50ms`` to seconds by name; also as vLLM writes them, in milliseconds:
    ``ttft:200 e2el:5000``.

    ``ttft`` bounds the time to the first token, ``tpot`` a request's mean time a token after the
    first, ``itl`` its longest gap between tokens, ``e2el`` (or ``e2e``) its whole time.

    Raises:
        ConfigError: no objective, an unknown or repeated name, or a time that is not above 0 with
            its unit.
    """
    objectives: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        name, equals, value = part.partition("=")
        if not equals:
            name, _, value = part.partition(":")
            value = f"{value}ms" if value else ""
        name = _OTHER_NAMES.get(name, name)
        seconds = _seconds(value)
        if name not in NAMES or seconds is None:
            raise ConfigError(
                f"an objective is one of {', '.join(NAMES)} and a time above 0 with its unit, "
                f"such as ttft=200ms; got {part!r}"
            )
        if name in objectives:
            raise ConfigError(f"the objective {name} is given twice; leave one out")
        objectives[name] = seconds
    if not objectives:
        raise ConfigError(
            f"{text!r} names no objective; give one such as ttft=200ms, or leave the option out"
        )
    return objectives


def meets(values: Mapping[str, float], objectives: Mapping[str, float]) -> bool:
    """Whether a request whose figures are ``values``, in seconds by name, meets all of them."""
    return all(values[name] <= bound for name, bound in objectives.items())


def _seconds(text: str) -> float | None:
    number = text.rstrip("mus")
    unit = _UNITS.get(text[len(number) :])
    try:
        seconds = float(number) * (unit or 0.0)
    except ValueError:
        return None
    return seconds if 0 < seconds < float("inf") else None
