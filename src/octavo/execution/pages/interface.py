"""What physical memory and the addresses it is mapped at look like, whatever the device.

A **handle** is one block of physical memory. An **address range** is a reserved run of virtual
addresses, divided into **places** of one block each; a handle may be mapped at many places::

    handles     0    1    2    3    4         created, zeroed, released
                │    │    └──┐ └───────┐
    slot A   [  0    1       2         · ]    reserved, mapped, unmapped, freed
    slot B   [  0    1       3         · ]    the first two are the same memory as in A

Reading or writing a place that is not mapped, or that has no access yet, ends the process with a
fault on a CPU and loses the context on a GPU. Nothing here knows sequences, or is thread-safe: one
thread maps.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

# What cuMemGetAllocationGranularity answers on every NVIDIA GPU so far; for arithmetic where no
# driver can be asked.
GPU_PAGE_BYTES = 2 << 20


def host_page_bytes() -> int:
    """The host's page: 4 KiB on x86-64, up to 64 KiB on other machines."""
    return os.sysconf("SC_PAGE_SIZE")


class PageError(RuntimeError):
    """Memory or addresses could not be had, or were misused."""


@dataclass(eq=False, slots=True)
class AddressRange:
    """``num_places * block_bytes`` reserved addresses from ``address`` on.

    ``handles`` maps each mapped place to what is there; places in ``accessible`` may be read and
    written. Only ``Pages`` changes them.
    """

    address: int
    num_places: int
    block_bytes: int
    handles: dict[int, int] = field(default_factory=dict, repr=False)
    accessible: set[int] = field(default_factory=set, repr=False)

    @property
    def num_bytes(self) -> int:
        return self.num_places * self.block_bytes

    def address_of(self, place: int) -> int:
        return self.address + place * self.block_bytes


class Pages(Protocol):
    """Physical blocks of one size, and the address ranges they are mapped in.

    Every method raises ``PageError`` when an argument breaks its contract or the system refuses;
    the message says which call, how much, and what is free. Then nothing has changed, but that
    ``unmap`` and ``release`` of several blocks may have got some of the way.
    """

    @property
    def block_bytes(self) -> int:
        """Size of every handle and place; a whole number of ``granularity``."""
        ...

    @property
    def granularity(self) -> int:
        """Bytes of the smallest piece that can be mapped."""
        ...

    @property
    def num_handles(self) -> int:
        """Handles created and not released."""
        ...

    @property
    def num_mappings(self) -> int:
        """What counts towards ``max_mappings``."""
        ...

    @property
    def max_mappings(self) -> int | None:
        """How many mappings there may be; None: as many as fit."""
        ...

    def num_available(self) -> int:
        """How many more blocks there is memory for, as far as the system knows."""
        ...

    def reserve(self, num_places: int) -> AddressRange:
        """Addresses for ``num_places`` blocks, with nothing mapped; they take no memory."""
        ...

    def create(self, count: int) -> list[int]:
        """``count`` handles, the lowest free numbers in ascending order.

        Their memory reads as zeros when it is first accessible: attention multiplies what is
        behind a sequence's end by zero, and garbage may be NaN.
        """
        ...

    def map(self, addresses: AddressRange, first: int, handles: Iterable[int]) -> None:
        """Map ``handles`` at the places from ``first`` on, which must be unmapped. All or none.

        Ascending runs of handles are cheapest. They can be used after ``set_access``.
        """
        ...

    def set_access(self, addresses: AddressRange, first: int, count: int) -> None:
        """Allow reading and writing ``count`` mapped places from ``first`` on."""
        ...

    def unmap(self, addresses: AddressRange, first: int, count: int) -> list[int]:
        """Unmap ``count`` mapped places from ``first`` on, which no running kernel may still use.

        Returns:
            The handles that were there, in order.
        """
        ...

    def release(self, handles: Iterable[int]) -> None:
        """Give the memory of handles that are mapped nowhere back to the system."""
        ...

    def free(self, addresses: AddressRange) -> None:
        """Give back a range with nothing mapped. Tensors over it must not be used again."""
        ...

    def tensor(self, addresses: AddressRange) -> torch.Tensor:
        """``uint8 [addresses.num_bytes]`` over the range; only accessible places may be used.

        It does not keep the range: it must not be used after ``free``.
        """
        ...

    def close(self) -> None:
        """Unmap, release and free everything; nothing can be used afterwards."""
        ...
