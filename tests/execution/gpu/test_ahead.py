"""Kernels are compiled before they are launched, once each, and launched as ever afterwards."""

from __future__ import annotations

import gc
import inspect
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.runtime import _async_compile

from engine.tiny_engine import run
from execution.gpu.test_gpu_engine import ON_GPU, gpu_engine, requests
from execution.models.tiny_models import tiny_llama, tiny_qwen3
from octavo.engine import build_gpu
from octavo.execution.kernels import ahead
from octavo.execution.kernels.ahead import (
    Kernel,
    KernelError,
    compiling_ahead,
    is_compiling_ahead,
)


class Function:
    """Stands in for what `triton.jit` returns, and compiles as that does."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.__name__ = name
        self.error = error
        self.launched: list[tuple[Any, ...]] = []
        self.compiled: list[tuple[Any, ...]] = []
        self.loaded_by: list[str] = []
        self.cache: dict[Any, Any] = {}

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **options: self.run(*args, grid=grid, warmup=False, **options)

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not warmup:
            self.launched.append((grid, args, options))
            return None
        mode = _async_compile.active_mode.get()
        assert mode is not None
        key = (self.__name__, str(args), str(options))
        rest = len(inspect.signature(mode.submit).parameters) - 2
        callbacks = [lambda kernel: self.cache.setdefault(key, kernel), lambda future: None]
        return mode.submit(key, lambda: self.compile(args, options), *callbacks[:rest])

    def compile(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        self.compiled.append((args, options))
        if self.error is not None:
            raise self.error
        loaded_by = self.loaded_by

        class Compiled:
            @property
            def run(self) -> None:
                loaded_by.append(threading.current_thread().name)

        return Compiled()


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where kernels are not interpreted."""
    monkeypatch.setattr(ahead, "INTERPRETED", False)


def test_launches_pass_through() -> None:
    function = Function("f")
    Kernel(function)[(3,)](1, 2, BLOCK=4)
    assert function.launched == [((3,), (1, 2), {"BLOCK": 4})]
    assert not is_compiling_ahead()


def test_interpreted_kernels_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "INTERPRETED", True)
    function = Function("f")
    with compiling_ahead():
        Kernel(function)[(1,)](1)
    assert function.launched
    assert not function.compiled


@pytest.mark.usefixtures("compiles")
def test_each_kind_of_launch_is_compiled_once_and_by_threads() -> None:
    function = Function("f")
    kernel = Kernel(function)
    x = torch.zeros(64, dtype=torch.int8)
    shift = -x.data_ptr() % 16
    aligned, odd = x[shift:], x[shift + 1 :]
    with compiling_ahead():
        assert is_compiling_ahead()
        for _ in range(3):
            kernel[(1,)](aligned, 1, num_warps=4)
            kernel[(7,)](aligned[16:], 1, num_warps=4)
            kernel[(1,)](odd, 1, num_warps=4)
            kernel[(1,)](aligned.bool(), 1, num_warps=4)
            kernel[(1,)](aligned, True, num_warps=4)
            kernel[(1,)](aligned, 1, num_warps=8)
    assert not function.launched
    assert len(function.compiled) == len(function.cache) == 5
    assert all(name.startswith("compile") for name in function.loaded_by)
    assert len(function.loaded_by) == 5
    assert not is_compiling_ahead()
    kernel[(1,)](aligned, 1)
    assert len(function.launched) == 1


@pytest.mark.usefixtures("compiles")
def test_what_has_no_hash_is_left_to_triton() -> None:
    function = Function("f")
    with compiling_ahead():
        for _ in range(2):
            Kernel(function)[(1,)]([1, 2])
    assert len(function.compiled) == 1


@pytest.mark.usefixtures("compiles")
def test_an_error_names_its_kernel_and_leaves_nothing_behind() -> None:
    good, bad = Function("good"), Function("bad", ValueError("no such layout"))

    def launch() -> None:
        with compiling_ahead():
            Kernel(bad)[(1,)](1)
            Kernel(good)[(1,)](1)

    with pytest.raises(KernelError, match="kernel bad cannot be compiled: no such layout"):
        launch()
    assert good.cache
    assert not is_compiling_ahead()
    with compiling_ahead():
        Kernel(good)[(1,)](2)
    assert len(good.cache) == 2


