"""Service at one rate, for the figures that compare block sizes in it."""

from __future__ import annotations

from dataclasses import replace

from octavo.bench.paper.engines import Engine, Engines
from octavo.bench.paper.report import PaperOptions, trace_name, work_of
from octavo.bench.paper.serving import Served, load_of, serve, sweep
from octavo.config import ConfigError
from octavo.workload.arrivals import arrival_times, with_arrivals

MANAGER = "paged"
TAKES = frozenset({"trace", "num_requests"})
REAL_TAKES = TAKES | {"rates", "duration_s"}
"""What changes such a figure of a real engine."""

# Of the simulator, which is as fast at any.
_NUM_REQUESTS = 400
_NEVER_S = float("inf")


def check_rate(options: PaperOptions) -> None:
    """Raises `ConfigError` where a real engine would not know how fast requests come: which rate
    is telling depends on model and machine."""
    if options.model is not None and len(options.rates) != 1:
        raise ConfigError(
            "this figure serves a real engine at one rate: give --rates with a number of requests "
            "a second that the machine can just not keep up with"
        )


def serve_at_one_rate(
    options: PaperOptions, engines: Engines, engine: Engine, simulated_rate: float
) -> Served:
    if options.model is None:
        items = work_of(options, engines, _NUM_REQUESTS)
        times = arrival_times("poisson", len(items), rate=simulated_rate, seed=options.seed)
        return serve(engine, with_arrivals(items, times))
    load = load_of(options, (), 0.0, _NEVER_S)
    items = work_of(replace(options, num_requests=None), engines)
    (served,) = sweep(engine, items, load).values()
    return served


def conditions(options: PaperOptions, engines: Engines, simulated_rate: float) -> str:
    """What was served, after a run; ``engines`` are those of the last block size."""
    name = trace_name(options, engines)
    if options.model is None:
        count = options.num_requests or _NUM_REQUESTS
        return (
            f"Service: {count} requests of {name} at {simulated_rate:g} a second over the "
            "simulated executor."
        )
    load = load_of(options, (), 0.0, _NEVER_S)
    return (
        f"Service: {name}, {load}, {load.rates[0]:g} requests a second. Pools of as many tokens, "
        f"the last of {engines.conditions}"
    )
