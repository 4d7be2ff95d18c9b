"""What to say of an architecture that no family runs."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Names of config.json and of GGUF: Qwen3MoeForCausalLM, MixtralForCausalLM, qwen2moe, ...
_EXPERTS = re.compile(r"moe|mixtral|deepseekv[23]|deepseek2|gptoss|gpt-oss|dbrx|grok", re.I)
_NOT_TEXT_DECODERS = re.compile(
    r"ForConditionalGeneration|vlm?(For|\b|_)|vlmoe|vlchat|llava|mllama|pixtral|vision|audio|omni|^clip$",
    re.I,
)


def refusal(name: str, supported: Iterable[str]) -> str:
    """``name`` is not supported; why, where its name says so; and what is."""
    why = ""
    if _NOT_TEXT_DECODERS.search(name):
        why = " (it is multimodal or an encoder-decoder: only text decoders are)"
    elif _EXPERTS.search(name):
        why = " (it is a mixture of experts: only dense models are)"
    return f"{name[:80]!r} is not supported{why}; supported: {', '.join(supported)}"
