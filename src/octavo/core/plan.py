"""The vocabulary between policy and mechanism: a frozen plan goes down, a result comes back.

Policy makes a `StepPlan`; an executor obeys it and answers with a `StepResult`. A plan holds only
what changed: rows are persistent on the device, so an unchanged decode batch is described by the
very `Batch` object of the step before.

An executor obeys the parts of a plan in this order: row inits, row forks, table deltas, commands,
the forward pass over the batch, sampling, fan-outs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from octavo.core.sampling_params import SamplingParams

IntArray: TypeAlias = NDArray[np.int32]
BoolArray: TypeAlias = NDArray[np.bool_]
FloatArray: TypeAlias = NDArray[np.float32]

NULL_BLOCK = 0
"""Block 0 is never allocated and never released; padding points to it."""


def int_array(values: object) -> IntArray:
    return np.asarray(values, dtype=np.int32)


_EMPTY = int_array([])
_EMPTY.setflags(write=False)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixGroup:
    """Rows whose first ``num_tokens`` tokens lie in the same blocks, so that they may be read once
    for all. ``places`` are theirs among a batch's rows."""

    places: IntArray
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The rows that run in a step.

    ``rows`` and ``num_scheduled_tokens`` are ``[n]``: row ``rows[i]`` computes that many tokens
    from its position on. ``samples[i]`` says whether the row catches up with its known tokens, so
    that a token is sampled from its last one; a prefill chunk that ends earlier samples nothing.
    ``num_tokens`` is their sum; ``sampled_rows`` is ``rows[samples]``. ``prefix_groups`` may tell
    which rows begin alike (None: nobody looked); they hold for as long as the batch does.
    ``is_mapped``: under `virtual`, the slot of every row shows what its block table says.
    """

    rows: IntArray
    num_scheduled_tokens: IntArray
    samples: BoolArray
    sampled_rows: IntArray
    num_tokens: int
    prefix_groups: tuple[PrefixGroup, ...] | None = None
    is_mapped: bool = True

    @classmethod
    def decode(cls, rows: IntArray) -> Batch:
        """Every row computes one token and samples the next."""
        ones = np.ones(len(rows), dtype=np.int32)
        return cls(rows, ones, np.ones(len(rows), dtype=np.bool_), rows, len(rows))

    @classmethod
    def empty(cls) -> Batch:
        """No row runs: the plan has commands only."""
        return cls.decode(_EMPTY)

    @classmethod
    def of(cls, rows: IntArray, num_scheduled_tokens: IntArray, samples: BoolArray) -> Batch:
        total = int(num_scheduled_tokens.sum())
        return cls(rows, num_scheduled_tokens, samples, rows[samples], total)


@dataclass(frozen=True, slots=True, eq=False)
class RowInit:
    """A row starts to serve a sequence, new or resumed.

    ``token_ids`` are the tokens known so far; those before ``num_computed_tokens`` are in the KV
    cache already. ``block_ids`` is the block table. ``seed`` and the index of a token in its
    sequence are the whole state of its sampling noise, so nothing that happens to the batch can
    change it. The first ``num_prompt_tokens`` of ``token_ids`` are the prompt (None: all), the rest
    was generated. ``stop_token_ids`` must not be sampled during ``params.min_tokens``.

    ``num_logprobs`` asks for the log probability of each sampled token and that many of the
    likeliest (None: nothing). ``params.prompt_logprobs`` is obeyed while no token of the row is
    generated: after that a resumed row computes its prompt again for the cache only.
    """

    row: int
    token_ids: IntArray
    num_computed_tokens: int
    block_ids: IntArray
    params: SamplingParams
    seed: int
    num_prompt_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RowForks:
    """Rows that go on with a token that the host chose, perhaps from where another row is.

    ``rows [n]``, ``parents [n]`` and ``token_ids [n]``: row ``rows[i]`` takes over the position and
    the block table of ``parents[i]`` (itself: it keeps its own), all rows at once, as they were
    before; its next input is ``token_ids[i]``. Nothing else of a row changes: all of them have been
    initialised, with the same parameters.
    """

    rows: IntArray
    parents: IntArray
    token_ids: IntArray

    def __len__(self) -> int:
        return len(self.rows)


NO_FORKS = RowForks(_EMPTY, _EMPTY, _EMPTY)


@dataclass(frozen=True, slots=True, eq=False)
class TableDeltas:
    """Block-table entries that changed: ``table[rows[i], indices[i]] = block_ids[i]``."""

    rows: IntArray
    indices: IntArray
    block_ids: IntArray

    def __len__(self) -> int:
        return len(self.rows)


NO_DELTAS = TableDeltas(_EMPTY, _EMPTY, _EMPTY)


@dataclass(frozen=True, slots=True, eq=False)
class CopyBlocks:
    """Copy whole blocks inside the pool before the forward pass; sources and destinations
    never overlap within one plan."""

    sources: IntArray
    destinations: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class SwapOut:
    """Copy device blocks to host blocks, after the copies of the same plan."""

    block_ids: IntArray
    host_block_ids: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class SwapIn:
    """Copy host blocks to device blocks. Rows that read them are planned once the result of a
    step reports ``transfer_id`` as finished."""

    transfer_id: int
    host_block_ids: IntArray
    block_ids: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class MapBlocks:
    """Show blocks at contiguous addresses, before the copies of the same plan.

    Every row has a **slot** of its own number: a range of addresses in which place p holds the
    tokens from ``p * block_size`` on. Vectors of one length: place ``places[i]`` of slot
    ``slots[i]`` shows block ``block_ids[i]`` from this step on, whatever it showed before; the null
    block stands for nothing: the place is unmapped. No place comes twice, and those that are
    unmapped come first, so that a limit on mappings is kept at every moment.

    ``is_ahead``: no step that was launched reads these places, nor does this one. They may be
    mapped while it runs; whoever reads one later finds there what was ordered last.
    """

    slots: IntArray
    places: IntArray
    block_ids: IntArray
    is_ahead: bool = False

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True, eq=False)
class CreateBlocks:
    """Give the pool memory for ``block_ids``, which have none: ascending ids, read as zeros, all of
    them or none. ``num_more`` are to follow in later plans: refused at once where there is no
    memory for all. Comes in a plan whose batch is empty."""

    block_ids: IntArray
    num_more: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ReleaseBlocks:
    """Give the memory of ``block_ids`` back to the system. No launched step names them, and no slot
    shows them once the `MapBlocks` before it is obeyed. Comes in a plan whose batch is empty."""

    block_ids: IntArray


KVCommand: TypeAlias = MapBlocks | CopyBlocks | SwapOut | SwapIn | CreateBlocks | ReleaseBlocks


@dataclass(frozen=True, slots=True, eq=False)
class FanOut:
    """One prefill yields the first tokens of several samples.

    The logits of ``source_row`` in this step are sampled once more for each of
    ``destination_rows``, each with its own parameters and seed. Destination rows are initialised
    in the same plan with the tokens and the blocks of the source.
    """

    source_row: int
    destination_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Everything an executor needs for one step."""

    step_id: int
    batch: Batch
    row_inits: tuple[RowInit, ...] = ()
    table_deltas: TableDeltas = NO_DELTAS
    commands: tuple[KVCommand, ...] = ()
    fan_outs: tuple[FanOut, ...] = ()
    row_forks: RowForks = NO_FORKS

    def sampled_rows(self) -> IntArray:
        """Rows in the order of `StepResult.token_ids`: the batch's, then the fan-outs'."""
        rows = self.batch.sampled_rows
        if not self.fan_outs:
            return rows
        fanned = [row for fan_out in self.fan_outs for row in fan_out.destination_rows]
        return np.concatenate([rows, int_array(fanned)])


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """What the model's raw distribution said of ``k`` tokens, each at its own place.

    ``logprobs [k]`` are natural logarithms and ``ranks [k]`` count from 1, the likeliest.
    ``top_ids`` and ``top_logprobs`` ``[k, w]`` hold the likeliest tokens of each place, best first;
    entry i has ``num_top[i]`` of them, the rest is padding.
    """

    logprobs: FloatArray
    ranks: IntArray
    top_ids: IntArray
    top_logprobs: FloatArray
    num_top: IntArray

    def __len__(self) -> int:
        return len(self.logprobs)

    def only(self, which: BoolArray) -> TokenScores:
        """The entries that ``which`` says."""
        return TokenScores(
            self.logprobs[which],
            self.ranks[which],
            self.top_ids[which],
            self.top_logprobs[which],
            self.num_top[which],
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprobs:
    """``scores`` of the sampled tokens ``token_ids[places]`` of a step, places ascending."""

    places: IntArray
    scores: TokenScores

    def only(self, wanted: BoolArray) -> StepLogprobs | None:
        """What remains when the step's tokens are cut to ``wanted``; None when nothing does."""
        kept: BoolArray = wanted[self.places]
        if not kept.any():
            return None
        places = (np.cumsum(wanted, dtype=np.int32) - 1)[self.places[kept]]
        return StepLogprobs(places, self.scores.only(kept))


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """``scores`` of a prompt's ``token_ids``, which begin at position ``start`` (never 0: nothing
    precedes the first). ``owner`` is the row in a `StepResult`, the request's number in
    `octavo.core.request.StepOutputs`. After a preemption positions may come again."""

    owner: int
    start: int
    token_ids: IntArray
    scores: TokenScores


@dataclass(frozen=True, slots=True, eq=False)
class ResizedBlocks:
    """What became of a plan's `CreateBlocks` or `ReleaseBlocks`: the blocks that have memory now,
    or have none any more. ``error`` says why that is not all of them."""

    block_ids: IntArray
    error: str | None = None


# In place of a sampled token: the row's logits were not finite, so that there is none.
NO_TOKEN = -1


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """``token_ids[i]`` was sampled for ``plan.sampled_rows()[i]``, or is `NO_TOKEN`;
    ``finished_transfers`` are the swaps whose blocks have arrived. ``logprobs`` and
    ``prompt_logprobs`` are for the rows that asked. ``resized`` answers a plan that resizes the
    pool."""

    step_id: int
    token_ids: IntArray
    finished_transfers: tuple[int, ...] = ()
    logprobs: StepLogprobs | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    resized: ResizedBlocks | None = None

    @property
    def is_finite(self) -> bool:
        """Whether every sampled row has a token."""
        return bool((self.token_ids != NO_TOKEN).all())


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """What the workers report once, at start: ids ``0 .. num_blocks - 1``, block 0 included, and
    as many more in host memory for swapping. The pool may be resized to ids below ``max_blocks``
    (None: it is one allocation and stays as it is)."""

    num_blocks: int
    block_size: int
    block_bytes: int
    num_host_blocks: int = 0
    max_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class KVUsage:
    """An exact split of the pool, in token slots: the parts sum to ``capacity``.

    ``live`` slots hold a token's keys and values (a shared block counts once), ``cached`` ones
    hold a prefix that no sequence references, pinned or not, ``reserved`` ones are kept for tokens
    that are known but not computed yet (where all of a sequence is reserved: that it will have),
    ``internal_waste`` is the unused rest of allocated blocks, ``external_waste`` is free but cannot
    be allocated, ``free`` is the rest.
    """

    capacity: int
    live: int
    cached: int
    reserved: int
    internal_waste: int
    external_waste: int
    free: int

    def in_bytes(self, token_bytes: int) -> KVUsage:
        """The same split in bytes, ``token_bytes`` a slot."""
        return KVUsage(*(getattr(self, name) * token_bytes for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence got its blocks; its first ``num_cached_tokens`` tokens are computed already."""

    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Drained:
    """What a manager changed since the last plan."""

    commands: tuple[KVCommand, ...] = ()
    table_deltas: TableDeltas = NO_DELTAS


NOTHING_DRAINED = Drained()
