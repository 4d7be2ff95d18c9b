"""Metrics by vLLM's names, counted exactly. The page passes ``promtool check metrics``."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tiny_server import TinyServer

# Every metric of vLLM's that makes sense here, with octavo_ for vllm:.
NAMES = (
    "octavo_num_requests_running",
    "octavo_num_requests_waiting",
    "octavo_kv_cache_usage_perc",
    "octavo_num_preemptions_total",
    "octavo_prompt_tokens_total",
    "octavo_prefix_cache_queries_total",
    "octavo_prefix_cache_hits_total",
    "octavo_generation_tokens_total",
    'octavo_request_success_total{finished_reason="stop"}',
    'octavo_request_success_total{finished_reason="length"}',
    'octavo_request_success_total{finished_reason="abort"}',
    'octavo_request_success_total{finished_reason="error"}',
)
HISTOGRAMS = (
    "octavo_time_to_first_token_seconds",
    "octavo_inter_token_latency_seconds",
    "octavo_request_time_per_output_token_seconds",
    "octavo_e2e_request_latency_seconds",
    "octavo_request_queue_time_seconds",
    "octavo_request_prefill_time_seconds",
    "octavo_request_decode_time_seconds",
    "octavo_request_inference_time_seconds",
    "octavo_request_prompt_tokens",
    "octavo_request_generation_tokens",
    "octavo_request_params_max_tokens",
    "octavo_request_params_n",
)


def test_all_names_are_there_from_the_start(server: TinyServer) -> None:
    metrics = server.metrics()
    for name in (*NAMES, *(f"{name}_count" for name in HISTOGRAMS)):
        assert name in metrics
    assert metrics["octavo_engine_process_resident_memory_bytes"] > 2**20
    assert metrics["process_open_fds"] > 3
    assert not any(":" in name.partition("{")[0] for name in metrics)
    (info,) = [name for name in metrics if name.startswith("octavo_cache_config_info")]
    labels = dict(re.findall(r'(\w+)="([^"]*)"', info))
    assert int(labels["num_tokens"]) == int(labels["num_blocks"]) * int(labels["block_size"])


def test_counts_of_two_choices_a_refusal_and_a_stop_are_exact(server: TinyServer) -> None:
    url = f"{server.url}/v1/completions"
    before = server.wait_idle()
    body = {"prompt": "abcd", "max_tokens": 9, "temperature": 0}
    text = httpx.post(url, json=body | {"n": 2}).json()["choices"][0]["text"]
    stopped = httpx.post(url, json=body | {"max_tokens": 50, "stop": text[4]})
    num_stopped = stopped.json()["usage"]["completion_tokens"]
    httpx.post(url, json=body | {"prompt": ""})
    httpx.post(url, json=body | {"max_tokens": 0, "echo": True})
    after = server.wait_idle()
    changes = {name: after[name] - before[name] for name in NAMES if after[name] != before[name]}
    assert changes == {
        "octavo_prompt_tokens_total": 2 * 4,  # two choices share one
        "octavo_prefix_cache_queries_total": 2 * 4,
        "octavo_generation_tokens_total": 2 * 9 + num_stopped,
        'octavo_request_success_total{finished_reason="stop"}': 1,
        'octavo_request_success_total{finished_reason="length"}': 2,
    }

    def grown(name: str) -> float:
        return after[name] - before[name]

    for name in HISTOGRAMS:
        if name not in ("octavo_inter_token_latency_seconds", "octavo_request_params_n"):
            assert grown(f"{name}_count") == 3, name
    assert grown("octavo_inter_token_latency_seconds_count") == 2 * 8 + num_stopped - 1
    assert grown("octavo_request_params_n_count") == 3  # the echo is a request too
    assert grown("octavo_request_params_n_sum") == 4
    assert grown("octavo_request_prompt_tokens_sum") == 12
    assert grown("octavo_request_generation_tokens_sum") == 18 + num_stopped
    assert grown("octavo_request_params_max_tokens_sum") == 9 + 9 + 50
    parts = [f"octavo_request_{part}_time_seconds_sum" for part in ("queue", "prefill", "decode")]
    whole = grown("octavo_e2e_request_latency_seconds_sum")
    assert 0 < sum(map(grown, parts)) <= whole * 1.01


def test_the_prefix_caches_hits_are_counted_once_however_a_request_ends(
    server: TinyServer,
) -> None:
    """At its length, by a stop string, and in the step that runs its prompt; two choices share."""
    url = f"{server.url}/v1/completions"
    prompt = [7 + n % 50 for n in range(70)]
    body = {"prompt": prompt, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    text = httpx.post(url, json=body).json()["choices"][0]["text"]
    before = server.wait_idle()
    reused = 0
    for changes in ({}, {"n": 2}, {"stop": text[4]}, {"max_tokens": 1}):
        usage = httpx.post(url, json=body | changes).json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0, changes
        reused += cached
    after = server.wait_idle()
    assert (
        after["octavo_prefix_cache_hits_total"] == before["octavo_prefix_cache_hits_total"] + reused
    )
    for name in ("octavo_prefix_cache_queries_total", "octavo_prompt_tokens_total"):
        assert after[name] == before[name] + 4 * len(prompt)


def test_without_a_prefix_cache_nothing_is_looked_up_in_it(tiny_model: Path) -> None:
    server = TinyServer(tiny_model, engine={"max_num_seqs": 4, "prefix_caching": False})
    try:
        body = {"prompt": "abcd", "max_tokens": 2}
        httpx.post(f"{server.wait_ready().url}/v1/completions", json=body).raise_for_status()
        metrics = server.wait_idle()
        assert metrics["octavo_prompt_tokens_total"] == 4
        assert metrics["octavo_prefix_cache_queries_total"] == 0
    finally:
        server.stop()


def test_auto_says_which_way_it_chose(tiny_model: Path) -> None:
    """Requests that do not fit together: each preemption is counted under the way it took."""
    server = TinyServer(
        tiny_model,
        engine={"max_num_seqs": 4, "kv_memory": "256KiB", "max_model_len": 256}
        | {"preemption": "auto", "swap_memory": "1MiB"},
    )
    try:
        url = f"{server.wait_ready().url}/v1/completions"
        body = {"max_tokens": 200, "ignore_eos": True, "temperature": 0}
        with ThreadPoolExecutor(4) as pool:
            bodies = [body | {"prompt": [5 + n] * 40} for n in range(4)]
            answers = list(pool.map(lambda b: httpx.post(url, json=b, timeout=60), bodies))
        assert [answer.status_code for answer in answers] == [200] * 4
        metrics = server.wait_idle()
        ways = [
            metrics[f'octavo_preemptions_by_way_total{{way="{way}"}}']
            for way in ("recompute", "swap")
        ]
        assert sum(ways) == metrics["octavo_num_preemptions_total"] > 0
    finally:
        server.stop()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian's prometheus has promtool")
def test_promtool_finds_nothing(server: TinyServer) -> None:
    page = httpx.get(f"{server.url}/metrics").text
    found = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
