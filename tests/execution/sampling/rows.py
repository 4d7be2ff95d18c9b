"""Rows of a sampler, and what they make of their logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.plan import int_array
from octavo.core.sampling_params import SamplingParams
from octavo.execution.sampling.sampler import Sampler


def start(
    sampler: Sampler,
    row: int,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int] = (),
    *,
    seed: int = 0,
    stops: tuple[int, ...] = (),
) -> None:
    """The row's sequence begins, or goes on after ``output``."""
    sampler.set_row(
        row,
        params,
        seed,
        token_ids=int_array([*prompt, *output]),
        num_prompt_tokens=len(prompt),
        stop_token_ids=stops,
        num_logprobs=params.logprobs,
    )


def random_logits(num_rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab, generator=generator) * 3


def edited(
    sampler: Sampler, logits: torch.Tensor, rows: Sequence[int], lengths: Sequence[int]
) -> torch.Tensor:
    """The logits that the tokens are chosen from; nothing is sampled, no row advances."""
    seen: list[torch.Tensor] = []

    class Seen(Exception):
        pass

    def choose(logits: torch.Tensor, *_: object) -> NDArray[np.int64]:
        seen.append(logits.clone())
        raise Seen

    sampler._choose = choose  # type: ignore[method-assign]
    try:
        sampler.sample(logits, int_array(list(rows)), np.array(lengths, dtype=np.int64))
    except Seen:
        pass
    finally:
        del sampler._choose
    return seen[0]
