"""Reading a request's body within a limit, and noticing that its sender has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from octavo.server.errors import APIError, ClientGoneError

T = TypeVar("T")

# A body over the limit is read on and thrown away up to this many times the limit: a client that
# is cut off while it writes does not see the answer.
_DISCARD_FACTOR = 64
_CLOSE = {"Connection": "close"}


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """The body of a JSON request, at most ``limit`` bytes, which arrives within ``timeout_s``.

    Raises:
        APIError: it is larger, late or compressed, or is not declared as JSON (which also keeps web
            pages of other sites from posting to a server on loopback).
        ClientGoneError: the connection closed before the end.
    """
    chunks: list[bytes] = []
    if "100-continue" in request.headers.get("expect", "").lower():
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise _too_large(limit)  # it waits for the answer before it sends
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limit:
                    chunks.append(chunk)
                else:
                    chunks.clear()
                    if size > _DISCARD_FACTOR * limit:
                        break
    except ClientDisconnect as error:
        raise ClientGoneError from error
    except TimeoutError:
        if size <= limit:
            raise APIError(
                f"the body did not arrive within {timeout_s:g} s; send it faster",
                status=408,
                code="request_timeout",
                headers=_CLOSE,
            ) from None
    if size > limit:
        raise _too_large(limit)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise APIError(
            f"the content type is {kind[:100]!r}; send the header Content-Type: application/json",
            status=415,
            code="unsupported_media_type",
        )
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise APIError(
            f"the content encoding is {coding[:100]!r}; send the body as it is, without the header "
            "Content-Encoding",
            status=415,
            code="unsupported_media_type",
        )
    return b"".join(chunks)


def _too_large(limit: int) -> APIError:
    return APIError(
        f"the body is larger than {limit} bytes; send less (the server's --max-request-bytes)",
        status=413,
        code="request_too_large",
        headers=_CLOSE,
    )


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client closes the connection.

    Raises:
        ClientGoneError: it did. The body must have been read before.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for item in (task, watch):
            item.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
