"""A device's stream of work: one queue, events, captured steps. The CUDA one, and a plain one that
does everything at once, under which the GPU's code runs in Triton's interpreter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a queue of work."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...


class Device(Protocol):
    """Where a GPU runner's work goes."""

    @property
    def torch_device(self) -> torch.device: ...

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Work that is started inside goes to the device's main queue."""

    def event(self) -> Event: ...

    def synchronize(self) -> None:
        """Wait for everything that was started, on every queue."""

    def pinned(self, num_ints: int) -> torch.Tensor:
        """Int32 host memory that the device copies from and to without waiting."""

    def free_bytes(self) -> int:
        """Memory of the device that nobody has; 0 where it has none of its own."""

    def capture_pool(self) -> Any:
        """Memory for captured work that runs one after the other. It goes with the last of it, so
        it is not to be shared by owners of different lifetimes."""

    def capture(self, work: Callable[[], Any], pool: Any) -> Callable[[], Any] | None:
        """Record ``work`` once, to be replayed at the cost of one call; None: not here. ``work``
        has run before, and must find its tensors at the same addresses. Where it fails ``pool`` is
        not to be used again; what was captured into it before stays."""


class CUDADevice:
    """A CUDA device with a stream of its own."""

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(index)
        self.stream = torch.cuda.Stream(self.torch_device)
        self._given_up: list[torch.cuda.CUDAGraph] = []

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def pinned(self, num_ints: int) -> torch.Tensor:
        return torch.zeros(num_ints, dtype=torch.int32, pin_memory=True)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def capture_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], Any], pool: Any) -> Callable[[], Any]:
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`: it collects garbage and empties the allocator at every capture.
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            result = work()
            graph.capture_end()
        except BaseException:
            self._give_up(graph, pool)
            raise

        def replay() -> Any:
            graph.replay()
            return result

        return replay

    def _give_up(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a capture that failed, so that others can follow, into other pools."""
        if torch.cuda.is_current_stream_capturing():
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
        # PyTorch before 2.12 leaves both of its allocators in the pool of a capture that cannot be
        # ended. That of the device can be told; that of pinned memory goes on asking the graph
        # whether it is being captured, so the graph has to stay.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.torch_device.index, pool)
        self._given_up.append(graph)


class _Done:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class PlainDevice:
    """The host itself: everything is done when a call returns."""

    torch_device = torch.device("cpu")

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        pass

    def event(self) -> _Done:
        return _Done()

    def pinned(self, num_ints: int) -> torch.Tensor:
        return torch.zeros(num_ints, dtype=torch.int32)

    def free_bytes(self) -> int:
        return 0

    def capture_pool(self) -> None:
        return None

    def capture(self, work: Callable[[], Any], pool: Any) -> None:
        return None
