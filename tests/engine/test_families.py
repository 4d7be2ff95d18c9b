"""Every family through the whole engine: `LLM` equals transformers, whatever the attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedModel

from engine.tiny_engine import make_llm, pool
from execution.models.tiny_models import (
    OPT_350M,
    PROMPT,
    tiny_mistral,
    tiny_opt,
    tiny_qwen2,
    tiny_qwen3,
)
from octavo.core.sampling_params import SamplingParams

Maker = Callable[..., PreTrainedModel]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPTS = [PROMPT, PROMPT[2:4], PROMPT * 3, [7]]


@pytest.mark.parametrize("attention", ["compiled", "gather"])
@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (tiny_qwen2, {}),
        (
            tiny_qwen2,
            {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8},
        ),
        (tiny_qwen3, {}),
        (tiny_mistral, {"sliding_window": 8}),
        (tiny_opt, {}),
        (tiny_opt, OPT_350M),
    ],
    ids=["qwen2", "qwen2-window", "qwen3", "mistral-window", "opt-125m", "opt-350m"],
)
def test_greedy_tokens_equal_transformers(
    tmp_path: Path, make: Maker, changes: dict[str, Any], attention: str
) -> None:
    reference = make(**changes)
    reference.save_pretrained(tmp_path)
    Tokenizer(WordLevel({"a": 0}, "a")).save(str(tmp_path / "tokenizer.json"))
    # Chunks of prompts run beside decoding rows.
    options = {"attention": attention, "max_num_batched_tokens": 12, "kv_memory": pool(64)}
    with make_llm(tmp_path, **options) as llm:
        found = [list(result.token_ids) for result in llm.generate(PROMPTS, GREEDY)]
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None
        )
        assert tokens == expected[0, len(prompt) :].tolist()


def test_a_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    repository = tmp_path / "models--org--tiny"
    folder = repository / "snapshots" / "abc"
    tiny_qwen2().save_pretrained(folder)
    Tokenizer(WordLevel({"a": 0}, "a")).save(str(folder / "tokenizer.json"))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with make_llm(Path("org/tiny")) as llm:
        (result,) = llm.generate(PROMPT, GREEDY)
        assert llm.report.model == "org/tiny"
    with make_llm(folder) as llm:
        assert llm.generate(PROMPT, GREEDY) == [result]
