"""Log probabilities on the device: computed behind a step, read when it is collected.

The numbers are those of `octavo.execution.sampling.logprobs`, by the same operations in the same
widths; only sorting equal tokens by their ids is left to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from octavo.core.plan import IntArray, PromptLogprobs, StepLogprobs
from octavo.execution.device import Device
from octavo.execution.sampling.logprobs import (
    PROMPT_SLICE,
    PlaceScores,
    join_scores,
    top_width,
)
from octavo.execution.sampling.prompts import ScoredPart
from octavo.execution.staging import Staging

_NO_LOGPROBS = -1


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """``places`` of a step or of a prompt's part whose scores have one width."""

    places: NDArray[np.int64]
    num_top: IntArray
    width: int

    @property
    def num_ints(self) -> int:
        return len(self.places) * (2 + 2 * self.width)


@dataclass(slots=True, eq=False)
class PendingScores:
    """What a step scored, once its event has passed; ``memory`` is read by `read` alone."""

    memory: torch.Tensor
    places: IntArray | None = None
    sampled: list[_Group] = field(default_factory=list)
    parts: list[tuple[ScoredPart, _Group]] = field(default_factory=list)

    def read(self) -> tuple[StepLogprobs | None, tuple[PromptLogprobs, ...]]:
        values: IntArray = self.memory.numpy().copy()
        first = 0

        def scores(group: _Group) -> PlaceScores:
            nonlocal first
            own = values[first : first + group.num_ints].reshape(len(group.places), -1)
            first += group.num_ints
            return PlaceScores(group.places, group.num_top, own)

        logprobs = None
        if self.places is not None:
            found = [scores(group) for group in self.sampled]
            logprobs = StepLogprobs(self.places, join_scores(len(self.places), found))
        prompts = tuple(
            PromptLogprobs(
                part.row,
                part.first,
                part.token_ids,
                join_scores(len(part.token_ids), [scores(group)]),
            )
            for part, group in self.parts
        )
        return logprobs, prompts


