"""Pages of a Linux host: one memory file, pieces of which are mapped wherever they are wanted.

Handle ``h`` is bytes ``[h * block_bytes, (h + 1) * block_bytes)`` of the file. Where consecutive
handles lie at consecutive places the kernel merges their mappings into one, and only what it keeps
apart counts towards its limit::

    places   0    1    2    3    4    5
    handles  7    8    9    ·    ·    3        3 mappings: 7-9, the hole, 3
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from octavo.execution import host
from octavo.execution.pages.interface import AddressRange, PageError, host_page_bytes
from octavo.execution.pages.ledger import Ledger, runs
from octavo.execution.pages.tensor import tensor_at

_NO_ACCESS = 0  # PROT_NONE
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
_MAP_FIXED_NOREPLACE = 0x100000
_MAP_NORESERVE = 0x4000
_HOLE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # fallocate's flags
_FAILED = ctypes.c_void_p(-1).value
_MAPPING_LIMIT = Path("/proc/sys/vm/max_map_count")
# Mappings left to libraries that load later, threads' stacks and the allocator. A serving process
# has about 500 when it starts.
_SPARE_MAPPINGS = 4096


class MemfdPages:
    """``Pages`` of the host. Memory is taken when it is first written."""

    def __init__(self, block_bytes: int, *, max_mappings: int | None = None) -> None:
        """``max_mappings`` is by default what the kernel's limit leaves when this is made."""
        self._ledger = Ledger(block_bytes, host_page_bytes())
        self._libc = _Libc()
        self._max_mappings = _remaining_mappings() if max_mappings is None else max_mappings
        self._num_mappings = 0
        self._file_blocks = 0
        try:
            self._file = os.memfd_create("octavo-blocks")
        except OSError as error:
            raise PageError(f"memfd_create failed: {error.strerror}") from error

    @property
    def block_bytes(self) -> int:
        return self._ledger.block_bytes

    @property
    def granularity(self) -> int:
        return self._ledger.granularity

    @property
    def num_handles(self) -> int:
        return len(self._ledger.num_uses)

    @property
    def num_mappings(self) -> int:
        return self._num_mappings

    @property
    def max_mappings(self) -> int | None:
        return self._max_mappings

    @property
    def resident_bytes(self) -> int:
        """Memory that the host has given so far."""
        return os.fstat(self._file).st_blocks * 512

    def num_available(self) -> int:
        # What was created but never written is still to be taken.
        owed = self.num_handles * self.block_bytes - self.resident_bytes
        return max(host.available_bytes() - max(owed, 0), 0) // self.block_bytes

    def reserve(self, num_places: int) -> AddressRange:
        self._ledger.check_count(num_places, "num_places")
        self._check_budget(1)
        num_bytes = num_places * self.block_bytes
        address = self._libc.mmap(None, num_bytes, _NO_ACCESS, _HOLE, -1, 0)
        self._num_mappings += 1
        return self._ledger.reserve(address, num_places)

    def create(self, count: int) -> list[int]:
        self._ledger.check_count(count, "count")
        handles = self._ledger.peek(count)
        if handles[-1] >= self._file_blocks:
            num_bytes = (handles[-1] + 1) * self.block_bytes
            try:
                os.truncate(self._file, num_bytes)
            except (OSError, OverflowError) as error:
                raise PageError(
                    f"ftruncate of the memory file to {num_bytes:,} bytes failed: {error}; "
                    f"{_available()}"
                ) from error
            self._file_blocks = handles[-1] + 1
        self._ledger.add(handles)
        return handles

    def map(self, addresses: AddressRange, first: int, handles: Iterable[int]) -> None:
        wanted = list(handles)
        self._ledger.check_map(addresses, first, wanted)
        before = _num_breaks(addresses, first, len(wanted))
        self._ledger.map(addresses, first, wanted)
        added = _num_breaks(addresses, first, len(wanted)) - before
        touched = 0
        try:
            self._check_budget(added)
            for index, handle, length in runs(wanted):
                touched = index + length
                self._libc.mmap(
                    addresses.address_of(first + index),
                    length * self.block_bytes,
                    _NO_ACCESS,
                    mmap.MAP_SHARED | _MAP_FIXED,
                    self._file,
                    handle * self.block_bytes,
                )
        except PageError:
            self._ledger.unmap(addresses, first, len(wanted))
            # The failed run too: it may have removed the reservation before it failed.
            with contextlib.suppress(PageError):
                self._make_hole(addresses, first, touched)
            raise
        self._num_mappings += added

    def set_access(self, addresses: AddressRange, first: int, count: int) -> None:
        self._ledger.check_mapped(addresses, first, count)
        places = range(first, first + count)
        new = [place for place in places if place not in addresses.accessible]
        if not new:
            return
        before = _num_breaks(addresses, first, count)
        addresses.accessible.update(new)
        added = _num_breaks(addresses, first, count) - before
        try:
            self._check_budget(added)
            self._protect(addresses, first, count, _READ_WRITE)
        except PageError:
            addresses.accessible.difference_update(new)
            # mprotect over several mappings may stop half-way.
            for _, place, length in runs(new):
                with contextlib.suppress(PageError):
                    self._protect(addresses, place, length, _NO_ACCESS)
            raise
        self._num_mappings += added

    def unmap(self, addresses: AddressRange, first: int, count: int) -> list[int]:
        self._ledger.check_mapped(addresses, first, count)
        before = _num_breaks(addresses, first, count)
        # A hole in the middle of a merged mapping makes three of one, which the limit may refuse;
        # our own budget does not: giving memory back has to be possible when it is used up.
        self._make_hole(addresses, first, count)
        handles = self._ledger.unmap(addresses, first, count)
        self._num_mappings += _num_breaks(addresses, first, count) - before
        return handles

    def release(self, handles: Iterable[int]) -> None:
        given = sorted(handles)
        self._ledger.check_release(given)
        for _, handle, length in runs(given):
            # Without this the file would keep the memory, and the next owner would read it.
            self._libc.punch_hole(self._file, handle * self.block_bytes, length * self.block_bytes)
            for each in range(handle, handle + length):
                self._ledger.remove(each)

    def free(self, addresses: AddressRange) -> None:
        self._ledger.check_free(addresses)
        self._libc.munmap(addresses.address, addresses.num_bytes)
        del self._ledger.ranges[addresses.address]
        self._num_mappings -= 1

    def tensor(self, addresses: AddressRange) -> torch.Tensor:
        return tensor_at(addresses.address, addresses.num_bytes, torch.device("cpu"))

    def close(self) -> None:
        if self._file < 0:
            return
        for addresses in list(self._ledger.ranges.values()):
            self._libc.munmap(addresses.address, addresses.num_bytes)
        self._ledger.ranges.clear()
        self._ledger.num_uses.clear()
        self._num_mappings = 0
        os.close(self._file)
        self._file = -1

    def _make_hole(self, addresses: AddressRange, first: int, count: int) -> None:
        """Put reserved addresses with nothing behind them back."""
        if count == 0:
            return
        address, num_bytes = addresses.address_of(first), count * self.block_bytes
        try:
            self._libc.mmap(address, num_bytes, _NO_ACCESS, _HOLE | _MAP_FIXED, -1, 0)
        except PageError:
            # Over the kernel's limit even one mapping in place of many is refused. Should another
            # thread take the addresses in between, it keeps them: hence not _MAP_FIXED.
            self._libc.munmap(address, num_bytes)
            self._libc.mmap(address, num_bytes, _NO_ACCESS, _HOLE | _MAP_FIXED_NOREPLACE, -1, 0)

    def _protect(self, addresses: AddressRange, first: int, count: int, access: int) -> None:
        self._libc.mprotect(addresses.address_of(first), count * self.block_bytes, access)

    def _check_budget(self, added: int) -> None:
        total = self._num_mappings + added
        if added > 0 and total > self._max_mappings:
            raise PageError(
                f"{total:,} separate mappings are needed, and {self._max_mappings:,} are allowed "
                f"({_MAPPING_LIMIT} is {_read_limit():,} for the whole process); unmap what is "
                "stale, use larger blocks, or raise vm.max_map_count"
            )


