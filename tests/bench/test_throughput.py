from __future__ import annotations

from pathlib import Path

from engine.tiny_engine import make_llm, save_gguf
from octavo.bench.throughput import latency, throughput
from octavo.workload.items import WorkItem


def test_outputs_have_the_workloads_lengths(tmp_path: Path) -> None:
    with make_llm(save_gguf(tmp_path / "tiny.gguf")) as llm:
        report = throughput(llm, [WorkItem(0.0, 5, 7), WorkItem(0.0, 9, 3)])
        assert (report["prompt_tokens"], report["output_tokens"]) == (14, 10)
        assert report["output_tokens_per_second"] > 0
        report = latency(llm, [WorkItem(0.0, 5, 4)] * 2, rounds=2, warmups=1)
    assert report["batch_size"] == 2
    assert report["output_tokens"] == 8
    assert 0 < report["latency_ms"]["min"] <= report["latency_ms"]["max"]
