"""``/v1/completions``: what it takes and how its answers are spelled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from octavo.engine.client import AsyncEngine
from octavo.engine.output import OutputDelta
from octavo.server.answers import Answer, CompletionChoice, Usage
from octavo.server.generation import EchoedPrompts, Generation, Result
from octavo.server.prompts import completion_prompts, prompt_texts
from octavo.server.protocol import CompletionRequest

DEFAULT_MAX_TOKENS = 16


async def start_completion(
    engine: AsyncEngine, body: CompletionRequest
) -> tuple[Generation, list[str]]:
    """The generation, and what is echoed before each prompt's choices: nothing without ``echo``.

    Raises as `completion_prompts`, `prompt_texts` and `Generation`.
    """
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    is_echo_only = bool(body.echo) and max_tokens == 0
    params = body.sampling_params(1 if is_echo_only else max_tokens)
    prompts = await completion_prompts(body.prompt, engine.tokenizer, engine.limits.max_length)
    kind = EchoedPrompts if is_echo_only else Generation
    generation = kind(engine, prompts, params, body.num_choices, body.cache_salt or "")
    if not body.echo:
        return generation, [""] * len(prompts)
    try:
        return generation, await prompt_texts(body.prompt, engine.tokenizer)
    except BaseException:
        generation.abort()
        raise


class CompletionShape:
    """Implements `octavo.server.streaming.Shape`. ``echoes`` has a text for each prompt."""

    def __init__(self, model: str, request_id: str, echoes: Sequence[str], n: int = 1) -> None:
        self._id = f"cmpl-{request_id}"
        self._created = int(time.time())
        self._model = model
        self._echoes = echoes
        self._n = n

    def answer(self, results: Sequence[Result], usage: Usage) -> Answer[CompletionChoice]:
        choices = [
            CompletionChoice(
                index, self._echo(index) + result.text, finish_reason=result.finish_reason
            )
            for index, result in enumerate(results)
        ]
        answer = self._answer(choices)
        answer.usage = usage
        return answer

    def chunks(
        self, index: int, delta: OutputDelta, *, is_first: bool
    ) -> list[Answer[CompletionChoice]]:
        if is_first and (echo := self._echo(index)):
            delta = replace(delta, text=echo + delta.text)
        if not delta.text and delta.finish_reason is None and not is_first:
            return []
        choice = CompletionChoice(index, delta.text, finish_reason=delta.finish_reason)
        return [self._answer([choice])]

    def usage_chunk(self, usage: Usage) -> Answer[CompletionChoice]:
        answer = self._answer([])
        answer.usage = usage
        return answer

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._n]

    def _answer(self, choices: list[CompletionChoice]) -> Answer[CompletionChoice]:
        return Answer(self._id, "text_completion", self._created, self._model, choices)
