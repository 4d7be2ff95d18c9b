"""The papers' figures that need times: latencies by hand, orders that must hold, the command."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from octavo.bench.paper import figure12, figure14, figure16, figure19
from octavo.bench.paper.curves import all_curves_of, curves_of, rows_of, rows_of_all
from octavo.bench.paper.engines import ALL_MANAGERS, STATIC
from octavo.bench.paper.managers import Pool
from octavo.bench.paper.report import PaperOptions
from octavo.bench.paper.serving import (
    Load,
    Served,
    arriving,
    serve,
    shown_rate,
    shown_ratio,
    sustained_rate,
    sweep,
)
from octavo.bench.paper.simulated import SimulatedEngines
from octavo.cli import app
from octavo.simulate.executor import FixedLatency
from octavo.workload.items import WorkItem

SMALL = Pool(num_blocks=8, block_size=4, max_model_len=16, token_bytes=10)
SECOND = FixedLatency(step_s=1.0, token_s=0.0)


def served_by(name: str, items: list[WorkItem]) -> Served:
    with SimulatedEngines(SMALL, SECOND).open(name) as engine:
        found = serve(engine, items)
        # The clock starts anew.
        assert serve(engine, items) == found
    return found


def test_normalized_latency_by_hand() -> None:
    """Steps of a second: four tokens take four seconds from the arrival, the second request waits
    for the first step's end."""
    items = [WorkItem(0.0, 2, 4), WorkItem(0.5, 2, 2)]
    served = served_by("paged", items)
    assert served.normalized_latency_s == pytest.approx((4 / 4 + (3 - 0.5) / 2) / 2)
    assert served.requests_per_s == pytest.approx(2 / 4)
    # One for a second, then two for two, then one.
    assert served.mean_running == pytest.approx(6 / 4)
    assert served.num_preemptions == 0


def test_nobody_joins_a_static_batch() -> None:
    items = [WorkItem(0.0, 2, 4), WorkItem(0.5, 2, 2)]
    served = served_by(STATIC, items)
    # It waits until 4 s.
    assert served.normalized_latency_s == pytest.approx((4 / 4 + (6 - 0.5) / 2) / 2)


def test_idle_time_is_skipped() -> None:
    served = served_by("paged", [WorkItem(0.0, 2, 1), WorkItem(100.0, 2, 1)])
    assert served.normalized_latency_s == 1.0
    assert served.requests_per_s == pytest.approx(2 / 101)


def test_a_sustained_rate_lies_between_what_was_measured() -> None:
    curve = {
        rate: Served(latency, rate, 1.0, 0, 5)
        for rate, latency in ((1.0, 0.02), (2.0, 0.06), (3.0, 0.18))
    }
    assert sustained_rate(curve, 0.12) == pytest.approx(2.5)
    assert sustained_rate(curve, 0.2) == 3.0
    assert sustained_rate(curve, 0.01) == 0.0
    assert (shown_rate(curve, 0.12), shown_rate(curve, 0.2)) == ("2.50", "≥ 3.00")
    both = {"slow": {1.0: Served(0.3, 1.0, 1.0, 0, 5)}, "fast": curve}
    both["mid"] = {1.0: Served(0.06, 1.0, 1.0, 0, 5), 2.0: Served(0.26, 1.0, 1.0, 0, 5)}
    assert shown_ratio(both, "fast", "mid", 0.12) == "1.9×"
    assert shown_ratio(both, "fast", "mid", 0.2) == "≥ 1.8×"
    for name, other in (("mid", "fast"), ("fast", "slow"), ("fast", "none")):
        assert shown_ratio(both, name, other, 0.2) == "–"


LOAD = Load(rates=(1, 2, 3, 8, 16), duration_s=50.0, num_requests=None, stop_at_s=3.0)


def test_a_sweep_ends_where_it_is_hopeless() -> None:
    """Eight at once in steps of a second serve four requests of two tokens each second."""
    with SimulatedEngines(SMALL, SECOND).open("paged") as engine:
        found = sweep(engine, [WorkItem(0.0, 2, 2)], LOAD)
    assert list(found) == [1, 2, 3, 8]
    latencies = [served.normalized_latency_s for served in found.values()]
    assert latencies == sorted(latencies)
    assert latencies[2] < 3.0 < latencies[3]
    assert rows_of("manager", curves_of("manager", rows_of("manager", {"paged": found}))) == (
        rows_of("manager", {"paged": found})
    )
    rows = rows_of_all("decoding", {"beam 2": {"paged": found}})
    assert rows_of_all("decoding", all_curves_of("decoding", rows)) == rows


