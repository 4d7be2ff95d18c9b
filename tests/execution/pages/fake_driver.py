"""A CUDA driver of plain Python that holds its caller to the documented contract of group VA.

It answers as ``cuda.bindings.driver`` does, a tuple of status and values, keeps bytes for each
handle, and asserts where a real driver would have undefined behaviour. Fresh memory is garbage.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

PAGE = 2 << 20
GARBAGE = 0xFF


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_DEVICE = 101


class CUdeviceptr:
    """The bindings answer addresses as objects with ``__int__``, not as integers."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __int__(self) -> int:
        return self._value


class CUmemGenericAllocationHandle(CUdeviceptr):
    pass


OK = (CUresult.CUDA_SUCCESS,)
INVALID = (CUresult.CUDA_ERROR_INVALID_VALUE,)


@dataclass
class FakeDriver:
    """``fail_at`` makes the n-th call of a name fail, counted from 0."""

    total_bytes: int = 1 << 40
    supported: int = 1
    fail_at: dict[str, int] = field(default_factory=dict)
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    memory: dict[int, int] = field(default_factory=dict)  # handle -> the byte it is full of
    sizes: dict[int, int] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    ranges: dict[int, int] = field(default_factory=dict)
    mapped: dict[int, tuple[int, int]] = field(default_factory=dict)  # address -> size, handle
    accessible: set[int] = field(default_factory=set)
    contexts: list[str] = field(default_factory=list)
    streams: int = 0
    retained: int = 0
    CUresult = CUresult
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102
    )
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __post_init__(self) -> None:
        self._next_address, self._next_handle = 1 << 44, 1000

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not (name.startswith("cu") and callable(value)):
            return value

        def recorded(*arguments: Any) -> tuple[Any, ...]:
            index = self.counts[name]
            self.counts[name] += 1
            self.calls.append((name, arguments))
            if self.fail_at.get(name) == index:
                return (CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
            answer: tuple[Any, ...] = value(*arguments)
            return answer

        return recorded

    def names(self, *only: str) -> list[str]:
        return [name for name, _ in self.calls if name in only]

    @property
    def used_bytes(self) -> int:
        alive = {handle for _, handle in self.mapped.values()} | (set(self.sizes) - self.released)
        return sum(self.sizes[handle] for handle in alive)

    @staticmethod
    def CUmemAllocationProp() -> SimpleNamespace:
        return SimpleNamespace(type=None, location=SimpleNamespace(type=None, id=None))

    @staticmethod
    def CUmemAccessDesc() -> SimpleNamespace:
        return SimpleNamespace(flags=None, location=SimpleNamespace(type=None, id=None))

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return OK if flags == 0 else INVALID

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return (*OK, f"device {ordinal}") if ordinal < 2 else (CUresult(101), None)

    def cuDeviceGetAttribute(self, attribute: int, device: str) -> tuple[Any, ...]:
        assert attribute == 102
        assert device.startswith("device")
        return (*OK, self.supported)

    def cuGetErrorName(self, status: CUresult) -> tuple[Any, ...]:
        return (*OK, status.name.encode())

    def cuDevicePrimaryCtxRetain(self, device: str) -> tuple[Any, ...]:
        self.retained += 1
        return (*OK, f"context of {device}")

    def cuDevicePrimaryCtxRelease(self, device: str) -> tuple[Any, ...]:
        self.retained -= 1
        return OK

    def cuCtxPushCurrent(self, context: str) -> tuple[Any, ...]:
        self.contexts.append(context)
        return OK

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return (*OK, self.contexts.pop())

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        assert self.contexts
        assert flags == 1
        self.streams += 1
        return (*OK, "stream")

    def cuStreamDestroy(self, stream: str) -> tuple[Any, ...]:
        assert self.contexts
        self.streams -= 1
        return OK

    def cuStreamSynchronize(self, stream: str) -> tuple[Any, ...]:
        assert self.contexts
        return OK

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        assert self.contexts
        return (*OK, self.total_bytes - self.used_bytes, self.total_bytes)

    def cuMemGetAllocationGranularity(self, properties: Any, option: int) -> tuple[Any, ...]:
        self._check_location(properties.location)
        return (*OK, PAGE) if option == 0 and properties.type == 1 else (*INVALID, None)

    def cuMemAddressReserve(
        self, size: int, alignment: int, address: int, flags: int
    ) -> tuple[Any, ...]:
        if size <= 0 or size % PAGE or alignment or address or flags:
            return (*INVALID, None)
        start = self._next_address
        self._next_address += size + PAGE
        self.ranges[start] = size
        return (*OK, CUdeviceptr(start))

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        if self.ranges.get(address) != size:
            return INVALID
        assert not self._mapped_in(address, size), "freed with mappings"
        del self.ranges[address]
        return OK

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, ...]:
        self._check_location(properties.location)
        if size <= 0 or size % PAGE or flags or properties.type != 1:
            return (*INVALID, None)
        if self.used_bytes + size > self.total_bytes:
            return (CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
        self._next_handle += 1
        self.sizes[self._next_handle], self.memory[self._next_handle] = size, GARBAGE
        return (*OK, CUmemGenericAllocationHandle(self._next_handle))

    def cuMemRelease(self, handle: CUmemGenericAllocationHandle) -> tuple[Any, ...]:
        if int(handle) not in self.sizes or int(handle) in self.released:
            return INVALID
        self.released.add(int(handle))
        return OK

    def cuMemMap(
        self, address: int, size: int, offset: int, handle: CUmemGenericAllocationHandle, flags: int
    ) -> tuple[Any, ...]:
        number = int(handle)
        if size % PAGE or size != self.sizes.get(number) or offset or flags:
            return INVALID
        if number in self.released or not self._is_reserved(address, size):
            return INVALID
        if self._mapped_in(address, size):
            return INVALID
        self.mapped[address] = (size, number)
        return OK

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        if self.mapped.get(address, (0, 0))[0] != size:
            return INVALID
        del self.mapped[address]
        self.accessible.discard(address)
        return OK

    def cuMemSetAccess(
        self, address: int, size: int, descriptions: list[Any], count: int
    ) -> tuple[Any, ...]:
        assert isinstance(descriptions, list)
        assert len(descriptions) == count == 1
        self._check_location(descriptions[0].location)
        places = self._mapped_in(address, size)
        if descriptions[0].flags != 3 or sum(self.mapped[at][0] for at in places) != size:
            return INVALID
        self.accessible.update(places)
        return OK

    def cuMemsetD8Async(self, address: int, value: int, size: int, stream: str) -> tuple[Any, ...]:
        assert self.contexts, "memset without a context"
        places = self._mapped_in(address, size)
        assert sum(self.mapped[at][0] for at in places) == size, "memset of unmapped memory"
        assert self.accessible.issuperset(places), "memset without access"
        for at in places:
            self.memory[self.mapped[at][1]] = value
        return OK

    def read(self, address: int) -> int:
        """The byte that the block mapped at ``address`` is full of."""
        assert address in self.accessible, "read without access"
        return self.memory[self.mapped[address][1]]

    def write(self, address: int, value: int) -> None:
        assert address in self.accessible, "write without access"
        self.memory[self.mapped[address][1]] = value

    def _mapped_in(self, address: int, size: int) -> list[int]:
        return [
            at
            for at, (length, _) in self.mapped.items()
            if address < at + length and at < address + size
        ]

    def _is_reserved(self, address: int, size: int) -> bool:
        return any(
            start <= address and address + size <= start + length
            for start, length in self.ranges.items()
        )

    @staticmethod
    def _check_location(location: Any) -> None:
        assert location.type == 1
        assert isinstance(location.id, int)
