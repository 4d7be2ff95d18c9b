"""Contiguous reservations: the split of the pool by hand, forks, and a state machine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from memory.paged_machine import SIZE, PagedMachine
from octavo.core.plan import CopyBlocks
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.memory.contiguous import ContiguousManager
from octavo.memory.reservation import Reservation
from toy_executor import as_ids


def manager(
    reserve: str = "oracle", num_blocks: int = 17, rows: int = 4, max_model_len: int = 32
) -> ContiguousManager:
    return ContiguousManager(num_blocks, SIZE, rows, Reservation(reserve, max_model_len))


def admit(contiguous: ContiguousManager, row: int, num_tokens: int, max_length: int) -> bool:
    return contiguous.admit(row, as_ids(range(num_tokens)), max_length=max_length) is not None


@pytest.mark.parametrize(
    ("reserve", "split"),
    [
        # 6 prompt tokens, 9 to come: 14 slots are used in the end, 5 are filled now.
        # A run of 8 blocks, all 32 slots reserved.
        ("max", (5, 9, 18, 0, 32)),
        # 6 + 16 slots, in 6 blocks, in a run of 8.
        ("pow2", (5, 9, 10, 8, 32)),
        # 14 slots in 4 blocks.
        ("oracle", (5, 9, 2, 0, 48)),
    ],
)
def test_the_split_of_the_pool(reserve: str, split: tuple[int, ...]) -> None:
    contiguous = manager(reserve)
    assert admit(contiguous, 0, 6, 15)
    contiguous.commit(as_ids([0]), as_ids([5]))
    usage = contiguous.usage()
    found = (usage.live, usage.reserved, usage.internal_waste, usage.external_waste, usage.free)
    assert found == split
    contiguous.check()
    contiguous.free(0)
    assert contiguous.usage().free == 64
    contiguous.check()


def test_free_runs_too_short_for_who_waits_are_external_waste() -> None:
    contiguous = manager()
    for row in range(4):
        assert admit(contiguous, row, 6, 17)
    for row in (1, 2):
        contiguous.free(row)
    assert contiguous.usage().free == 32
    assert not admit(contiguous, 1, 6, 30), "two runs of four blocks, which are no buddies"
    assert contiguous.num_free_blocks == 8
    assert (contiguous.usage().free, contiguous.usage().external_waste) == (0, 32)
    contiguous.check()
    assert admit(contiguous, 1, 6, 8), "somebody else fits"
    usage = contiguous.usage()
    # A run of two blocks, 7 slots of them to be used.
    assert (usage.reserved, usage.internal_waste) == (16 + 16 + 7, 1)
    assert (usage.external_waste, usage.free) == (0, 24)


def test_an_empty_pool_is_free_whoever_was_refused() -> None:
    contiguous = manager(num_blocks=12)
    assert admit(contiguous, 0, 6, 30)
    assert not admit(contiguous, 1, 6, 30)
    usage = contiguous.usage()
    assert (usage.free, usage.external_waste) == (0, 12)
    contiguous.free(0)
    assert contiguous.usage().free == 44


def test_a_sequence_never_asks_again() -> None:
    contiguous = manager()
    assert admit(contiguous, 0, 6, 15)
    table = contiguous.block_ids(0).tolist()
    assert table == list(range(table[0], table[0] + 4))
    assert contiguous.writable[0] == 16
    assert contiguous.grow(0, 14)
    drained = contiguous.drain()
    assert not drained.commands
    assert not len(drained.table_deltas)
    assert contiguous.block_ids(0).tolist() == table


def test_a_fork_copies_into_a_run_of_its_own() -> None:
    contiguous = manager()
    assert admit(contiguous, 0, 6, 15)
    assert admit(contiguous, 1, 6, 15)
    contiguous.commit(as_ids([0]), as_ids([6]))
    contiguous.fork(0, 1, 6)
    assert contiguous.writable[1] == 0
    assert not contiguous.drain().commands, "the step that fills the source comes first"
    contiguous.free(0)
    assert contiguous.num_free_blocks == 16 - 4 - 2, "the sources are kept"
    assert contiguous.grow(1, 7)
    drained = contiguous.drain()
    (copies,) = drained.commands
    assert isinstance(copies, CopyBlocks)
    assert copies.destinations.tolist() == contiguous.block_ids(1)[:2].tolist()
    assert drained.table_deltas.block_ids.tolist() == contiguous.block_ids(1).tolist()
    contiguous.check()
    contiguous.retire((copies,))
    assert contiguous.num_free_blocks == 16 - 4
    assert contiguous.usage().live == 6
    contiguous.check()


def test_a_fork_that_ends_at_once_copies_nothing() -> None:
    contiguous = manager()
    admit(contiguous, 0, 6, 15)
    admit(contiguous, 1, 6, 15)
    contiguous.fork(0, 1, 6)
    contiguous.free(1)
    contiguous.free(0)
    assert not contiguous.drain().commands
    assert contiguous.num_free_blocks == 16
    contiguous.check()


@pytest.mark.parametrize(("num_blocks", "most"), [(17, 4), (16, 3), (12, 2), (4, 0)])
def test_as_many_samples_fit_as_their_sum_says(num_blocks: int, most: int) -> None:
    """Runs of four blocks each, in pools that are no power of two, too."""
    contiguous = manager(num_blocks=num_blocks, rows=6)
    for n in range(1, 6):
        params = SamplingParams(max_tokens=9)
        request = Request(0, as_ids(range(6)), params, 9, seed=0, n=n)
        assert contiguous.can_never_fit(contiguous.num_blocks_needed(request)) == (n > most)
    admitted = 0
    while admitted < 6 and admit(contiguous, admitted, 6, 15):
        admitted += 1
    assert admitted == most


class ContiguousMachine(PagedMachine):
    """The machine of the paged manager, without what there is no sharing for."""

    reserve = "oracle"
    max_model_len = 24

    def __init__(self) -> None:
        super().__init__()
        self.prompts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.pending: set[int] = set()

    def make(self) -> Any:
        return ContiguousManager(13, SIZE, self.rows, Reservation(self.reserve, self.max_model_len))

    @precondition(lambda self: len(self.model) < self.rows)
    @rule(num_prompt=st.integers(1, 12), num_output=st.integers(1, 12))
    def admit(self, num_prompt: int, num_output: int) -> None:
        row = next(r for r in range(self.rows) if r not in self.model)
        num_prompt = min(num_prompt, self.max_model_len - 1)
        tokens, end = self.fresh(num_prompt), min(num_prompt + num_output, self.max_model_len)
        length = self.paged.reservation.num_blocks(num_prompt, end, SIZE)
        has_run = any(len(run) >= length for run in self.paged.pool.free_runs())
        free = self.paged.num_free_blocks
        admitted = self.paged.admit(row, as_ids(tokens), max_length=end)
        assert (admitted is not None) == has_run
        assert self.paged.num_free_blocks == free - (length if has_run else 0)
        if admitted is None:
            return
        self.prompts[row], self.ends[row] = num_prompt, end
        self.begin(row, tokens)
        self.obey()
        self.write(row, 0)
        self.paged.commit(as_ids([row]), as_ids([len(tokens)]))

    def write(self, row: int, start: int) -> None:
        for position in range(start, len(self.model[row])):
            block_id = self.tables[row][position // SIZE]
            assert block_id in self.paged._runs[row], "a row writes into another's run"
            for other in self.pending:
                kept = self.tables[other].get(position // SIZE)
                assert kept != block_id or position >= len(self.model[other]), "not copied yet"
            self.arena[block_id, position % SIZE] = self.model[row][position]

    def begin(self, row: int, tokens: list[int]) -> None:
        self.model[row], self.salts[row] = tokens, b""
        self.tables[row] = dict(enumerate(self.paged.block_ids(row).tolist()))

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data(), count=st.integers(1, 6))
    def grow(self, data: st.DataObject, count: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.model)))
        length = len(self.model[row])
        count = min(count, self.ends[row] - 1 - length)
        if count < 1:
            return
        assert self.paged.grow(row, length + count)
        self.obey()
        self.pending.discard(row)
        self.model[row] += self.fresh(count)
        self.write(row, length)
        self.paged.commit(as_ids([row]), as_ids([count]))

    @precondition(lambda self: 0 < len(self.model) < self.rows)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """A sample: it is admitted like its parent."""
        parent = data.draw(st.sampled_from(sorted(self.model)))
        child = next(r for r in range(self.rows) if r not in self.model)
        if parent in self.pending:
            return
        prompt = as_ids(self.model[parent][: self.prompts[parent]])
        if self.paged.admit(child, prompt, max_length=self.ends[parent]) is None:
            return
        self.take_over(parent, child)

    @precondition(lambda self: len(self.model) > 1)
    @rule(data=st.data())
    def take_over_a_dead_row(self, data: st.DataObject) -> None:
        """A beam: the run of a dead one is as good as the one that it has to have."""
        parent, dead = data.draw(
            st.lists(st.sampled_from(sorted(self.model)), min_size=2, max_size=2, unique=True)
        )
        lengths = [len(self.paged._runs[row]) for row in (parent, dead)]
        if parent in self.pending or lengths[0] != lengths[1]:
            return
        # Its step was processed, and those that fork from it go on at once.
        while self.outstanding:
            self.paged.retire(self.outstanding.pop(0))
        if any(set(run) & set(self.paged._runs[dead]) for run in self.paged._sources.values()):
            return
        self.forget(dead)
        self.take_over(parent, dead)

    def take_over(self, parent: int, child: int) -> None:
        self.paged.fork(parent, child, len(self.model[parent]))
        self.model[child], self.salts[child] = list(self.model[parent]), b""
        self.prompts[child], self.ends[child] = self.prompts[parent], self.ends[parent]
        self.pending.add(child)
        # Its parent's, until its next step.
        self.tables[child] = dict(enumerate(self.paged.block_ids(child).tolist()))

    def shrink(self, count: int) -> None:
        """No rule: a pool of runs stays as it is."""
        assert self.paged.remove_idle(count) == ()

    def widen(self, count: int) -> None:
        assert not len(self.paged.missing_blocks(count))

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data(), grow_first=st.booleans())
    def free(self, data: st.DataObject, grow_first: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.model)))
        if grow_first and len(self.model[row]) < self.ends[row] - 1:
            self.paged.grow(row, len(self.model[row]) + 1)
        self.forget(row)
        self.obey()

    def forget(self, row: int) -> None:
        self.paged.free(row)
        del self.model[row], self.tables[row]
        self.pending.discard(row)

    @invariant()
    def every_row_reads_its_own_tokens(self) -> None:
        self.paged.check()
        for row, tokens in self.model.items():
            table = self.tables[row]
            assert list(table.values()) == list(range(table[0], table[0] + len(table)))
            assert list(table.values()) == self.paged.block_ids(row).tolist()
            read = [int(self.arena[table[p // SIZE], p % SIZE]) for p in range(len(tokens))]
            assert read == tokens

    @invariant()
    def the_split_is_exact(self) -> None:
        usage = self.paged.usage()
        assert usage.live == sum(map(len, self.model.values()))
        assert usage.live + usage.reserved == sum(self.ends[row] - 1 for row in self.model)
        assert usage.cached == 0

    def teardown(self) -> None:
        for row in list(self.model):
            self.forget(row)
        self.obey()
        while self.outstanding:
            self.paged.retire(self.outstanding.pop(0))
        self.paged.check()
        assert self.paged.num_free_blocks == self.paged.num_usable_blocks
        assert not self.swapped
        assert not self.pins


class Pow2Machine(ContiguousMachine):
    reserve = "pow2"


class MaxMachine(ContiguousMachine):
    reserve = "max"
    max_model_len = 14


TestOracle = ContiguousMachine.TestCase
TestPow2 = Pow2Machine.TestCase
TestMax = MaxMachine.TestCase
TestOracle.settings = settings(stateful_step_count=40)
TestPow2.settings = settings(stateful_step_count=40)
TestMax.settings = settings(stateful_step_count=40)
