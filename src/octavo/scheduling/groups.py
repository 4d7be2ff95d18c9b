"""A request's sequences while they live: what the columns of rows do not hold. No decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.plan import Batch, FloatArray, IntArray, KVCommand, RowInit
from octavo.core.protocols import Swapped
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.scheduling.beam_search import BeamSearch


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
        request, beams = self.group.request, self.group.beams
        return RowInit(
            row=self.row,
            token_ids=self.token_ids,
            num_computed_tokens=num_computed_tokens,
            block_ids=block_ids,
            params=request.params if beams is None else beams.row_params,
            seed=self.seed,
            num_prompt_tokens=len(request.prompt_token_ids),
            stop_token_ids=request.stop_token_ids,
            num_logprobs=request.params.logprobs if beams is None else beams.search.num_top,
        )


@dataclass(slots=True, eq=False)
class Beams:
    """A group's beam search: its candidates are the group's sequences, in the order of ``places``
    (rank → index of the sequence).

    ``arrived`` holds, by index, the likeliest next tokens of the candidates whose step is done; all
    are needed to go on. ``unwanted`` are the results, from 0, that were given up.
    """

    search: BeamSearch
    row_params: SamplingParams
    places: list[int]
    arrived: dict[int, tuple[IntArray, FloatArray]] = field(default_factory=dict)
    unwanted: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, request: Request) -> Beams:
        params = request.params
        search = BeamSearch(
            request.beam_width,
            request.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            stop_token_ids=request.stop_token_ids,
            min_tokens=params.min_tokens,
            num_logprobs=params.logprobs,
        )
        # The host chooses; what a row samples by itself is dropped.
        plain = SamplingParams(temperature=0.0, prompt_logprobs=params.prompt_logprobs)
        return cls(search, plain, [0])


@dataclass(slots=True, eq=False)
class Group:
    """The sequences of one request, admitted, preempted and resumed together.

    A new group runs its prompt once, on the row of its first sequence; the others wait for the
    fan-out (``is_fanned_out``) on rows of their own. With ``beams`` the sequences are candidates,
    and the fan-out comes with the first result.
    """

    request: Request
    arrival: int
    sequences: list[Sequence] = field(default_factory=list)
    is_fanned_out: bool = False
    is_resuming: bool = False
    # All of it ends: nobody has to take over what a sequence was computing.
    is_ending: bool = False
    # Blocks in host memory, by sequence index, while the group is swapped out; its rows wait for
    # them to arrive while it is swapped in.
    swapped: dict[int, Swapped] | None = None
    is_arriving: bool = False
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    beams: Beams | None = None

    def __post_init__(self) -> None:
        prompt = self.request.prompt_token_ids
        count = self.request.num_sequences
        self.sequences = [Sequence(self, index, prompt) for index in range(count)]
        self.is_fanned_out = count == 1
        if self.request.beam_width:
            self.beams = Beams.of(self.request)

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
    # Rows of beams that the plan prepares, whether they run or not.
    prepared: tuple[int, ...] = ()

    def rows(self) -> list[int]:
        """Every row that the step prepares, computes or samples for."""
        rows: list[int] = self.batch.rows.tolist()
        return rows + [child for _, child in self.forks] + list(self.prepared)
