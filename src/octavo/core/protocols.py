"""The seams between rooms: what a KV manager and an executor must do. No implementation here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

from octavo.core.plan import (
    Admission,
    Drained,
    IntArray,
    KVCapacity,
    KVCommand,
    KVUsage,
    PrefixGroup,
    StepPlan,
    StepResult,
)
from octavo.core.request import Request

Swapped: TypeAlias = Any
"""A sequence's blocks in host memory; opaque to everyone but the manager that made it."""


class KVManager(Protocol):
    """Decides which blocks hold which tokens. Sequences are named by their row.

    A call that fails changes nothing. Policy reads `writable` directly, so that an unchanged
    decode batch costs no call a row.
    """

    @property
    def writable(self) -> IntArray:
        """``[max_num_seqs]``: positions below ``writable[row]`` may be written in place."""

    @property
    def block_size(self) -> int: ...

    @property
    def prefix_caching(self) -> bool:
        """Whether `publish` does anything."""

    @property
    def sharing(self) -> bool:
        """Whether sequences may have blocks in common for longer than a step."""

    @property
    def reserves_ahead(self) -> bool:
        """Whether a sequence has room from its admission on for all that it may become: `grow`
        never lacks blocks, and those that will be forked are admitted, too, with their group."""

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def num_usable_blocks(self) -> int: ...

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that `pin` keeps, each counted once."""

    @property
    def max_mapped_blocks(self) -> int | None:
        """How many blocks may be mapped in the slots of rows at once, a shared one in each slot
        that shows it; None: nothing is mapped. Whoever admits keeps running sequences below."""

    def choose_rows(
        self,
        free_rows: Sequence[int],
        count: int,
        token_ids: IntArray,
        *,
        reserve: int | None = None,
        salt: bytes = b"",
        use_cache: bool = True,
    ) -> list[int]:
        """The ``count`` rows that suit sequences beginning with ``token_ids`` best, best first.
        None of them where `admit` would refuse with ``reserve`` (None: nobody is admitted)."""

    def num_blocks_needed(self, request: Request) -> int:
        """Blocks that all sequences of the request take at their longest."""

    def can_never_fit(self, num_blocks: int) -> bool:
        """Whether the pool has fewer blocks than ``num_blocks`` beside the pinned ones, even when
        nothing runs."""

    def admit(
        self,
        row: int,
        token_ids: IntArray,
        *,
        max_length: int | None = None,
        reserve: int = 0,
        salt: bytes = b"",
        use_cache: bool = True,
    ) -> Admission | None:
        """Take blocks for all of ``token_ids``, cached prefix first, leaving ``reserve`` free.

        ``max_length`` is how many tokens the sequence has when it ends by length; whoever
        `reserves_ahead` needs it, and takes blocks for all of them. Only blocks published under the
        same ``salt`` are shared. Without ``use_cache`` nothing is hit, and `publish` does nothing
        for the row. None means not now.
        """

    def publish(self, row: int, token_ids: IntArray) -> list[int]:
        """Let others share the row's full blocks of ``token_ids``, its first tokens, whose keys
        and values are computed or about to be. Returns the blocks that are new to the cache."""

    def unpublish(self, block_ids: Iterable[int]) -> None:
        """Take blocks back out of the cache: what they should hold was never computed."""

    def reset_prefix_cache(self) -> None:
        """Forget what is cached but not pinned. Sequences that run keep their blocks."""

    def pin(self, token_ids: IntArray, *, salt: bytes = b"") -> tuple[int, ...] | None:
        """Keep the cached full blocks of ``token_ids`` until `unpin`: one more reference to each.

        Returns:
            The blocks. None and no change when not all of them are in the cache.
        """

    def unpin(self, block_ids: Iterable[int]) -> None:
        """Give back what one `pin` returned: cached blocks like others, the tail evicted first."""

    def num_to_pin(self, token_ids: IntArray, *, salt: bytes = b"") -> int:
        """How many full blocks of ``token_ids`` are not pinned yet."""

    def remove_idle(self, count: int) -> tuple[KVCommand, ...]:
        """Take up to ``count`` blocks out of the pool, free ones first, then cached ones, the
        longest unused first; fewer where the others are referenced.

        Returns:
            What gives their memory back, for a plan of its own; nothing when none is idle.
        """

    def missing_blocks(self, count: int) -> IntArray:
        """The ids that a pool of ``count`` more blocks would have, ascending."""

    def add_blocks(self, block_ids: IntArray) -> None:
        """Blocks that were missing, or removed, have memory: they are free."""

    def grow(self, row: int, num_tokens: int, *, reserve: int = 0) -> bool:
        """Make positions below ``num_tokens`` writable, leaving ``reserve`` blocks free; False
        when blocks are missing."""

    def fork(self, parent: int, child: int, num_tokens: int) -> None:
        """Let ``child`` share the blocks of the parent's first ``num_tokens`` tokens. Without
        `sharing` only until the child grows, which then copies them all; into blocks that it was
        admitted with, where the manager `reserves_ahead`."""

    def swap_out(self, rows: Sequence[int], num_tokens: Sequence[int]) -> list[Swapped] | None:
        """Copy the blocks of each row's first ``num_tokens`` tokens to host memory, shared ones
        once: all, or none (None) when host memory is full. The rows keep theirs until freed."""

    def swap_in(
        self, tables: Sequence[Swapped], rows: Sequence[int], *, reserve: int = 0
    ) -> int | None:
        """Bring sequences back into blocks of their own, leaving ``reserve`` free beside those
        that their next tokens need.

        Returns:
            The transfer's id: the rows may run once it is reported, and `drop_swapped` is due
            then. None when blocks are missing.
        """

    def drop_swapped(self, tables: Iterable[Swapped]) -> None:
        """The host blocks are not needed any more."""

    def follow(self, parent: int, child: int) -> None:
        """What is computed of the parent's shared tokens is computed for the child, too."""

    def commit(self, rows: IntArray, num_tokens: IntArray) -> None:
        """``num_tokens[i]`` more tokens of ``rows[i]`` are computed (vectors of one length)."""

    def free(self, row: int) -> None:
        """Drop the row's references."""

    def block_ids(self, row: int) -> IntArray:
        """The row's block table, as it is now."""

    def prefix_groups(self, rows: IntArray, num_computed: IntArray) -> tuple[PrefixGroup, ...]:
        """Which of ``rows``, of so many computed tokens each, begin with the same full blocks."""

    def is_mapped(self, rows: IntArray) -> bool:
        """Whether the slots of all ``rows`` follow their tables. True where there are no slots."""

    def drain(self) -> Drained:
        """Commands and table changes since the last call. Tables of rows admitted or forked in
        between are not in it: a `RowInit` carries them whole."""

    def retire(self, commands: tuple[KVCommand, ...]) -> None:
        """The step that carried ``commands`` has been processed; let go of what they named."""

    def usage(self) -> KVUsage: ...

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken. For tests and debug runs."""


class StepError(RuntimeError):
    """A step failed; its requests fail, the executor stays usable."""


class Executor(Protocol):
    """Obeys plans in the order of their launch and never decides.

    At most ``depth`` launched plans may be outstanding.
    """

    @property
    def capacity(self) -> KVCapacity: ...

    def launch(self, plan: StepPlan) -> None:
        """Start a plan. Does not wait for it when steps are pipelined."""

    def collect(self) -> StepResult:
        """The result of the oldest launched plan, waiting for it.

        Raises:
            StepError: the step failed.
        """

    def close(self) -> None:
        """Stop and release memory. Safe to call twice."""