@pytest.mark.usefixtures("compiles")
def test_a_pass_that_fails_says_its_own_error() -> None:
    function = Function("f")

    def launch() -> None:
        with compiling_ahead():
            Kernel(function)[(1,)](1)
            raise IndexError("mine")

    with pytest.raises(IndexError, match="mine"):
        launch()
    assert not function.compiled
    assert not is_compiling_ahead()
    assert _async_compile.active_mode.get() is None


@pytest.mark.usefixtures("compiles")
def test_the_interpreter_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    interval, seen = sys.getswitchinterval(), []
    function = Function("f")
    monkeypatch.setattr(
        function, "compile", lambda *_: seen.append((sys.getswitchinterval(), gc.isenabled()))
    )
    # What it makes has no ``run``, which is an error like any.
    with pytest.raises(KernelError, match="kernel f cannot"), compiling_ahead():
        Kernel(function)[(1,)](1)
    assert seen[0][0] > 1
    assert not seen[0][1]
    assert sys.getswitchinterval() == interval
    assert gc.isenabled()


@pytest.mark.usefixtures("compiles")
def test_threads_that_cannot_start_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: int) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", fail)
    function = Function("f")
    with pytest.raises(Exception, match=r"given up|initializer failed"), compiling_ahead():
        Kernel(function)[(1,)](1)
    assert not function.compiled
    assert _async_compile.active_mode.get() is None


@pytest.mark.usefixtures("compiles")
def test_other_threads_launch_meanwhile() -> None:
    function = Function("f")
    with compiling_ahead():
        other = threading.Thread(target=lambda: Kernel(function)[(1,)](1))
        other.start()
        other.join()
    assert function.launched
    assert not function.compiled


def test_starting_compiles_nothing_after_the_pass(tmp_path: Path) -> None:
    """With Triton's own compiler, and without a GPU."""
    shape = {"num_hidden_layers": 4, "max_position_embeddings": 1024}
    tiny_llama(**shape).save_pretrained(tmp_path / "model")
    program = Path(__file__).with_name("compile_without_gpu.py")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    # What decoding rows of the second run sampled is looked up by the step that follows.
    kinds = json.dumps(
        [
            {"dtype": "float16"},
            {"dtype": "float16", "is_invariant": True},
            # Whose norms are in its products. Weights in bfloat16 are packed for the CPU that this
            # runs on.
            {"dtype": "float32"},
        ]
    )
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "model"), kinds],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for result in found["results"]:
        assert len(result["ahead"]) == result["loaded_ahead"] > 3
        assert result["launched_ahead"] == 0
        assert result["late"] == []
        assert result["loaded_late"] == 0
        assert result["launched_late"] > 100
    assert {"_prefill", "_decode", "_skinny_linear"} <= set(found["results"][0]["ahead"])
    assert not {"torch._dynamo", "torch._inductor", "sympy", "numba"} & set(found["modules"])


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_on_a_gpu_the_first_pass_finds_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_qwen3(head_dim=16).save_pretrained(tmp_path)
    core = gpu_engine(tmp_path, num_blocks=60, depth=2, chunk=32)
    expected = run(core, requests(), beams={})
    core.close()
    for function in (
        value.function
        for name, module in list(sys.modules.items())
        if name.startswith("octavo.execution.kernels.")
        for value in vars(module).values()
        if isinstance(value, Kernel)
    ):
        function.device_caches.clear()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime,
        "jit_post_compile_hook",
        lambda **call: compiled.append(call["fn"].name),
    )
    from octavo.engine import gpu_parts

    made: list[SimpleNamespace] = []
    whole = gpu_parts.GPUParts.runner

    def watched(parts: Any, *args: Any, **options: Any) -> Any:
        monkeypatch.setattr(gpu_parts.GPUParts, "runner", whole)
        small = parts.runner(12, capture=False)
        build_gpu.compile_kernels(parts, small, 32)
        num_ahead = len(compiled)
        build_gpu.warm_up(small, 32)
        made.append(SimpleNamespace(ahead=num_ahead, late=compiled[num_ahead:]))
        return parts.runner(*args, **options)

    monkeypatch.setattr(gpu_parts.GPUParts, "runner", watched)
    core = gpu_engine(tmp_path, num_blocks=60, depth=2, chunk=32)
    assert run(core, requests(), beams={}) == expected
    core.close()
    assert made[0].ahead > 5
    assert made[0].late == []
