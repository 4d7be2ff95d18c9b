"""Greedy and random sampling over rows of mixed parameters.

Each row's token depends on its own logits, parameters, seed and token index alone, to the last
bit: every sum over the vocabulary runs within one row, in one order. Rows that use a feature pay
for it; an all-greedy batch is one argmax.

What a row changes in its logits before that comes in the order of `SamplingParams`: masks, biases,
penalties. The state behind it, a row's own tokens, is what `Sampler.set_row` was told and what has
been sampled since, so a row that is initialised anew goes on where it was.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.plan import NO_TOKEN, IntArray, StepLogprobs, int_array
from octavo.core.sampling_params import SamplingParams
from octavo.execution.sampling.logprobs import token_scores
from octavo.execution.sampling.masks import Entries, TokenMasks
from octavo.execution.sampling.noise import uniform
from octavo.execution.sampling.penalties import Penalties

# Candidates looked at before a row's whole vocabulary is sorted. With top-p 0.95 a language model
# rarely needs more; sorting 49,152 logits takes 2 to 3 ms a row, taking the top 512 about 0.3 ms.
_NUM_CANDIDATES = 512
_ALWAYS = np.iinfo(np.int64).max
_NO_LOGPROBS = -1


class Sampler:
    """Sampling parameters of every row, and the sampling of a step."""

    def __init__(self, max_num_seqs: int) -> None:
        self.temperature = np.ones(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        # In float64: a tiny top_p must not become 0, nor one just below 1 become 1.
        self.top_p = np.ones(max_num_seqs, dtype=np.float64)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float64)
        self.seed = np.zeros(max_num_seqs, dtype=np.uint64)
        # A row changes its logits while its sequence is shorter than this.
        self._edited_until = np.zeros(max_num_seqs, dtype=np.int64)
        self._masks = TokenMasks()
        self._bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._penalties = Penalties(max_num_seqs)
        self._num_logprobs: IntArray = np.full(max_num_seqs, _NO_LOGPROBS, dtype=np.int32)

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        *,
        token_ids: IntArray | None = None,
        num_prompt_tokens: int | None = None,
        stop_token_ids: tuple[int, ...] = (),
        num_logprobs: int | None = None,
    ) -> None:
        """A row starts, new or resumed. ``seed`` is resolved: 0 to 2**64 - 1; the rest is as in
        `octavo.core.plan.RowInit`."""
        self.temperature[row] = params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = seed
        self._num_logprobs[row] = _NO_LOGPROBS if num_logprobs is None else num_logprobs
        known = int_array([]) if token_ids is None else token_ids
        num_prompt = len(known) if num_prompt_tokens is None else num_prompt_tokens
        until = self._masks.set_row(row, params, known, num_prompt, stop_token_ids)
        self._penalties.set_row(row, params, known, num_prompt)
        self._bias.pop(row, None)
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            self._bias[row] = (np.array(ids, np.int64), np.array(values, np.float32))
        is_lasting = params.logit_bias or self._penalties.is_used[row]
        self._edited_until[row] = _ALWAYS if is_lasting else until

    def needs(
        self, rows: IntArray, token_indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which of ``rows`` change their logits before the token at ``token_indices``, and which
        ask for log probabilities."""
        edited: NDArray[np.bool_] = token_indices < self._edited_until[rows]
        scored: NDArray[np.bool_] = self._num_logprobs[rows] != _NO_LOGPROBS
        return edited, scored

    def sample(
        self, logits: torch.Tensor, rows: IntArray, token_indices: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """One token a row.

        ``logits`` is fp32 ``[n, vocab]``; ``token_indices[i]`` is the place in its sequence of the
        token to sample. Returns ``[n]`` token ids: `NO_TOKEN` where a row's logits hold NaN or
        +inf, or nothing but -inf.
        """
        edited = np.flatnonzero(token_indices < self._edited_until[rows])
        if not len(edited):
            return self._choose(logits, rows, token_indices)
        logits = self._edit(logits, edited, rows[edited], token_indices[edited])
        tokens = self._choose(logits, rows, token_indices)
        self._advance(rows[edited], tokens[edited])
        return tokens

    def logprobs(
        self, logits: torch.Tensor, rows: IntArray, token_ids: NDArray[np.int64]
    ) -> StepLogprobs | None:
        """Raw log probabilities of what `sample` chose, for the rows that asked; None: no row."""
        places = np.flatnonzero(self._num_logprobs[rows] != _NO_LOGPROBS)
        if not len(places):
            return None
        own = logits if len(places) == len(rows) else logits[torch.from_numpy(places)]
        # A row without a token gets scores that nobody reads.
        chosen = np.maximum(token_ids[places], 0)
        scores = token_scores(own, chosen, self._num_logprobs[rows[places]])
        return StepLogprobs(places.astype(np.int32), scores)

    def _edit(
        self,
        logits: torch.Tensor,
        places: NDArray[np.int64],
        rows: IntArray,
        token_indices: NDArray[np.int64],
    ) -> torch.Tensor:
        """A copy of the logits, with what ``rows[i]`` changes in ``logits[places[i]]``."""
        logits = logits.clone()
        self._masks.apply(logits, places, rows, token_indices)
        if self._bias:
            entries, values = Entries(), []
            for place, row in zip(places.tolist(), rows.tolist(), strict=True):
                if row in self._bias:
                    entries.add(place, self._bias[row][0])
                    values.append(self._bias[row][1])
            if values:
                logits[entries.index()] += torch.from_numpy(np.concatenate(values))
        penalized = self._penalties.is_used[rows]
        if penalized.any():
            self._penalties.apply(logits, places[penalized], rows[penalized])
        return logits

    def _advance(self, rows: IntArray, token_ids: NDArray[np.int64]) -> None:
        token_ids = np.maximum(token_ids, 0)  # a row without a token has come to its end
        self._masks.advance(rows, token_ids)
        penalized = self._penalties.is_used[rows]
        if penalized.any():
            self._penalties.advance(rows[penalized], token_ids[penalized])

    def _choose(
        self, logits: torch.Tensor, rows: IntArray, token_indices: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        num_vocab = logits.shape[1]
        best = torch.argmax(logits, dim=-1, keepdim=True)
        largest = logits.gather(1, best)
        tokens: NDArray[np.int64] = best[:, 0].numpy()
        is_finite: NDArray[np.bool_] = torch.isfinite(largest)[:, 0].numpy()  # argmax finds a NaN
        tokens[~is_finite] = NO_TOKEN
        top_k = self.top_k[rows]
        random = (self.temperature[rows] > 0) & (top_k != 1) & is_finite
        if not random.any():
            return tokens
        filtered = random & (((top_k > 0) & (top_k < num_vocab)) | (self.top_p[rows] < 1))
        noise = torch.from_numpy(uniform(self.seed[rows], token_indices))
        for is_chosen, choose in (
            (random & ~filtered, self._choose_plain),
            (filtered, self._choose_sorted),
        ):
            which = np.flatnonzero(is_chosen)
            if len(which):
                index = torch.from_numpy(which)
                own = logits if len(which) == len(rows) else logits[index]
                # The largest is subtracted first, so that no temperature overflows. Below 1e-5
                # a temperature is greedy in all but name.
                temperature = np.maximum(self.temperature[rows[which]], 1e-5)
                scaled = (own - largest[index]).div_(torch.from_numpy(temperature)[:, None])
                tokens[which] = choose(scaled, rows[which], noise[index])
        return tokens

    def _choose_plain(
        self, scaled: torch.Tensor, rows: IntArray, noise: torch.Tensor
    ) -> NDArray[np.int64]:
        """Among the whole vocabulary, in its own order."""
        probabilities = torch.softmax(scaled, dim=-1)
        min_p = self.min_p[rows]
        if min_p.any():
            floor = probabilities.amax(dim=-1) * torch.from_numpy(min_p)
            probabilities.masked_fill_(probabilities < floor.float()[:, None], 0.0)
        picked: NDArray[np.int64] = _invert(probabilities, noise).numpy()
        return picked

    def _choose_sorted(
        self, scaled: torch.Tensor, rows: IntArray, noise: torch.Tensor
    ) -> NDArray[np.int64]:
        """Among the most likely tokens: top-k, then top-p of what that leaves, then min-p."""
        num_vocab = scaled.shape[1]
        probabilities = torch.softmax(scaled, dim=-1)
        top_k = self.top_k[rows]
        limit = torch.from_numpy(np.where(top_k > 0, np.minimum(top_k, num_vocab), num_vocab))
        top_p = torch.from_numpy(self.top_p[rows])
        min_p = torch.from_numpy(self.min_p[rows])
        result = torch.empty(len(rows), dtype=torch.int64)
        pending = torch.arange(len(rows))
        for count in (min(_NUM_CANDIDATES, num_vocab), num_vocab):
            candidates = torch.topk(scaled[pending], count, dim=-1).indices
            kept = probabilities[pending].gather(1, candidates).double()
            k, p = limit[pending, None], top_p[pending, None]
            kept.masked_fill_(torch.arange(count) >= k, 0.0)
            mass = torch.cumsum(kept, dim=-1)
            # Top-p divides what top-k leaves: all of it, 1, where top-k is off. The candidates
            # are enough where they hold all that top-k or, without it, top-p can leave.
            goal = p * torch.where(k <= count, mass[:, -1:], 1.0)
            enough = ((k <= count) | ((k == num_vocab) & (mass[:, -1:] >= goal)))[:, 0]
            drop = mass - kept >= goal
            drop |= kept < kept[:, :1] * min_p[pending, None]
            drop[:, 0] = False
            place = _invert(kept.masked_fill_(drop, 0.0), noise[pending])
            chosen = candidates.gather(1, place[:, None])[:, 0]
            result[pending[enough]] = chosen[enough]
            pending = pending[~enough]
            if not len(pending):
                break
        picked: NDArray[np.int64] = result.numpy()
        return picked


def _invert(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative weight exceeds ``noise`` of the sum: never a zero one."""
    cumulative = torch.cumsum(weights, dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    # Rounding may lift the product to the sum itself, which nothing exceeds.
    target = torch.minimum(noise * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
