"""Our kernel over block tables against stock kernels over slots, and over runs of blocks: an
engine's scores differ by no more than rounding to bfloat16 does, and the tokens it chooses only
where two are as good.

Greedy rows that once differ go their own ways, so that counts of equal tokens say little (see
`test_slots_churn`). Here the places are looked at where they differ first: how far apart the two
candidates are, in either engine's eyes. On a GPU its kernels are compared, on a CPU those of a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from execution.gpu.test_gpu_agreement import SHAPE
from execution.models.tiny_models import tiny_llama
from octavo.config import EngineConfig
from octavo.core.plan import TokenScores, int_array
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.build import build_engine

ON_GPU = torch.cuda.is_available()
NUM_TOP = 8
KINDS: dict[str, dict[str, dict[str, str]]] = {
    "cuda": {
        "ours": {"kv": "paged", "attention": "triton"},
        "slots": {"kv": "virtual", "attention": "stock"},
        "runs": {"kv": "contiguous", "attention": "stock", "reserve": "oracle"},
    },
    "cpu": {
        "ours": {"kv": "paged", "attention": "compiled"},
        "slots": {"kv": "virtual", "attention": "contiguous"},
        "runs": {"kv": "contiguous", "attention": "contiguous", "reserve": "oracle"},
    },
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """``rounding`` is a log probability's mean error against float32 at most, of either kind.

    Errors that know nothing of each other are √2 of their size apart in the mean; those that share
    some (of weights, norms and products, which are the same) less: 1.5 is more than rounding.
    ``largest`` is how far apart one log probability may be, of thousands of places: six standard
    deviations, each √2 * 1.25 of a mean error. Two candidates, each off by that much, change places
    where they are ``2 * largest`` apart at most.
    """

    rounding: float
    largest: float

    @property
    def margin(self) -> float:
        return 2 * self.largest


# A mean error of this model is 0.0063 to 0.0070 in bfloat16 (`test_gpu_agreement`), and 4.5e-7 in
# float32, of which a few large ones count for more.
BFLOAT16 = Bounds(rounding=0.01, largest=0.07)
FLOAT32 = Bounds(rounding=2e-6, largest=2e-5)


@dataclass(slots=True)
class Scored:
    """Of one sequence: its log probabilities given a prompt, then the tokens that were chosen, and
    the likeliest at each of those places, prompt and chosen alike."""

    prompt: NDArray[np.float64]
    tokens: list[int] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)


def top_of(scores: TokenScores, index: int) -> dict[int, float]:
    """The likeliest tokens, best first."""
    ids, values = scores.top_ids[index].tolist(), scores.top_logprobs[index].tolist()
    return dict(list(zip(ids, values, strict=True))[:NUM_TOP])


def scored_by(
    model: Path, device: str, dtype: str, kind: str, prompts: list[list[int]], num_tokens: int
) -> list[Scored]:
    config = EngineConfig(
        model=str(model), device=device, dtype=dtype, max_num_seqs=len(prompts),
        kv_memory="1GiB" if device == "cuda" else "64MiB", **KINDS[device][kind],
    )  # fmt: skip
    core, report = build_engine(config)
    assert report.kv == KINDS[device][kind]["kv"]
    params = SamplingParams(
        temperature=0.0, ignore_eos=True, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP
    )
    for row, prompt in enumerate(prompts):
        core.scheduler.add(Request(row, int_array(prompt), params, num_tokens, seed=0))
    found = [
        Scored(np.full(len(prompt) - 1, np.nan), top=[{} for _ in prompt[1:]]) for prompt in prompts
    ]
    while core.has_work:
        outputs = core.step()
        assert all(finished.error is None for finished in outputs.finished)
        for piece in outputs.prompt_logprobs:
            first = piece.start - 1
            own = found[piece.owner]
            own.prompt[first : first + len(piece.token_ids)] = piece.scores.logprobs
            for index in range(len(piece.token_ids)):
                own.top[first + index] = top_of(piece.scores, index)
        if outputs.logprobs is None:
            continue
        for index, (row, token) in enumerate(
            zip(outputs.numbers.tolist(), outputs.token_ids.tolist(), strict=True)
        ):
            found[row].tokens.append(token)
            found[row].top.append(top_of(outputs.logprobs.scores, index))
    core.close()
    for own in found:
        assert len(own.tokens) == num_tokens
        assert not np.isnan(own.prompt).any()
    return found


def margins(ours: Scored, stock: Scored) -> list[float]:
    """How far apart two candidates are, in the eyes of the one that sees them further apart, where
    the likeliest tokens differ: anywhere in the prompt, and at the first chosen token that does.
    Infinite where one does not even know the other's candidate."""
    num_prompt = len(ours.prompt)
    pairs = list(zip(ours.top, stock.top, strict=True))
    same = [a == b for a, b in zip(ours.tokens, stock.tokens, strict=True)]
    # Behind the first that differs they read different tokens.
    num_comparable = num_prompt + (same.index(False) + 1 if False in same else len(same))
    found = []
    for own, other in pairs[:num_comparable]:
        (a, *_), (b, *_) = own, other
        if a != b:
            apart = [abs(top.get(a, -np.inf) - top.get(b, -np.inf)) for top in (own, other)]
            found.append(max(apart))
    return found


