"""``/v1/completions``: what it takes and how its answers are spelled."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from octavo.engine.client import AsyncEngine
from octavo.engine.output import OutputDelta
from octavo.server.generation import Generation, Result
from octavo.server.prompts import completion_prompts
from octavo.server.protocol import Answer, CompletionChoice, CompletionRequest, Usage

DEFAULT_MAX_TOKENS = 16


async def start_completion(engine: AsyncEngine, body: CompletionRequest) -> Generation:
    """Raises as `completion_prompts` and `Generation`."""
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = body.sampling_params(max_tokens)
    prompts = await completion_prompts(body.prompt, engine.tokenizer, engine.limits.max_length)
    return Generation(engine, prompts, params)


class CompletionShape:
    """Implements `octavo.server.streaming.Shape`."""

    def __init__(self, model: str) -> None:
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model

    def answer(self, results: Sequence[Result], usage: Usage) -> Answer:
        choices = [
            CompletionChoice(index, result.text, finish_reason=result.finish_reason)
            for index, result in enumerate(results)
        ]
        answer = self._answer(choices)
        answer.usage = usage
        return answer

    def chunks(self, index: int, delta: OutputDelta, *, is_first: bool) -> list[Answer]:
        if not delta.text and delta.finish_reason is None and not is_first:
            return []
        choice = CompletionChoice(index, delta.text, finish_reason=delta.finish_reason)
        return [self._answer([choice])]

    def usage_chunk(self, usage: Usage) -> Answer:
        answer = self._answer([])
        answer.usage = usage
        return answer

    def _answer(self, choices: list[CompletionChoice]) -> Answer:
        return Answer(self._id, "text_completion", self._created, self._model, choices)
