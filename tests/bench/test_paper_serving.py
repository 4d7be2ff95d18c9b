"""The papers' figures that need times: latencies by hand, orders that must hold, the command."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from octavo.bench.paper import figure12, figure14, figure16, figure19
from octavo.bench.paper.engine import STATIC
from octavo.bench.paper.managers import Pool
from octavo.bench.paper.registry import FIGURES
from octavo.bench.paper.report import PaperOptions
from octavo.bench.paper.serving import Served, serve, shown_rate, sustained_rate, sweep
from octavo.cli import app
from octavo.simulate.executor import FixedLatency
from octavo.workload.items import WorkItem

SMALL = Pool(num_blocks=8, block_size=4, max_model_len=16, token_bytes=10)
SECOND = FixedLatency(step_s=1.0, token_s=0.0)


def test_normalized_latency_by_hand() -> None:
    """Steps of a second: four tokens take four seconds from the arrival, the second request waits
    for the first step's end."""
    items = [WorkItem(0.0, 2, 4), WorkItem(0.5, 2, 2)]
    served = serve("paged", SMALL, items, SECOND)
    assert served.normalized_latency_s == pytest.approx((4 / 4 + (3 - 0.5) / 2) / 2)
    assert served.requests_per_s == pytest.approx(2 / 4)
    # One for a second, then two for two, then one.
    assert served.mean_running == pytest.approx(6 / 4)
    assert served.num_preemptions == 0


def test_nobody_joins_a_static_batch() -> None:
    items = [WorkItem(0.0, 2, 4), WorkItem(0.5, 2, 2)]
    served = serve(STATIC, SMALL, items, SECOND)
    # It waits until 4 s.
    assert served.normalized_latency_s == pytest.approx((4 / 4 + (6 - 0.5) / 2) / 2)


def test_idle_time_is_skipped() -> None:
    served = serve("paged", SMALL, [WorkItem(0.0, 2, 1), WorkItem(100.0, 2, 1)], SECOND)
    assert served.normalized_latency_s == 1.0
    assert served.requests_per_s == pytest.approx(2 / 101)


def test_a_sustained_rate_lies_between_what_was_measured() -> None:
    curve = {
        rate: Served(latency, rate, 1.0, 0)
        for rate, latency in ((1.0, 0.02), (2.0, 0.06), (3.0, 0.18))
    }
    assert sustained_rate(curve, 0.12) == pytest.approx(2.5)
    assert sustained_rate(curve, 0.2) == 3.0
    assert sustained_rate(curve, 0.01) == 0.0
    assert (shown_rate(curve, 0.12), shown_rate(curve, 0.2)) == ("2.50", "≥ 3.00")


def test_a_sweep_ends_where_it_is_hopeless() -> None:
    items = [WorkItem(0.0, 2, 1)] * 3
    rates: list[float] = []

    def run(at: list[WorkItem]) -> Served:
        rates.append(2 / at[-1].arrival_s)
        return Served(0.3 * len(rates), 1.0, 1.0, 0)

    found = sweep((1, 2, 3, 4), items, run, seed=0, stop_at_s=0.5)
    assert list(found) == [1, 2]


def test_paging_sustains_the_highest_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 24 of ShareGPT's lengths, the order of the paper's figure 12."""
    monkeypatch.setattr(figure12, "RATES", (0.2, 0.8, 1.6, 3.0))
    report = figure12.measure(PaperOptions(num_requests=24))
    rates = report.values["sustained_rate"]
    assert list(rates) == list(figure12.NAMES)
    assert rates[STATIC] < rates["orca-max"] <= rates["orca-pow2"] <= rates["orca-oracle"]
    assert rates["orca-oracle"] <= rates["paged"] == rates["virtual"]


def test_several_outputs_share_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure14, "WIDTHS", (4,))
    monkeypatch.setattr(figure14, "RATES", (8, 32))
    report = figure14.measure(PaperOptions(num_requests=24))
    assert set(report.values) == {"parallel 4", "beam 4"}
    for rates in report.values.values():
        assert rates["orca-max"] < rates["paged"]
        assert rates["orca-oracle"] <= rates["paged"]


def test_a_shared_prefix_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure16, "RATES", (16, 64))
    monkeypatch.setattr(figure16, "PREFIXES", {"5-shot": 341})
    rates = figure16.measure(PaperOptions(num_requests=60)).values["5-shot"]
    assert rates["paged, shared"] > rates["paged"]
    assert rates["paged, shared"] > rates["orca-oracle"]


def test_swapping_costs_a_copy_for_each_block_or_each_layer() -> None:
    small, large = figure19.overheads_ms(1), figure19.overheads_ms(256)
    assert small["recompute_ms"] == large["recompute_ms"]
    # 512 copies of one token's block each way, or 80 times as many.
    assert small["swap_one_ms"] - large["swap_one_ms"] == pytest.approx(510 * figure19.COPY_S * 1e3)
    assert small["swap_layered_ms"] > 5 * small["recompute_ms"]
    assert large["swap_layered_ms"] < large["recompute_ms"]


@pytest.mark.parametrize("figure", ["18", "19"])
def test_the_command(figure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = FIGURES[figure].__module__
    monkeypatch.setattr(f"{module}.SIZES", (16, 64))
    done = CliRunner().invoke(
        app, ["bench", "paper", "--figure", figure, "--num-requests", "12", "--simulated", "--json"]
    )
    assert done.exit_code == 0, done.output
    values = json.loads(done.output)
    assert list(values) == ["16", "64"]
    assert all(number > 0 for name, number in values["16"].items() if name.endswith(("_ms", "_s")))
