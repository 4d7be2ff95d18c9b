"""GGUF files: equal to the checkpoint they came from, and to their dequantized values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from reference_attention import greedy, logits_of
from tiny_models import PROMPT, dequantized, reference_logits, tiny_llama, write_gguf

from octavo.core.gguf_file import GGUFFile
from octavo.core.model_config import ModelLoadError, RopeScaling
from octavo.execution.models import gguf_weights
from octavo.execution.models.gguf_config import gguf_config
from octavo.execution.models.gguf_weights import GGUFWeights
from octavo.execution.models.loading import load_config, load_model


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 4},
        {"tie_word_embeddings": True},
        {"head_dim": 32},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ],
    ids=str,
)
def test_f32_equals_the_directory_it_came_from(tmp_path: Path, changes: dict[str, Any]) -> None:
    reference = tiny_llama(**changes)
    reference.save_pretrained(tmp_path)
    path = write_gguf(tmp_path / "model.gguf", reference)
    model, original = load_model(path, dtype="float32"), load_model(tmp_path, dtype="float32")
    assert torch.equal(logits_of(model, PROMPT), logits_of(original, PROMPT))
    assert greedy(model, PROMPT, 8) == greedy(original, PROMPT, 8)
    close(logits_of(model, PROMPT), reference_logits(reference, PROMPT))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_quantized_equals_its_dequantized_values(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_llama(), kind)
    expected = reference_logits(dequantized(tiny_llama(), kind), PROMPT)
    close(logits_of(load_model(path, dtype="float32"), PROMPT), expected)


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_ternary_blocks_of_256(tmp_path: Path, kind: str) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 256}
    path = write_gguf(tmp_path / "model.gguf", tiny_llama(**shape), kind)
    expected = reference_logits(dequantized(tiny_llama(**shape), kind), PROMPT)
    close(logits_of(load_model(path, dtype="float32"), PROMPT), expected)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_types_that_gguf_reads_but_cannot_write(tmp_path: Path, kind: str) -> None:
    """Random stored bytes: what counts is that each row's values land where they belong."""
    quantized = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[quantized]
    shape = {"hidden_size": 256, "intermediate_size": 256}
    data = np.random.default_rng(0).integers(
        0, 60, (256, 256 // block * block_bytes), dtype=np.uint8
    )
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("blk.0.ffn_down.weight", data, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = torch.from_numpy(gguf.dequantize(data, quantized))
    config = load_config(write_gguf(tmp_path / "config.gguf", tiny_llama(**shape)))
    weights = GGUFWeights(GGUFFile(tmp_path / "model.gguf"), config)
    name = "model.layers.0.mlp.down_proj.weight"
    whole = torch.empty(256, 256)
    weights.copy(name, (256, 256), whole, 0, 0)
    assert torch.equal(whole.nan_to_num(7), expected.nan_to_num(7))
    for axis in (0, 1):
        part = torch.empty(128, 256) if axis == 0 else torch.empty(256, 128)
        weights.copy(name, (256, 256), part, axis, 128)
        assert torch.equal(part.nan_to_num(7), expected.narrow(axis, 128, 128).nan_to_num(7))


def test_small_chunks_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_llama(), "Q8_0")
    expected = logits_of(load_model(path, dtype="float32"), PROMPT)
    monkeypatch.setattr(gguf_weights, "_CHUNK_VALUES", 1)
    assert torch.equal(logits_of(load_model(path, dtype="float32"), PROMPT), expected)


def test_llama3_rope_factors(tmp_path: Path) -> None:
    """The converter's rope_freqs.weight and config.json's llama3 scaling are the same model."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    reference = tiny_llama(rope_parameters=rope, head_dim=32)
    factors = []
    for index in range(16):
        wavelength = 2 * np.pi * 10000.0 ** (2 * index / 32)
        smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
        factors.append(1 / ((1 - np.clip(smooth, 0, 1)) / 8.0 + np.clip(smooth, 0, 1)))
    path = write_gguf(
        tmp_path / "model.gguf",
        reference,
        tensors={"rope_freqs.weight": np.array(factors, np.float32)},
    )
    model = load_model(path, dtype="float32")
    assert model.config.rope_freq_factors is not None
    close(logits_of(model, PROMPT), reference_logits(reference, PROMPT))


def test_linear_rope(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    reference = tiny_llama(rope_parameters=rope)
    path = write_gguf(
        tmp_path / "model.gguf",
        reference,
        metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    )
    model = load_model(path, dtype="float32")
    assert model.config.rope_scaling == RopeScaling(kind="linear", factor=4.0)
    close(logits_of(model, PROMPT), reference_logits(reference, PROMPT))


def test_config(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "model.gguf",
        tiny_llama(tie_word_embeddings=True),
        "Q8_0",
        metadata={
            "tokenizer.ggml.eot_token_id": 9,
            "llama.attention.key_length": None,
            "llama.attention.value_length": None,
            "llama.attention.head_count_kv": [2, 2],
        },
    )
    config = gguf_config(GGUFFile(path))
    assert (config.architecture, config.vocab_size, config.num_layers) == ("llama", 96, 2)
    assert (config.num_attention_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 9))
    assert (config.tie_word_embeddings, config.attention_bias) == (True, False)
    assert (config.dtype, config.max_position_embeddings) == ("bfloat16", 128)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 1}, "no place for: blk.1"),
        ({"llama.block_count": 2_000_000_000}, "blk.2.attn_norm.weight is missing"),
        ({"llama.embedding_length": 128}, r"shape \[96, 64\], expected \[96, 128\]"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.rope.dimension_count": 8}, "only the head dimension 16"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn' is not supported"),
        ({"llama.attention.head_count_kv": [2, 4]}, "same in every layer"),
        ({"llama.context_length": 2_000_000_000}, "context_length must be"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, "must be a number"),
        ({"llama.attention.head_count": 3}, "not a multiple of the key-value"),
    ],
)
def test_wrong_metadata(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_llama(), metadata=metadata)
    with pytest.raises(ModelLoadError, match=rf"model\.gguf: .*{message}"):
        load_model(path)


def test_wrong_tensors(tmp_path: Path) -> None:
    model = tiny_llama()
    path = tmp_path / "model.gguf"
    write_gguf(path, model, without=("blk.1.ffn_up.weight",))
    with pytest.raises(ModelLoadError, match=r"tensor blk\.1\.ffn_up\.weight is missing"):
        load_model(path)
    write_gguf(path, model, without=("token_embd.weight",))
    with pytest.raises(ModelLoadError, match=r"tensor token_embd\.weight is missing"):
        load_model(path)
    write_gguf(path, model, tensors={"rope_freqs.weight": np.zeros(8, np.float32)})
    with pytest.raises(ModelLoadError, match="must be positive and finite"):
        load_model(path)
    write_gguf(
        path,
        model,
        tensors={"blk.0.ffn_up.weight": np.zeros((128, 64), np.int32)},
        without=("blk.0.ffn_up.weight",),
    )
    with pytest.raises(ModelLoadError, match="type I32, which cannot be dequantized"):
        load_model(path)
    whole = write_gguf(path, model).read_bytes()
    path.write_bytes(whole[:-1000])
    with pytest.raises(ModelLoadError, match="incomplete download"):
        load_model(path)


@pytest.mark.parametrize(
    ("architecture", "why"),
    [("gemma3", ""), ("qwen3moe", r"\(it is a mixture of experts"), ("qwen2vl", r"\(it is multi")],
)
def test_other_architectures_are_refused(tmp_path: Path, architecture: str, why: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    message = f"'{architecture}' is not supported.*{why}.*; supported: llama, qwen2, qwen3"
    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path / "model.gguf")
