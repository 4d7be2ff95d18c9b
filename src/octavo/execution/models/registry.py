"""Architectures and the families that run them. Names are config.json's or GGUF's."""

from __future__ import annotations

from octavo.execution.models.decoder import Family
from octavo.execution.models.llama import llama
from octavo.execution.models.opt import opt
from octavo.execution.models.qwen2 import qwen2
from octavo.execution.models.qwen3 import qwen3

MODELS: dict[str, Family] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": llama,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "OPTForCausalLM": opt,
    "llama": llama,  # GGUF's name for Llama and Mistral
    "qwen2": qwen2,
    "qwen3": qwen3,
}
