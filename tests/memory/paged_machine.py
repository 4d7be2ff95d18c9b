"""Any order of calls of a manager, as a state machine against Python lists."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.core.layout import num_blocks_for
from octavo.core.plan import CopyBlocks, KVCommand, MapBlocks, ReleaseBlocks, SwapOut
from octavo.memory.paged import PagedManager
from octavo.memory.swap import SwappedTable
from toy_executor import ToyMMU, as_ids

SIZE = 4


class PagedMachine(RuleBasedStateMachine):
    """Any order of calls; a toy arena replays the commands and every row reads its own tokens."""

    rows = 5
    sharing = True

    def __init__(self) -> None:
        super().__init__()
        self.mmu = ToyMMU(self.rows)
        self.paged = self.make()
        self.host = np.full((8, SIZE), -1, dtype=np.int64)
        self.swapped: list[tuple[list[SwappedTable], list[list[int]], list[bytes]]] = []
        self.arena = np.full((17, SIZE), -1, dtype=np.int64)
        self.num_blocks = 12
        self.absent: set[int] = set()
        self.model: dict[int, list[int]] = {}
        self.salts: dict[int, bytes] = {}
        self.tables: dict[int, dict[int, int]] = {}
        self.outstanding: list[tuple[KVCommand, ...]] = []
        self.pins: list[tuple[list[int], bytes, tuple[int, ...]]] = []
        self.counter = 0

    def make(self) -> PagedManager:
        return PagedManager(
            13, SIZE, self.rows, prefix_caching=True, num_host_blocks=7, sharing=self.sharing
        )

    def next_row(self, tokens: list[int], salt: bytes) -> int:
        return next(r for r in range(self.rows) if r not in self.model)

    def has_places(self, count: int) -> bool:
        return True

    def fresh(self, count: int) -> list[int]:
        self.counter += count
        return list(range(self.counter - count, self.counter))

    def write(self, row: int, start: int) -> None:
        for position in range(start, len(self.model[row])):
            block_id = self.tables[row][position // SIZE]
            owners = sum(block_id in table.values() for table in self.tables.values())
            owners += sum(block_id in block_ids for _, _, block_ids in self.pins)
            assert owners == 1, "a shared block is written"
            self.arena[block_id, position % SIZE] = self.model[row][position]

    def obey(self) -> None:
        drained = self.paged.drain()
        deltas = drained.table_deltas
        for row, index, block_id in zip(deltas.rows, deltas.indices, deltas.block_ids, strict=True):
            self.tables[int(row)][int(index)] = int(block_id)
        for command in drained.commands:
            if isinstance(command, MapBlocks):
                self.mmu.obey(command)
            elif isinstance(command, CopyBlocks):
                self.arena[command.destinations] = self.arena[command.sources]
            elif isinstance(command, SwapOut):
                self.host[command.host_block_ids] = self.arena[command.block_ids]
            else:
                self.arena[command.block_ids] = self.host[command.host_block_ids]
        if drained.commands:
            self.outstanding.append(drained.commands)

    @precondition(lambda self: len(self.model) < self.rows)
    @rule(
        common=st.integers(0, 14),
        story=st.integers(0, 1),
        own=st.integers(0, 6),
        reserve=st.integers(0, 2),
        salt=st.sampled_from([b"", b"tenant"]),
    )
    def admit(self, common: int, story: int, own: int, reserve: int, salt: bytes) -> None:
        """Prompts begin with a part of one of two stories, so that prefixes are hit."""
        free = self.paged.num_free_blocks
        tokens = list(range(10**6 * (story + 1), 10**6 * (story + 1) + common))
        tokens += self.fresh(own or not common)
        needed = -(-len(tokens) // SIZE)
        if not self.has_places(needed):
            return
        row = self.next_row(tokens, salt)
        admitted = self.paged.admit(row, as_ids(tokens), reserve=reserve, salt=salt)
        if needed + reserve <= free:
            assert admitted is not None
        if admitted is not None:
            cached = admitted.num_cached_tokens
            assert cached < len(tokens)
            assert cached % SIZE == 0
            for pinned, pin_salt, _ in self.pins:
                if salt == pin_salt:
                    alike = next(
                        (i for i, (a, b) in enumerate(zip(pinned, tokens, strict=False)) if a != b),
                        min(len(pinned), len(tokens) - 1),
                    )
                    assert cached >= alike // SIZE * SIZE, "a pinned prefix is not hit"
            self.model[row] = tokens
            self.salts[row] = salt
            self.tables[row] = dict(enumerate(self.paged.block_ids(row).tolist()))
            self.obey()
            self.write(row, cached)
            self.paged.publish(row, as_ids(tokens))
            self.paged.commit(as_ids([row]), as_ids([len(tokens) - cached]))

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.model)))
        for block_id in self.paged.publish(row, as_ids(self.model[row])):
            assert block_id in self.tables[row].values()

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data())
    def unpublish(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.model)))
        # What is pinned was computed: nobody takes it back.
        pinned = {block_id for _, _, block_ids in self.pins for block_id in block_ids}
        self.paged.unpublish(set(self.tables[row].values()) - pinned)

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data(), length=st.integers(0, 16))
    def pin(self, data: st.DataObject, length: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.model)))
        tokens, salt = self.model[row][:length], self.salts[row]
        num_new = self.paged.num_to_pin(as_ids(tokens), salt=salt)
        before = self.paged.num_pinned_blocks
        block_ids = self.paged.pin(as_ids(tokens), salt=salt)
        if block_ids is None:
            assert self.paged.num_pinned_blocks == before
            return
        assert self.paged.num_pinned_blocks == before + num_new
        self.pins.append((tokens[: len(block_ids) * SIZE], salt, block_ids))
        assert len(self.pins[-1][0]) == len(tokens) // SIZE * SIZE

    @precondition(lambda self: bool(self.pins))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.pins) - 1))
        self.paged.unpin(self.pins.pop(index)[2])

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, unique=True))
        tables = self.paged.swap_out(rows, [len(self.model[row]) for row in rows])
        if tables is None:
            return
        self.obey()
        self.swapped.append(
            (tables, [self.model.pop(r) for r in rows], [self.salts[r] for r in rows])
        )
        for row in rows:
            self.paged.free(row)
            del self.tables[row]

    @precondition(lambda self: bool(self.swapped))
    @rule(reserve=st.integers(0, 1))
    def swap_in(self, reserve: int) -> None:
        tables, contents, salts = self.swapped[0]
        rows = [r for r in range(self.rows) if r not in self.model][: len(tables)]
        if len(rows) < len(tables):
            return
        if not self.has_places(sum(len(table.host_block_ids) for table in tables)):
            return
        if self.paged.swap_in(tables, rows, reserve=reserve) is None:
            return
        self.swapped.pop(0)
        self.obey()
        self.paged.drop_swapped(tables)
        for row, tokens, salt in zip(rows, contents, salts, strict=True):
            self.model[row], self.salts[row] = tokens, salt
            self.tables[row] = dict(enumerate(self.paged.block_ids(row).tolist()))

    @precondition(lambda self: bool(self.swapped))
    @rule()
    def give_up_swapped(self) -> None:
        self.paged.drop_swapped(self.swapped.pop()[0])

    @rule()
    def reset(self) -> None:
        self.paged.reset_prefix_cache()
        pinned = {block_id for _, _, block_ids in self.pins for block_id in block_ids}
        used = {block_id for table in self.tables.values() for block_id in table.values()}
        assert self.paged.usage().cached <= len(pinned) * SIZE
        assert self.paged.usage().cached >= len(pinned - used) * SIZE

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data(), count=st.integers(1, 6))
    def grow(self, data: st.DataObject, count: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.model)))
        length = len(self.model[row])
        if not self.has_places(num_blocks_for(length + count, SIZE) - len(self.tables[row])):
            return
        before = (self.paged.block_ids(row).tolist(), self.paged.num_free_blocks)
        if self.paged.grow(row, length + count):
            self.obey()
            self.model[row] += self.fresh(count)
            self.write(row, length)
            self.paged.commit(as_ids([row]), as_ids([count]))
        else:
            assert before == (self.paged.block_ids(row).tolist(), self.paged.num_free_blocks)

    @rule(count=st.integers(1, 8))
    def shrink(self, count: int) -> None:
        idle = self.paged.num_free_blocks
        cached = [b for b in range(1, self.paged.pool.num_blocks) if self.paged.pool.is_cached(b)]
        commands = self.paged.remove_idle(count)
        if not idle:
            assert not commands
            return
        *mapping, release = commands
        assert isinstance(release, ReleaseBlocks)
        gone = set(release.block_ids.tolist())
        assert len(gone) == min(count, idle)
        assert gone.isdisjoint(self.absent)
        if count <= idle - len(cached):
            assert gone.isdisjoint(cached), "cached blocks go last"
        for command in mapping:
            assert isinstance(command, MapBlocks)
            self.mmu.obey(command)
        for slot in self.mmu.slots:
            assert gone.isdisjoint(slot.values()), "a slot shows memory that goes"
        self.arena[sorted(gone)] = -99
        self.absent |= gone
        self.num_blocks -= len(gone)
        assert self.paged.num_usable_blocks == self.num_blocks

    @precondition(lambda self: self.num_blocks < 16)
    @rule(count=st.integers(1, 8))
    def widen(self, count: int) -> None:
        """Not beyond what the toy arena has."""
        new = self.paged.missing_blocks(min(count, 16 - self.num_blocks))
        self.paged.add_blocks(new)
        assert new.tolist() == sorted(set(new.tolist()))
        self.absent -= set(new.tolist())
        self.arena[new] = 0
        self.num_blocks += len(new)
        assert self.paged.num_usable_blocks == self.num_blocks

    @precondition(lambda self: 0 < len(self.model) < self.rows)
    @rule(data=st.data(), shrink=st.integers(0, 3))
    def fork(self, data: st.DataObject, shrink: int) -> None:
        parent = data.draw(st.sampled_from(sorted(self.model)))
        child = next(r for r in range(self.rows) if r not in self.model)
        length = len(self.model[parent])
        if not self.has_places(num_blocks_for(length, SIZE)):
            return
        self.paged.fork(parent, child, length)
        self.model[child] = list(self.model[parent])
        self.salts[child] = self.salts[parent]
        self.tables[child] = dict(enumerate(self.paged.block_ids(child).tolist()))
        if shrink:
            # Before the fork is told.
            self.shrink(shrink)

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data(), grow_first=st.booleans())
    def free(self, data: st.DataObject, grow_first: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.model)))
        if grow_first:
            self.paged.grow(row, len(self.model[row]) + 1)
        self.paged.free(row)
        del self.model[row], self.tables[row]
        self.obey()

    @precondition(lambda self: bool(self.outstanding))
    @rule()
    def process_a_step(self) -> None:
        self.paged.retire(self.outstanding.pop(0))

    @invariant()
    def every_row_reads_its_own_tokens(self) -> None:
        self.paged.check()
        for row, tokens in self.model.items():
            if not self.paged.is_mapped(as_ids([row])):
                continue
            read = [
                int(self.arena[self.tables[row][p // SIZE], p % SIZE]) for p in range(len(tokens))
            ]
            assert read == tokens
            assert list(self.tables[row].values()) == self.paged.block_ids(row).tolist()

    @invariant()
    def pinned_blocks_keep_their_tokens(self) -> None:
        for tokens, _, block_ids in self.pins:
            assert self.arena[list(block_ids)].ravel().tolist() == tokens

    def teardown(self) -> None:
        while self.pins:
            self.paged.unpin(self.pins.pop()[2])
        assert self.paged.num_pinned_blocks == 0
        for row in list(self.model):
            self.paged.free(row)
        self.obey()
        while self.outstanding:
            self.paged.retire(self.outstanding.pop(0))
        while self.swapped:
            self.give_up_swapped()
        assert self.paged.swap_space.num_free == 7
        self.paged.check()
        assert self.paged.num_free_blocks == self.paged.num_usable_blocks, "only cached blocks"
