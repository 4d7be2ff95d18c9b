"""Architectures and the classes that run them. Names are config.json's or GGUF's."""

from __future__ import annotations

from octavo.execution.models.llama import LlamaModel

MODELS: dict[str, type[LlamaModel]] = {
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
    "llama": LlamaModel,  # GGUF's name for both
}
