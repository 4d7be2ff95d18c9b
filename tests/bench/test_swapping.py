"""Swaps beside decode steps, on a tiny model and a CPU: they are ordered, and timed both ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.test_translation import SHAPE
from octavo.bench import swapping, works
from octavo.bench.ceilings import Ceilings
from octavo.core.plan import StepPlan, SwapOut

AT = Ceilings(
    read_bytes=1e9, matmul_flops=1e9, fp8_flops=0.0, to_host_bytes=1e8, from_host_bytes=1e8
)


def test_swaps_beside_decode_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "_PROMPT", 12)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE))
    plans: list[StepPlan] = []
    with works.open_llm(
        str(path), device="cpu", kv_memory="8MiB", swap_memory="1MiB", preemption="swap",
        max_model_len=512, prefix_caching=False, attention="gather", threads=1,
    ) as llm:  # fmt: skip
        executor, capacity = llm._core.executor, llm.report.capacity
        launch = executor.launch

        def noting(plan: StepPlan) -> None:
            plans.append(plan)
            launch(plan)

        monkeypatch.setattr(executor, "launch", noting)
        found = swapping.beside_decode(llm, AT, rows=3, steps=12)
        assert executor.launch == noting, "the engine is as it was"
        assert llm._core.scheduler.manager.num_free_blocks == capacity.num_blocks - 1
    swaps = [[c for c in plan.commands if isinstance(c, SwapOut)] for plan in plans]
    decoding = [len(p.batch.rows) == 3 == p.batch.num_tokens for p in plans]
    assert [bool(s) for s in swaps[-12:]] == decoding[-12:]
    assert sum(map(bool, swaps)) >= 11
    assert not any(swaps[: len(plans) // 2]), "the same steps were timed without before"
    (command,) = swaps[-1]
    assert len(set(command.block_ids.tolist())) == len(command.host_block_ids) >= 1
    assert found.work == "decode 3 beside swaps"
    assert found.floor is not None
    assert found.share == pytest.approx(found.floor / found.figure)
    assert f"{len(command.block_ids)} blocks out a step" in found.notes
