"""The requests under way, as the front end knows them: takes a step's news apart and hands each
request its own. Knows no sockets and no processes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from octavo.core.request import Finished, FinishReason
from octavo.engine.logprobs import beam_logprobs, step_logprobs
from octavo.engine.messages import StepMessage
from octavo.engine.stream import RequestState

logger = logging.getLogger(__name__)


class Outstanding:
    """States by request number, from `add` to their end."""

    def __init__(self) -> None:
        self._states: dict[int, RequestState] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._states)

    async def wait_empty(self) -> None:
        """Until no request is under way."""
        await self._empty.wait()

    def add(self, states: Sequence[RequestState]) -> None:
        self._states.update((state.number, state) for state in states)
        self._empty.clear()

    def end(self, number: int, error: Exception | None, reason: FinishReason) -> bool:
        """Whether the request was under way; its consumer gets ``error``, or just the end."""
        state = self._forget(number)
        if state is not None:
            state.fail(error, reason, time.monotonic())
        return state is not None

    def end_all(self, make_error: Callable[[], Exception]) -> None:
        """Every consumer gets an error of its own."""
        for number in list(self._states):
            self.end(number, make_error(), FinishReason.ERROR)

    def digest(self, message: StepMessage, now_s: float) -> tuple[int, ...]:
        """Hand out a step's news. Returns the requests that are over although the engine goes on
        with them."""
        for started in message.started:
            if (state := self._states.get(started.number)) is not None:
                state.start(started.waited_s, started.num_cached_tokens)
        failed = self._digest_prompts(message, now_s)
        tokens: dict[int, list[int]] = {}
        for number, token_id in message.tokens():
            tokens.setdefault(number, []).append(token_id)
        ends: dict[int, Finished] = {}
        for finished in message.finished:
            ends[finished.number] = finished
            tokens.setdefault(finished.number, [])
        logprobs = {} if message.logprobs is None else step_logprobs(message.outputs())
        beams = {wire.number: wire.beam() for wire in message.beams}
        given_up = []
        for number, token_ids in tokens.items():
            state = self._states.get(number)
            if state is None:  # aborted; the engine did not know yet
                continue
            end = ends.get(number)
            scores = (logprobs[number],) if number in logprobs else ()
            beam = beams.get(number)
            score = None
            if beam is not None:
                token_ids = beam.token_ids.tolist()
                scores, score = beam_logprobs(beam), beam.score
            try:
                if end is None:
                    state.receive(token_ids, None, None, now_s, scores)
                else:
                    state.num_cached_tokens = end.num_cached_tokens
                    state.receive(token_ids, end.reason, end.error, now_s, scores, score)
            except Exception as error:  # a text that cannot be made concerns its request only
                logger.exception("request %d failed in the front end", number)
                state.fail(error, FinishReason.ERROR, now_s)
            if state.finish_reason is not None:
                self._forget(number)
                if end is None:  # a stop string, or the failure above
                    given_up.append(number)
        return (*failed, *given_up)

    def _digest_prompts(self, message: StepMessage, now_s: float) -> list[int]:
        """Returns the requests that fail with it."""
        failed = []
        for wire in message.prompt_logprobs:
            state = self._states.get(wire.owner)
            if state is None:
                continue
            try:
                state.receive_prompt(wire.piece())
            except Exception as error:
                logger.exception("request %d failed in the front end", wire.owner)
                self._forget(wire.owner)
                state.fail(error, FinishReason.ERROR, now_s)
                failed.append(wire.owner)
        return failed

    def _forget(self, number: int) -> RequestState | None:
        state = self._states.pop(number, None)
        if not self._states:
            self._empty.set()
        return state
