"""Qwen2, Qwen3 and OPT against transformers: logits, greedy tokens, narrow weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_attention import ReferenceAttention, greedy, logits_of
from safetensors.torch import load_file, save_file
from tiny_models import (
    OPT_350M,
    PROMPT,
    dequantized,
    reference_logits,
    tiny_opt,
    tiny_qwen2,
    tiny_qwen3,
    write_gguf,
)
from transformers import PreTrainedModel

from octavo.core.model_config import ModelLoadError
from octavo.execution.models.loading import load_config, load_model
from octavo.execution.models.quantized import is_supported

Maker = Callable[..., PreTrainedModel]
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
CASES: dict[str, tuple[Maker, dict[str, Any]]] = {
    "qwen2": (tiny_qwen2, THETA),
    "qwen2-tied-mha": (tiny_qwen2, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3": (tiny_qwen3, THETA),
    "qwen3-tied-mqa": (tiny_qwen3, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3-biases-eps": (tiny_qwen3, {"attention_bias": True, "rms_norm_eps": 1e-2}),
    "qwen3-narrow-heads": (tiny_qwen3, {"head_dim": 8}),
    "opt-125m": (tiny_opt, {}),
    "opt-350m": (tiny_opt, OPT_350M),
    "opt-untied": (tiny_opt, {"tie_word_embeddings": False}),
    "opt-no-biases": (tiny_opt, {"enable_bias": False, "_remove_final_layer_norm": True}),
}
needs_vnni = pytest.mark.skipif(not is_supported(), reason="needs a CPU with AVX512-VNNI")


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def similarity(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.cosine_similarity(found.flatten(), expected.flatten(), dim=0))


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(tmp_path: Path, case: str) -> None:
    make, changes = CASES[case]
    reference = make(**changes)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float32")
    close(logits_of(model, PROMPT), reference_logits(reference, PROMPT))
    expected = reference.generate(
        torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False, eos_token_id=None
    )
    assert greedy(model, PROMPT, 16) == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("case", ["qwen2", "qwen2-tied-mha", "qwen3", "qwen3-tied-mqa"])
def test_gguf_equals_the_directory_it_came_from(tmp_path: Path, case: str) -> None:
    make, changes = CASES[case]
    reference = make(**changes)
    reference.save_pretrained(tmp_path)
    path = write_gguf(tmp_path / "model.gguf", reference)
    model, original = load_model(path, dtype="float32"), load_model(tmp_path, dtype="float32")
    assert model.config.architecture == reference.config.model_type
    assert model.rope.cos.equal(original.rope.cos)
    assert torch.equal(logits_of(model, PROMPT), logits_of(original, PROMPT))


def test_a_qwen2_gguf_derives_its_head_dimension(tmp_path: Path) -> None:
    """llama.cpp's converter writes no key length for Qwen2."""
    names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    path = write_gguf(
        tmp_path / "model.gguf", tiny_qwen2(), metadata={f"qwen2.{name}": None for name in names}
    )
    assert load_config(path).head_dim == 16


def test_a_qwen3_gguf_without_its_norms_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_qwen3(), without=("blk.1.attn_k_norm.weight",))
    with pytest.raises(ModelLoadError, match=r"tensor blk\.1\.attn_k_norm\.weight is missing"):
        load_model(path)


@needs_vnni
@pytest.mark.parametrize("make", [tiny_qwen2, tiny_qwen3])
@pytest.mark.parametrize(("kind", "kinds"), [("Q4_0", "int4"), ("Q8_0", "int8")])
def test_a_quantized_gguf_runs_as_stored(
    tmp_path: Path, make: Maker, kind: str, kinds: str
) -> None:
    path = write_gguf(tmp_path / "model.gguf", make(), kind)
    expected = reference_logits(dequantized(make(), kind), PROMPT)
    close(logits_of(load_model(path, dtype="float32"), PROMPT), expected)
    model = load_model(path, dtype="bfloat16", weights="auto")
    assert model.weight_kinds() == kinds
    assert similarity(logits_of(model, PROMPT), expected) > 0.995


@needs_vnni
@pytest.mark.parametrize("mode", ["auto", "int8", "int4"])
@pytest.mark.parametrize("case", ["qwen2", "qwen3", "opt-125m", "opt-350m", "opt-untied"])
def test_weights_are_narrowed_on_request(tmp_path: Path, case: str, mode: str) -> None:
    make, changes = CASES[case]
    make(**changes).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="bfloat16", weights=mode)
    assert model.weight_kinds() == ("bfloat16" if mode == "auto" else mode)
    expected = logits_of(load_model(tmp_path, dtype="float32"), PROMPT)
    assert similarity(logits_of(model, PROMPT), expected) > (0.8 if mode == "int4" else 0.995)
    plain = load_model(tmp_path, dtype="bfloat16").weight_bytes()
    assert mode == "auto" or model.weight_bytes() < plain


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ["qwen2", "qwen3", "opt-125m", "opt-350m"])
def test_half_precision_is_close_to_float32(tmp_path: Path, case: str, dtype: str) -> None:
    make, changes = CASES[case]
    make(**changes).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=dtype)
    expected = logits_of(load_model(tmp_path, dtype="float32"), PROMPT)
    assert similarity(logits_of(model, PROMPT), expected) > 0.998


@pytest.mark.parametrize("case", ["qwen3", "opt-125m", "opt-350m"])
def test_chunks_equal_one_prefill(tmp_path: Path, case: str) -> None:
    make, changes = CASES[case]
    make(**changes).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float32")
    attention = ReferenceAttention(model)
    rows = [attention.run(chunk) for chunk in (PROMPT[:4], PROMPT[4:5], PROMPT[5:])]
    close(model.logits(torch.cat(rows)), logits_of(model, PROMPT))


@pytest.mark.parametrize("case", CASES)
def test_dummy_weights(tmp_path: Path, case: str) -> None:
    make, changes = CASES[case]
    make(**changes).save_pretrained(tmp_path)
    source = tmp_path / "config.json"
    logits = logits_of(load_model(source, load_format="dummy", dtype="bfloat16"), PROMPT)
    assert logits.isfinite().all()
    assert logits.std() > 0


def test_opt_without_rotation_has_an_empty_table(tmp_path: Path) -> None:
    tiny_opt().save_pretrained(tmp_path)
    model = load_model(tmp_path, max_positions=40)
    assert model.rope.cos.shape == model.rope.sin.shape == (40, 0)


def test_opts_own_checkpoints_leave_out_a_prefix(tmp_path: Path) -> None:
    reference = tiny_opt(**OPT_350M)
    reference.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    assert "decoder.embed_tokens.weight" in tensors
    save_file(tensors, file)
    model = load_model(tmp_path, dtype="float32")
    close(logits_of(model, PROMPT), reference_logits(reference, PROMPT))
