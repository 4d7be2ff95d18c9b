"""Slots that own their memory: reuse, who gives way under pressure, and what goes with time."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.memory.request_slots import NO_PIECE, Orders, OutOfPiecesError, RequestSlots


def slots(num_pieces: int = 12, num_eager: int = 0, share: float = 1.0) -> RequestSlots:
    return RequestSlots(
        4, 6, num_pieces, max_idle_share=share, idle_timeout_s=10, num_eager=num_eager
    )


def test_a_request_gets_the_slot_with_most_memory_and_nothing_is_mapped_again() -> None:
    policy = slots()
    assert [policy.alloc(), policy.alloc()] == [0, 1]
    growth = policy.grow([2, 4, 0, 0])
    assert {slot: sorted(places) for slot, places in growth.mapped.items()} == {
        0: [0, 1],
        1: [0, 1, 2, 3],
    }
    policy.free(0, 1.0)
    policy.free(1, 2.0)
    assert policy.num_mapped == 6
    assert policy.alloc() == 1
    assert not policy.grow([0, 4, 0, 0]).mapped
    assert list(policy.grow([0, 5, 0, 0]).mapped[1]) == [4]


def test_under_pressure_the_longest_idle_gives_way_from_its_end() -> None:
    policy = slots(num_pieces=9)
    for _ in range(3):
        policy.alloc()
    policy.grow([3, 3, 3, 0])
    policy.free(1, 1.0)
    policy.free(0, 2.0)
    growth = policy.grow([0, 0, 5, 0])
    assert growth.taken == {1: {2: NO_PIECE, 1: NO_PIECE}}
    assert len(policy.slots[0]) == 3, "the next request's"
    growth = policy.grow([0, 0, 6, 0])
    assert growth.taken == {1: {0: NO_PIECE}}


def test_what_a_request_does_not_need_any_more_goes_last() -> None:
    policy = slots(num_pieces=6)
    policy.alloc()
    policy.alloc()
    policy.grow([5, 0, 0, 0])
    policy.grow([2, 1, 0, 0])
    assert policy.grow([2, 3, 0, 0]).taken == {0: {4: NO_PIECE, 3: NO_PIECE}}
    with pytest.raises(
        OutOfPiecesError, match="2 more pieces are needed, and of 6 0 are free and 1"
    ):
        policy.grow([2, 5, 0, 0])
    policy.check()


def test_a_request_that_pauses_keeps_its_memory() -> None:
    policy = slots(num_pieces=6)
    policy.alloc()
    policy.alloc()
    policy.grow([3, 3, 0, 0])
    with pytest.raises(OutOfPiecesError):
        policy.grow([0, 4, 0, 0])
    assert len(policy.slots[0]) == 3
    assert policy.is_used(0)


def test_idle_memory_goes_after_a_time_to_the_system() -> None:
    policy = slots()
    policy.alloc()
    policy.alloc()
    policy.grow([2, 3, 0, 0])
    policy.free(0, 100.0)
    policy.free(1, 105.0)
    assert policy.reclaim(109.9) == ({}, [])
    orders, released = policy.reclaim(110.0)
    assert orders == {0: {1: NO_PIECE, 0: NO_PIECE}}
    assert len(released) == 2
    orders, released = policy.reclaim(120.0)
    assert (list(orders), len(released)) == ([1], 3)
    assert policy.num_mapped == 0


def test_above_the_share_idle_memory_goes_to_others() -> None:
    policy = slots(num_pieces=10, share=0.5)
    policy.alloc()
    policy.alloc()
    policy.grow([4, 4, 0, 0])
    assert policy.reclaim(0.0) == ({}, []), "nothing is idle"
    policy.free(0, 0.0)
    assert policy.reclaim(0.0) == ({0: {3: NO_PIECE, 2: NO_PIECE, 1: NO_PIECE}}, [])


def test_the_next_slot_is_made_ready_and_stays_so() -> None:
    policy = slots(num_eager=2)
    assert sorted(policy.look_ahead([0] * 4)[0]) == [0, 1]
    assert policy.look_ahead([0] * 4) == {}
    assert policy.reclaim(1000.0) == ({}, [])
    assert policy.alloc() == 0
    assert policy.look_ahead([3, 0, 0, 0]).keys() == {0, 1}
    full = slots(num_pieces=4, num_eager=2, share=0.5)
    full.alloc()
    full.grow([2, 0, 0, 0])
    assert full.look_ahead([2, 0, 0, 0]) == {}, "no idle memory above the share"


class Machine(RuleBasedStateMachine):
    """Orders are replayed: what each slot shows is what the policy thinks, and a piece that a
    request needs is shown nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = RequestSlots(4, 5, 11, max_idle_share=0.7, idle_timeout_s=5, num_eager=2)
        self.shown: list[dict[int, int]] = [{} for _ in range(4)]
        self.needed: dict[int, int] = {}
        self.now_s = 0.0

    def obey(self, orders: Orders) -> None:
        for slot, places in orders.items():
            for place, piece in places.items():
                if piece == NO_PIECE:
                    del self.shown[slot][place]
                else:
                    assert place not in self.shown[slot], "shown already"
                    self.shown[slot][place] = piece

    @rule()
    def alloc(self) -> None:
        expected = self.policy.next_slot()
        slot = self.policy.alloc()
        assert slot == expected
        assert (slot is None) == (len(self.needed) == 4)
        if slot is not None:
            self.needed[slot] = 0

    @precondition(lambda self: bool(self.needed))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.needed)))
        del self.needed[slot]
        self.policy.free(slot, self.now_s)

    @rule(data=st.data(), fails=st.booleans())
    def step(self, data: st.DataObject, fails: bool) -> None:
        wanted = [data.draw(st.integers(0, 5)) if s in self.needed else 0 for s in range(4)]
        needed = {s: wanted[s] or count for s, count in self.needed.items()}
        if sum(needed.values()) > 11:
            before = [list(slot) for slot in self.policy.slots]
            with pytest.raises(OutOfPiecesError):
                self.policy.grow(wanted)
            assert before == self.policy.slots
            return
        growth = self.policy.grow(wanted)
        self.obey(growth.taken)
        self.obey(growth.mapped)
        if fails:
            self.obey(self.policy.undo(growth))
            for slot, count in self.needed.items():
                if 0 < wanted[slot] < count:
                    # It gave up what it announced to need no more.
                    self.needed[slot] = min(count, max(len(self.policy.slots[slot]), wanted[slot]))
            return
        self.needed = needed
        orders, released = self.policy.reclaim(self.now_s)
        self.obey(orders)
        in_use = {self.shown[s][p] for s, count in needed.items() for p in range(count)}
        assert in_use.isdisjoint(released)
        self.obey(self.policy.look_ahead([min(c + 1, 5) if c else 0 for c in wanted]))

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def slots_show_what_is_needed(self) -> None:
        self.policy.check()
        for slot, shown in enumerate(self.shown):
            assert [shown[place] for place in range(len(shown))] == self.policy.slots[slot]
        for slot, count in self.needed.items():
            assert len(self.shown[slot]) >= count


TestMachine = Machine.TestCase
TestMachine.settings = settings(stateful_step_count=40)
