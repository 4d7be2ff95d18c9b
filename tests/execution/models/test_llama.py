"""The decoder against transformers: logits, and greedy tokens over prefill and decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference_attention import ReferenceAttention, greedy, logits_of
from tiny_models import PROMPT, reference_logits, tiny_llama, tiny_mistral

from octavo.execution.models.loading import load_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
CASES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "llama3": {"rope_parameters": LLAMA3},
    "linear": {"rope_parameters": LINEAR},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim": {"head_dim": 32},
    "eps": {"rms_norm_eps": 1e-2},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(tmp_path: Path, case: str) -> None:
    reference = tiny_llama(**CASES[case])
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float32")
    torch.testing.assert_close(
        logits_of(model, PROMPT), reference_logits(reference, PROMPT), atol=1e-4, rtol=1e-4
    )
    expected = reference.generate(
        torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=None
    )
    assert greedy(model, PROMPT, 20) == expected[0, len(PROMPT) :].tolist()


def test_mistral_equals_transformers(tmp_path: Path) -> None:
    reference = tiny_mistral(sliding_window=None, head_dim=32)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float32")
    assert model.config.architecture == "MistralForCausalLM"
    torch.testing.assert_close(
        logits_of(model, PROMPT), reference_logits(reference, PROMPT), atol=1e-4, rtol=1e-4
    )


def test_mistral_carries_its_sliding_window(tmp_path: Path) -> None:
    tiny_mistral(sliding_window=48).save_pretrained(tmp_path)
    assert load_model(tmp_path).config.sliding_window == 48


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close_to_float32(tmp_path: Path, dtype: str) -> None:
    reference = tiny_llama(tie_word_embeddings=True, initializer_range=0.05)
    reference.to(getattr(torch, dtype)).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=dtype)
    assert model.dtype == getattr(torch, dtype)
    logits = logits_of(model, PROMPT)
    assert logits.dtype == torch.float32
    expected = logits_of(load_model(tmp_path, dtype="float32"), PROMPT)
    assert (logits - expected).abs().max() < 0.02 * expected.abs().max()


def test_chunked_prefill_equals_one_prefill(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float32")
    attention = ReferenceAttention(model)
    rows = [attention.run(chunk) for chunk in (PROMPT[:4], PROMPT[4:5], PROMPT[5:])]
    torch.testing.assert_close(
        model.logits(torch.cat(rows)), logits_of(model, PROMPT), atol=1e-4, rtol=1e-4
    )


def test_forward_leaves_the_embedding_table_alone(tmp_path: Path) -> None:
    """The residual is summed in place, and must not be the table itself."""
    tiny_llama().save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float32")
    assert torch.equal(logits_of(model, PROMPT), logits_of(model, PROMPT))
