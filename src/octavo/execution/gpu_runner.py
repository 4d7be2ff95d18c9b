"""One step on a GPU: started here, collected later. Nothing is waited for in between.

Rows persist on the device and a plan sends what changed, so a steady decode step is one launch of a
captured graph (`graphs`). Whatever else a step needs is put together first and sent in one copy
(`staging`). The host knows every row's position, since plans say how far rows go; it
never reads the device to plan the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.layout import num_blocks_for
from octavo.core.plan import (
    NULL_BLOCK,
    Batch,
    IntArray,
    MapBlocks,
    ResizedBlocks,
    RowInit,
    StepPlan,
    StepResult,
    int_array,
)
from octavo.execution.attention.paged import PagedAttention
from octavo.execution.device import Device, Event
from octavo.execution.device_arena import DeviceArena
from octavo.execution.device_edits import DeviceEdits
from octavo.execution.device_rows import DeviceRows
from octavo.execution.device_scores import DeviceScores, PendingScores
from octavo.execution.graphs import Forward, StepGraphs
from octavo.execution.sampling.prompts import PromptScorer
from octavo.execution.staging import Staging

# Of places and values in one copy, 1 MiB: what rows start with, and whatever else changes of them.
_ROOM = 1 << 18


class GPUModel(Protocol):
    """What a GPU runner needs of a model."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Any,
        wanted: torch.Tensor | None = None,
    ) -> Any: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class PendingStep:
    """A step that was started: what its result needs, once ``event`` has passed."""

    step_id: int
    event: Event
    tokens: torch.Tensor
    num_sampled: int
    num_obeyed: int
    transfers: tuple[int, ...] = ()
    scores: PendingScores | None = None
    resized: ResizedBlocks | None = None


