"""First come, first served; iteration-level batching; chunked prefill; preemption.

The scheduler makes a `StepPlan` out of queue, rows and blocks, and digests `StepResult`s. It reads
no clock, imports no torch and never asks the executor. `state` holds what it knows, `planning`
makes plans, `waiting` admits, `results` digests; here is what the outside asks.
"""

from __future__ import annotations

from octavo.core.layout import num_blocks_for
from octavo.core.plan import KVUsage, StepPlan, StepResult
from octavo.core.protocols import KVManager
from octavo.core.request import (
    AsleepError,
    ContextLengthError,
    QueueFullError,
    Request,
    RequestError,
    StepOutputs,
)
from octavo.scheduling.groups import Group
from octavo.scheduling.planning import Planner
from octavo.scheduling.prefixes import PrefixRegistry
from octavo.scheduling.resizing import PoolResizing
from octavo.scheduling.results import ResultDigest
from octavo.scheduling.rows import RowTable
from octavo.scheduling.state import SchedulerConfig, SchedulerState

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler:
    """One queue, one set of rows, one manager.

    Use: `add` and `abort` at any time; `plan` when the executor has room for a step; `update`
    with each result in the order of launch, or `fail` when the step failed.
    """

    def __init__(self, config: SchedulerConfig, manager: KVManager) -> None:
        self.config = config
        self.state = SchedulerState(config, manager)
        self._prefixes = PrefixRegistry(self.state)
        self.resizing = PoolResizing(self.state, self._prefixes)
        self._planner = Planner(self.state, self.resizing)
        self._results = ResultDigest(self.state, self._prefixes, self.resizing)

    @property
    def manager(self) -> KVManager:
        return self.state.manager

    @property
    def rows(self) -> RowTable:
        return self.state.rows

    @property
    def num_preemptions(self) -> int:
        """Times that a group lost its blocks."""
        return self.state.num_preemptions

    @property
    def num_swaps(self) -> int:
        """How many of these were swapped out; the others are recomputed."""
        return self.state.num_swaps

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, whatever number of sequences each has."""
        return len(self.state.waiting)

    @property
    def num_waiting_sequences(self) -> int:
        """Sequences of the requests in the queue: what `num_running` counts, before they run."""
        return sum(len(group.sequences) for group in self.state.waiting)

    @property
    def num_running(self) -> int:
        """Sequences that own a row and are still wanted."""
        return int(self.rows.is_wanted.sum())

    @property
    def has_work(self) -> bool:
        """Whether something runs, waits, or is in flight, or the pool is being resized."""
        state = self.state
        return bool(
            state.sequences or state.launched or state.releasing or self.resizing.is_under_way
        )

    @property
    def has_room(self) -> bool:
        """Whether the queue takes another request."""
        return self.num_waiting < self.config.max_queued_requests

    def usage(self) -> KVUsage:
        return self.manager.usage()

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes but the registered; sequences that run keep their blocks."""
        self.manager.reset_prefix_cache()

    def drop_prefix(self, number: int) -> bool:
        """Stop keeping the prefix that request ``number`` registered; False: there is none."""
        return self._prefixes.drop(number)

    def add(self, request: Request, *, is_promised: bool = False) -> None:
        """Queue a request. One that ``is_promised`` was accepted before: a pool that shrinks is
        still as large as it needs.

        Raises:
            ContextLengthError: it can never fit in the pool, however long it waits.
            RequestError: it has more samples or beams than run at once.
            QueueFullError: ``max_queued_requests`` wait already.
            AsleepError: the pool's memory was given back.
        """
        if self.resizing.is_asleep:
            raise AsleepError("the engine is asleep; wake it up to be served")
        num_blocks = self.manager.num_blocks_needed(request)
        is_too_long = request.max_length > self.config.max_model_len
        num_there = self.manager.num_usable_blocks if is_promised else self.state.num_lasting_blocks
        left = num_there - self.manager.num_pinned_blocks
        if is_too_long or self.manager.can_never_fit(num_blocks) or num_blocks > left:
            raise ContextLengthError(
                f"the request may grow to {request.max_length} tokens, {num_blocks} blocks, "
                f"more than the model's {self.config.max_model_len} tokens or than the KV cache "
                "can hold beside registered prefixes"
            )
        count = request.num_sequences
        if count > self.config.max_num_seqs:
            name, what = ("beam_width", "beams") if request.beam_width else ("n", "samples")
            raise RequestError(
                f"{name} is {count}, but only {self.config.max_num_seqs} sequences run at once "
                f"(max_num_seqs); ask for fewer {what}"
            )
        num_places = count * num_blocks_for(request.max_length, self.manager.block_size)
        max_mapped = self.manager.max_mapped_blocks
        if max_mapped is not None and num_places > max_mapped:
            raise ContextLengthError(
                f"{count} sequences of up to {request.max_length} tokens need {num_places} mapped "
                f"blocks, and {max_mapped} can be mapped at once; ask for fewer or shorter ones"
            )
        if not self.has_room:
            raise QueueFullError(
                f"{self.num_waiting} requests wait already (max_queued_requests); try again later"
            )
        if request.pins_prefix:
            self._prefixes.expect(request)
        group = Group(request, self.state.arrivals)
        self.state.arrivals += 1
        for sequence in group.sequences:
            assert not self.knows(sequence.number), f"request {sequence.number} exists"
            self.state.sequences[sequence.number] = sequence
        self.state.waiting.append(group)

    def knows(self, number: int) -> bool:
        """Whether a sequence of this number waits or runs."""
        return number in self.state.sequences

    def num_cached_tokens(self, number: int) -> int:
        """Of the prompt of a sequence that waits or runs, how much came from the prefix cache; 0
        before it ran and after it ended, when `Finished` tells."""
        sequence = self.state.sequences.get(number)
        return 0 if sequence is None else sequence.group.num_cached_tokens

    def abort(self, number: int) -> bool:
        """Forget a sequence; its blocks are free at once, or with the last step that names them.

        The other samples of its request go on; a beam search does as long as one of its ``n``
        results is wanted. False when there is no such sequence (it may have just ended).
        """
        sequence = self.state.sequences.get(number)
        if sequence is None:
            return False
        group = sequence.group
        self._prefixes.forget(number)
        if group.beams is None:
            self.state.forget(sequence)
            return True
        if sequence.index >= group.request.n or sequence.index in group.beams.unwanted:
            return False
        group.beams.unwanted.add(sequence.index)
        if len(group.beams.unwanted) == group.request.n:
            self.state.forget_group(group)
        return True

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run before a result arrives."""
        return self._planner.plan()

    def update(self, result: StepResult) -> StepOutputs:
        """Digest the result of the oldest launched step."""
        return self._results.update(result)

    def fail(self, step_id: int, error: str) -> StepOutputs:
        """The oldest launched step failed: its requests end, everything else goes on."""
        return self._results.fail(step_id, error)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken. For tests and debug runs."""
        self.state.check()
        self._prefixes.check()
