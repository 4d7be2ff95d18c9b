"""A tiny random Llama with a byte-level tokenizer and a ChatML template, written without torch.

Its head knows lower-case letters only, so whatever it says is readable and never ends by itself.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN, LAYERS, HEADS, KV_HEADS, MLP = 64, 2, 4, 2, 128
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 320  # some ids have no token, as in many checkpoints
MAX_LEN = 4096
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    letters = _write_tokenizer(folder, template)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(letters), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write_tokenizer(folder: Path, template: str | None) -> list[int]:
    """Returns the ids of the lower-case letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2]}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return [vocab[letter] for letter in string.ascii_lowercase]


def _weights(letters: list[int]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * 0.3).astype(np.float32)

    ones = np.ones(HIDDEN, dtype=np.float32)
    head = np.zeros((VOCAB, HIDDEN), dtype=np.float32)
    head[letters] = random.standard_normal((len(letters), HIDDEN)) * 4
    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": ones,
        "lm_head.weight": head,
    }
    head_dim = HIDDEN // HEADS
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": ones.copy(),
            prefix + "post_attention_layernorm.weight": ones.copy(),
            prefix + "self_attn.q_proj.weight": matrix(HEADS * head_dim, HIDDEN),
            prefix + "self_attn.k_proj.weight": matrix(KV_HEADS * head_dim, HIDDEN),
            prefix + "self_attn.v_proj.weight": matrix(KV_HEADS * head_dim, HIDDEN),
            prefix + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * head_dim),
            prefix + "mlp.gate_proj.weight": matrix(MLP, HIDDEN),
            prefix + "mlp.up_proj.weight": matrix(MLP, HIDDEN),
            prefix + "mlp.down_proj.weight": matrix(HIDDEN, MLP),
        }
    return tensors


def token_of(character: str) -> int:
    """The id of a character that the byte-level alphabet writes as itself."""
    return len(SPECIAL) + sorted(pre_tokenizers.ByteLevel.alphabet()).index(character)
