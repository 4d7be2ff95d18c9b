"""Kernels that overlap read some things before their predecessor has ended: those were written
before a kernel that overlaps with none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.tiny_engine import run
from execution.gpu.test_gpu_engine import gpu_engine, requests
from execution.models.tiny_models import tiny_opt, tiny_qwen3
from octavo.core.plan import StepPlan
from octavo.execution.kernels.ahead import Kernel

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
# What they write is read early: rows, positions and tables by the first, parts by both.
WRITERS = {"_gather_rows", "_fill_tokens", "_decode_parts"}
EARLY_READERS = {"_rope_and_write", "_decode"}


class Launches(TorchDispatchMode):
    """Notes Octavo's kernels and PyTorch's embedding, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.table: torch.Tensor | None = None

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket is torch.ops.aten.index_select:  # type: ignore[attr-defined]
            assert self.table is not None
            if args[0].data_ptr() == self.table.data_ptr():
                self.names.append("embedding")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("make", "kv"), [(tiny_qwen3, "paged"), (tiny_qwen3, "virtual"), (tiny_opt, "paged")]
)
def test_an_embedding_lies_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any], kv: str
) -> None:
    make().save_pretrained(tmp_path)
    launches, launcher = Launches(), Kernel.__getitem__

    def noting(kernel: Kernel, grid: Any) -> Any:
        launches.names.append(kernel.function.__name__)
        return launcher(kernel, grid)

    core = gpu_engine(tmp_path, num_blocks=40, depth=1, chunk=8, kv=kv)
    launch = core.executor.launch
    launches.table = core.executor.runner.model.model.embedding.weight  # type: ignore[attr-defined]

    def launch_noted(plan: StepPlan) -> None:
        with launches:
            launch(plan)

    monkeypatch.setattr(core.executor, "launch", launch_noted)
    monkeypatch.setattr(Kernel, "__getitem__", noting)
    run(core, requests(), beams={})
    core.close()
    assert set(launches.names) > WRITERS | EARLY_READERS | {"embedding"}
    written: list[str] = []
    for name in launches.names:
        if name in WRITERS:
            written.append(name)
        elif name == "embedding":
            written.clear()
        assert name not in EARLY_READERS or not written, f"{name} overlaps with {written}"
