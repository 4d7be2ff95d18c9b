"""Pages of an NVIDIA GPU, through the driver's virtual memory calls (CUDA driver API, group VA).

One driver handle is one block. The driver is slow at these calls, tens of microseconds each, and
they need not run on the thread that launches kernels.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from octavo.execution.pages.interface import AddressRange, PageError
from octavo.execution.pages.ledger import Ledger, runs

if TYPE_CHECKING:
    import torch


class CudaPages:
    """``Pages`` of one GPU. The memory is taken when a handle is created."""

    def __init__(self, block_bytes: int, *, device: int = 0, driver: Any = None) -> None:
        """``driver`` is ``cuda.bindings.driver``, which is imported where none is given.

        Raises:
            PageError: the package, the driver or the device is missing, the device cannot do it,
                or ``block_bytes`` is not a whole number of its pages.
        """
        self._driver = _import_driver() if driver is None else driver
        self._device = device
        self._call("cuInit", 0)
        handle = self._call("cuDeviceGet", device)
        attribute = self._driver.CUdevice_attribute
        if not self._call(
            "cuDeviceGetAttribute",
            attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            handle,
        ):
            raise PageError(f"GPU {device} has no virtual memory management")
        self._properties, self._access = _descriptions(self._driver, device)
        self._ledger = Ledger(block_bytes, _ask_granularity(self._call, self._driver, device))
        self._physical: dict[int, Any] = {}
        self._unzeroed: set[int] = set()
        # torch uses the device's primary context too, so tensors work on both sides.
        self._device_handle = handle
        self._context = self._call("cuDevicePrimaryCtxRetain", handle)
        self._stream: Any = None
        try:
            with self._current_context():
                # Not the default stream: zeroing would wait for the model's kernels.
                flag = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
                self._stream = self._call("cuStreamCreate", int(flag))
        except PageError:
            self._call("cuDevicePrimaryCtxRelease", handle)
            raise

    @property
    def block_bytes(self) -> int:
        return self._ledger.block_bytes

    @property
    def granularity(self) -> int:
        return self._ledger.granularity

    @property
    def num_handles(self) -> int:
        return len(self._physical)

    @property
    def num_mappings(self) -> int:
        return self._ledger.num_mapped

    @property
    def max_mappings(self) -> int | None:
        return None

    def num_available(self) -> int:
        with self._current_context():
            code, free, _ = self._driver.cuMemGetInfo()
        # Where the driver does not say, creating will.
        return (
            int(free) // self.block_bytes if code == self._driver.CUresult.CUDA_SUCCESS else 1 << 62
        )

    def reserve(self, num_places: int) -> AddressRange:
        self._ledger.check_count(num_places, "num_places")
        num_bytes = num_places * self.block_bytes
        address = self._call("cuMemAddressReserve", num_bytes, 0, 0, 0, size=num_bytes)
        return self._ledger.reserve(int(address), num_places)

    def create(self, count: int) -> list[int]:
        self._ledger.check_count(count, "count")
        made: list[Any] = []
        try:
            for _ in range(count):
                physical = self._call(
                    "cuMemCreate", self.block_bytes, self._properties, 0, size=self.block_bytes
                )
                made.append(physical)
        except PageError as error:
            error.add_note(f"block {len(made) + 1:,} of {count:,}; the others were released")
            for physical in made:
                self._roll_back("cuMemRelease", physical)
            raise
        handles = self._ledger.peek(count)
        self._ledger.add(handles)
        self._physical.update(zip(handles, made, strict=True))
        self._unzeroed.update(handles)
        return handles

    def map(self, addresses: AddressRange, first: int, handles: Iterable[int]) -> None:
        wanted = list(handles)
        self._ledger.check_map(addresses, first, wanted)
        size, done = self.block_bytes, 0
        try:
            for done, handle in enumerate(wanted):
                address = addresses.address_of(first + done)
                # Only whole handles can be mapped: the offset has to be 0.
                self._call("cuMemMap", address, size, 0, self._physical[handle], 0, size=size)
        except PageError:
            for place in range(first, first + done):
                self._roll_back("cuMemUnmap", addresses.address_of(place), size)
            raise
        self._ledger.map(addresses, first, wanted)

    def set_access(self, addresses: AddressRange, first: int, count: int) -> None:
        self._ledger.check_mapped(addresses, first, count)
        if count == 0:
            return
        num_bytes = count * self.block_bytes
        address = addresses.address_of(first)
        self._call("cuMemSetAccess", address, num_bytes, [self._access], 1, size=num_bytes)
        self._zero(addresses, range(first, first + count))
        addresses.accessible.update(range(first, first + count))

    def unmap(self, addresses: AddressRange, first: int, count: int) -> list[int]:
        self._ledger.check_mapped(addresses, first, count)
        handles = []
        # One call a place: the driver unmaps what one cuMemMap mapped, no more and no less.
        for place in range(first, first + count):
            address = addresses.address_of(place)
            self._call("cuMemUnmap", address, self.block_bytes, size=self.block_bytes)
            handles += self._ledger.unmap(addresses, place, 1)
        return handles

    def release(self, handles: Iterable[int]) -> None:
        given = list(handles)
        self._ledger.check_release(given)
        for handle in given:
            self._call("cuMemRelease", self._physical[handle], size=self.block_bytes)
            del self._physical[handle]
            self._unzeroed.discard(handle)
            self._ledger.remove(handle)

    def free(self, addresses: AddressRange) -> None:
        self._ledger.check_free(addresses)
        num_bytes = addresses.num_bytes
        self._call("cuMemAddressFree", addresses.address, num_bytes, size=num_bytes)
        del self._ledger.ranges[addresses.address]

    def tensor(self, addresses: AddressRange) -> torch.Tensor:
        import torch

        from octavo.execution.pages.tensor import tensor_at

        return tensor_at(addresses.address, addresses.num_bytes, torch.device("cuda", self._device))

    def close(self) -> None:
        if self._stream is None:
            return
        for addresses in list(self._ledger.ranges.values()):
            for place in sorted(addresses.handles):
                self.unmap(addresses, place, 1)
            self.free(addresses)
        self.release(list(self._physical))
        with self._current_context():
            self._call("cuStreamDestroy", self._stream)
        self._stream = None
        self._call("cuDevicePrimaryCtxRelease", self._device_handle)

    def _zero(self, addresses: AddressRange, places: range) -> None:
        """Clear what has never been accessible: the driver does not promise zeros."""
        new = [place for place in places if addresses.handles[place] in self._unzeroed]
        if not new:
            return
        with self._current_context():
            for _, place, length in runs(new):
                address, num_bytes = addresses.address_of(place), length * self.block_bytes
                self._call("cuMemsetD8Async", address, 0, num_bytes, self._stream, size=num_bytes)
            self._call("cuStreamSynchronize", self._stream)
        self._unzeroed.difference_update(addresses.handles[place] for place in new)

    @contextlib.contextmanager
    def _current_context(self) -> Iterator[None]:
        """Memory and streams belong to a context, and a mapping thread has none of its own."""
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def _roll_back(self, name: str, *arguments: Any) -> None:
        # The first error is the one to report; a driver that cannot undo either is lost anyway.
        with contextlib.suppress(PageError):
            self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any, size: int | None = None) -> Any:
        try:
            return _call(self._driver, name, *arguments)
        except PageError as error:
            if size is not None:
                raise PageError(f"{error}; {size:,} bytes were asked for, {self._free()}") from None
            raise

    def _free(self) -> str:
        try:
            with self._current_context():
                code, free, total = self._driver.cuMemGetInfo()
        except PageError:
            code = None
        if code != self._driver.CUresult.CUDA_SUCCESS:
            return f"and GPU {self._device} does not say what is free"
        return f"{free:,} of {total:,} bytes of GPU {self._device} are free"


def cuda_page_bytes(device: int = 0, driver: Any = None) -> int:
    """What the driver of GPU ``device`` maps at least: 2 MiB on every one so far.

    Raises:
        PageError: the package, the driver or the device is missing.
    """
    driver = _import_driver() if driver is None else driver

    def call(name: str, *arguments: Any) -> Any:
        return _call(driver, name, *arguments)

    call("cuInit", 0)
    return _ask_granularity(call, driver, device)


def _ask_granularity(call: Callable[..., Any], driver: Any, device: int) -> int:
    properties, _ = _descriptions(driver, device)
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(call("cuMemGetAllocationGranularity", properties, minimum))


def _descriptions(driver: Any, device: int) -> tuple[Any, Any]:
    """What is created (memory of the device) and who may use it (the device)."""
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    access = driver.CUmemAccessDesc()
    for location in (properties.location, access.location):
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return properties, access


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    """The value of a driver call. Each returns a tuple of its status and its values."""
    try:
        status, *values = getattr(driver, name)(*arguments)
    except RuntimeError as error:  # the bindings are there, but no libcuda
        raise PageError(f"{name}: no usable NVIDIA driver: {error}") from error
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorName(status)
        text = text.decode() if isinstance(text, bytes) else status
        shown = ", ".join(f"{each:#x}" for each in arguments if isinstance(each, int))
        raise PageError(f"{name}({shown}) failed: {text}")
    return values[0] if values else None


def _import_driver() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise PageError(
            f"mapping GPU memory needs the CUDA driver's bindings ({error}); run: "
            "pip install cuda-bindings"
        ) from error
