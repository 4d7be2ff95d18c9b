"""A request's sequences while they live: what the columns of rows do not hold. No decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.plan import Batch, IntArray, KVCommand, RowInit
from octavo.core.protocols import Swapped
from octavo.core.request import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens. ``token_ids`` is current only while it waits; ``row`` is -1 then."""

    group: Group
    index: int
    token_ids: IntArray
    row: int = -1

    @property
    def number(self) -> int:
        return self.group.request.number + self.index

    @property
    def seed(self) -> int:
        return (self.group.request.seed + self.index) & (2**64 - 1)

    def row_init(self, num_computed_tokens: int, block_ids: IntArray) -> RowInit:
        request = self.group.request
        return RowInit(
            row=self.row,
            token_ids=self.token_ids,
            num_computed_tokens=num_computed_tokens,
            block_ids=block_ids,
            params=request.params,
            seed=self.seed,
            num_prompt_tokens=len(request.prompt_token_ids),
            stop_token_ids=request.stop_token_ids,
            num_logprobs=request.params.logprobs,
        )


@dataclass(slots=True, eq=False)
class Group:
    """The sequences of one request, admitted, preempted and resumed together.

    A new group runs its prompt once, on the row of its first sequence; the others wait for the
    fan-out (``is_fanned_out``) on rows of their own.
    """

    request: Request
    arrival: int
    sequences: list[Sequence] = field(default_factory=list)
    is_fanned_out: bool = False
    is_resuming: bool = False
    is_failing: bool = False
    # Blocks in host memory, by sequence index, while the group is swapped out; its rows wait for
    # them to arrive while it is swapped in.
    swapped: dict[int, Swapped] | None = None
    is_arriving: bool = False
    num_preemptions: int = 0
    num_cached_tokens: int = 0

    def __post_init__(self) -> None:
        prompt = self.request.prompt_token_ids
        self.sequences = [Sequence(self, index, prompt) for index in range(self.request.n)]
        self.is_fanned_out = self.request.n == 1

    @property
    def cache_salt(self) -> bytes:
        """Whose cached prefixes may be hit: nobody's where all prompt logits are needed."""
        request = self.request
        if request.needs_prompt_logits:
            return b"%b\0prompt logits\0%d" % (request.cache_salt, request.number)
        return request.cache_salt

    @property
    def rows(self) -> list[int]:
        """Rows of the sequences that have one."""
        return [sequence.row for sequence in self.sequences if sequence.row >= 0]


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """What has to be remembered of a plan until its result comes."""

    step_id: int
    batch: Batch
    sampled_rows: IntArray
    commands: tuple[KVCommand, ...]
    # Blocks that this step fills and others may hit already: (row, block id).
    published: tuple[tuple[int, int], ...]
    # Rows that were forked for a fan-out: (parent, child).
    forks: tuple[tuple[int, int], ...]

    def rows(self) -> list[int]:
        """Every row that the step computes or samples for."""
        rows: list[int] = self.batch.rows.tolist()
        return rows + [child for _, child in self.forks]
