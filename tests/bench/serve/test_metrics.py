from __future__ import annotations

import pytest

from octavo.bench.percentiles import summary
from octavo.bench.serve.metrics import Load, Sample, figures, most_at_once
from octavo.bench.serve.objectives import parse_objectives
from octavo.config import ConfigError


def sample(start: float, first: float, gaps: list[float], end: float) -> Sample:
    return Sample(
        start_s=start,
        first_token_s=first,
        last_token_s=first + sum(gaps),
        end_s=end,
        gaps_s=gaps,
        num_output_tokens=len(gaps) + 1,
        num_prompt_tokens=10,
        num_cached_tokens=4,
    )


def three() -> Load:
    """Two that are served, of 3 tokens and of 1, and one that is not."""
    slow = sample(0.0, 0.5, [0.25, 1.75], 2.6)
    quick = sample(1.0, 0.1, [], 0.2)
    failed = Sample(start_s=2.0, end_s=0.5, error="503: full")
    return Load("m", [slow, quick, failed], 4.0)


def test_a_requests_own_figures() -> None:
    values = three().samples[0].values()
    assert values == {"ttft": 0.5, "tpot": 1.0, "itl": 1.75, "e2el": 2.6}


def test_a_run_by_hand() -> None:
    report = figures(three())
    assert (report["num_prompts"], report["completed"], report["failed"]) == (3, 2, 1)
    assert report["errors"] == ["503: full"]
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (20, 4)
    assert report["total_cached_tokens"] == 8
    assert report["request_throughput"] == 0.5
    assert report["output_throughput"] == 1.0
    assert report["total_token_throughput"] == 6.0
    assert report["max_concurrent_requests"] == 2
    assert report["mean_ttft_ms"] == pytest.approx(300)
    assert report["median_ttft_ms"] == pytest.approx(300)
    assert report["std_ttft_ms"] == pytest.approx(200)
    assert report["p90_ttft_ms"] == pytest.approx(460)
    assert report["p99_e2el_ms"] == pytest.approx(200 + 0.99 * 2400)
    # Gaps are of all requests together; a request of one token has no time after the first.
    assert report["mean_itl_ms"] == pytest.approx(1000)
    assert report["max_itl_ms"] == pytest.approx(1750)
    assert report["mean_tpot_ms"] == report["max_tpot_ms"] == pytest.approx(1000)
    assert "request_goodput" not in report


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("ttft=600ms", 2),
        ("ttft=499ms", 1),
        ("ttft=1s,itl=1.75s", 2),
        ("ttft=1s,itl=1.7s", 1),
        ("tpot=999ms", 1),
        ("e2e=100ms", 0),
        ("ttft:600 e2el:2500", 1),
    ],
)
def test_goodput_counts_those_that_meet_all(text: str, good: int) -> None:
    report = figures(three(), parse_objectives(text))
    assert report["request_goodput"] == good / 4
    assert report["goodput_share"] == good / 3, "a failure is no goodput"


def test_a_run_that_served_nothing_has_no_latencies() -> None:
    report = figures(Load("m", [Sample(start_s=0.0, error="no")], 1.0), {"ttft": 1.0})
    assert report["completed"] == report["request_throughput"] == report["request_goodput"] == 0
    assert report["median_ttft_ms"] is None


def test_most_at_once_counts_the_end_before_a_start_of_the_same_instant() -> None:
    spans = [(0.0, 1.0), (1.0, 1.0), (1.5, 2.0), (1.75, 0.1)]
    assert most_at_once([Sample(start_s=start, end_s=end) for start, end in spans]) == 3
    assert most_at_once([]) == 0


def test_objectives() -> None:
    assert parse_objectives("ttft=200ms, itl=0.05s") == {"ttft": 0.2, "itl": 0.05}
    assert parse_objectives("e2e=5s,tpot=500us") == {"e2el": 5.0, "tpot": 5e-4}
    assert parse_objectives("ttft:200 e2el:5000") == {"ttft": 0.2, "e2el": 5.0}


@pytest.mark.parametrize(
    "bad", ["ttft", "ttft=5", "speed=1s", "ttft=-1ms", "ttft=xms", "ttft=", "ttft:", "ttft=infs"]
)
def test_an_objective_that_is_none(bad: str) -> None:
    with pytest.raises(ConfigError, match="an objective is one of ttft, tpot, itl, e2el"):
        parse_objectives(bad)


@pytest.mark.parametrize("empty", ["", " ", ",", " , "])
def test_no_objective_is_refused(empty: str) -> None:
    with pytest.raises(ConfigError, match="names no objective; give one such as ttft=200ms"):
        parse_objectives(empty)


def test_an_objective_is_given_once() -> None:
    with pytest.raises(ConfigError, match="e2el is given twice"):
        parse_objectives("e2e=1s,e2el=2s")


def test_summaries() -> None:
    found = summary([float(i) for i in range(1, 101)])
    assert found["mean"] == 50.5
    assert found["p50"] == 50.5
    assert found["max"] == 100.0
    assert summary([]) == {}
