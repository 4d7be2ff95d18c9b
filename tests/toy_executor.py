"""An executor whose "model" is a hash of what it reads through the block table.

The arena is a table of Python integers: a row writes its tokens into its blocks and reads its whole
context back from them, so a wrong table entry, a missed copy or a block reused too early changes
the tokens that come out. `expected_tokens` says what must come out.
"""

from __future__ import annotations

import zlib
from collections import deque

import numpy as np

from octavo.core.plan import (
    NULL_BLOCK,
    CreateBlocks,
    IntArray,
    KVCapacity,
    MapBlocks,
    ReleaseBlocks,
    ResizedBlocks,
    StepLogprobs,
    StepPlan,
    StepResult,
    SwapIn,
    SwapOut,
    TokenScores,
    int_array,
)
from octavo.core.protocols import StepError

VOCAB = 97
POISON = -7
"""What a failed step leaves in its blocks; whoever reads it samples it."""


def next_token(context: list[int], seed: int) -> int:
    data = int_array([*context, seed]).tobytes()
    return zlib.crc32(data) % VOCAB


def expected_tokens(
    prompt: list[int], max_tokens: int, seed: int = 0, stops: tuple[int, ...] = ()
) -> list[int]:
    context = list(prompt)
    for _ in range(max_tokens):
        context.append(next_token(context, seed))
        if context[-1] in stops:
            break
    return context[len(prompt) :]


def token_logprobs(context: list[int]) -> np.ndarray:
    """``[VOCAB]`` log probabilities, float32: multiples of 1/64 with many ties, whose sums are
    exact. ``context`` is the whole sequence."""
    generator = np.random.default_rng(zlib.crc32(int_array(context).tobytes()))
    return -generator.integers(16, 400, VOCAB).astype(np.float32) / 64


