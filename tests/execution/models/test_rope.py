"""The rotary table against transformers' frequencies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_llama
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.execution.models.hf_config import load_hf_config
from octavo.execution.models.rope import rope_table

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
        LLAMA3,
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_table_equals_transformers(tmp_path: Path, rope: dict[str, Any]) -> None:
    model = tiny_llama(rope_parameters=rope, head_dim=64)
    model.config.save_pretrained(tmp_path)
    config = load_hf_config(write_architecture(tmp_path))
    table = rope_table(config, 4096)
    embedding = LlamaRotaryEmbedding(model.config)
    cos, sin = embedding(torch.zeros(1), torch.arange(4096)[None])
    assert table.cos.shape == table.sin.shape == (4096, 32)
    assert table.cos.dtype == torch.float32
    torch.testing.assert_close(table.cos, cos[0, :, :32], atol=2e-4, rtol=0)
    torch.testing.assert_close(table.sin, sin[0, :, :32], atol=2e-4, rtol=0)


def write_architecture(directory: Path) -> Path:
    """A config saved without its model does not say which class it is for."""
    import json

    path = directory / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "architectures": ["LlamaForCausalLM"]})
    )
    return path
