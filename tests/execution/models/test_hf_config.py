"""config.json: what is read, and what is refused in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.core.model_config import ModelLoadError, RopeScaling
from octavo.execution.models.hf_config import load_hf_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write(directory: Path, **changes: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({**BASE, **changes}))
    return directory


def test_silent_fields_mean_what_transformers_means(tmp_path: Path) -> None:
    config = load_hf_config(write(tmp_path))
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (4, 16, 2048)
    assert (config.rms_norm_eps, config.rope_theta, config.rope_scaling) == (1e-6, 10000.0, None)
    assert (config.dtype, config.tie_word_embeddings, config.sliding_window) == (
        "float32",
        False,
        None,
    )
    assert config.eos_token_ids == ()
    mistral = load_hf_config(
        write(tmp_path, architectures=["MistralForCausalLM"], num_attention_heads=32)
    )
    assert (mistral.num_kv_heads, mistral.sliding_window) == (8, 4096)


def test_fields_are_read(tmp_path: Path) -> None:
    config = load_hf_config(
        write(
            tmp_path,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            attention_bias=True,
            mlp_bias=True,
            torch_dtype="float16",
            bos_token_id=1,
            eos_token_id=[2, 7],
            sliding_window=None,
        )
    )
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (2, 32, 4096)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (True,) * 3
    assert (config.rms_norm_eps, config.dtype) == (1e-5, "float16")
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 7))


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_scaling": None, "rope_theta": 5e5}, 5e5, None),
        ({"rope_scaling": {"rope_type": "default"}}, 1e4, None),
        ({"rope_scaling": {"rope_type": None}}, 1e4, None),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 5e5},
            5e5,
            RopeScaling(kind="linear", factor=2.0),
        ),
        (
            {"rope_scaling": LLAMA3, "rope_theta": 5e5},
            5e5,
            RopeScaling(kind="llama3", factor=8.0),
        ),
        (
            {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
            5e5,
            RopeScaling(kind="llama3", factor=8.0),
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
    ],
)
def test_rope(
    tmp_path: Path, changes: dict[str, Any], theta: float, scaling: RopeScaling | None
) -> None:
    config = load_hf_config(write(tmp_path, **changes))
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_eos_ids_are_merged_with_generation_config(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=2)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2, 9]}')
    assert load_hf_config(tmp_path).eos_token_ids == (2, 5, 9)
    assert load_hf_config(tmp_path / "config.json").eos_token_ids == (2, 5, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"GPT2LMHeadModel.*supported: LlamaForCausalLM, .*OPTForCausalLM",
        ),
        ({"architectures": None}, "architectures must name a model's class, got None"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"]},
            r"'Qwen3MoeForCausalLM' is not supported \(it is a mixture of experts.*Qwen3For",
        ),
        ({"architectures": ["MixtralForCausalLM"]}, "it is a mixture of experts"),
        ({"architectures": ["Qwen2VLForConditionalGeneration"]}, "it is multimodal or"),
        ({"architectures": ["Qwen3VLMoeForConditionalGeneration"]}, "it is multimodal or"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be positive"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4}}, "must be less than"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq' is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": -1}, "hidden_size must be an integer from 1"),
        ({"hidden_size": "64"}, "hidden_size must be an integer"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"hidden_size": 66}, "not a multiple of 4 attention heads"),
        ({"num_key_value_heads": 3}, "not a multiple of the key-value heads"),
        ({"head_dim": 15}, "must be even"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings must be an integer"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be a number"),
        ({"tie_word_embeddings": "yes"}, "must be true or false"),
        ({"torch_dtype": "float8_e4m3fn"}, "'float8_e4m3fn' is not supported"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"config\.json: .*{message}"):
        load_hf_config(write(tmp_path, **changes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object, got list"),
        ("[" * 100_000, "not valid JSON"),
        ("\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "not valid JSON"),
    ],
)
def test_broken_json_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelLoadError, match=rf"config\.json: .*{message}"):
        load_hf_config(tmp_path)


def test_absent_and_broken_neighbours_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json: cannot be read"):
        load_hf_config(tmp_path)
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text("nonsense")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: is not valid JSON"):
        load_hf_config(tmp_path)


QWEN = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4}
WINDOW = {**QWEN, "use_sliding_window": True, "sliding_window": 48, "max_position_embeddings": 128}


def test_qwen_defaults(tmp_path: Path) -> None:
    config = load_hf_config(
        write(tmp_path, architectures=["Qwen2ForCausalLM"], num_attention_heads=32)
    )
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (32, 2, 32768)
    assert config.sliding_window is None
    config = load_hf_config(write(tmp_path, **{**QWEN, "architectures": ["Qwen3ForCausalLM"]}))
    assert (config.num_kv_heads, config.head_dim, config.attention_bias) == (4, 128, False)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"use_sliding_window": False}, None),
        ({"use_sliding_window": None}, None),
        ({"sliding_window": None}, None),
        ({"max_window_layers": 2}, None),
        ({}, None),  # transformers' own max_window_layers is 28, and here are 2 layers
        ({"max_window_layers": 0}, 48),
        ({"max_window_layers": 1, "sliding_window": 128}, None),
        ({"layer_types": ["full_attention"] * 2, "max_window_layers": 0}, None),
        ({"layer_types": ["sliding_attention"] * 2}, 48),
    ],
    ids=str,
)
def test_qwen_windows(tmp_path: Path, changes: dict[str, Any], window: int | None) -> None:
    assert load_hf_config(write(tmp_path, **{**WINDOW, **changes})).sliding_window == window


@pytest.mark.parametrize(
    "changes",
    [{"max_window_layers": 1}, {"layer_types": ["full_attention", "sliding_attention"]}],
    ids=str,
)
def test_a_window_of_some_layers_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match="gives 1 of 2 layers a window of 48 tokens"):
        load_hf_config(write(tmp_path, **{**WINDOW, **changes}))


OPT: dict[str, Any] = {"architectures": ["OPTForCausalLM"], "ffn_dim": 256}


def test_opt(tmp_path: Path) -> None:
    config = load_hf_config(write(tmp_path, **OPT))
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (4, 16, 2048)
    assert (config.intermediate_size, config.embedding_size) == (256, 64)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (True,) * 3
    assert (config.norm_after, config.final_norm, config.has_rotation) == (False, True, False)
    config = load_hf_config(
        write(tmp_path, **OPT, do_layer_norm_before=False, word_embed_proj_dim=32)
    )
    assert (config.norm_after, config.final_norm, config.embedding_size) == (True, False, 32)
    config = load_hf_config(write(tmp_path, **OPT, _remove_final_layer_norm=True))
    assert (config.norm_after, config.final_norm) == (False, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "gelu"}, "activation_function 'gelu' is not supported"),
        ({"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine false is not"),
        ({"ffn_dim": None}, "ffn_dim is missing"),
    ],
)
def test_what_is_refused_of_opt(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"config\.json: .*{message}"):
        load_hf_config(write(tmp_path, **{**OPT, **changes}))
