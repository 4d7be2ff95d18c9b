"""Replicas on a virtual clock: hand-computed traces, the order of a moment, conservation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.request import FinishReason
from octavo.simulate.calibration import load_calibration
from octavo.simulate.cluster import ARRIVAL, RESULT, STEP, Cluster
from octavo.simulate.executor import FixedLatency
from octavo.simulate.outcome import TokenTimes
from octavo.simulate.replica import ReplicaConfig
from octavo.simulate.routing import ROUTERS, LeastLoaded, PrefixAware, RoundRobin
from octavo.workload.arrivals import arrival_times, with_arrivals
from octavo.workload.items import WorkItem, WorkloadError

SECOND = FixedLatency(step_s=1.0, token_s=0.0)
SMALL = ReplicaConfig(
    num_blocks=65,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=128,
    depth=1,
)
MANAGERS = ("paged", "virtual")


def changed(**changes: object) -> ReplicaConfig:
    values = {name: getattr(SMALL, name) for name in ReplicaConfig.__slots__}
    return ReplicaConfig(**values | changes)  # type: ignore[arg-type]


def test_a_trace_by_hand() -> None:
    """A step takes a second. The first comes at 0 and needs three steps; the second comes during
    the second of them, is planned at 2 and needs two."""
    items = [WorkItem(0.0, 4, 3), WorkItem(1.5, 4, 2)]
    times = Cluster(SMALL, SECOND).run(items)
    assert times.first_s.tolist() == [1.0, 3.0]
    assert times.end_s.tolist() == [3.0, 4.0]
    assert times.gaps_s().tolist() == [1.0, 1.0, 1.0]
    outcome = times.outcome()
    assert outcome.num_tokens == 5
    assert outcome.span_s == 4.0
    assert outcome.tokens_per_s == 1.25
    assert outcome.ttft_s["mean"] == 1.25
    assert outcome.e2e_s["p50"] == 2.75


def test_two_steps_in_flight_by_hand() -> None:
    """The step that runs from 1 to 2 was planned at 0 already, so that what comes at 0.5 runs from
    2 on; tokens come a second apart all the same."""
    items = [WorkItem(0.0, 4, 4), WorkItem(0.5, 4, 1)]
    times = Cluster(changed(depth=2), SECOND).run(items)
    assert times.first_s.tolist() == [1.0, 3.0]
    assert times.end_s.tolist() == [4.0, 3.0]


def test_a_prompt_in_chunks_by_hand() -> None:
    """40 tokens in steps of 16 take three; time goes by tokens, too."""
    latency = FixedLatency(step_s=1.0, token_s=0.5)
    times = Cluster(SMALL, latency).run([WorkItem(2.0, 40, 2)])
    assert times.first_s.tolist() == [2.0 + 3 + 40 / 2]
    assert times.end_s.tolist() == [25.0 + 1.5]


def test_what_happens_in_one_moment_has_an_order() -> None:
    """At 1.0 a step ends at each of two replicas and two requests come: results by replica, then
    arrivals as in the workload, then steps by replica, however they got into the heap."""
    items = [WorkItem(0.0, 4, 2), WorkItem(0.0, 4, 1), WorkItem(1.0, 4, 1), WorkItem(1.0, 4, 1)]
    seen: list[tuple[float, int, int]] = []

    def note(now_s: float, kind: int, index: int) -> None:
        seen.append((now_s, kind, index))

    times = Cluster(SMALL, SECOND, 2, RoundRobin()).run(items, note)
    assert [event for event in seen if event[0] == 1.0] == [
        (1.0, RESULT, 0),
        (1.0, RESULT, 1),
        (1.0, ARRIVAL, 2),
        (1.0, ARRIVAL, 3),
        (1.0, STEP, 0),
        (1.0, STEP, 1),
    ]
    # The arrivals of that moment were part of the steps planned in it.
    assert times.first_s.tolist() == [1.0, 1.0, 2.0, 2.0]
    assert seen == sorted(seen)


def test_the_router_sees_the_results_of_the_moment() -> None:
    items = [WorkItem(0.0, 4, 1), WorkItem(0.0, 4, 9), WorkItem(1.0, 4, 1), WorkItem(2.0, 4, 1)]
    cluster = Cluster(SMALL, SECOND, 2)
    cluster.run(items)
    assert cluster.num_requests.tolist() == [3, 1], "the first is done at 1.0, the long one not"
    assert cluster.outstanding.tolist() == [0, 0]


def workload(count: int, rate: float, seed: int = 0) -> list[WorkItem]:
    random = np.random.default_rng(seed)
    items = [
        WorkItem(0.0, int(random.integers(1, 40)), int(random.integers(1, 30)))
        for _ in range(count)
    ]
    return with_arrivals(items, arrival_times("poisson", count, rate=rate, seed=seed))


@pytest.mark.parametrize("router", sorted(ROUTERS))
@pytest.mark.parametrize("kv", MANAGERS)
def test_every_request_ends_once_and_tokens_add_up(kv: str, router: str) -> None:
    """On pools so small that rows are preempted."""
    items = workload(120, 2.0)
    for depth in (1, 2):
        config = changed(kv=kv, depth=depth, num_blocks=25)
        cluster = Cluster(config, FixedLatency(0.05, 0.001), 3, ROUTERS[router]())
        times = cluster.run(items)
        assert sorted(times.finished) == list(range(120))
        assert all(f.reason is FinishReason.LENGTH for f in times.finished.values())
        expected = [item.num_output_tokens for item in items]
        assert times.num_tokens.tolist() == expected
        assert len(times.gaps_s()) == sum(expected) - 120
        assert (times.first_s > times.arrival_s).all()
        assert (times.end_s >= times.first_s).all()
        total = (times.first_s + [0.0] * 120).sum() + times.gaps_s().sum()
        assert total == pytest.approx(times.end_s.sum()), "gaps lead from first tokens to last"
        assert cluster.num_requests.sum() == 120
        assert not cluster.outstanding.any()
        for replica in cluster.replicas:
            replica.scheduler.check()
            assert not replica.has_work
    busy = Cluster(changed(kv=kv, num_blocks=25), SECOND)
    busy.run(workload(60, 20.0))
    assert busy.num_preemptions


@pytest.mark.parametrize("kv", MANAGERS)
def test_a_run_repeats_itself(kv: str) -> None:
    def run(seed: int) -> tuple[list[float], list[float], int]:
        latency = load_calibration("h200-llama-3.1-8b").latency()
        cluster = Cluster(changed(kv=kv, depth=2), latency, 2, seed=seed)
        times = cluster.run(workload(80, 300.0, seed))
        return times.end_s.tolist(), times.gaps_s().tolist(), cluster.num_steps

    assert run(0) == run(0)
    assert run(0) != run(1)


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=12
    ),
    st.integers(1, 3),
    st.sampled_from(sorted(ROUTERS)),
)
def test_events_come_in_order_whatever_comes(
    requests: list[tuple[float, int, int]], num_replicas: int, router: str
) -> None:
    items = [WorkItem(*request) for request in sorted(requests)]
    seen: list[tuple[float, int, int]] = []
    cluster = Cluster(SMALL, FixedLatency(0.5, 0.25), num_replicas, ROUTERS[router]())
    times = cluster.run(items, lambda *event: seen.append(event))
    assert seen == sorted(seen)
    assert len(times.finished) == len(items)
    steps = sum(kind == STEP for _, kind, _ in seen)
    assert steps == cluster.num_steps == sum(kind == RESULT for _, kind, _ in seen)


def test_prefixes_that_requests_share_are_computed_once() -> None:
    """Two prompts of 1,024 tokens with 512 in common."""
    config = changed(
        num_blocks=2000, block_size=16, max_model_len=4096, max_num_batched_tokens=2048,
        prefix_caching=True,
    )  # fmt: skip
    items = [WorkItem(0.0, 1024, 2, (1, 2)), WorkItem(9.0, 1024, 2, (1, 3))]
    times = Cluster(config, FixedLatency(0.0, 0.001)).run(items)
    assert times.num_cached_tokens == 512
    assert times.first_s.tolist() == pytest.approx([1.024, 9.512])


def test_what_can_never_be_served_is_refused() -> None:
    with pytest.raises(WorkloadError, match="request 1 has 200 prompt and 2 output tokens, and a"):
        Cluster(SMALL, SECOND).run([WorkItem(0.0, 4, 3), WorkItem(0.0, 200, 2)])
    with pytest.raises(ValueError, match="num_replicas must be at least 1"):
        Cluster(SMALL, SECOND, 0)


def test_a_window_leaves_the_rise_out() -> None:
    items = [WorkItem(0.0, 4, 3), WorkItem(2.0, 4, 2), WorkItem(4.0, 4, 2)]
    times = Cluster(SMALL, SECOND).run(items)
    assert times.first_s.tolist() == [1.0, 3.0, 5.0]
    late = times.outcome(begin_s=1.5)
    # From 1.5 to 4.0: two requests; the gaps that end at 2 and 3 and at 4, and one first token.
    assert (late.num_requests, late.num_tokens, late.span_s) == (2, 4, 2.5)
    assert times.num_waiting(4.0) == 1
    assert times.num_waiting(0.5) == 1


def test_nothing_has_no_percentiles() -> None:
    times = TokenTimes([WorkItem(0.0, 1, 1)])
    outcome = times.outcome(begin_s=0.0)
    assert outcome.itl_s == {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}


def outstanding(*counts: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(counts, dtype=np.int32)


def test_round_robin() -> None:
    router, item = RoundRobin(), WorkItem(0.0, 1, 1)
    chosen = [router.choose(item, outstanding(9, 0, 0)) for _ in range(5)]
    assert chosen == [0, 1, 2, 0, 1]


def test_least_loaded_takes_turns_among_equals() -> None:
    router, item = LeastLoaded(), WorkItem(0.0, 1, 1)
    assert router.choose(item, outstanding(2, 1, 3)) == 1
    chosen = [router.choose(item, outstanding(0, 0, 0)) for _ in range(6)]
    assert chosen == [0, 2, 1, 0, 2, 1]


def test_prefix_aware_goes_where_the_longest_beginning_is() -> None:
    router = PrefixAware()
    idle = outstanding(0, 0, 0)
    first = router.choose(WorkItem(0.0, 1, 1, (1, 2, 3)), idle)
    second = router.choose(WorkItem(0.0, 1, 1, (9,)), idle)
    assert first != second
    assert router.choose(WorkItem(0.0, 1, 1, (1, 2, 4)), idle) == first
    assert router.choose(WorkItem(0.0, 1, 1, (9, 8)), idle) == second
    busy = outstanding(*(30 if replica == first else 1 for replica in range(3)))
    elsewhere = router.choose(WorkItem(0.0, 1, 1, (1, 2, 3)), busy)
    assert elsewhere != first
    assert router.choose(WorkItem(0.0, 1, 1, (1, 2, 3)), idle) == elsewhere, "it is there now"
    others = {router.choose(WorkItem(0.0, 1, 1), idle) for _ in range(3)}
    assert others == {0, 1, 2}, "without prefixes it is where the load is least"


def test_prefix_aware_computes_less() -> None:
    """Conversations of 20 prefixes over four replicas."""
    config = changed(
        num_blocks=400, block_size=16, max_model_len=4096, max_num_batched_tokens=2048,
        prefix_caching=True,
    )  # fmt: skip
    random = np.random.default_rng(0)
    items = [
        WorkItem(float(index), 1100, 2, (int(random.integers(20)), 100 + index))
        for index in range(100)
    ]
    cached = {}
    for name, router in ROUTERS.items():
        times = Cluster(config, FixedLatency(0.0, 0.0001), 4, router()).run(items)
        cached[name] = times.num_cached_tokens
    assert cached["prefix-aware"] > 1.3 * cached["round-robin"]
