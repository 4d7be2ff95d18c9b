"""One step on a CPU: inputs, forward pass, sampling. Rows persist; a plan sends what changed.

Knows rows, positions and block tables; knows no requests and makes no decision.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.layout import num_blocks_for
from octavo.core.plan import (
    NULL_BLOCK,
    Batch,
    IntArray,
    PromptLogprobs,
    RowInit,
    StepLogprobs,
    StepPlan,
    StepResult,
    int_array,
)
from octavo.execution.arena import Arena
from octavo.execution.attention.interface import AttentionBackend, StepAttention, StepRows
from octavo.execution.sampling.prompts import PromptScorer
from octavo.execution.sampling.sampler import Sampler


class Model(Protocol):
    """What a runner needs of a model (see `octavo.execution.models`)."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class Runner:
    """Runs plans in order on a model, an arena and an attention backend."""

    def __init__(
        self,
        model: Model,
        arena: Arena,
        attention: AttentionBackend,
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self.model = model
        self.arena = arena
        self.attention = attention
        self.sampler = Sampler(max_num_seqs)
        max_blocks = num_blocks_for(max_model_len, arena.layout.block_size)
        self.tables: IntArray = np.full((max_num_seqs, max_blocks), NULL_BLOCK, dtype=np.int32)
        self.position: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self.last_token = np.zeros(max_num_seqs, dtype=np.int64)
        # Tokens that a row was initialised with, and their number.
        self._known: list[IntArray] = [np.zeros(0, dtype=np.int32)] * max_num_seqs
        self._num_known: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self._prompts = PromptScorer()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Obey one plan."""
        arrived = self._apply(plan)
        batch = plan.batch
        if not len(batch.rows):
            return StepResult(
                plan.step_id, int_array([]), arrived, resized=self.arena.take_resized()
            )
        starts = self.position[batch.rows]
        # Advanced first: a step that fails must not put the one behind it out of step.
        self.position[batch.rows] = starts + batch.num_scheduled_tokens
        ends = np.cumsum(batch.num_scheduled_tokens, dtype=np.int32)
        step = StepRows(
            rows=batch.rows,
            counts=batch.num_scheduled_tokens,
            offsets=ends - batch.num_scheduled_tokens,
            starts=starts,
            positions=_positions(batch, starts, ends),
            tables=self.tables,
        )
        token_ids = torch.from_numpy(self._token_ids(step))
        positions = torch.from_numpy(step.positions)
        last = torch.from_numpy(ends[batch.samples].astype(np.int64) - 1)
        # Prompts that are scored need the states of all their tokens.
        is_scored = self._prompts.wants(batch.rows)
        wanted = None if is_scored or len(last) == batch.num_tokens else last
        attention = self.attention.plan(step)
        hidden = self.model.forward(token_ids, positions, attention, wanted)
        prompts: tuple[PromptLogprobs, ...] = ()
        if is_scored:
            prompts = self._prompts.score(
                step.rows, step.starts, step.counts, hidden, self.model.logits
            )
        tokens, logprobs = self._sample(
            plan, hidden if wanted is not None or len(last) == len(hidden) else hidden[last]
        )
        return StepResult(
            plan.step_id,
            tokens.astype(np.int32),
            arrived,
            logprobs=logprobs,
            prompt_logprobs=prompts,
        )

    def _apply(self, plan: StepPlan) -> tuple[int, ...]:
        """Everything in a plan but its batch; returns the transfers that have finished."""
        for init in plan.row_inits:
            row = init.row
            self.tables[row] = NULL_BLOCK
            self.tables[row, : len(init.block_ids)] = init.block_ids
            self.position[row] = init.num_computed_tokens
            self._known[row] = init.token_ids
            self._num_known[row] = len(init.token_ids)
            self._start_sampling(init)
        forks = plan.row_forks
        if len(forks):
            # Every parent is read before any row is written.
            self.tables[forks.rows] = self.tables[forks.parents]
            self.position[forks.rows] = self.position[forks.parents]
            self.last_token[forks.rows] = forks.token_ids
            self._num_known[forks.rows] = 0
        deltas = plan.table_deltas
        if len(deltas):
            self.tables[deltas.rows, deltas.indices] = deltas.block_ids
        return self.arena.obey(plan.commands)

    def _start_sampling(self, init: RowInit) -> None:
        self.sampler.set_row(
            init.row,
            init.params,
            init.seed,
            token_ids=init.token_ids,
            num_prompt_tokens=init.num_prompt_tokens,
            stop_token_ids=init.stop_token_ids,
            num_logprobs=init.num_logprobs,
        )
        self._prompts.set_row(init)

    def _token_ids(self, step: StepRows) -> NDArray[np.int64]:
        """Known tokens of rows that are behind, else what the row sampled last."""
        token_ids = np.empty(step.num_tokens, dtype=np.int64)
        token_ids[step.offsets] = self.last_token[step.rows]
        for i in np.flatnonzero(step.starts < self._num_known[step.rows]).tolist():
            offset, count, start = step.offsets[i], step.counts[i], step.starts[i]
            known = self._known[step.rows[i]]
            token_ids[offset : offset + count] = known[start : start + count]
        return token_ids

    def _sample(
        self, plan: StepPlan, hidden: torch.Tensor
    ) -> tuple[NDArray[np.int64], StepLogprobs | None]:
        """``hidden`` are the states of the batch's sampled rows, in their order."""
        rows = plan.sampled_rows()
        if not len(rows):
            return np.zeros(0, dtype=np.int64), None
        logits = self.model.logits(hidden)
        if plan.fan_outs:
            logits = logits[torch.from_numpy(self._fan_out(plan))]
        tokens = self.sampler.sample(logits, rows, self.position[rows].astype(np.int64))
        # A row without a token may be in the next step already, whose result is dropped.
        self.last_token[rows] = np.maximum(tokens, 0)
        return tokens, self.sampler.logprobs(logits, rows, tokens)

    def _fan_out(self, plan: StepPlan) -> NDArray[np.int64]:
        """For each sampled row the row of logits it draws from; destinations follow sources."""
        place = {row: i for i, row in enumerate(plan.batch.sampled_rows.tolist())}
        index = list(range(len(place)))
        for fan_out in plan.fan_outs:
            source = place[fan_out.source_row]
            for row in fan_out.destination_rows:
                self.position[row] = self.position[fan_out.source_row]
                index.append(source)
        return np.asarray(index, dtype=np.int64)


def _positions(batch: Batch, starts: IntArray, ends: IntArray) -> IntArray:
    """``[num_tokens]``: every token's place in its sequence."""
    counts = batch.num_scheduled_tokens
    if batch.num_tokens == len(batch.rows):
        return starts
    first = np.repeat(starts - (ends - counts), counts)
    positions: IntArray = first + np.arange(batch.num_tokens, dtype=np.int32)
    return positions