def top_tokens(context: list[int], count: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``count`` likeliest ids, of equal ones the lower first, and their log probabilities."""
    logprobs = token_logprobs(context)
    order = np.lexsort((np.arange(VOCAB), -logprobs))[:count]
    return order.astype(np.int32), logprobs[order]


class ToyMMU:
    """What each slot shows: the address translation, in a dictionary a slot. Reading a place with
    nothing in it is a fault."""

    def __init__(self, num_slots: int, max_mapped: int | None = None) -> None:
        self.slots: list[dict[int, int]] = [{} for _ in range(num_slots)]
        self.num_calls = 0
        self.max_mapped = max_mapped

    @property
    def num_mapped(self) -> int:
        return sum(map(len, self.slots))

    def obey(self, command: MapBlocks) -> None:
        places = list(zip(command.slots.tolist(), command.places.tolist(), strict=True))
        assert len(set(places)) == len(places), "a place comes twice"
        for (slot, place), block_id in zip(places, command.block_ids.tolist(), strict=True):
            self.num_calls += 1
            if block_id == NULL_BLOCK:
                del self.slots[slot][place]
            else:
                assert self.slots[slot].get(place) != block_id, "a place shows the block already"
                self.slots[slot][place] = block_id
            assert self.max_mapped is None or self.num_mapped <= self.max_mapped
        for slot in set(command.slots.tolist()):
            assert set(self.slots[slot]) == set(range(len(self.slots[slot]))), "a slot has a hole"

    def block(self, slot: int, place: int) -> int:
        assert place in self.slots[slot], f"slot {slot} shows nothing at place {place}"
        return self.slots[slot][place]


class ToyExecutor:
    """Implements the executor seam; with ``eager`` a plan runs at launch, else at collect. With an
    ``mmu`` rows are read and written through their slots, which must agree with their tables."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        eager: bool = True,
        mmu: ToyMMU | None = None,
    ) -> None:
        self.mmu = mmu
        self._is_mapped = True
        self.capacity = KVCapacity(num_blocks, block_size, block_bytes=1)
        self.arena = [[-1] * block_size for _ in range(num_blocks)]
        self.host = [[-1] * block_size for _ in range(4 * num_blocks)]
        self.tables: list[dict[int, int]] = [{} for _ in range(max_rows)]
        self.known: list[list[int]] = [[] for _ in range(max_rows)]
        self.position = [0] * max_rows
        self.seed = [0] * max_rows
        self.num_logprobs: list[int | None] = [None] * max_rows
        self.fail_steps: set[int] = set()
        # Blocks without memory, and how many there can be with it.
        self.absent: set[int] = set()
        self.max_present: int | None = None
        self.refuses_release = False
        self.plans: list[StepPlan] = []
        self._eager = eager
        self._queue: deque[StepPlan | StepResult | StepError] = deque()

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._queue.append(self._run(plan) if self._eager else plan)

    def collect(self) -> StepResult:
        item = self._queue.popleft()
        if isinstance(item, StepPlan):
            item = self._run(item)
        if isinstance(item, StepError):
            raise item
        return item

    def close(self) -> None:
        self._queue.clear()

    def _run(self, plan: StepPlan) -> StepResult | StepError:
        fails = plan.step_id in self.fail_steps
        for init in plan.row_inits:
            self.known[init.row] = init.token_ids.tolist()
            self.position[init.row] = init.num_computed_tokens
            self.tables[init.row] = dict(enumerate(init.block_ids.tolist()))
            self.seed[init.row] = init.seed
            self.num_logprobs[init.row] = init.num_logprobs
        self._fork(plan)
        deltas = plan.table_deltas
        for row, index, block_id in zip(
            deltas.rows.tolist(), deltas.indices.tolist(), deltas.block_ids.tolist(), strict=True
        ):
            self.tables[row][index] = block_id
        transfers = []
        resized: ResizedBlocks | None = None
        ahead: list[MapBlocks] = []
        self._is_mapped = plan.batch.is_mapped
        for command in plan.commands:
            if isinstance(command, MapBlocks):
                assert self.mmu is not None, "nothing is mapped under `paged`"
                assert command in plan.commands[:2], "mapping comes before copies"
                if command.is_ahead:
                    ahead.append(command)
                else:
                    self.mmu.obey(command)
                continue
            if isinstance(command, CreateBlocks | ReleaseBlocks):
                assert not len(plan.batch.rows), "the pool is resized in a step of its own"
                resized = self._resize(command)
                continue
            if isinstance(command, SwapOut):
                self._copy(self.arena, command.block_ids, self.host, command.host_block_ids)
                continue
            if isinstance(command, SwapIn):
                self._copy(self.host, command.host_block_ids, self.arena, command.block_ids)
                transfers.append(command.transfer_id)
                continue
            touched = command.sources.tolist() + command.destinations.tolist()
            assert not set(command.sources.tolist()) & set(command.destinations.tolist())
            assert NULL_BLOCK not in touched
            self._copy(self.arena, command.sources, self.arena, command.destinations)
        batch = plan.batch
        assert len(set(batch.rows.tolist())) == len(batch.rows), "a row runs twice in a step"
        for row, count in zip(
            batch.rows.tolist(), batch.num_scheduled_tokens.tolist(), strict=True
        ):
            for _ in range(count):
                position = self.position[row]
                token = POISON if fails else self.known[row][position]
                self._write(row, position, token)
                self.position[row] += 1
        tokens = [self._sample(row) for row in batch.sampled_rows.tolist()]
        for fan_out in plan.fan_outs:
            tokens += [self._sample(row) for row in fan_out.destination_rows]
        for command in ahead:
            # As late as may be: this step reads none of it.
            assert self.mmu is not None
            self.mmu.obey(command)
        if fails:
            return StepError(f"step {plan.step_id} was told to fail")
        logprobs = self._logprobs(plan.sampled_rows().tolist(), tokens)
        return StepResult(
            plan.step_id, int_array(tokens), tuple(transfers), logprobs, resized=resized
        )

    @property
    def num_present(self) -> int:
        return len(self.arena) - len(self.absent)

    def _resize(self, command: CreateBlocks | ReleaseBlocks) -> ResizedBlocks:
        block_ids = command.block_ids.tolist()
        assert block_ids == sorted(set(block_ids))
        assert NULL_BLOCK not in block_ids
        nothing = int_array([])
        if isinstance(command, CreateBlocks):
            if (
                self.max_present is not None
                and self.num_present + len(block_ids) > self.max_present
            ):
                return ResizedBlocks(nothing, "no memory")
            for block_id in block_ids:
                if block_id == len(self.arena):
                    self.arena.append([])
                else:
                    self.absent.remove(block_id)
                self.arena[block_id] = [0] * self.capacity.block_size
            return ResizedBlocks(command.block_ids)
        if self.refuses_release:
            return ResizedBlocks(nothing, "not given back")
        for block_id in block_ids:
            assert block_id not in self.absent
            for slot in self.mmu.slots if self.mmu is not None else ():
                assert block_id not in slot.values(), "a slot shows memory that goes"
            # Whoever reads or writes it now fails.
            self.arena[block_id] = []
        self.absent.update(block_ids)
        return ResizedBlocks(command.block_ids)

    def _fork(self, plan: StepPlan) -> None:
        forks = plan.row_forks
        parents = forks.parents.tolist()
        old = {p: (dict(self.tables[p]), self.position[p], list(self.known[p])) for p in parents}
        rows = forks.rows.tolist()
        assert len(set(rows)) == len(rows), "a row forks twice in a step"
        for row, parent, token in zip(rows, parents, forks.token_ids.tolist(), strict=True):
            table, self.position[row], known = old[parent]
            self.tables[row] = dict(table)
            self.known[row] = [*known[: self.position[row]], token]

    def _logprobs(self, rows: list[int], tokens: list[int]) -> StepLogprobs | None:
        asking = [i for i, row in enumerate(rows) if self.num_logprobs[row] is not None]
        if not asking:
            return None
        contexts = [self.read(rows[i]) for i in asking]
        counts = [self.num_logprobs[rows[i]] or 0 for i in asking]
        width = max(counts)
        tops = [top_tokens(context, width) for context in contexts]
        own = np.array(
            [token_logprobs(c)[tokens[i]] for i, c in zip(asking, contexts, strict=True)],
            dtype=np.float32,
        )
        scores = TokenScores(
            logprobs=own,
            ranks=int_array([1] * len(asking)),
            top_ids=np.stack([ids for ids, _ in tops]),
            top_logprobs=np.stack([values for _, values in tops]),
            num_top=np.minimum(int_array(counts), VOCAB),
        )
        return StepLogprobs(int_array(asking), scores)

    def _copy(
        self,
        source: list[list[int]],
        source_ids: IntArray,
        target: list[list[int]],
        target_ids: IntArray,
    ) -> None:
        for from_id, to_id in zip(source_ids.tolist(), target_ids.tolist(), strict=True):
            assert NULL_BLOCK not in (from_id, to_id)
            target[to_id] = list(source[from_id])

    def _write(self, row: int, position: int, token: int) -> None:
        index, offset = divmod(position, self.capacity.block_size)
        block_id = self._block(row, index)
        assert block_id != NULL_BLOCK
        self.arena[block_id][offset] = token

    def read(self, row: int) -> list[int]:
        size = self.capacity.block_size
        return [
            self.arena[self._block(row, p // size)][p % size] for p in range(self.position[row])
        ]

    def _block(self, row: int, index: int) -> int:
        block_id = self.tables[row][index]
        if self.mmu is not None and self._is_mapped:
            assert self.mmu.block(row, index) == block_id, f"slot {row} shows another's block"
        return block_id

    def _sample(self, row: int) -> int:
        context = self.read(row)
        if POISON in context:
            self.known[row].append(POISON)
            return POISON
        assert context == self.known[row][: self.position[row]], f"row {row} reads another's tokens"
        token = next_token(context, self.seed[row])
        self.known[row] = [*context, token]
        return token


def as_ids(values: list[int]) -> IntArray:
    return np.asarray(values, dtype=np.int32)
