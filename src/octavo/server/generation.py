"""The engine's streams behind one HTTP request: all started or none, merged, counted, ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from octavo.core.request import FinishReason
from octavo.core.sampling_params import SamplingParams
from octavo.engine.client import AsyncEngine
from octavo.engine.output import OutputDelta
from octavo.engine.stream import RequestStream
from octavo.server.errors import APIError
from octavo.server.protocol import Usage


@dataclass(slots=True)
class Result:
    """One choice, complete."""

    finish_reason: FinishReason | None = None
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Generation:
    """One stream for each choice, in the order of the prompts.

    Raises:
        RequestError, QueueFullError, EngineDeadError: a prompt was refused; none has been kept.
    """

    def __init__(
        self, engine: AsyncEngine, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> None:
        self._streams: list[RequestStream] = []
        try:
            for prompt in prompts:
                self._streams.append(engine.submit(prompt, params))
        except BaseException:
            self.abort()
            raise

    @property
    def num_choices(self) -> int:
        return len(self._streams)

    def usage(self) -> Usage:
        return Usage.of(
            sum(stream.num_prompt_tokens for stream in self._streams),
            sum(stream.num_tokens for stream in self._streams),
        )

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
