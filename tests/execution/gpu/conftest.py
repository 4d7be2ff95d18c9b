"""Kernels run compiled where there is a GPU, and in Triton's interpreter elsewhere (see the
conftest above)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from execution.models.tiny_models import tiny_qwen3
from octavo.execution.attention import paged

pytest.importorskip("triton")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3, for tests that mind no shape."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_qwen3(head_dim=16).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same inputs at every run, unless ``OCTAVO_TEST_SEED`` asks for others."""
    torch.manual_seed(int(os.environ.get("OCTAVO_TEST_SEED", "0")))


@pytest.fixture(autouse=True)
def e4m3_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter loses the carry where rounding to e4m3 reaches the next power of two
    (31.4 becomes 16), and reads its NaN as 480. PyTorch converts as a GPU does."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(values: NDArray[Any], source: Any, target: Any, rounding: Any) -> NDArray[Any]:
        if (source, target) == (tl.float32, tl.float8e4nv):
            wide = torch.from_numpy(values.astype(np.float32))
            return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if (source, target) == (tl.float8e4nv, tl.float32):
            narrow = torch.from_numpy(values.astype(np.uint8)).view(torch.float8_e4m3fn)
            return narrow.float().numpy()
        return convert(values, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", converted)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch has programs for all parts that rows could be cut into, and nearly all of them find
    nothing to do. The interpreter runs them one by one: where rows are as short as here, fewer cut
    them in the same places, since a part has its least number of keys."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(paged, "SHARES", 16)


@pytest.fixture(autouse=True)
def language_patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each function that a kernel calls, the interpreter looks through all of Triton's language
    for what to replace, although the kernel's launch has replaced it: a fifth of its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patched_once(function: Any) -> Any:
        modules = [m for m in function.__globals__.values() if m is tl or m is tl.core]
        if modules and not any(tl.core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()
        return patch(function)

    monkeypatch.setattr(interpreter, "_patch_lang", patched_once)
