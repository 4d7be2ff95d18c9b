"""Two engines on one GPU: what one gives back, the other takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.tiny_engine import run
from execution.models.tiny_models import tiny_qwen3
from octavo.config import EngineConfig
from octavo.core.plan import int_array
from octavo.core.request import PoolBusyError, Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.build import build_engine
from octavo.engine.core import EngineCore
from octavo.engine.pool import run_resize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def built(model: Path, num_bytes: int) -> EngineCore:
    config = EngineConfig(
        model=str(model), device="cuda", dtype="float32", kv="virtual", kv_memory=str(num_bytes),
        max_num_seqs=8,
    )  # fmt: skip
    return build_engine(config)[0]


def tokens(core: EngineCore) -> dict[int, list[int]]:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    return run(core, [Request(n, int_array([3 + n, 5, 7]), params, 40, 0) for n in range(6)])


def test_what_one_engine_gives_back_the_other_takes(tmp_path: Path) -> None:
    tiny_qwen3(head_dim=16).save_pretrained(tmp_path)
    free = torch.cuda.mem_get_info()[0]
    first, second = built(tmp_path, free * 6 // 10), built(tmp_path, free // 10)
    expected = tokens(first)
    assert tokens(second) == expected
    block_bytes = second.executor.capacity.block_bytes
    small = second.scheduler.manager.num_usable_blocks
    large = free * 7 // 10 // block_bytes
    with pytest.raises(PoolBusyError, match="bytes are needed for"):
        run_resize(second, lambda: second.scheduler.resizing.resize(large))
    assert second.scheduler.manager.num_usable_blocks == small
    assert tokens(second) == expected
    before = torch.cuda.mem_get_info()[0]
    run_resize(first, first.scheduler.resizing.sleep)
    assert torch.cuda.mem_get_info()[0] >= before + free // 2
    assert run_resize(second, lambda: second.scheduler.resizing.resize(large)) == large
    assert tokens(second) == expected
    with pytest.raises(PoolBusyError, match="bytes are needed for"):
        run_resize(first, first.scheduler.resizing.wake_up)
    assert first.scheduler.resizing.is_asleep
    run_resize(second, lambda: second.scheduler.resizing.resize(small))
    run_resize(first, first.scheduler.resizing.wake_up)
    assert tokens(first) == expected
    assert tokens(second) == expected
    first.close()
    second.close()


def test_the_pool_changes_while_captured_steps_run(tmp_path: Path) -> None:
    tiny_qwen3(head_dim=16).save_pretrained(tmp_path)
    core = built(tmp_path, 256 << 20)
    expected = tokens(core)
    first = core.scheduler.state.step_id
    step, sizes = core.step, [(34, 20), (26, 200), (18, 40), (10, 300), (2, 12)]

    def resizing_step():  # type: ignore[no-untyped-def]
        outputs = step()
        if sizes and core.scheduler.state.step_id >= first + sizes[-1][0]:
            core.scheduler.resizing.resize(sizes.pop()[1])
        return outputs

    core.step = resizing_step  # type: ignore[method-assign]
    assert tokens(core) == expected
    assert not sizes
    assert core.scheduler.manager.num_usable_blocks == 20
    core.close()
