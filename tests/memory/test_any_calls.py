"""Any order of calls of the paged and the virtual manager, with sharing and without."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import settings
from hypothesis.stateful import invariant, precondition, rule

from memory.paged_machine import SIZE, PagedMachine
from octavo.core.layout import num_blocks_for
from octavo.memory.paged import PagedManager
from octavo.memory.virtual import VirtualManager
from toy_executor import ToyMMU, as_ids


class VirtualMachine(PagedMachine):
    """The same through slots: every row reads its own tokens through its own addresses, however
    few places may be mapped."""

    max_mapped = 16
    options: ClassVar[dict[str, int]] = {}

    def make(self) -> PagedManager:
        self.mmu = ToyMMU(self.rows, self.max_mapped)
        self.virtual = VirtualManager(
            13,
            SIZE,
            self.rows,
            max_mapped_blocks=self.max_mapped,
            prefix_caching=True,
            num_host_blocks=7,
            sharing=self.sharing,
            **self.options,
        )
        return self.virtual

    def next_row(self, tokens: list[int], salt: bytes) -> int:
        free = [r for r in range(self.rows) if r not in self.model]
        (row,) = self.paged.choose_rows(free, 1, as_ids(tokens), salt=salt)
        assert row in free
        return row

    def has_places(self, count: int) -> bool:
        """What whoever admits sees to; one more for what `free` grows."""
        return sum(map(len, self.tables.values())) + count < self.max_mapped

    @invariant()
    def slots_show_what_tables_say(self) -> None:
        # A fork is told with the next plan.
        self.obey()
        for row, tokens in self.model.items():
            if not self.paged.is_mapped(as_ids([row])):
                continue
            read = [
                int(self.arena[self.mmu.block(row, p // SIZE), p % SIZE])
                for p in range(len(tokens))
            ]
            assert read == tokens
        for row in range(self.rows):
            shown = self.mmu.slots[row]
            assert [shown[place] for place in range(len(shown))] == self.virtual.slot(row).tolist()
        assert self.mmu.num_mapped == self.virtual.num_mapped_blocks <= self.max_mapped


class AheadMachine(VirtualMachine):
    """Places are mapped ahead, and rows that forked are read through their tables."""

    options: ClassVar[dict[str, int]] = {"num_ahead": 2, "num_places": 5, "maps_forks": False}


class UnsharedMachine(PagedMachine):
    """The same without sharing: once every row has taken a step, none has a block in common."""

    sharing = False

    @precondition(lambda self: bool(self.model))
    @rule()
    def step(self) -> None:
        for row in sorted(self.model):
            length = len(self.model[row]) + 1
            if not self.has_places(num_blocks_for(length, SIZE) - len(self.tables[row])):
                return
            if not self.paged.grow(row, len(self.model[row]) + 1):
                self.obey()
                return
            self.obey()
        owned = [block_id for table in self.tables.values() for block_id in table.values()]
        assert len(set(owned)) == len(owned)


class UnsharedVirtualMachine(VirtualMachine, UnsharedMachine):
    """Both."""


TestPagedMachine = PagedMachine.TestCase
TestVirtualMachine = VirtualMachine.TestCase
TestUnsharedVirtualMachine = UnsharedVirtualMachine.TestCase
TestAheadMachine = AheadMachine.TestCase
TestAheadMachine.settings = settings(stateful_step_count=40)
TestVirtualMachine.settings = settings(stateful_step_count=40)
TestUnsharedVirtualMachine.settings = settings(stateful_step_count=40)
TestUnsharedMachine = UnsharedMachine.TestCase
TestUnsharedMachine.settings = settings(stateful_step_count=40)
TestPagedMachine.settings = settings(stateful_step_count=40)
