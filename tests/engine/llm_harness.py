"""What tests of the offline `LLM` share."""

from __future__ import annotations

from typing import Any

from octavo.core.sampling_params import SamplingParams
from octavo.engine.llm import LLM, Completion

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
TEXTS = ["hello", "hello world 12", "né", "Once", "日本", "a", "  ", "12 12"]


def one(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> Completion:
    (completion,) = llm.generate(prompt, params)
    return completion
