"""Compiling kernels before they are launched, on all cores.

Triton compiles a kernel at its first launch, while the launching thread waits: an 8B's first step
needs some twenty, one after the other. Inside `compiling_ahead` a launch only says what it would
run; what it says is compiled by threads, and what is launched afterwards finds it. Of a
compilation three quarters are LLVM and ptxas, during which Python's lock is free.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import triton

from octavo.execution.kernels.gpu import INTERPRETED

_NEVER_S = 60.0
_working = threading.Lock()


class KernelError(RuntimeError):
    """A kernel cannot be compiled or loaded; the message names it."""


class Kernel:
    """A kernel that is launched from Python, ``kernel[grid](...)``, as `triton.jit` leaves it.

    Kernels that others call stay what `triton.jit` makes of them.
    """

    __slots__ = ("_launcher", "function")

    def __init__(self, function: Any) -> None:
        self.function = function
        self._launcher = function.__getitem__

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        compiler = _compiler.get()
        if compiler is None:
            launch: Callable[..., Any] = self._launcher(grid)
            return launch
        return partial(compiler.submit, self.function, grid)


class _Compiler:
    """What launches have asked for, each kind of launch once."""

    def __init__(self) -> None:
        self.kernels: list[tuple[str, Any]] = []
        self._seen: set[Any] = set()

    def submit(self, function: Any, grid: Any, *arguments: Any, **options: Any) -> None:
        # Finer than the key by which Triton tells kernels apart, and cheaper: a model's layers
        # launch the same over and over.
        kinds = (*map(_kind, arguments), *((name, _kind(options[name])) for name in options))
        try:
            key = (function.__name__, id(function), kinds)
            if key in self._seen:
                return
            self._seen.add(key)
        except TypeError:
            pass  # A descriptor has no hash; Triton finds by its own key that it has this one.
        kernel = function.run(*arguments, grid=grid, warmup=True, **options)
        self.kernels.append((function.__name__, kernel))

    def finish(self) -> None:
        """Wait for all.

        Raises:
            KernelError: one cannot be compiled.
        """
        for name, kernel in self.kernels:
            # None: Triton's own hook has refused it. What was compiled before is no future.
            if not hasattr(kernel, "future"):
                continue
            try:
                kernel.result()
            except Exception as error:
                raise KernelError(f"kernel {name} cannot be compiled: {error}") from error


_compiler: ContextVar[_Compiler | None] = ContextVar("compiler", default=None)
"""Of this thread alone: another engine's may be launching meanwhile."""


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return type(value), value


class _Queue(Executor):
    """Compilations that wait until `work`: while they run, whoever submits would hardly get
    Python's lock."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, compile: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        future: Future[Any] = Future()
        self._waiting.append((future, compile))
        return future

    def work(self) -> None:
        """Compile and load what waits."""
        if not self._waiting:
            return
        start = None
        if torch.cuda.is_initialized():
            # A thread begins with the first device.
            start = partial(torch.cuda.set_device, torch.cuda.current_device())
        num_threads = min(len(os.sched_getaffinity(0)), len(self._waiting))
        with (
            _working,  # How long a thread may keep Python's lock is the whole process's.
            _uninterrupted(),
            ThreadPoolExecutor(num_threads, "compile", initializer=start) as threads,
        ):
            for future, compile in self._waiting:
                threads.submit(_fulfil, future, compile)

    def end(self) -> None:
        """Nobody is to wait for what was not compiled."""
        for future, _ in self._waiting:
            if not future.done():
                future.set_exception(RuntimeError("the compilation was given up"))


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Threads give up Python's lock where they need none, and nowhere else: `ast.parse`, of which
    Triton makes use, counts in one place for all threads, and where a collection of garbage lets
    another one in it fails ("recursion depth mismatch", CPython 3.11.7)."""
    interval, collects = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(_NEVER_S)
    gc.disable()
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        if collects:
            gc.enable()


def _fulfil(future: Future[Any], compile: Callable[[], Any]) -> None:
    try:
        kernel = compile()
        # Looked up by the first launch, this loads the binary, for which Triton 3.6 has a C
        # compiler make a launcher.
        _ = kernel.run
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(kernel)


def is_compiling_ahead() -> bool:
    """Whether launches only compile now, so that what kernels would write is not written."""
    return _compiler.get() is not None


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Launches of this thread only have their kernels compiled, which is done when this ends.

    Operations that are no `Kernel` run as ever, on whatever memory holds. In Triton's interpreter
    nothing is compiled, and launches stay launches.

    Raises:
        KernelError: one cannot be compiled.
    """
    if INTERPRETED:
        yield
        return
    compiler, queue = _Compiler(), _Queue()
    # Errors are raised by `finish`, with names.
    with triton.AsyncCompileMode(queue, ignore_errors=True):
        token = _compiler.set(compiler)
        try:
            yield
            queue.work()
        finally:
            _compiler.reset(token)
            queue.end()
        compiler.finish()
