"""Connections that cannot be held for ever: how many, and how long a client may take.

A uvicorn protocol over h11; knows HTTP's states and no routes.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from octavo.server.errors import LARGE_HEAD, APIError
from octavo.server.gate import Gate

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)

# The application answers a late body itself, with a status; this much later it is cut off.
_GRACE_S = 5.0
# How long a client that was told that there are too many connections may take to read it.
_SURPLUS_TIMEOUT_S = 5.0
_CUT_OFF_LOG_INTERVAL_S = 10.0

_LATE = APIError(
    "the request did not arrive in time; send it faster", status=408, code="request_timeout"
)
_TOO_MANY = APIError(
    "there are too many connections; try again later (the server's --max-connections)",
    status=503,
    kind="server_error",
    code="too_many_connections",
    headers={"Retry-After": "1", "Connection": "close"},
)


def limited_protocol(max_connections: int, client_timeout_s: float) -> type[H11Protocol]:
    """A protocol class with these limits.

    More than ``max_connections`` are answered 503, twice as many are cut off. A request's head and
    its body must each arrive within ``client_timeout_s``; a client that leaves what was written to
    it unread for as long is cut off, which ends its request.
    """

    class LimitedProtocol(_LimitedProtocol):
        pass

    LimitedProtocol.max_connections = max_connections
    LimitedProtocol.client_timeout_s = client_timeout_s
    return LimitedProtocol


class _LimitedProtocol(H11Protocol):
    max_connections: int
    client_timeout_s: float
    # Of all connections of one server.
    num_cut_off = 0
    silent_until_s = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._request_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self._is_reading_body = False
        self._timeout_s = self.client_timeout_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = _Writer(transport)  # type: ignore[assignment]
        if len(self.connections) > 2 * self.max_connections:
            self._tell_of_cut_off()
            transport.abort()
            return
        if len(self.connections) > self.max_connections:
            self.app = _ANSWER_TOO_MANY
            self._timeout_s = min(self._timeout_s, _SURPLUS_TIMEOUT_S)
        self._start_request_timer(self._timeout_s)

    def _tell_of_cut_off(self) -> None:
        """Once in a while: a flood of connections must not become one of lines."""
        kind = type(self)
        kind.num_cut_off += 1
        if self.loop.time() >= kind.silent_until_s:
            kind.silent_until_s = self.loop.time() + _CUT_OFF_LOG_INTERVAL_S
            logger.warning(
                "%d connections are open, twice --max-connections: %d were cut off so far",
                2 * self.max_connections,
                kind.num_cut_off,
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_request_timer()
        self._stop_reader_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            if not self._is_reading_body:
                self._is_reading_body = True
                self._stop_request_timer()
                self._start_request_timer(self._timeout_s + _GRACE_S)
            return
        self._is_reading_body = False
        if state is h11.IDLE and self.conn.trailing_data[0]:  # the beginning of a head
            if self._request_timer is None:
                self._start_request_timer(self._timeout_s)
        else:
            self._stop_request_timer()

    # The transport calls these when its buffer is full, and when it has drained.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_reader_timer()

    def resume_writing(self) -> None:
        self._stop_reader_timer()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._cut_off_unless_closed()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._cut_off_unless_closed()

    def send_400_response(self, msg: str) -> None:
        # Called where the parser's error is caught, which knows better than ``msg``.
        if getattr(sys.exc_info()[1], "error_status_hint", 400) == 431:
            self._answer(LARGE_HEAD)
            return
        self._answer(APIError(f"{msg} The server speaks HTTP/1.1.", code="invalid_http"))

    def _cut_off_unless_closed(self) -> None:
        """A closing transport waits for its last bytes to be read, if need be for ever."""
        if self.transport.is_closing():
            self._start_reader_timer()

    def _answer(self, error: APIError) -> None:
        body = error.body()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        response = h11.Response(
            status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status]
        )
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()
        self._cut_off_unless_closed()

    def _on_late_request(self) -> None:
        self._request_timer = None
        if self.transport.is_closing():
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self._answer(_LATE)
        else:
            self.transport.abort()

    def _start_request_timer(self, timeout_s: float) -> None:
        self._request_timer = self.loop.call_later(timeout_s, self._on_late_request)

    def _stop_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _start_reader_timer(self) -> None:
        if self._reader_timer is None:
            self._reader_timer = self.loop.call_later(self.client_timeout_s, self.transport.abort)

    def _stop_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None


class _Writer:
    """A transport that takes nothing more once the connection is lost. asyncio's own writes a line
    to the log for each piece that comes before its loop has told anybody."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


async def _answer_too_many(scope: Scope, receive: Receive, send: Send) -> None:
    await _TOO_MANY.response()(scope, receive, send)


# With an id and a line in the log, as any other answer.
_ANSWER_TOO_MANY = Gate(_answer_too_many)
