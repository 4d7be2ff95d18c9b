"""One request's results on their way from the engine's reader to whoever waits for them.

Knows text and times; knows no sockets. Everything happens on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from octavo.core.plan import PromptLogprobs
from octavo.core.request import FinishReason
from octavo.engine.logprobs import PromptScores, TokenLogprobs
from octavo.engine.output import OutputDelta, OutputText


class Observer(Protocol):
    """Told of every request's life, for metrics. Times are in seconds."""

    def on_first_token(
        self, num_prompt_tokens: int, num_cached_tokens: int, latency_s: float
    ) -> None:
        """The prompt, some of it cached, is done and the first token is here, ``latency_s`` after
        `submit`. Samples that share a prompt tell of it once; 0 for the others."""

    def on_tokens(self, num_tokens: int, gap_s: float | None) -> None:
        """Tokens that count arrived, ``gap_s`` after those before (None: they are the first)."""

    def on_end(self, reason: FinishReason, life: RequestLife) -> None:
        """The request ended; called once for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLife:
    """One request from `submit` to its end, in seconds and tokens.

    ``queue_s`` is from `submit` to the first step that ran it, ``prefill_s`` and ``decode_s``
    from there to the first and from the first to the last token; None: it did not come so far.
    ``max_tokens`` is what was asked for.
    """

    num_prompt_tokens: int
    num_tokens: int
    max_tokens: int
    whole_s: float
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None


class RequestState:
    """What has arrived for a request and not been taken yet.

    A slow consumer costs no more memory than the request's tokens: what waits is merged.
    """

    def __init__(
        self,
        number: int,
        num_prompt_tokens: int,
        output: OutputText | None,
        created_s: float,
        observer: Observer | None,
        max_tokens: int,
        *,
        runs_prompt: bool = True,
        prompt_scores: PromptScores | None = None,
    ) -> None:
        self.number = number
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        # All samples of a request share them; only the first receives.
        self.prompt_scores = prompt_scores
        self._output = output
        self._created_s = created_s
        self._started_s: float | None = None
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._ended_s: float | None = None
        self._observer = observer
        # Samples of one request share its prompt, which counts once.
        self._runs_prompt = runs_prompt
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._error: str | None = None
        self._score: float | None = None
        self._exception: Exception | None = None
        self._is_final_taken = False
        self._waiter: asyncio.Future[None] | None = None

    def start(self, waited_s: float, num_cached_tokens: int) -> None:
        """The engine has run the request for the first time, ``waited_s`` after it was sent."""
        self._started_s = self._created_s + max(0.0, waited_s)
        self.num_cached_tokens = num_cached_tokens

    def life(self, now_s: float) -> RequestLife:
        """Up to now, or to the end."""
        started, first, last = self._started_s, self._first_token_s, self._last_token_s
        return RequestLife(
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=self.num_tokens,
            max_tokens=self.max_tokens,
            whole_s=(now_s if self._ended_s is None else self._ended_s) - self._created_s,
            queue_s=None if started is None else started - self._created_s,
            prefill_s=None if started is None or first is None else max(0.0, first - started),
            decode_s=None if first is None or last is None else last - first,
        )

    def receive_prompt(self, piece: PromptLogprobs) -> None:
        """Keep what a step says of the prompt. The last piece comes before the first token."""
        if self.prompt_scores is not None:
            self.prompt_scores.add(piece)

    def receive(
        self,
        token_ids: Sequence[int],
        reason: FinishReason | None,
        error: str | None,
        now_s: float,
        logprobs: Sequence[TokenLogprobs] = (),
        score: float | None = None,
    ) -> None:
        """Digest a step's tokens. Sets `finish_reason` when the request is over, also where only
        a stop string says so. ``logprobs`` has an entry for each token, or none at all; a beam
        comes whole, with its ``score``."""
        self._score = score
        if self._output is None:
            delta = OutputDelta("", tuple(token_ids), reason, error)
        else:
            delta = self._output.add(token_ids, reason, error)
        self._texts.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        if logprobs:
            self._logprobs.extend(logprobs[: len(delta.token_ids)])
        self._note_tokens(len(delta.token_ids), now_s)
        if delta.finish_reason is not None:
            self._error = delta.error
            self._end(delta.finish_reason, now_s)
        self._wake()

    def fail(self, exception: Exception | None, reason: FinishReason, now_s: float) -> None:
        """The request is over without a last delta: the consumer gets ``exception``, or just the
        end when it is None."""
        self._exception = exception
        if exception is None:
            self._is_final_taken = True
            self._texts.clear()
            self._token_ids.clear()
            self._logprobs.clear()
        self._end(reason, now_s)
        self._wake()

    async def take(self) -> OutputDelta | None:
        """What has arrived since the last call, waiting for something; None after the end."""
        while True:
            if self._token_ids or (self.finish_reason is not None and not self._is_final_taken):
                return self._take()
            if self.finish_reason is not None:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _take(self) -> OutputDelta:
        text, token_ids = "".join(self._texts), tuple(self._token_ids)
        logprobs = tuple(self._logprobs)
        self._texts.clear()
        self._token_ids.clear()
        self._logprobs.clear()
        if self.finish_reason is None:
            return OutputDelta(text, token_ids, logprobs=logprobs)
        if self._exception is not None:
            if token_ids:
                return OutputDelta(text, token_ids, logprobs=logprobs)
            self._is_final_taken = True
            raise self._exception
        self._is_final_taken = True
        return OutputDelta(text, token_ids, self.finish_reason, self._error, logprobs, self._score)

    def _note_tokens(self, num_tokens: int, now_s: float) -> None:
        if not num_tokens:
            return
        last, self._last_token_s = self._last_token_s, now_s
        if last is None:
            self._first_token_s = now_s
        self.num_tokens += num_tokens
        if self._observer is not None:
            if last is None:
                prompt = (self.num_prompt_tokens, self.num_cached_tokens)
                prompt = prompt if self._runs_prompt else (0, 0)
                self._observer.on_first_token(*prompt, now_s - self._created_s)
            self._observer.on_tokens(num_tokens, None if last is None else now_s - last)

    def _end(self, reason: FinishReason, now_s: float) -> None:
        self.finish_reason = reason
        self._ended_s = now_s
        if self._observer is not None:
            self._observer.on_end(reason, self.life(now_s))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class RequestStream(AsyncIterator[OutputDelta]):
    """The deltas of one request, for one consumer.

    The last delta has a ``finish_reason``. The request is aborted in the engine when the consumer
    leaves early in any way: `abort`, the end of an ``async with``, cancellation, or dropping the
    stream.

    Iterating raises:
        RequestError, QueueFullError: the engine refused the request after all.
        EngineDeadError: the engine died or was stopped.
    """

    def __init__(self, state: RequestState, abort: Callable[[int], None]) -> None:
        self._state = state
        self._abort = abort
        self._loop = asyncio.get_running_loop()

    @property
    def num_prompt_tokens(self) -> int:
        return self._state.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far; those after a stop string do not count."""
        return self._state.num_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache; known with the first token."""
        return self._state.num_cached_tokens

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """An entry for each token of the prompt, None for its first; complete once there is a
        delta. None where `SamplingParams` did not ask."""
        scores = self._state.prompt_scores
        return None if scores is None else scores.values()

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._state.finish_reason

    def life(self) -> RequestLife:
        """How long each part of the request took, up to now or to its end."""
        return self._state.life(time.monotonic())

    async def __anext__(self) -> OutputDelta:
        try:
            delta = await self._state.take()
        except asyncio.CancelledError:
            self.abort()
            raise
        if delta is None:
            raise StopAsyncIteration
        return delta

    def abort(self) -> None:
        """End the request now; does nothing when it has ended."""
        if self._state.finish_reason is None:
            self._abort(self._state.number)

    async def aclose(self) -> None:
        self.abort()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()

    def __del__(self) -> None:
        # Dropped, perhaps by the garbage collector on another thread.
        if self._state.finish_reason is None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the engine
                self._loop.call_soon_threadsafe(self._abort, self._state.number)
