"""``/v1/chat/completions``: what it takes and how its answers are spelled."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from octavo.engine.client import AsyncEngine
from octavo.engine.output import OutputDelta
from octavo.server.generation import Generation, Result
from octavo.server.prompts import chat_prompt
from octavo.server.protocol import (
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    ChatRequest,
    Usage,
)


async def start_chat(engine: AsyncEngine, body: ChatRequest) -> Generation:
    """Raises as `chat_prompt` and `Generation`. Without a limit an answer may fill the context."""
    newer = body.max_completion_tokens
    params = body.sampling_params(body.max_tokens if newer is None else newer)
    prompt = await chat_prompt(body.messages, engine.tokenizer, engine.limits.max_length)
    return Generation(engine, [prompt], params)


class ChatShape:
    """Implements `octavo.server.streaming.Shape`. A stream's first chunk tells the role."""

    def __init__(self, model: str) -> None:
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model

    def answer(self, results: Sequence[Result], usage: Usage) -> Answer:
        choices = [
            ChatChoice(index, ChatMessage(result.text), finish_reason=result.finish_reason)
            for index, result in enumerate(results)
        ]
        return Answer(self._id, "chat.completion", self._created, self._model, choices, usage)

    def chunks(self, index: int, delta: OutputDelta, *, is_first: bool) -> list[Answer]:
        chunks = []
        if is_first:
            chunks.append(self._chunk(index, ChatDelta(role="assistant", content="")))
        if delta.text:
            chunks.append(self._chunk(index, ChatDelta(content=delta.text)))
        if delta.finish_reason is not None:
            chunks.append(self._chunk(index, ChatDelta(), delta.finish_reason))
        return chunks

    def usage_chunk(self, usage: Usage) -> Answer:
        answer = self._answer([])
        answer.usage = usage
        return answer

    def _chunk(self, index: int, delta: ChatDelta, reason: str | None = None) -> Answer:
        return self._answer([ChatChunkChoice(index, delta, finish_reason=reason)])

    def _answer(self, choices: list[Any]) -> Answer:
        return Answer(self._id, "chat.completion.chunk", self._created, self._model, choices)