def check_agreement(
    folder: Path,
    device: str,
    dtype: str,
    shape: dict[str, Any],
    lengths: tuple[int, ...],
    num_tokens: int,
    bounds: Bounds,
) -> None:
    reference = tiny_llama(**shape).float()
    reference.save_pretrained(folder)
    random = np.random.default_rng(5)
    prompts = [random.integers(3, shape["vocab_size"], length).tolist() for length in lengths]
    expected = []
    for prompt in prompts:
        ids = torch.tensor(prompt)
        with torch.no_grad():
            table = reference(ids[None]).logits[0, :-1].log_softmax(dim=-1)
        expected.append(table.gather(1, ids[1:, None])[:, 0].double().numpy())
    exact = np.concatenate(expected)
    scored = {
        kind: scored_by(folder, device, dtype, kind, prompts, num_tokens) for kind in KINDS[device]
    }
    logprobs = {kind: np.concatenate([s.prompt for s in found]) for kind, found in scored.items()}
    errors = {kind: np.abs(found - exact) for kind, found in logprobs.items()}
    for kind, error in errors.items():
        print(f"{kind} against float32: mean {error.mean():.2g}, largest {error.max():.2g}")
    means = {kind: float(error.mean()) for kind, error in errors.items()}
    assert max(means.values()) < bounds.rounding
    assert max(means.values()) < 1.25 * min(means.values()), "none rounds worse"
    for kind in ("slots", "runs"):
        apart = np.abs(logprobs["ours"] - logprobs[kind])
        pairs = list(zip(scored["ours"], scored[kind], strict=True))
        ties = [margin for ours, stock in pairs for margin in margins(ours, stock)]
        rows = sum(ours.tokens != stock.tokens for ours, stock in pairs)
        print(
            f"{kind}: {len(apart)} places apart: mean {apart.mean():.2g}, largest "
            f"{apart.max():.2g}; other likeliest tokens at {len(ties)}, candidates at most "
            f"{max(ties, default=0):.2g} apart; {rows} of {len(pairs)} rows of {num_tokens} chosen "
            "tokens differ"
        )
        assert apart.mean() < 1.5 * min(means.values())
        assert apart.max() < bounds.largest
        assert max(ties, default=0.0) < bounds.margin


@pytest.mark.parametrize(("dtype", "bounds"), [("bfloat16", BFLOAT16), ("float32", FLOAT32)])
def test_a_cpus_kernels_differ_by_rounding_only(tmp_path: Path, dtype: str, bounds: Bounds) -> None:
    """Compiled over tables, PyTorch's own over slots and runs."""
    pytest.importorskip("numba")
    shape = SHAPE | {"num_hidden_layers": 2, "max_position_embeddings": 512}
    check_agreement(tmp_path, "cpu", dtype, shape, (5, 95, 275), 16, bounds)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_stock_kernels_differ_by_rounding_only(tmp_path: Path) -> None:
    lengths = (5, 95, 185, 275, 500, 1000, 3000, 6000)
    check_agreement(tmp_path, "cuda", "bfloat16", SHAPE, lengths, 64, BFLOAT16)