def test_requests_arrive_for_a_while() -> None:
    items = [WorkItem(0.0, 2, 1), WorkItem(0.0, 3, 1), WorkItem(0.0, 4, 1)]
    found = arriving(items, 4.0, LOAD)
    times = [item.arrival_s for item in found]
    assert times == sorted(times)
    assert 0.0 < times[0] < 5.0
    assert 45.0 < times[-1] < 50.0
    assert [item.num_prompt_tokens for item in found[:4]] == [2, 3, 4, 2]
    assert arriving(items, 4.0, LOAD) == found
    assert arriving(items, 4.0, replace(LOAD, seed=1)) != found
    gaps = np.diff(times)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.2), "as exponential ones"


@pytest.mark.parametrize("seed", range(3))
def test_a_rate_brings_what_it_says(seed: int) -> None:
    """However short the run, so that what is sustained is a rate that was there."""
    items = [WorkItem(0.0, 2, 1)]
    for rate, duration_s in ((4.0, 6.0), (0.1, 600.0), (2.5, 2.0)):
        load = replace(LOAD, duration_s=duration_s, seed=seed)
        found = arriving(items, rate, load)
        assert len(found) == round(rate * duration_s)
        assert found[-1].arrival_s < len(found) / rate <= duration_s + 1 / rate
    # Of fewer the same rate.
    few = arriving(items, 4.0, replace(LOAD, num_requests=8))
    assert len(few) == 8
    assert few[-1].arrival_s < 2.0
    # Less than one is expected.
    assert len(arriving(items, 0.1, replace(LOAD, duration_s=1.0))) == 1


def test_paging_sustains_the_highest_rate() -> None:
    """On 24 of ShareGPT's lengths, the order of the paper's figure 12."""
    options = PaperOptions(num_requests=24, rates=(0.2, 0.8, 1.6, 3.0))
    rates = figure12.measure(options).values["sustained_rate"]
    assert list(rates) == list(ALL_MANAGERS)
    assert rates[STATIC] < rates["orca-max"] <= rates["orca-pow2"] <= rates["orca-oracle"]
    assert rates["orca-oracle"] <= rates["paged"] == rates["virtual"]


def test_several_outputs_share_their_prompt() -> None:
    report = figure14.measure(PaperOptions(num_requests=24, widths=(4,), rates=(8, 32)))
    assert set(report.values) == {"parallel 4", "beam 4"}
    for rates in report.values.values():
        assert rates["orca-max"] < rates["paged"]
        assert rates["orca-oracle"] <= rates["paged"]


def test_a_shared_prefix_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure16, "PREFIXES", {"5-shot": 341})
    options = PaperOptions(num_requests=60, rates=(16, 64))
    rates = figure16.measure(options).values["5-shot"]
    assert rates["paged-shared"] > rates["paged"]
    assert rates["paged-shared"] > rates["orca-oracle"]


def test_swapping_costs_a_copy_for_each_block_or_each_layer() -> None:
    small, large = figure19.overheads_ms(1), figure19.overheads_ms(256)
    assert small["recompute_ms"] == large["recompute_ms"]
    # 512 copies of one token's block each way, or 80 times as many.
    assert small["swap_one_ms"] - large["swap_one_ms"] == pytest.approx(510 * figure19.COPY_S * 1e3)
    assert small["swap_layered_ms"] > 5 * small["recompute_ms"]
    assert large["swap_layered_ms"] < large["recompute_ms"]


@pytest.mark.parametrize("figure", ["18", "19"])
def test_the_command(figure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedEngines, "block_sizes", (16, 64))
    done = CliRunner().invoke(
        app, ["bench", "paper", "--figure", figure, "--num-requests", "12", "--simulated", "--json"]
    )
    assert done.exit_code == 0, done.output
    values = json.loads(done.output)
    assert list(values) == ["16", "64"]
    assert all(number > 0 for name, number in values["16"].items() if name.endswith(("_ms", "_s")))
