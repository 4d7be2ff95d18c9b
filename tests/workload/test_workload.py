from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.memory.paged import PagedManager
from octavo.workload.arrivals import arrival_times, rescaled
from octavo.workload.items import WorkItem, WorkloadError
from octavo.workload.prompts import prompt_token_ids
from octavo.workload.traces import load_trace
from octavo.workload.workload import make_workload

TRACES = {
    "azure": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
        "2024-05-10 00:00:00.009930+00:00,10,0\n"
    ),
    "burstgpt": (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,230,1317,Conversation log\n"
    ),
    "mooncake": (
        '{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}\n'
        '{"timestamp": 3000, "input_length": 900, "output_length": 7, "hash_ids": [1, 3]}\n'
    ),
    "sharegpt": "prompt_tokens,output_tokens\n21,518\n8,66\n",
    "vidur": "num_prefill_tokens,num_decode_tokens\n3772,54\n2015,156\n",
}
EXPECTED = {
    "azure": [(0.0, 374, 44), (4.314579, 396, 109)],
    "burstgpt": [(0.0, 472, 18), (40.0, 1087, 230)],
    "mooncake": [(0.0, 700, 5), (3.0, 900, 7)],
    "sharegpt": [(0.0, 21, 518), (0.0, 8, 66)],
    "vidur": [(0.0, 3772, 54), (0.0, 2015, 156)],
}


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "trace"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("kind", TRACES)
def test_traces_are_known_by_their_first_line(tmp_path: Path, kind: str) -> None:
    items = load_trace(write(tmp_path, TRACES[kind]))
    found = [(i.arrival_s, i.num_prompt_tokens, i.num_output_tokens) for i in items]
    assert [f[1:] for f in found] == [e[1:] for e in EXPECTED[kind]]
    assert [f[0] for f in found] == pytest.approx([e[0] for e in EXPECTED[kind]], abs=1e-6)


@pytest.mark.parametrize("kind", TRACES)
def test_a_spreadsheets_byte_order_mark_is_no_part_of_a_trace(tmp_path: Path, kind: str) -> None:
    plain = load_trace(write(tmp_path, TRACES[kind]))
    assert load_trace(write(tmp_path, "\ufeff" + TRACES[kind])) == plain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no known format: its first line names a, b"),
        ("prompt_tokens,output_tokens\n1,x\n", "line 2"),
        ("prompt_tokens,output_tokens\n1\n", "line 2"),
        ('{"timestamp": 0, "input_length": 3}\n', "line 1.*output_length"),
        ('{"timestamp": \n', "line 1"),
        ("prompt_tokens,output_tokens\n", "no request"),
        ("prompt_tokens,output_tokens\n5,99999999\n", "line 2: 99,999,999 tokens are more than"),
        ("prompt_tokens,output_tokens\n5," + "9" * 99, "line 2: absurdly many tokens"),
        ("prompt_tokens,output_tokens\n5,5\n" + "1" * 200_000, "after line 2: field larger than"),
        ("prompt_tokens,output_tokens\n5,-1\n6,7", "line 2: a number of tokens is below 0"),
        (TRACES["burstgpt"] + "nan,a,5,5,10,x\n", "line 4: it arrives at nan s"),
        (TRACES["burstgpt"] + "inf,a,5,5,10,x\n", "line 4: it arrives at inf s"),
        ('{"timestamp": NaN, "input_length": 3, "output_length": 3}', "line 1.*arrives at nan"),
        ('{"timestamp": 0, "input_length": Infinity, "output_length": 3}', "line 1.*infinity"),
        ('{"timestamp": 0, "input_length": 1e30, "output_length": 3}', "line 1.*absurdly many"),
        ('{"timestamp": ' + "[" * 200_000, "line 1"),
        ("", "is empty"),
    ],
)
def test_a_broken_trace_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        load_trace(write(tmp_path, text))


def test_an_absent_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot read the trace"):
        load_trace(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("process", "cv", "spread"), [("poisson", 1, 1), ("gamma", 3, 3), ("constant", 1, 0)]
)
def test_arrivals_have_their_rate_and_burstiness(process: str, cv: float, spread: float) -> None:
    times = arrival_times(process, 20000, rate=4.0, cv=cv, seed=1)
    gaps = np.diff(times)
    assert times[0] == 0
    assert (gaps >= 0).all()
    assert 1 / gaps.mean() == pytest.approx(4.0, rel=0.08)
    assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.1, abs=1e-9)
    assert np.array_equal(times, arrival_times(process, 20000, rate=4.0, cv=cv, seed=1))