def _continues(addresses: AddressRange, place: int) -> bool:
    """Whether ``place`` and the next one are one mapping to the kernel."""
    here, there = addresses.handles.get(place), addresses.handles.get(place + 1)
    if here is None or there is None:
        return here is there
    return there == here + 1 and (place in addresses.accessible) == (
        place + 1 in addresses.accessible
    )


def _num_breaks(addresses: AddressRange, first: int, count: int) -> int:
    """Ends of mappings at or between ``count`` places from ``first`` on, inside the range."""
    last = min(first + count, addresses.num_places - 1)
    return sum(not _continues(addresses, place) for place in range(max(first - 1, 0), last))


def _read_limit() -> int:
    return int(_MAPPING_LIMIT.read_text())


def _remaining_mappings() -> int:
    with open("/proc/self/maps", "rb") as maps:
        return max(_read_limit() - sum(1 for _ in maps) - _SPARE_MAPPINGS, 0)


def _available() -> str:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return f"{int(line.split()[1]) * 1024:,} bytes of host memory are available"
    return "the host does not say how much memory is available"


class _Libc:
    """System calls that Python does not have, their errors as ``PageError``."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        size, integer, pointer = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        self._mmap = libc.mmap
        self._mmap.restype = pointer
        self._mmap.argtypes = (pointer, size, integer, integer, integer, ctypes.c_int64)
        self._munmap = libc.munmap
        self._munmap.argtypes = (pointer, size)
        self._mprotect = libc.mprotect
        self._mprotect.argtypes = (pointer, size, integer)
        self._fallocate = libc.fallocate
        self._fallocate.argtypes = (integer, integer, ctypes.c_int64, ctypes.c_int64)

    def mmap(
        self, address: int | None, num_bytes: int, access: int, flags: int, file: int, offset: int
    ) -> int:
        # ctypes would cut a longer number off without a word.
        if num_bytes >= 1 << 63:
            raise PageError(f"mmap of {num_bytes:,} bytes: more than there are addresses")
        result: int | None = self._mmap(address, num_bytes, access, flags, file, offset)
        if result is None or result == _FAILED:
            raise _failure(f"mmap of {num_bytes:,} bytes at {address or 0:#x}")
        return result

    def munmap(self, address: int, num_bytes: int) -> None:
        if self._munmap(address, num_bytes):
            raise _failure(f"munmap of {num_bytes:,} bytes at {address:#x}")

    def mprotect(self, address: int, num_bytes: int, access: int) -> None:
        if self._mprotect(address, num_bytes, access):
            raise _failure(f"mprotect of {num_bytes:,} bytes at {address:#x}")

    def punch_hole(self, file: int, offset: int, num_bytes: int) -> None:
        if self._fallocate(file, _PUNCH_HOLE | _KEEP_SIZE, offset, num_bytes):
            raise _failure(f"fallocate (punching a hole of {num_bytes:,} bytes at {offset:,})")


def _failure(call: str) -> PageError:
    code = ctypes.get_errno()
    message = f"{call} failed: {os.strerror(code)} ({errno.errorcode.get(code, code)})"
    if code == errno.ENOMEM:
        with open("/proc/self/maps", "rb") as maps:
            used = sum(1 for _ in maps)
        message += (
            f"; {_available()}, and the process uses {used:,} of {_read_limit():,} mappings "
            f"({_MAPPING_LIMIT})"
        )
    return PageError(message)
