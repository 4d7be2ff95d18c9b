"""Server-sent events, and the one path from a generation to an answer, whole or streamed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.engine.output import OutputDelta
from octavo.server.answers import Answer, Usage
from octavo.server.body import until_gone
from octavo.server.errors import EXPECTED, as_api_error
from octavo.server.generation import Generation, Result
from octavo.server.protocol import GenerationRequest

logger = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode


class Shape(Protocol):
    """How one endpoint spells its answers."""

    def answer(self, results: Sequence[Result], usage: Usage) -> Answer[Any]: ...

    def chunks(self, index: int, delta: OutputDelta, *, is_first: bool) -> Sequence[Answer[Any]]:
        """What is sent for a delta; nothing when it adds nothing to see."""

    def usage_chunk(self, usage: Usage) -> Answer[Any]: ...


async def respond(
    request: Request, body: GenerationRequest, generation: Generation, shape: Shape
) -> Response:
    """Run a generation to its answer. It ends when the client leaves.

    A stream's first delta is awaited before the headers, so that refusals have a status.

    Raises:
        ClientGoneError: the client left before the answer began.
    """
    request.state.generation = generation
    try:
        if not body.stream:
            results = await until_gone(request, generation.results())
            if not body.has_logprobs:
                return json_response(shape.answer(results, generation.usage()))
            # Perhaps twenty entries for each of many thousand tokens.
            return await asyncio.to_thread(
                lambda: json_response(shape.answer(results, generation.usage()))
            )
        deltas = generation.deltas()
        first = await until_gone(request, _first(deltas))
    except BaseException:
        generation.abort()
        raise
    return EventStream(_events(generation, shape, first, deltas, body))


def json_response(answer: object) -> Response:
    return Response(_encode(answer), media_type="application/json")


class EventStream(Response):
    """A ``text/event-stream`` of ready-made events that ends when the client leaves, also while
    it is slow to read."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        watching = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, watching):
                task.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first(
    deltas: AsyncIterator[tuple[int, OutputDelta]],
) -> tuple[int, OutputDelta]:
    return await anext(deltas)


async def _events(
    generation: Generation,
    shape: Shape,
    first: tuple[int, OutputDelta],
    rest: AsyncIterator[tuple[int, OutputDelta]],
    body: GenerationRequest,
) -> AsyncGenerator[bytes, None]:
    started: set[int] = set()

    def event(index: int, delta: OutputDelta) -> bytes:
        chunks = shape.chunks(index, delta, is_first=index not in started)
        started.add(index)
        if body.continuous_usage:
            for chunk in chunks:
                chunk.usage = generation.usage()
        elif body.include_usage:
            for chunk in chunks:
                chunk.usage = None
        return b"".join([_sse(_encode(chunk)) for chunk in chunks])

    async def event_of(index: int, delta: OutputDelta) -> bytes:
        if body.num_prompt_logprobs is not None and index not in started:
            return await asyncio.to_thread(event, index, delta)  # a long prompt's are many
        return event(index, delta)

    try:
        yield await event_of(*first)
        async for index, delta in rest:
            if data := await event_of(index, delta):
                yield data
        if body.include_usage:
            yield _sse(_encode(shape.usage_chunk(generation.usage())))
    except Exception as error:
        if not isinstance(error, EXPECTED):
            logger.exception("a stream failed")
        yield _sse(as_api_error(error).body())
    finally:
        generation.abort()
    yield _sse(b"[DONE]")


def _sse(data: bytes) -> bytes:
    return b"data: %b\n\n" % data
