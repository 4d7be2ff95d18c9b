"""Plans on a latency model that is worked out by hand, and objectives at the door."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.simulate import capacity
from octavo.simulate.capacity import MAX_REPLICAS, Planner
from octavo.simulate.capacity_plan import Setup, Trial
from octavo.simulate.gpus import GPU, GPUError, gpu_named, with_price
from octavo.simulate.latency import Coefficients
from octavo.simulate.objectives import Objective, ObjectiveError, parse_objectives
from octavo.simulate.shape import ModelShape
from octavo.workload.items import WorkItem

SHAPE = ModelShape(
    name="small",
    num_layers=2,
    hidden_size=64,
    num_kv_heads=2,
    layer_weights=1e6,
    head_weights=1e5,
    weight_bytes=2.0,
    token_bytes=2048.0,
    attention_width=128.0,
    max_position_embeddings=4096,
)
# A step takes 10 ms and 1 ms a row: ten rows that decode 10 tokens each bring 50 requests a second.
GPU_10MS = GPU(
    name="small",
    memory_bytes=40e6,
    reserved_bytes=1e6,
    price_per_hour=2.0,
    max_ranks=2,
    coefficients=lambda: Coefficients(
        byte_rate=1e15,
        flop_rate=1e15,
        blend=2.0,
        kv_rate=1e15,
        attention_rate=1e15,
        step_s=0.010,
        row_s=0.001,
        link_s=0.0,
    ),
)
ITEMS = [WorkItem(0.0, 8, 10)] * 300


def planner(slo: str, **changes: object) -> Planner:
    given: dict[str, object] = {
        "gpu": GPU_10MS,
        "shape": SHAPE,
        "objectives": parse_objectives(slo),
        "items": ITEMS,
        "ranks": (1,),
        "span_s": 2.0,
        "num_verified": 600,
        "swap_bytes": 0.0,
    }
    return Planner(**given | changes)  # type: ignore[arg-type]


def test_a_replica_sustains_what_its_steps_allow() -> None:
    """With up to k rows a step takes 10 + k ms, and k rows bring k / 10 requests a step. Tokens
    20 ms apart at the 90th percentile allow about ten rows: 10 / 10 / 0.020 = 50 a second."""
    found = planner("itl_p90=20ms").sustained(Setup())
    assert 30 < found.rate < 50, "arrivals are random: the mean has to stay below ten rows"
    assert [trial.rate for trial in found.trials] == sorted(trial.rate for trial in found.trials)
    for trial in found.trials:
        assert trial.meets(parse_objectives("itl_p90=20ms")) == (trial.rate <= found.rate)
    looser = planner("itl_p90=40ms").sustained(Setup())
    assert looser.rate > 1.4 * found.rate


def test_a_plan_is_met_and_priced() -> None:
    plan = planner("itl_p90=20ms,ttft_p90=100ms").plan(150.0)
    assert plan.num_replicas >= 150 / plan.replica_rate
    assert plan.num_gpus == plan.num_replicas
    for objective in plan.objectives:
        assert objective.value_s(plan.outcome) <= objective.limit_s
    # 150 requests of 10 tokens a second, at 2 dollars a replica and hour.
    expected = plan.num_replicas * 2.0 / (1500 * 3600) * 1e6
    assert plan.cost_per_million_tokens == pytest.approx(expected)
    assert plan.is_settled
    assert plan == planner("itl_p90=20ms,ttft_p90=100ms").plan(150.0), "repeatable"


def test_a_cluster_too_large_to_settle_is_simulated_in_part() -> None:
    """100 requests come in 0.2 s at 500 a second, about as long as one takes."""
    told: list[str] = []
    plan = planner("itl_p90=20ms", num_verified=100, tell=told.append).plan(500.0)
    assert any(text.startswith(f"{plan.num_replicas} replica(s) at 500 req") for text in told)
    assert 1 <= plan.num_settled_replicas < plan.num_replicas
    assert plan.is_settled
    assert plan.outcome.itl_s["p90"] <= 0.020


def test_ranks_are_used_where_they_cost_less() -> None:
    """Where layers take the time and links are free, two ranks halve nothing of a fixed step."""
    plan = planner("itl_p90=20ms", ranks=(1, 2)).plan(60.0)
    assert plan.setup.tensor_parallel == 1
    tried = {candidate.setup.tensor_parallel for candidate in plan.candidates}
    assert tried == {1, 2}


def test_a_model_that_one_gpu_cannot_hold_is_shared() -> None:
    large = replace(SHAPE, layer_weights=25e6)
    plan = planner("itl_p90=20ms", shape=large, ranks=(1, 2)).plan(20.0)
    assert plan.setup.tensor_parallel == 2
    assert plan.num_gpus == 2 * plan.num_replicas
    with pytest.raises(ValueError, match=r"small on 1 small: weights take .* use more ranks"):
        planner("itl_p90=20ms", shape=large).plan(20.0)
    with pytest.raises(ValueError, match="a host has 2 small at most"):
        planner("itl_p90=20ms", shape=large, ranks=(4,)).plan(20.0)


def test_small_pools_may_swap() -> None:
    """Where rows are preempted, swapping is tried; it is kept only where it sustains more."""
    told: list[str] = []
    tight = replace(GPU_10MS, memory_bytes=4e6 + 30 * 16 * 2048, coefficients=GPU_10MS.coefficients)
    items = [WorkItem(0.0, 30, 60)] * 200
    plan = planner("e2e_p90=10s", gpu=tight, items=items, swap_bytes=2**24, tell=told.append).plan(
        5.0
    )
    assert any("to swap" in text for text in told)
    assert plan.outcome.num_failed == 0


def test_what_nothing_meets_says_what_to_change() -> None:
    with pytest.raises(ObjectiveError) as caught:
        planner("itl_p99=5ms,ttft_p99=1s").plan(10.0)
    message = str(caught.value)
    assert "itl_p99 is 1" in message
    assert "5 ms is asked" in message
    assert "ttft" not in message, "that one is met"
    assert "--tensor-parallel" in message
    with pytest.raises(ObjectiveError, match=f"and {MAX_REPLICAS} are simulated at most"):
        planner("itl_p90=20ms").plan(1e6)
    with pytest.raises(ValueError, match="rate must be above 0"):
        planner("itl_p90=20ms").plan(0.0)


def test_a_hopeless_rate_is_refused_before_any_search() -> None:
    told: list[str] = []
    with pytest.raises(ObjectiveError, match=f"and {MAX_REPLICAS} are simulated at most; lower"):
        planner("itl_p90=20ms", tell=told.append).plan(1e300)
    assert not told


def test_no_variants_are_tried_for_a_rate_that_they_cannot_serve() -> None:
    told: list[str] = []
    with pytest.raises(ObjectiveError, match=f"and {MAX_REPLICAS} are simulated at most; lower"):
        planner("itl_p90=20ms", tell=told.append).plan(1e6)
    assert len(told) == 1


def test_a_trial_ends_whatever_the_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_MOST", 400)
    trial = planner("itl_p99=1s", span_s=86400.0)._trial(Setup(), 20.0)
    assert 300 < trial.outcome.num_requests <= 400


def test_a_queue_that_grows_meets_nothing() -> None:
    found = planner("itl_p99=1s").sustained(Setup(max_num_batched_tokens=16))
    overload = [trial for trial in found.trials if not trial.keeps_up]
    assert overload
    assert all(isinstance(trial, Trial) for trial in overload)
    assert not any(trial.meets(()) for trial in overload)


def test_objectives_are_read() -> None:
    assert parse_objectives("ttft_p99=200ms, itl_p50 = 0.05s,e2el_mean=3s") == (
        Objective("ttft", "p99", 0.2),
        Objective("itl", "p50", 0.05),
        Objective("e2el", "mean", 3.0),
    )
    assert parse_objectives("e2e_p50=1s") == parse_objectives("e2el_p50=1s")
    for text in ("", "ttft=200ms", "ttft_p98=1s", "ttft_p99=200", "x_p99=1s", "itl_p99=1.2.3s"):
        with pytest.raises(ObjectiveError):
            parse_objectives(text)
    with pytest.raises(ObjectiveError, match="above 0"):
        parse_objectives("ttft_p99=0ms")
    with pytest.raises(ObjectiveError, match="twice"):
        parse_objectives("ttft_p99=1s,ttft_p99=2s")


def test_gpus_have_names_and_prices() -> None:
    assert gpu_named("h200").price_per_hour > 0
    with pytest.raises(GPUError, match=r"gpu must be one of h200, a100-40gb, got 'h300'"):
        gpu_named("h300")
    assert with_price(gpu_named("h200"), 9.0).price_per_hour == 9.0
    with pytest.raises(GPUError, match="price must be above 0"):
        with_price(gpu_named("h200"), 0.0)
