"""Two ranks in one process, on threads, equal one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_attention import greedy, logits_of
from tiny_models import (
    OPT_350M,
    PROMPT,
    tiny_llama,
    tiny_opt,
    tiny_qwen2,
    tiny_qwen3,
    write_gguf,
)
from transformers import PreTrainedModel

from octavo.execution.models.decoder import Decoder
from octavo.execution.models.loading import load_model
from octavo.execution.models.parallel import TensorParallel


class ThreadedRanks:
    """Collectives over threads: each leaves its tensor, waits, and reads all of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=30)
        self._tensors: list[torch.Tensor] = [torch.empty(0)] * size

    def load(self, source: Path, dtype: str) -> list[Decoder]:
        return [
            load_model(
                source,
                dtype=dtype,
                rank=rank,
                size=self.size,
                all_reduce=lambda tensor, rank=rank: sum(self._exchange(rank, tensor)),
                all_gather=lambda tensor, rank=rank: torch.cat(self._exchange(rank, tensor), -1),
            )
            for rank in range(self.size)
        ]

    def _exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._tensors[rank] = tensor
        self._barrier.wait()
        tensors = list(self._tensors)
        self._barrier.wait()
        return tensors


def check_two_ranks_equal_one(source: Path) -> list[Decoder]:
    alone = load_model(source, dtype="float32")
    ranks = ThreadedRanks(2).load(source, "float32")
    with ThreadPoolExecutor(2) as threads:
        logits = list(threads.map(lambda model: logits_of(model, PROMPT), ranks))
        tokens = list(threads.map(lambda model: greedy(model, PROMPT, 8), ranks))
    torch.testing.assert_close(logits[0], logits_of(alone, PROMPT), atol=1e-4, rtol=1e-4)
    assert torch.equal(logits[0], logits[1])
    assert tokens == [greedy(alone, PROMPT, 8)] * 2
    return ranks


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_two_ranks_equal_one(tmp_path: Path, kind: str, tied: bool) -> None:
    reference = tiny_llama(
        attention_bias=True, mlp_bias=True, tie_word_embeddings=tied, head_dim=32
    )
    source = tmp_path
    reference.save_pretrained(tmp_path)
    if kind == "gguf":
        source = write_gguf(tmp_path / "model.gguf", reference)
    ranks = check_two_ranks_equal_one(source)
    assert [(rank.num_heads, rank.num_kv_heads) for rank in ranks] == [(2, 1), (2, 1)]


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (tiny_qwen2, {"tie_word_embeddings": True}),
        (tiny_qwen3, {"attention_bias": True}),
        (tiny_opt, {}),
        (tiny_opt, OPT_350M),
        (tiny_opt, {"tie_word_embeddings": False, "enable_bias": False}),
    ],
)
def test_two_ranks_of_other_families(
    tmp_path: Path, make: Callable[..., PreTrainedModel], changes: dict[str, Any]
) -> None:
    make(**changes).save_pretrained(tmp_path)
    check_two_ranks_equal_one(tmp_path)


@pytest.mark.parametrize("make", [tiny_qwen2, tiny_qwen3])
def test_two_ranks_of_other_ggufs(tmp_path: Path, make: Callable[..., PreTrainedModel]) -> None:
    check_two_ranks_equal_one(write_gguf(tmp_path / "model.gguf", make()))


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"num_key_value_heads": 1}, 2, r"key-value heads \(1\) cannot be split over 2"),
        ({}, 3, r"attention heads \(4\) cannot be split over 3"),
        ({"vocab_size": 97}, 2, r"model.embed_tokens \(97\) cannot be split over 2"),
        ({"intermediate_size": 129}, 2, r"gate_proj \(129\) cannot be split over 2"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    tmp_path: Path, changes: dict[str, int], size: int, message: str
) -> None:
    tiny_llama(**changes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, size=size, all_reduce=lambda t: t, all_gather=lambda t: t)


def test_ranks_need_collectives() -> None:
    with pytest.raises(ValueError, match="needs all_reduce"):
        TensorParallel(0, 2)
    with pytest.raises(ValueError, match="less than size 2, got 2"):
        TensorParallel(2, 2, lambda t: t, lambda t: t)