class DeviceScores:
    """The log probabilities that a GPU's rows ask for."""

    def __init__(
        self,
        device: Device,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        depth: int,
        staging: Staging,
    ) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._staging = staging
        self._num_logprobs: IntArray = np.full(max_num_seqs, _NO_LOGPROBS, dtype=np.int32)
        staging.reserve(max_num_seqs)
        staging.reserve(max_num_batched_tokens)
        self._results: list[torch.Tensor | None] = [None] * (depth + 1)
        self._turn = 0
        # What was put for the step, on the device.
        self._sampled = self._prompts = torch.empty(0, dtype=torch.int32)
        self._found: list[torch.Tensor] = []
        self._pending: PendingScores | None = None

    def set_row(self, row: int, num_logprobs: int | None) -> None:
        self._num_logprobs[row] = _NO_LOGPROBS if num_logprobs is None else num_logprobs

    def start(self) -> None:
        """A step begins: what one that failed half-way had scored is nobody's."""
        self._pending, self._found = None, []

    def places(self, rows: IntArray) -> NDArray[np.int64]:
        """Which of ``rows`` ask for log probabilities."""
        return np.flatnonzero(self._num_logprobs[rows] != _NO_LOGPROBS)

    def put_sampled(self, rows: IntArray, places: NDArray[np.int64]) -> None:
        """Have sent what `score_sampled` needs: ``places`` among a step's ``rows [n]``."""
        pending = self._begun()
        num_top = np.minimum(self._num_logprobs[rows[places]], np.int32(self._vocab_size))
        widths = np.array([top_width(count) for count in num_top.tolist()])
        order = np.argsort(widths, kind="stable")
        host, self._sampled = self._staging.take(len(order))
        host[:] = places[order]
        first = 0
        for width in np.unique(widths).tolist():
            which = order[first : first + int((widths == width).sum())]
            pending.sampled.append(_Group(which, num_top[which], min(width, self._vocab_size)))
            first += len(which)
        pending.places = places.astype(np.int32)

    def score_sampled(self, logits: torch.Tensor, out: torch.Tensor) -> None:
        """Score the tokens ``out [n]`` at the places that were put, under ``logits [n, vocab]`` as
        the model made them."""
        assert self._pending is not None
        first = 0
        for group in self._pending.sampled:
            last = first + len(group.places)
            for start in range(first, last, PROMPT_SLICE):
                index = self._sampled[start : min(start + PROMPT_SLICE, last)]
                # Logits that are not finite have no token; their rows end when it is collected.
                chosen = out.index_select(0, index).clamp_(min=0)
                own = logits.index_select(0, index).float()
                self._found.append(packed_scores(own, chosen, group.width))
            first = last

    def put_prompts(self, parts: Iterable[ScoredPart]) -> None:
        """Have sent the tokens that `score_prompts` scores."""
        found = tuple(parts)
        if not found:
            return
        pending = self._begun()
        host, self._prompts = self._staging.take(sum(len(part.token_ids) for part in found))
        np.concatenate([part.token_ids for part in found], out=host)
        for part in found:
            count = len(part.token_ids)
            num_top = min(part.num_top, self._vocab_size)
            group = _Group(
                np.arange(count),
                np.full(count, num_top, dtype=np.int32),
                min(top_width(part.num_top), self._vocab_size),
            )
            pending.parts.append((part, group))

    def score_prompts(
        self, hidden: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Score the prompts that were put from the states ``hidden [tokens, hidden]`` of a step."""
        offset = 0
        for part, group in () if self._pending is None else self._pending.parts:
            count = len(part.token_ids)
            for start in range(0, count, PROMPT_SLICE):
                end = min(start + PROMPT_SLICE, count)
                own = logits(hidden[part.offset + start : part.offset + end]).float()
                tokens = self._prompts[offset + start : offset + end]
                self._found.append(packed_scores(own, tokens, group.width))
            offset += count

    def finish(self) -> PendingScores | None:
        """What was scored since the last call, on its way to the host; None: nothing."""
        pending, found = self._pending, self._found
        self._pending, self._found = None, []
        if pending is None:
            return None
        # Those of prompts come first in a step, and last in what is read.
        num_prompt = sum(-(-len(group.places) // PROMPT_SLICE) for _, group in pending.parts)
        found = found[num_prompt:] + found[:num_prompt]
        packed = torch.cat([part.view(-1) for part in found])
        memory = self._memory(packed.numel())
        memory.copy_(packed, non_blocking=True)
        pending.memory = memory
        return pending

    def _begun(self) -> PendingScores:
        if self._pending is None:
            self._pending = PendingScores(torch.empty(0, dtype=torch.int32))
        return self._pending

    def _memory(self, num_ints: int) -> torch.Tensor:
        """Pinned; the step that had it before this one was collected before this one started."""
        self._turn = (self._turn + 1) % len(self._results)
        memory = self._results[self._turn]
        if memory is None or len(memory) < num_ints:
            memory = self._device.pinned(1 << (num_ints - 1).bit_length())
            self._results[self._turn] = memory
        return memory[:num_ints]


def packed_scores(logits: torch.Tensor, token_ids: torch.Tensor, width: int) -> torch.Tensor:
    """Int32 ``[k, 2 + 2 * width]`` of fp32 ``logits [k, vocab]``: log probability of the token (by
    its bits), rank, the likeliest ids, and theirs."""
    chosen = token_ids.long()[:, None]
    ranks = (logits > logits.gather(1, chosen)).sum(dim=-1, keepdim=True, dtype=torch.int32) + 1
    # PyTorch adds a row's numbers in an order that follows its address, to four of them: so that
    # its bits do not follow its place among the rows, each begins at a multiple of that.
    vocab_size = logits.shape[1]
    if vocab_size % 4:
        logits = F.pad(logits, (0, -vocab_size % 4), value=float("-inf"))
    table = torch.log_softmax(logits, dim=-1)[:, :vocab_size]
    parts = [table.gather(1, chosen).view(torch.int32), ranks]
    if width:
        top = torch.topk(table, width, dim=-1)
        parts += [top.indices.int(), top.values.view(torch.int32)]
    return torch.cat(parts, dim=1)
