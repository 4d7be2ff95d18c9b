"""Both kinds of pages behind one face: what is in a place is one byte that fills its block."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Protocol

import pytest
import torch

from execution.pages.fake_driver import PAGE, FakeDriver
from octavo.execution.pages.cuda import CudaPages
from octavo.execution.pages.interface import AddressRange, Pages, host_page_bytes
from octavo.execution.pages.memfd import MemfdPages


class Memory(Protocol):
    pages: Pages

    def read(self, addresses: AddressRange, place: int) -> int: ...

    def write(self, addresses: AddressRange, place: int, value: int) -> None: ...

    def check_empty(self) -> None: ...


class HostMemory:
    """The real thing, read and written through the tensor over the range."""

    def __init__(self) -> None:
        self.pages = MemfdPages(2 * host_page_bytes())

    def read(self, addresses: AddressRange, place: int) -> int:
        block = self._block(addresses, place)
        # Both pages, and their edges: a block mapped from half a block on would show.
        values = set(block[[0, len(block) // 2 - 1, len(block) // 2, -1]].tolist())
        assert len(values) == 1
        return int(values.pop())

    def write(self, addresses: AddressRange, place: int, value: int) -> None:
        self._block(addresses, place).fill_(value)

    def _block(self, addresses: AddressRange, place: int) -> torch.Tensor:
        size = self.pages.block_bytes
        return self.pages.tensor(addresses)[place * size : (place + 1) * size]

    def check_empty(self) -> None:
        assert self.pages.resident_bytes == 0


class FakeMemory:
    """The driver's calls, against a driver that checks them."""

    def __init__(self) -> None:
        self.driver = FakeDriver()
        self.pages = CudaPages(2 * PAGE, driver=self.driver)

    def read(self, addresses: AddressRange, place: int) -> int:
        return self.driver.read(addresses.address_of(place))

    def write(self, addresses: AddressRange, place: int, value: int) -> None:
        self.driver.write(addresses.address_of(place), value)

    def check_empty(self) -> None:
        assert self.driver.used_bytes == 0
        assert not self.driver.mapped
        assert not self.driver.ranges
        assert not self.driver.contexts


KINDS = [pytest.param(HostMemory, id="memfd"), pytest.param(FakeMemory, id="cuda")]


def mappings_in(addresses: AddressRange) -> list[str]:
    """``rw-s``, ``---p``, ... of each mapping that the kernel keeps in the range."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) (....) ", line)
        assert match
        start, end = int(match[1], 16), int(match[2], 16)
        if start < addresses.address + addresses.num_bytes and end > addresses.address:
            found.append(match[3])
    return found


def num_process_mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_resident_kib() -> int:
    match = re.search(r"RssShmem:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1])