def test_bad_arrivals_are_refused() -> None:
    for arguments in (
        ("poisson", None, 1.0),
        *[("poisson", rate, 1.0) for rate in (0.0, -1.0, float("nan"), float("inf"), 1e-310)],
        *[("gamma", 1.0, cv) for cv in (0.0, -1.0, float("nan"), float("inf"), 1e300, 1e-300)],
    ):
        with pytest.raises(WorkloadError):
            arrival_times(arguments[0], 3, rate=arguments[1], cv=arguments[2])
    with pytest.raises(WorkloadError, match="must be one of"):
        arrival_times("never", 3, rate=1.0)


def test_a_traces_own_arrivals_can_be_rescaled() -> None:
    items = [WorkItem(t, 1, 1) for t in (0.0, 1.0, 10.0)]
    assert [i.arrival_s for i in rescaled(items, 2.0)] == [0.0, 0.1, 1.0]
    with pytest.raises(WorkloadError, match="lengths only"):
        rescaled([WorkItem(0.0, 1, 1)] * 3, 1.0)
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(WorkloadError, match="a rate above 0"):
            rescaled(items, rate)


def test_prompts_share_what_their_hashes_share() -> None:
    items = [WorkItem(0, 700, 5, (1, 2)), WorkItem(0, 900, 7, (1, 3)), WorkItem(0, 40, 7)]
    prompts = [prompt_token_ids(i, n, lowest=10, highest=500) for n, i in enumerate(items)]
    assert [len(p) for p in prompts] == [700, 900, 40]
    assert np.array_equal(prompts[0][:512], prompts[1][:512])
    assert not np.array_equal(prompts[0][512:700], prompts[1][512:700])
    assert min(p.min() for p in prompts) >= 10
    assert max(p.max() for p in prompts) < 500
    again = prompt_token_ids(items[2], 2, lowest=10, highest=500)
    assert np.array_equal(again, prompts[2])


def test_a_traces_hashes_hit_the_prefix_cache(tmp_path: Path) -> None:
    """What two requests share is shared in blocks: 512 tokens, then 188 of the first's second."""
    items = load_trace(write(tmp_path, TRACES["mooncake"]))
    manager = PagedManager(200, 16, 4, prefix_caching=True)
    cached = []
    for row, item in enumerate([*items, items[0]]):
        prompt = prompt_token_ids(item, row, lowest=0, highest=1000).astype(np.int32)
        admission = manager.admit(row, prompt)
        assert admission is not None
        cached.append(admission.num_cached_tokens)
        manager.publish(row, prompt)
    assert cached == [0, 512, 688]


def test_a_workload_of_fixed_lengths() -> None:
    items = make_workload(
        trace=None, num_requests=3, input_len=5, output_len=7, arrivals="constant", rate=2.0
    )
    assert items == [WorkItem(0.0, 5, 7), WorkItem(0.5, 5, 7), WorkItem(1.0, 5, 7)]


def test_a_table_of_lengths_is_sampled_and_a_trace_is_followed(tmp_path: Path) -> None:
    rows = "".join(f"{i},{i}\n" for i in range(1, 101))
    table = write(tmp_path, "prompt_tokens,output_tokens\n" + rows)
    options = {"trace": table, "num_requests": 10, "input_len": 1, "output_len": 1}
    items = make_workload(**options, max_total_len=40, seed=3)  # type: ignore[arg-type]
    assert len({i.num_prompt_tokens for i in items}) == 10
    assert max(i.num_prompt_tokens for i in items) <= 20
    assert items == make_workload(**options, max_total_len=40, seed=3)  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match="only 5 requests of at most 10 tokens"):
        make_workload(**options, max_total_len=10)  # type: ignore[arg-type]
    trace = write(tmp_path, TRACES["burstgpt"])
    options = {"trace": trace, "num_requests": 2, "input_len": 1, "output_len": 1}
    items = make_workload(**options, arrivals="trace")  # type: ignore[arg-type]
    assert [i.arrival_s for i in items] == [0.0, 40.0]


def test_a_table_of_lengths_has_no_arrivals_to_keep(tmp_path: Path) -> None:
    path = write(tmp_path, "prompt_tokens,output_tokens\n3,4\n5,6\n")
    with pytest.raises(WorkloadError, match="lengths only, and no arrivals"):
        make_workload(trace=path, num_requests=2, input_len=1, output_len=1, arrivals="trace")
