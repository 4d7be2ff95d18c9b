"""Sharing out a GPU's memory: the parts sum to the whole, and the KV cache gets what remains."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.toy_process import build
from octavo.config import ConfigError, EngineConfig, KVMemory
from octavo.engine.device_memory import DeviceMemory, share_out
from octavo.engine.messages import Ready, decode_from_engine, encode
from octavo.engine.report import EngineStats
from octavo.server.metrics import Metrics

GIB = 2**30


def shared(memory: str, **changes: int) -> DeviceMemory:
    sizes: dict[str, Any] = {
        "total_bytes": 80 * GIB,
        "free_bytes": 64 * GIB,
        "weight_bytes": 15 * GIB,
        "workspace_bytes": 2 * GIB,
        "graph_bytes": GIB,
        "sampling_bytes": GIB // 2,
        "block_bytes": 2**21,
        "block_size": 16,
    }
    return share_out(KVMemory.parse(memory), **sizes | changes)


@given(
    memory=st.sampled_from(["auto", "7%", "100%", "3GiB", "100000"]),
    total=st.integers(GIB, 200 * GIB),
    used=st.floats(0, 1),
    weights=st.floats(0, 1),
    workspace=st.integers(0, 8 * GIB),
    block_bytes=st.integers(1, 2**24),
)
def test_the_parts_sum_to_the_whole(
    memory: str, total: int, used: float, weights: float, workspace: int, block_bytes: int
) -> None:
    taken = int(used * total)
    sizes = {
        "total_bytes": total,
        "free_bytes": total - taken,
        "weight_bytes": int(weights * taken),
        "workspace_bytes": workspace,
        "block_bytes": block_bytes,
    }
    try:
        found = shared(memory, **sizes)
    except ConfigError:
        return
    parts = found.parts()
    assert sum(parts.values()) == found.total_bytes == total
    assert min(parts.values()) >= 0
    assert parts["KV cache"] % block_bytes == 0
    assert parts["KV cache"] >= 2 * block_bytes
    if memory == "100%":
        assert parts["unused"] < block_bytes


def test_what_is_asked_for() -> None:
    remaining = 64 * GIB - 2 * GIB - GIB - GIB // 2
    assert shared("100%").kv_bytes == remaining
    assert shared("50%").kv_bytes == remaining // 2 // 2**21 * 2**21
    assert shared("10GiB").kv_bytes == 10 * GIB
    # 90 % of the device, less what is taken and the workspace.
    assert shared("auto").kv_bytes == (72 - 16 - 2) * GIB
    # Where that is more than what remains, what remains.
    assert shared("auto", graph_bytes=20 * GIB).kv_bytes == 64 * GIB - (22 * GIB + GIB // 2)
    with pytest.raises(ConfigError, match=r"asks for 61.00 GiB but 60.50 GiB .* ask for less"):
        shared("61GiB")
    for memory in ("auto", "1GiB", "90%"):
        with pytest.raises(ConfigError, match=r"1.00 GiB are free .* take 3.50 GiB .* lower max_n"):
            shared(memory, free_bytes=GIB)
    with pytest.raises(ConfigError, match=r"at least two blocks .* but 100000 bytes"):
        shared("100000")


def test_every_part_is_told() -> None:
    """At the start, in the log, to the front end, and in the metrics."""
    _, report = build(EngineConfig(model="toy"))
    report = replace(report, memory=shared("auto"), start_s={"import": 0.5, "weights": 1.25})
    lines = str(report).splitlines()
    assert lines[-2].startswith("GPU memory: 80.00 GiB = other 1.00 GiB + weights 15.00 GiB + w")
    assert lines[-2].endswith(" + KV cache 54.00 GiB + unused 6.50 GiB")
    assert lines[-1] == "Start: import 0.5 s, weights 1.2 s"
    assert report.fields()["memory"]["kv_bytes"] == 54 * GIB
    ready = decode_from_engine(encode(Ready(report)))
    assert ready == Ready(report)
    engine: Any = SimpleNamespace(
        report=report, stats=EngineStats(captured_bytes=77), num_outstanding=0, pid=None, error=None
    )
    text = Metrics(engine).text().decode()
    values = re.findall(r'octavo_gpu_memory_bytes\{part="[\w ]+"\} (\S+)', text)
    assert sum(map(float, values)) == 80 * GIB
    (total,) = re.findall(r"^octavo_gpu_memory_total_bytes (\S+)", text, re.M)
    assert float(total) == 80 * GIB
    assert re.findall(r"^octavo_gpu_graph_bytes (\S+)", text, re.M) == ["77.0"]
    engine.report = replace(report, memory=None)
    assert "octavo_gpu" not in Metrics(engine).text().decode()
    assert "memory" not in engine.report.fields()
