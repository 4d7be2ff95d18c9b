"""Greedy and random sampling over rows of mixed parameters.

Each row's token depends on its own logits, parameters, seed and token index alone. Rows that use a
feature pay for it; an all-greedy batch is one argmax.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.plan import IntArray
from octavo.core.sampling_params import SamplingParams
from octavo.execution.sampling.noise import uniform

# Candidates looked at before a row's whole vocabulary is sorted. With top-p 0.95 a language model
# rarely needs more; sorting 49,152 logits takes 2 to 3 ms a row, taking the top 512 about 0.3 ms.
_NUM_CANDIDATES = 512


class Sampler:
    """Sampling parameters of every row, and the sampling of a step."""

    def __init__(self, max_num_seqs: int) -> None:
        self.temperature = np.ones(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.seed = np.zeros(max_num_seqs, dtype=np.uint64)

    def set_row(self, row: int, params: SamplingParams, seed: int) -> None:
        self.temperature[row] = params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = seed

    def sample(
        self, logits: torch.Tensor, rows: IntArray, token_indices: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """One token a row.

        ``logits`` is fp32 ``[n, vocab]``; ``token_indices[i]`` is the place in its sequence of the
        token to sample. Returns ``[n]`` token ids.
        """
        tokens: NDArray[np.int64] = torch.argmax(logits, dim=-1).numpy()
        random = np.flatnonzero(self.temperature[rows] > 0)
        if not len(random):
            return tokens
        chosen = rows[random]
        noise = torch.from_numpy(uniform(self.seed[chosen], token_indices[random]))
        scaled = logits if len(random) == len(rows) else logits[torch.from_numpy(random)]
        # Divided in fp32 by at least 1e-5: lower temperatures are greedy in all but name.
        temperature = np.maximum(self.temperature[chosen], 1e-5)
        scaled = scaled / torch.from_numpy(temperature)[:, None]
        filtered = (self.top_k[chosen] > 0) | (self.top_p[chosen] < 1)
        result = np.empty(len(random), dtype=np.int64)
        for is_filtered, choose in ((True, self._choose_sorted), (False, self._choose_plain)):
            which = np.flatnonzero(filtered == is_filtered)
            if len(which):
                index = torch.from_numpy(which)
                result[which] = choose(scaled[index], chosen[which], noise[index])
        tokens[random] = result
        return tokens

    def _choose_plain(
        self, scaled: torch.Tensor, rows: IntArray, noise: torch.Tensor
    ) -> NDArray[np.int64]:
        """Inverse of the cumulative distribution over the vocabulary in its own order."""
        probabilities = torch.softmax(scaled, dim=-1)
        min_p = self.min_p[rows]
        if min_p.any():
            floor = probabilities.amax(dim=-1) * torch.from_numpy(min_p)
            probabilities.masked_fill_(probabilities < floor[:, None], 0.0)
        return _invert(probabilities, noise)

    def _choose_sorted(
        self, scaled: torch.Tensor, rows: IntArray, noise: torch.Tensor
    ) -> NDArray[np.int64]:
        """Among the most likely tokens: top-k, then top-p over what is left, then min-p."""
        num_vocab = scaled.shape[1]
        top_k = torch.from_numpy(self.top_k[rows])
        top_k = torch.where(top_k > 0, top_k.clamp(max=num_vocab), num_vocab)
        top_p = torch.from_numpy(self.top_p[rows])
        min_p = torch.from_numpy(self.min_p[rows])
        result = np.empty(len(rows), dtype=np.int64)
        log_total = torch.logsumexp(scaled, dim=-1)
        pending = torch.arange(len(rows))
        count = min(_NUM_CANDIDATES, num_vocab)
        while len(pending):
            values, token_ids = torch.topk(scaled[pending], count, dim=-1)
            probabilities = torch.exp(values - log_total[pending, None])
            rank = torch.arange(count)
            k = top_k[pending]
            probabilities.masked_fill_(rank >= k[:, None], 0.0)
            # The mass that top-p divides: all of it, or what top-k keeps. A row is settled when
            # the candidates hold every token that its filters can keep.
            mass = torch.cumsum(probabilities, dim=-1, dtype=torch.float64)
            total = torch.where(k < num_vocab, mass[:, -1], torch.ones_like(mass[:, -1]))
            threshold = top_p[pending].double() * total
            settled = (k <= count) | (mass[:, -1] >= threshold) & (top_p[pending] < 1)
            settled = settled & ((k >= num_vocab) | (k <= count)) | (count == num_vocab)
            before = mass - probabilities
            probabilities.masked_fill_(before >= threshold[:, None], 0.0)
            floor = probabilities[:, 0] * min_p[pending]
            probabilities.masked_fill_(probabilities < floor[:, None], 0.0)
            place = torch.from_numpy(_invert(probabilities[settled], noise[pending[settled]]))
            picked = token_ids[settled].gather(1, place[:, None])[:, 0]
            result[pending[settled].numpy()] = picked.numpy()
            pending, count = pending[~settled], num_vocab
        return result


def _invert(probabilities: torch.Tensor, noise: torch.Tensor) -> NDArray[np.int64]:
    """The first index whose cumulative (unnormalized) probability exceeds ``noise`` of the sum."""
    cumulative = torch.cumsum(probabilities, dim=-1, dtype=torch.float64)
    target = noise * cumulative[:, -1]
    index = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    # Rounding may leave the target at the very end: take the last token that has probability.
    last = probabilities.shape[1] - 1 - (probabilities.flip(-1) > 0).int().argmax(dim=-1)
    picked: NDArray[np.int64] = torch.minimum(index, last).numpy()
    return picked
