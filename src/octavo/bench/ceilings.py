"""What a device can do at most, measured in the run that reports shares of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Rates a second: bytes read from device memory, floating-point operations of a bfloat16
    product, bytes copied from and to pinned host memory, operations of an fp8 product with a scale
    for each row and column (0 where there is none)."""

    read_bytes: float
    matmul_flops: float
    fp8_flops: float
    to_host_bytes: float
    from_host_bytes: float

    @classmethod
    def measure(cls) -> Ceilings:
        """On the current CUDA device; takes half a second and 6 GiB for the moment."""
        read_s = _seconds_of(torch.sum, torch.ones(2**30, dtype=torch.float32, device="cuda"))
        shape = (8192, 8192)
        a, b = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        matmul_s = _seconds_of(torch.matmul, a, b)
        fp8_s = float("inf")
        if torch.cuda.get_device_capability() >= (8, 9):
            a, b = (part.to(torch.float8_e4m3fn) for part in (a, b))
            fp8_s = _seconds_of(_fp8_product, a, b, torch.ones(8192, 1, device="cuda"))
        host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        on_device = torch.empty(2**28, dtype=torch.uint8, device="cuda")
        out_s = _seconds_of(_copy, host, on_device)
        in_s = _seconds_of(_copy, on_device, host)
        return cls(
            read_bytes=2**32 / read_s,
            matmul_flops=2 * 8192**3 / matmul_s,
            fp8_flops=2 * 8192**3 / fp8_s,
            to_host_bytes=2**28 / out_s,
            from_host_bytes=2**28 / in_s,
        )


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _fp8_product(a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch._scaled_mm(
        a,
        b.t(),
        scale_a=scales,
        scale_b=scales.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _seconds_of(work: Callable[..., object], *arguments: torch.Tensor) -> float:
    return gpu_seconds(lambda: work(*arguments))


def gpu_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The fastest of ``repeats`` runs, by the device's clock, after one to warm up."""
    work()
    best = float("inf")
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best
