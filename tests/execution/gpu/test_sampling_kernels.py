"""Sampling on the device: exact where it can be, and within rounding of a plain reference."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from execution.gpu.references import ints
from octavo.execution.kernels.sampling import (
    BAD_LOGITS,
    SampledRows,
    SamplingState,
    SamplingWorkspace,
    argmax_tokens,
    sample_tokens,
)
from octavo.execution.sampling.noise import uniform

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
VOCAB = 3000


def kept(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """Float64 ``[vocab]``: what each token weighs after the filters; equals of the last stay."""
    x = logits.double()
    weights = ((x - x.max()) / max(temperature, 1e-5)).exp()
    if 0 < top_k < len(x):
        weights = weights.where(x >= x.topk(top_k).values[-1], 0.0)
    if top_p < 1:
        order = torch.argsort(x, descending=True, stable=True)
        mass = weights[order].cumsum(0)
        last = int((mass < top_p * weights.sum()).sum())
        weights = weights.where(x >= x[order[min(last, len(x) - 1)]], 0.0)
    return weights.where(weights >= min_p, 0.0)


def params() -> Iterator[tuple[float, int, float, float]]:
    yield from ((1.0, 0, 1.0, 0.0), (0.7, 0, 0.9, 0.0), (1.5, 20, 1.0, 0.0), (1.0, 50, 0.5, 0.0))
    yield from ((0.8, 0, 1.0, 0.1), (0.9, 40, 0.95, 0.02), (5.0, 0, 0.3, 0.0), (1e-3, 5, 0.5, 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_rows(device: torch.device, dtype: torch.dtype) -> None:
    check_random_rows(device, dtype, VOCAB)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("vocab", [128_256, 151_936, 50_257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_rows_of_large_vocabularies(
    device: torch.device, dtype: torch.dtype, vocab: int
) -> None:
    check_random_rows(device, dtype, vocab)


def check_random_rows(device: torch.device, dtype: torch.dtype, vocab: int) -> None:
    chosen = list(params())
    n = len(chosen)
    logits = (2 * torch.randn(n, vocab, device=device)).to(dtype)
    seeds = np.array([1, 2**63 + 5, 2**64 - 1, 7, 8, 9, 10, 11], dtype=np.uint64)
    column = lambda i, kind: torch.tensor([p[i] for p in chosen] + [0], dtype=kind, device=device)  # noqa: E731
    state = SamplingState(
        column(0, torch.float32),
        column(1, torch.int32),
        column(2, torch.float32),
        column(3, torch.float32),
        torch.from_numpy(np.append(seeds, np.uint64(0)).view(np.int64)).to(device),
    )
    positions = ints(list(range(5, 5 + n)), device)
    order = ints(list(range(n)), device)
    sampled = SampledRows(order, order, positions, n)
    workspace = SamplingWorkspace(n, device)
    out, last, place = (torch.zeros(n + 1, dtype=torch.int32, device=device) for _ in range(3))
    argmax_tokens(logits, sampled, workspace, out, last, place)
    # The first of equals, which only a CPU's is sure to be.
    assert out[:n].tolist() == logits.float().cpu().argmax(dim=-1).tolist()
    assert place[:n].tolist() == [p + 1 for p in positions.tolist()]
    sample_tokens(logits, sampled, state, workspace, out, last)
    assert last.tolist() == out.tolist()
    noise = uniform(seeds, positions.cpu().numpy().astype(np.int64) + 1)
    for i, values in enumerate(chosen):
        weights = kept(logits[i].float().cpu(), *values)
        token = int(out[i])
        assert weights[token] > 0, f"{values}: a token that the filters drop"
        below, total = float(weights[:token].sum()), float(weights.sum())
        target = noise[i] * total
        slack = 1e-4 * total
        assert below - slack <= target <= below + float(weights[token]) + slack, values


def test_greedy_rows_ties_and_bad_logits(device: torch.device) -> None:
    logits = torch.randn(5, VOCAB, device=device)
    logits[0, [17, 2500]] = 9.0
    logits[1, 3] = float("nan")
    logits[2, 4] = float("inf")
    logits[3] = float("-inf")
    rows = ints([2, 0, 1, 3, 4], device)
    positions = ints([1, 2, 3, 4, 5], device)
    sampled = SampledRows(ints(list(range(5)), device), rows, positions, 4)
    workspace = SamplingWorkspace(5, device)
    out, last, place = (torch.zeros(5, dtype=torch.int32, device=device) for _ in range(3))
    for _ in range(2):
        argmax_tokens(logits, sampled, workspace, out, last, place)
        assert out[:4].tolist() == [17, BAD_LOGITS, BAD_LOGITS, BAD_LOGITS]
        assert int(out[4]) == int(logits[4].argmax())
        assert place.tolist() == [3, 4, 2, 5, 0], "padding is not advanced"
        assert last.tolist() == [0, 0, 17, 0, 0]