class GPURunner:
    """Runs plans in order on a model, an arena and paged attention."""

    def __init__(
        self,
        model: GPUModel,
        arena: DeviceArena,
        attention: PagedAttention,
        device: Device,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        depth: int = 2,
        capture: bool = True,
    ) -> None:
        self.model = model
        # Rows that decode would attend in another order than the same tokens in a chunk.
        self._has_steady = not attention.is_invariant
        self.arena = arena
        self.attention = attention
        self.device = device
        max_blocks = num_blocks_for(max_model_len, arena.layout.block_size)
        self.staging = Staging(device, depth, _ROOM)
        self.rows = DeviceRows(device, max_num_seqs, max_blocks)
        self.graphs = StepGraphs(
            model,
            attention,
            self.rows,
            device,
            num_kv_heads=arena.layout.num_kv_heads,
            max_num_batched_tokens=max_num_batched_tokens,
            staging=self.staging,
            capture=capture,
        )
        self.edits = DeviceEdits(device, max_num_seqs, vocab_size, self.staging)
        self.scores = DeviceScores(
            device, max_num_seqs, max_num_batched_tokens, vocab_size, depth, self.staging
        )
        self.position: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self._known: list[IntArray] = [int_array([])] * max_num_seqs
        self._num_known: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        # Whether the device has the row's position: it learns of one when the row samples.
        self._is_placed = np.ones(max_num_seqs, dtype=np.bool_)
        self._is_random = np.zeros(max_num_seqs, dtype=np.bool_)
        self._prompts = PromptScorer()
        self._results = [device.pinned(2 * max_num_seqs) for _ in range(depth + 1)]
        self._turn = 0
        self._last_event: Event | None = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a plan behind those that were started before."""
        with self.device.context():
            self._await_readers(plan)
            self.scores.start()
            try:
                self._apply(plan)
                transfers = self.arena.obey(plan.commands, self.staging)
                run = self._prepared(plan) if len(plan.batch.rows) else None
            finally:
                # Where that fails, too: what changes of rows is said once.
                self.staging.send()
            num_sampled = 0 if run is None else run()
            return self._pending(plan, num_sampled, transfers)

    def collect(self, pending: PendingStep) -> StepResult:
        """The result of a started step, waiting for it."""
        pending.event.synchronize()
        self.arena.collected(pending.num_obeyed)
        tokens: IntArray = pending.tokens[: pending.num_sampled].numpy().copy()
        logprobs, prompts = (None, ()) if pending.scores is None else pending.scores.read()
        return StepResult(
            pending.step_id,
            tokens,
            self.arena.arrived(pending.transfers, wait=not pending.num_sampled),
            logprobs=logprobs,
            prompt_logprobs=prompts,
            resized=pending.resized,
        )

    def _prepared(self, plan: StepPlan) -> Callable[[], int]:
        """Put together what a step needs. Returns what runs it, once that is sent, and says how
        many tokens are sampled."""
        batch = plan.batch
        starts = self.position[batch.rows]
        lengths = starts + batch.num_scheduled_tokens
        # Advanced first: a step that fails must not put the one behind it out of step.
        self.position[batch.rows] = lengths
        for fan_out in plan.fan_outs:
            for row in fan_out.destination_rows:
                self.position[row] = self.position[fan_out.source_row]
        slots = self.arena.slots
        if batch.is_mapped and slots is not None and not slots.can_show(batch.rows, lengths):
            batch = replace(batch, is_mapped=False)
        rows = plan.sampled_rows()
        indices = self.position[rows].astype(np.int64)
        is_edited = self.edits.needs(rows, indices)
        edited = np.flatnonzero(is_edited)
        scored = self.scores.places(rows)
        # Those that edit are sampled again, from what they make of their logits.
        is_random = bool(self._is_random[rows[~is_edited]].any())
        has_logits = bool(len(edited) or len(scored))
        logits_of: Callable[[], torch.Tensor | None]
        if self._is_steady(plan, starts):
            self.graphs.put_decode(batch)
            logits_of = partial(self.graphs.decode, batch, lengths, is_random, has_logits)
        else:
            logits_of = self._put_chunks(plan, batch, starts, rows, is_random, has_logits)
        edit = None
        if len(edited):
            own = rows[edited]
            edit = self.edits.put_sampled(
                edited, own, indices[edited], is_random=bool(self._is_random[own].any())
            )
        if len(scored):
            self.scores.put_sampled(rows, scored)

        def run() -> int:
            logits = logits_of()
            if logits is not None:
                out = self.graphs.out[: len(rows)]
                if edit is not None:
                    self.edits.sample(logits, edit, self.rows, out)
                if len(scored):
                    self.scores.score_sampled(logits, out)
            return len(rows)

        return run

    def _put_chunks(
        self,
        plan: StepPlan,
        batch: Batch,
        starts: IntArray,
        rows: IntArray,
        is_random: bool,
        has_logits: bool,
    ) -> Callable[[], torch.Tensor | None]:
        """Put together a step of more than a known token a row, of which ``rows`` sample. Returns
        what runs it; the logits as `StepGraphs.head`."""
        self._is_placed[batch.rows] = batch.samples
        is_scored = self._prompts.wants(batch.rows)
        index = self._sampled_tokens(plan)
        # Prompts that are scored need the states of all their tokens.
        forward = self._put_forward(batch, starts, None if is_scored else index)
        head = None
        if len(rows):
            index = index if forward.is_all else np.arange(len(index))
            head = self.graphs.put_head(index, rows, self.position[rows])
        if is_scored:
            parts = self._prompts.parts(batch.rows, starts, batch.num_scheduled_tokens)
            self.scores.put_prompts(parts)

        def run() -> torch.Tensor | None:
            hidden = forward.run()
            if is_scored:
                self.scores.score_prompts(hidden, self.model.logits)
            if head is None:
                return None
            return self.graphs.head(hidden, head, is_random, has_logits)

        return run

    def _pending(self, plan: StepPlan, num_sampled: int, transfers: tuple[int, ...]) -> PendingStep:
        self._turn = (self._turn + 1) % len(self._results)
        tokens = self._results[self._turn]
        if num_sampled:
            tokens[:num_sampled].copy_(self.graphs.out[:num_sampled], non_blocking=True)
        scores = self.scores.finish()
        event = self.device.event()
        event.record()
        self._last_event = event
        return PendingStep(
            plan.step_id,
            event,
            tokens,
            num_sampled,
            self.arena.num_obeyed,
            transfers,
            scores,
            self.arena.take_resized(),
        )

    def _await_readers(self, plan: StepPlan) -> None:
        """Mappings change while the step before runs. It reads only what is not to be changed, but
        where a row gets another block for tokens that it has (copy-on-write): wait for it then."""
        for command in plan.commands:
            if not isinstance(command, MapBlocks) or command.is_ahead:
                continue
            starts = command.places * self.arena.layout.block_size
            is_read = (starts < self.position[command.slots]) & (command.block_ids != NULL_BLOCK)
            # Rows that start had their last step processed.
            new = [init.row for init in plan.row_inits]
            if self._last_event and bool((is_read & ~np.isin(command.slots, new)).any()):
                self._last_event.synchronize()

    def _apply(self, plan: StepPlan) -> None:
        for init in plan.row_inits:
            self._start_row(init)
        forks = plan.row_forks
        if len(forks):
            self.position[forks.rows] = self.position[forks.parents]
            self._num_known[forks.rows] = 0
        self.rows.apply(plan.row_inits, forks, plan.table_deltas, self.staging)
        self.attention.follow(plan.row_inits, forks, plan.table_deltas)
        self.edits.put()

    def _start_row(self, init: RowInit) -> None:
        row, params = init.row, init.params
        self.position[row] = init.num_computed_tokens
        self._known[row] = init.token_ids
        self._num_known[row] = len(init.token_ids)
        self._is_placed[row] = True
        self._is_random[row] = params.temperature > 0 and params.top_k != 1
        self.edits.set_row(init)
        self.scores.set_row(row, init.num_logprobs)
        self._prompts.set_row(init)

    def _is_steady(self, plan: StepPlan, starts: IntArray) -> bool:
        """Whether every row runs one token, which the device knows, as it knows the row's position,
        and samples the next."""
        batch = plan.batch
        return (
            self._has_steady
            and batch.num_tokens == len(batch.rows) == len(batch.sampled_rows)
            and not plan.fan_outs
            and not self._prompts.wants(batch.rows)
            and bool((starts >= self._num_known[batch.rows] - 1).all())
            and bool(self._is_placed[batch.rows].all())
        )

    def _put_forward(
        self, batch: Batch, starts: IntArray, wanted: NDArray[np.int64] | None
    ) -> Forward:
        counts = batch.num_scheduled_tokens
        ends = np.cumsum(counts, dtype=np.int32)
        offsets = ends - counts
        positions = np.repeat(starts - offsets, counts) + np.arange(batch.num_tokens)
        token_ids: IntArray = np.full(batch.num_tokens, -1, dtype=np.int32)
        for i in np.flatnonzero(starts < self._num_known[batch.rows]).tolist():
            known = self._known[batch.rows[i]]
            offset, count, start = offsets[i], counts[i], starts[i]
            token_ids[offset : offset + count] = known[start : start + count]
        return self.graphs.put_forward(
            batch.rows, counts, starts, token_ids, positions, wanted, batch.is_mapped
        )

    def _sampled_tokens(self, plan: StepPlan) -> NDArray[np.int64]:
        """Which of the step's tokens each sampled row draws from."""
        batch = plan.batch
        last = np.cumsum(batch.num_scheduled_tokens, dtype=np.int64) - 1
        index = last[batch.samples]
        if not plan.fan_outs:
            return index
        place = {row: i for i, row in enumerate(batch.sampled_rows.tolist())}
        fanned = [
            index[place[fan_out.source_row]]
            for fan_out in plan.fan_outs
            for _ in fan_out.destination_rows
        ]
        return np.concatenate([index, np.array(fanned, dtype=np.int64)])
