"""Steps are timed one by one on a tiny model, on a CPU: whose time it was, and of which step."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from bench.test_translation import SHAPE
from octavo.bench import works
from octavo.bench.timed_steps import Step, mapping_cpu_s, timed_steps
from octavo.engine.llm import LLM


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE))
    return str(path)


def opened(config: str, kind: str) -> LLM:
    return works.open_llm(
        config, kv=kind, device="cpu", kv_memory="8MiB", max_model_len=512, prefix_caching=False
    )


@pytest.mark.parametrize("kind", ["paged", "virtual"])
def test_cpu_time_is_that_of_all_threads(config: str, kind: str) -> None:
    with opened(config, kind) as llm:
        before = mapping_cpu_s(), time.process_time()
        with timed_steps(llm) as steps:
            works.generate(llm, [(9, 30)] * 3, 0)
        mapping_s = mapping_cpu_s() - before[0]
        process_s = time.process_time() - before[1]
    assert (mapping_s > 0) == (kind == "virtual")
    rounding_s = 1e-9  # differences of floats are added
    assert 0 < sum(s.cpu_s for s in steps) <= process_s + rounding_s
    assert sum(s.mapping_cpu_s for s in steps) <= mapping_s + rounding_s
    assert any(s.mapping_cpu_s > 0 for s in steps) == (kind == "virtual")
    for step in steps:
        assert step.cpu_s >= 0
        assert step.waiting_cpu_s + step.mapping_cpu_s <= step.cpu_s + 1e-3, "no clock is exact"


def test_steps_are_timed_one_by_one(config: str) -> None:
    with opened(config, "paged") as llm:
        with timed_steps(llm) as steps:
            works.generate(llm, [(6, 3)] * 2, 0)
        step = llm._core.step
        works.generate(llm, [(6, 3)], 0)
        assert llm._core.step == step, "the engine is as it was"
    assert [(s.num_rows, s.has_chunks) for s in steps] == [(2, True), (2, False), (2, False)]
    assert all(0 <= s.waited_s <= s.seconds for s in steps)
    assert isinstance(steps[0], Step)
