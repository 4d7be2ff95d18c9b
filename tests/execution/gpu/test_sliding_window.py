"""Sliding windows through our own kernels in a whole engine: prompts and what is generated are
longer than the window, and chunks begin and end inside of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.tiny_engine import build, run
from execution.gpu.test_gpu_engine import BLOCK_SIZE, MAX_NUM_SEQS, gpu_engine
from execution.models.tiny_models import tiny_mistral
from octavo.core.plan import int_array
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
WINDOW = 6
NEW_TOKENS = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_mistral(sliding_window=WINDOW).save_pretrained(folder)
    return folder


def requests() -> list[Request]:
    random = np.random.default_rng(4)
    return [
        Request(
            number=index,
            prompt_token_ids=int_array(random.integers(3, 96, length)),
            params=SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS),
            max_tokens=NEW_TOKENS,
            seed=0,
            stop_token_ids=(),
        )
        for index, length in enumerate((17, 8))
    ]


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, list[int]]:
    core, _ = build(model, max_num_seqs=MAX_NUM_SEQS, block_size=BLOCK_SIZE)
    found = run(core, requests())
    core.close()
    return found


@pytest.mark.parametrize(("kv", "chunk"), [("paged", 9), ("virtual", 5)])
def test_tokens_are_those_of_the_cpu(
    model: Path, expected: dict[int, list[int]], kv: str, chunk: int
) -> None:
    core = gpu_engine(model, num_blocks=40, depth=2, chunk=chunk, kv=kv)
    assert run(core, requests()) == expected
    assert core.scheduler.num_preemptions == 0
    core.close()
