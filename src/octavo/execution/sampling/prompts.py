"""Which rows want their prompt scored, and the scores, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from octavo.core.plan import IntArray, PromptLogprobs, RowInit
from octavo.execution.sampling.logprobs import prompt_scores


@dataclass(frozen=True, slots=True, eq=False)
class ScoredPart:
    """Tokens of a prompt, from position ``first`` on, and where the states begin that come before
    each of them among those of a step."""

    row: int
    first: int
    token_ids: IntArray
    offset: int
    num_top: int


class PromptScorer:
    """A row is scored from its start until its prompt has passed, unless it goes on after a
    preemption: then its prompt is computed again for the cache only."""

    def __init__(self) -> None:
        # By row: how many of the likeliest tokens it wants, and its prompt.
        self._rows: dict[int, tuple[int, IntArray]] = {}

    def set_row(self, init: RowInit) -> None:
        """A row starts, new or resumed."""
        self._rows.pop(init.row, None)
        num_top = init.params.prompt_logprobs
        if num_top is not None and init.num_prompt_tokens in (None, len(init.token_ids)):
            self._rows[init.row] = (num_top, init.token_ids)

    def wants(self, rows: IntArray) -> bool:
        """Whether one of ``rows`` is scored, so that the states of all its tokens are needed."""
        return bool(self._rows) and not self._rows.keys().isdisjoint(rows.tolist())

    def score(
        self,
        rows: IntArray,
        starts: IntArray,
        counts: IntArray,
        hidden: torch.Tensor,
        logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[PromptLogprobs, ...]:
        """Scores of the prompt tokens that follow a step's positions.

        ``hidden [num_tokens, hidden]`` are the states of ``counts[i]`` tokens of each row, from
        position ``starts[i]`` on, row after row; ``logits`` makes fp32 logits on the host of some.
        """
        found = []
        for part in self.parts(rows, starts, counts):
            states = hidden[part.offset : part.offset + len(part.token_ids)]
            scores = prompt_scores(logits, states, part.token_ids.astype(np.int64), part.num_top)
            found.append(PromptLogprobs(part.row, part.first, part.token_ids, scores))
        return tuple(found)

    def parts(self, rows: IntArray, starts: IntArray, counts: IntArray) -> Iterator[ScoredPart]:
        """What `score` would score; a prompt that has passed is forgotten."""
        offset = 0
        for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
            if row in self._rows:
                num_top, prompt = self._rows[row]
                first = start + 1
                token_ids = prompt[first : first + count]
                if first + count > len(prompt):
                    del self._rows[row]
                if len(token_ids):
                    yield ScoredPart(row, first, token_ids, offset, num_top)
            offset += count
