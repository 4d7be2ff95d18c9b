"""Growing and shrinking the pool while it serves, and giving all of it back while nobody needs it.

A resize is a target. Plans of their own bring the pool nearer to it, in pieces between which other
steps run: blocks that nobody references go first, the others as they are given back. Rows that need
a block meanwhile may be preempted in the ordinary way. Which blocks go is decided by `memory`.

What was accepted can be finished: the pool stays large enough for each request that waits or runs
until that has ended, and what would not fit in the smaller pool is refused at the door from the
start.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.plan import (
    Batch,
    CreateBlocks,
    KVCommand,
    ReleaseBlocks,
    ResizedBlocks,
    StepPlan,
    int_array,
)
from octavo.core.request import PoolBusyError, PoolSizeError
from octavo.scheduling.groups import Launched
from octavo.scheduling.prefixes import PrefixRegistry
from octavo.scheduling.state import SchedulerState

# A driver takes some 30 µs for a block: 15 ms, in which decoding rows wait.
MAX_BLOCKS_A_STEP = 512


@dataclass(frozen=True, slots=True)
class PoolResized:
    """A resize has ended: sequences can own ``num_blocks`` now. With an ``error`` it came to
    nothing, and the pool is what it was, as far as the system allows."""

    num_blocks: int
    error: str | None = None


class PoolResizing:
    """The pool's size and where it is going, on a `SchedulerState`."""

    def __init__(self, state: SchedulerState, prefixes: PrefixRegistry) -> None:
        self._state = state
        self._prefixes = prefixes
        self.is_under_way = False
        self._is_in_flight = False
        # What the pool had when the resize began, and what went wrong on its way.
        self._before = state.target_blocks
        self._error: str | None = None
        self._ended: PoolResized | None = None
        # While asleep: the blocks to come back with.
        self._awake: int | None = None
        # The most that a request under way needs, and of which requests that is.
        self._need_of: tuple[int, int, tuple[int, ...]] | None = None
        self._need = 0

    @property
    def is_asleep(self) -> bool:
        return self._awake is not None

    @property
    def num_lasting_blocks(self) -> int:
        """Blocks that requests may count on: fewer than there are while the pool shrinks, and those
        to come back while it is asleep."""
        return self._state.num_lasting_blocks if self._awake is None else self._awake

    def resize(self, num_blocks: int) -> None:
        """Have ``num_blocks`` for sequences from soon on; what was wanted before is forgotten.

        Raises:
            PoolSizeError: there cannot be so many or so few.
            PoolBusyError: the engine is asleep.
        """
        self._check_elastic()
        if self._awake is not None:
            raise PoolBusyError("the engine is asleep; wake it up before resizing its KV cache")
        most = self._state.config.max_blocks
        assert most is not None
        if not 1 <= num_blocks < most:
            raise PoolSizeError(
                f"the KV cache can have from 1 to {most - 1} blocks of "
                f"{self._state.manager.block_size} tokens beside the null block, not {num_blocks}"
            )
        self._prefixes.check_pool(num_blocks)
        self._start(num_blocks)

    def sleep(self) -> None:
        """Give all blocks back, and with them cached and registered prefixes. What a launched step
        names goes when that has ended. Nothing to do when asleep.

        Raises:
            PoolSizeError: the pool cannot be resized.
            PoolBusyError: requests are under way, or a resize is.
        """
        self._check_elastic()
        if self.is_under_way:
            raise PoolBusyError("the KV cache is being resized; try again when that has ended")
        if self._awake is not None:
            self._ended = PoolResized(self._state.manager.num_usable_blocks)
            return
        if self._state.sequences:
            count = len({id(s.group) for s in self._state.sequences.values()})
            raise PoolBusyError(
                f"{count} {'request runs or waits' if count == 1 else 'requests run or wait'}; let "
                "them end, or abort them, before the engine goes to sleep"
            )
        self._prefixes.drop_all()
        self._awake = self._state.manager.num_usable_blocks
        self._start(0)

    def wake_up(self) -> None:
        """Have the blocks back that `sleep` gave away. Nothing to do when awake.

        Raises:
            PoolBusyError: it is going to sleep just now.
        """
        if self._awake is None:
            if not self.is_under_way:  # a resize has an end of its own
                self._ended = PoolResized(self._state.manager.num_usable_blocks)
            return
        if self.is_under_way:
            raise PoolBusyError("the engine is going to sleep or waking up; try again")
        self._start(self._awake)

    def take_ended(self) -> PoolResized | None:
        """The resize that has ended since the last call."""
        ended, self._ended = self._ended, None
        return ended

    def plan(self) -> StepPlan | None:
        """A step that brings the pool nearer to its target; None: nothing can be done now."""
        if not self.is_under_way or self._is_in_flight:
            return None
        commands = self._commands()
        if not commands:
            return None
        state, batch = self._state, Batch.empty()
        self._is_in_flight = True
        state.step_id += 1
        rows = int_array([])
        state.launched.append(Launched(state.step_id, batch, rows, commands, (), ()))
        return StepPlan(step_id=state.step_id, batch=batch, commands=commands)

    def digest(self, commands: tuple[KVCommand, ...], resized: ResizedBlocks) -> None:
        """The result of a step that `plan` made."""
        manager = self._state.manager
        for command in commands:
            if isinstance(command, CreateBlocks):
                manager.add_blocks(resized.block_ids)
            elif isinstance(command, ReleaseBlocks):
                gone = set(resized.block_ids.tolist())
                kept = [b for b in command.block_ids.tolist() if b not in gone]
                manager.add_blocks(int_array(kept))
        self._is_in_flight = False
        if resized.error is not None:
            # Back to where it was, once; if that fails too, it stays where it is.
            is_second = self._error is not None
            self._error = self._error or resized.error
            self._state.target_blocks = manager.num_usable_blocks if is_second else self._before
        self._settle()

    def fail(self, commands: tuple[KVCommand, ...], error: str) -> None:
        """A step that failed may have been one of `plan`: what it should have released counts as
        gone, since nobody knows."""
        for command in commands:
            if isinstance(command, CreateBlocks):
                self.digest(commands, ResizedBlocks(int_array([]), error))
            elif isinstance(command, ReleaseBlocks):
                self.digest(commands, ResizedBlocks(command.block_ids, error))

    def _start(self, num_blocks: int) -> None:
        self._before = self._state.manager.num_usable_blocks
        self._state.target_blocks = num_blocks
        self._error = None
        self._ended = None
        self.is_under_way = True
        self._settle()

    def _settle(self) -> None:
        num_blocks = self._state.manager.num_usable_blocks
        if self._is_in_flight or num_blocks != self._state.target_blocks:
            return
        self.is_under_way = False
        if num_blocks:
            # Woken up, or never fallen asleep.
            self._awake = None
        self._ended = PoolResized(num_blocks, self._error)

    def _commands(self) -> tuple[KVCommand, ...]:
        manager, target = self._state.manager, self._state.target_blocks
        num_blocks = manager.num_usable_blocks
        if num_blocks < target:
            count = min(target - num_blocks, MAX_BLOCKS_A_STEP)
            num_more = target - num_blocks - count
            return (CreateBlocks(manager.missing_blocks(count), num_more),)
        if not manager.num_free_blocks:
            return ()
        excess = num_blocks - max(target, self._num_promised())
        return manager.remove_idle(min(excess, MAX_BLOCKS_A_STEP)) if excess > 0 else ()

    def _num_promised(self) -> int:
        """Blocks with which each request under way can be finished, whatever else waits for it."""
        manager, state = self._state.manager, self._state
        # Asked at every step while a shrink waits: worked out when requests have come or gone.
        known = (state.arrivals, len(state.sequences), tuple(state.promised))
        if known != self._need_of:
            self._need_of, self._need = known, state.most_blocks_needed()
        return manager.num_pinned_blocks + self._need

    def _check_elastic(self) -> None:
        if self._state.config.max_blocks is None:
            raise PoolSizeError(
                "this KV cache is one allocation and cannot be resized; start the engine with "
                "--kv virtual, whose memory comes in pages"
            )
