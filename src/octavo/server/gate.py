"""What every HTTP request passes: an id, the keys, the log, and an answer for what nobody foresaw.

Plain ASGI around the application; knows no routes but those that need no key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.errors import LARGE_HEAD, APIError, as_api_error

# Probes and scrapers have no key.
OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics"})
MAX_HEAD_BYTES = 64 * 1024
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")

logger = logging.getLogger(__name__)


class Gate:
    """Gives each request its id, in ``scope["state"]["request_id"]`` and the header
    ``X-Request-Id``, and one line in the log at its end. A client's own id is kept where it is
    sane. Probes are logged at debug level only."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        began_s = time.monotonic()
        status = 0
        is_complete = False

        async def send_and_note(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            else:
                is_complete = not message.get("more_body", False)
            await send(message)

        try:
            # The parser limits only what arrives piece by piece.
            if _head_bytes(scope) > MAX_HEAD_BYTES:
                await LARGE_HEAD.response()(scope, receive, send_and_note)
                return
            await self._app(scope, receive, send_and_note)
        except Exception as error:
            logger.exception("a bug in the server", extra={"request_id": request_id})
            if not status:
                await as_api_error(error).response()(scope, receive, send_and_note)
            elif not is_complete:
                raise  # the connection must be closed; what follows would be read as the answer
        finally:
            _log(scope, status, time.monotonic() - began_s)


class KeyCheck:
    """Refuses requests without one of ``api_keys``, except for `OPEN_PATHS`.

    Every key is compared, as a digest and in constant time: nothing of a key can be learnt from
    how long a refusal takes.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._knows(scope):
            await _unauthorized().response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return kind.lower() == "bearer" and any(matches)


def _head_bytes(scope: Scope) -> int:
    """Of a request's line and headers, as they were sent but for white space."""
    line = len(scope["method"]) + len(scope.get("raw_path") or b"") + len(scope["query_string"])
    return line + sum(len(name) + len(value) + 4 for name, value in scope["headers"])


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _unauthorized() -> APIError:
    return APIError(
        "the API key is missing or wrong; send the header Authorization: Bearer KEY",
        status=401,
        kind="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _log(scope: Scope, status: int, duration_s: float) -> None:
    level = logging.DEBUG if scope["path"] in OPEN_PATHS else logging.INFO
    if not logger.isEnabledFor(level):
        return
    state = scope["state"]
    fields: dict[str, Any] = {
        "request_id": state["request_id"],
        "status": status or None,  # the client left before there was one
        "duration_s": round(duration_s, 4),
    }
    if (generation := state.get("generation")) is not None:
        fields |= generation.summary()
    path = repr(scope["path"][:200])[1:-1]
    logger.log(level, "%s %s", scope["method"][:20], path, extra=fields)
