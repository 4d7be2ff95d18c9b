"""The engine's streams behind one HTTP request: all started or none, merged, counted, ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.core.request import FinishReason
from octavo.core.sampling_params import SamplingParams
from octavo.engine.client import AsyncEngine
from octavo.engine.output import OutputDelta
from octavo.engine.stream import RequestStream
from octavo.server.answers import Usage
from octavo.server.errors import APIError


@dataclass(slots=True)
class Result:
    """One choice, complete."""

    finish_reason: FinishReason | None = None
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Generation:
    """``n`` choices for each prompt, in the order of the prompts: choice ``i`` answers prompt
    ``i // n``. With a seed, each prompt's choices have the seeds ``seed, seed + 1, ...``.

    Raises:
        RequestError, QueueFullError, EngineDeadError: a prompt was refused; none has been kept.
        APIError: there are more choices than the engine ever takes.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        n: int = 1,
        cache_salt: str = "",
    ) -> None:
        self._n = n
        room = engine.max_outstanding
        if len(prompts) * n > room:
            raise APIError(
                f"the request asks for {len(prompts) * n} choices ({len(prompts)} prompts, n {n}), "
                f"more than the {room} that this server runs and queues; ask for fewer",
                param="n" if n > 1 else "prompt",
            )
        self._num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        self._streams: list[RequestStream] = []
        try:
            for prompt in prompts:
                self._streams += engine.submit_samples(prompt, params, n, cache_salt)
        except BaseException:
            self.abort()
            raise

    def usage(self) -> Usage:
        num_cached = sum(stream.num_cached_tokens for stream in self._streams[:: self._n])
        num_output = sum(stream.num_tokens for stream in self._streams)
        return Usage.of(self._num_prompt_tokens, num_output, num_cached)

    def abort(self) -> None:
        """End what still runs."""
        for stream in self._streams:
            stream.abort()

    async def deltas(self) -> AsyncIterator[tuple[int, OutputDelta]]:
        """Pairs of choice and delta, as they come. Leaving early ends the request.

        Raises:
            APIError: a step of the engine failed.
            RequestError, QueueFullError, EngineDeadError: as iterating a `RequestStream`.
        """
        try:
            async for index, delta in _merged(self._streams):
                if delta.finish_reason is FinishReason.ERROR:
                    raise APIError(
                        delta.error or "the engine failed to compute the request",
                        status=500,
                        kind="server_error",
                        code="step_failed",
                    )
                yield index, delta
        finally:
            self.abort()

    async def results(self) -> list[Result]:
        """Every choice, once all are complete. Raises as `deltas`."""
        results = [Result() for _ in self._streams]
        try:
            async for index, delta in self.deltas():
                results[index].texts.append(delta.text)
                results[index].finish_reason = delta.finish_reason
        finally:
            self.abort()
        return results

    def summary(self) -> dict[str, Any]:
        """What the log says of it: counts, reasons and the longest times. No text."""
        usage = self.usage()
        reasons = {str(stream.finish_reason) for stream in self._streams if stream.finish_reason}
        lives = [stream.life() for stream in self._streams]
        times: dict[str, float] = {}
        for name in ("queue_s", "prefill_s", "decode_s"):
            known = [value for life in lives if (value := getattr(life, name)) is not None]
            if known:
                times[name] = round(max(known), 4)
        return {
            "choices": max(1, len(self._streams)),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "finish_reason": ",".join(sorted(reasons)) or None,
            **times,
        }


class EchoedPrompts(Generation):
    """Generates nothing: the answer to ``max_tokens`` 0 with ``echo``.

    Raises:
        RequestError: a prompt could not be served either way.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        n: int = 1,
        cache_salt: str = "",
    ) -> None:
        for prompt in prompts:
            engine.resolve(prompt, replace(params, max_tokens=1))
        super().__init__(engine, (), params)
        self._num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        self._num_choices = len(prompts) * n

    async def deltas(self) -> AsyncIterator[tuple[int, OutputDelta]]:
        for index in range(self._num_choices):
            yield index, OutputDelta("", (), FinishReason.LENGTH)

    async def results(self) -> list[Result]:
        return [Result(FinishReason.LENGTH) for _ in range(self._num_choices)]


async def _merged(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, OutputDelta]]:
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return

    async def step(index: int) -> tuple[int, OutputDelta | None]:
        return index, await anext(streams[index], None)

    pending = {asyncio.ensure_future(step(index)) for index in range(len(streams))}
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for index, news in sorted((task.result() for task in done), key=lambda pair: pair[0]):
                if news is not None:
                    yield index, news
                    pending.add(asyncio.ensure_future(step(index)))
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
