"""One kernel over block tables and over slots: the engine's scores are the same to the last bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from execution.gpu.test_gpu_engine import MAX_NUM_SEQS, ON_GPU, gpu_engine
from execution.models.tiny_models import tiny_qwen3
from octavo.core.plan import int_array
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.memory.virtual import VirtualManager

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
Scores = dict[int, list[tuple[int, bytes]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_qwen3(head_dim=16).save_pretrained(folder)
    return folder


def scores(model: Path, kv: str, attention: str) -> Scores:
    """Of prompts in chunks beside rows that decode, token by token: the token, and the bytes of its
    log probability and of the likeliest tokens'."""
    random = np.random.default_rng(4)
    dtype = "bfloat16" if ON_GPU else "float32"
    core = gpu_engine(
        model, num_blocks=60, depth=2, chunk=6, dtype=dtype, kv=kv, attention=attention
    )
    assert isinstance(core.scheduler.manager, VirtualManager) == (kv == "virtual")
    for number, length in enumerate((9, 3, 7)[: MAX_NUM_SEQS - 1]):
        params = SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=0)
        prompt = int_array(random.integers(3, 96, length))
        core.scheduler.add(Request(number, prompt, params, 3, seed=0))
    found: Scores = {number: [] for number in range(3)}
    while core.has_work:
        outputs = core.step()
        for piece in outputs.prompt_logprobs:
            found[piece.owner] += [
                (int(token), score.tobytes())
                for token, score in zip(piece.token_ids, piece.scores.logprobs, strict=True)
            ]
        if outputs.logprobs is None:
            continue
        told = outputs.logprobs.scores
        for index, (number, token) in enumerate(
            zip(outputs.numbers, outputs.token_ids, strict=True)
        ):
            data = told.logprobs[index].tobytes() + told.top_logprobs[index].tobytes()
            found[int(number)].append((int(token), data))
    core.close()
    return found


@pytest.mark.parametrize("attention", ["triton", "mixed"] if ON_GPU else ["triton"])
def test_scores_are_the_same_to_the_last_bit(model: Path, attention: str) -> None:
    tables, slots = scores(model, "paged", "triton"), scores(model, "virtual", attention)
    assert [len(told) for told in tables.values()] == [8 + 3, 2 + 3, 6 + 3]
    assert slots == tables
