"""``/v1/chat/completions``: what it takes and how its answers are spelled."""

from __future__ import annotations

import time
from collections.abc import Sequence

from octavo.engine.client import AsyncEngine
from octavo.engine.logprobs import TokenLogprobs
from octavo.engine.output import OutputDelta
from octavo.server.answers import (
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Usage,
)
from octavo.server.errors import APIError
from octavo.server.generation import BestOf, Generation, Result
from octavo.server.logprobs import Spelling, chat_logprobs, spelled_score
from octavo.server.prompts import chat_prompt, with_bad_words
from octavo.server.protocol import ChatRequest
from octavo.text.tokenizer import Tokenizer


async def start_chat(engine: AsyncEngine, body: ChatRequest) -> Generation:
    """Without a limit an answer may fill the context. Raises as `chat_prompt`, `with_bad_words` and
    `Generation`."""
    newer = body.max_completion_tokens
    try:
        params = body.sampling_params(body.max_tokens if newer is None else newer)
    except APIError as error:
        if error.param == "max_tokens" and newer is not None:
            error.param = "max_completion_tokens"
        raise
    params = await with_bad_words(params, engine.tokenizer)
    prompt = await chat_prompt(body.messages, engine.tokenizer, engine.limits.max_length)
    n, salt = body.num_choices, body.cache_salt or ""
    if body.num_samples > n:
        return BestOf(engine, [prompt], params, n, salt, best_of=body.num_samples)
    return Generation(engine, [prompt], params, n, salt)


class ChatShape:
    """Implements `octavo.server.streaming.Shape`. A stream's first chunk tells the role."""

    def __init__(
        self, model: str, request_id: str, body: ChatRequest, tokenizer: Tokenizer | None
    ) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._created = int(time.time())
        self._model = model
        self._spelling = Spelling(tokenizer) if body.logprobs else None

    def answer(self, results: Sequence[Result], usage: Usage) -> Answer[ChatChoice]:
        choices = [
            ChatChoice(
                index,
                ChatMessage(result.text),
                self._logprobs(result.logprobs),
                result.finish_reason,
                spelled_score(result.score),
            )
            for index, result in enumerate(results)
        ]
        return Answer(self._id, "chat.completion", self._created, self._model, choices, usage)

    def chunks(
        self, index: int, delta: OutputDelta, *, is_first: bool
    ) -> list[Answer[ChatChunkChoice]]:
        chunks = []
        if is_first:
            chunks.append(self._chunk(index, ChatDelta(role="assistant", content="")))
        if delta.text or delta.logprobs:
            # Text may be held back while its tokens are told of.
            content = ChatDelta(content=delta.text)
            chunks.append(self._chunk(index, content, logprobs=self._logprobs(delta.logprobs)))
        if delta.finish_reason is not None:
            last = self._chunk(index, ChatDelta(), delta.finish_reason)
            last.choices[0].score = spelled_score(delta.score)
            chunks.append(last)
        return chunks

    def usage_chunk(self, usage: Usage) -> Answer[ChatChunkChoice]:
        answer = self._answer([])
        answer.usage = usage
        return answer

    def _logprobs(self, values: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        return None if self._spelling is None else chat_logprobs(values, self._spelling)

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        reason: str | None = None,
        logprobs: ChatLogprobs | None = None,
    ) -> Answer[ChatChunkChoice]:
        return self._answer([ChatChunkChoice(index, delta, logprobs, reason)])

    def _answer(self, choices: list[ChatChunkChoice]) -> Answer[ChatChunkChoice]:
        return Answer(self._id, "chat.completion.chunk", self._created, self._model, choices)
