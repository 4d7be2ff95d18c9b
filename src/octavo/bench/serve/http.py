"""As much of HTTP/1.1 as a load generator needs: POST a body, read what streams back.

General clients cost a third of a millisecond of CPU for each token that arrives (httpx, measured),
which on the machine that is measured too makes its server slower. Knows nothing of what it carries.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

# Of a response's head, and of the line before a chunk.
_MAX_HEAD_BYTES = 256 * 1024
_READ_BYTES = 64 * 1024
_CONNECT_TIMEOUT_S = 10.0


class HTTPError(Exception):
    """No answer, or none that can be read; the message says what happened."""


@dataclass(frozen=True, slots=True)
class Response:
    """``pieces`` are the body's bytes as they come: once, to the end."""

    status: int
    pieces: AsyncGenerator[bytes, None]


class HTTPClient:
    """Keeps connections to one origin and opens as many as there are requests at once.

    ``base_url`` is ``http`` or ``https``, perhaps with a path that all requests' paths follow; no
    piece of an answer may take longer than ``timeout_s``.

    Raises:
        ValueError: the URL names no host, or is of another scheme.
    """

    def __init__(
        self, base_url: str, *, headers: Mapping[str, str] | None = None, timeout_s: float
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{base_url!r} is not like http://host:port")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        lines = {"Host": parts.netloc.rpartition("@")[2], **(headers or {})}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator[Response]:
        """Send a JSON body. Leaving before the answer's end closes the connection.

        Raises:
            HTTPError: as said there; while ``pieces`` are read, too.
        """
        request = (
            f"POST {self._path}{path} HTTP/1.1\r\n{self._headers}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        try:
            connection, status, headers = await self._exchange(request)
            try:
                async with aclosing(connection.body(headers, self._timeout_s)) as pieces:
                    yield Response(status, pieces)
                if connection.is_reusable:
                    self._idle.append(connection)
            finally:
                if not connection.is_reusable:
                    connection.close()
        except TimeoutError as error:
            raise HTTPError("the server took too long") from error
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise HTTPError(f"the answer broke off: {error}") from error
        except OSError as error:
            raise HTTPError(str(error) or repr(error)) from error

    async def _exchange(self, request: bytes) -> tuple[_Connection, int, dict[str, str]]:
        while self._idle:
            connection = self._idle.pop()
            try:
                if not connection.reader.at_eof():
                    return await self._ask(connection, request)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                # The server closed an idle connection just then; the request was not looked at.
                if getattr(error, "partial", b""):
                    raise
            connection.close()
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(
                self._host, self._port, ssl=self._tls, limit=_MAX_HEAD_BYTES
            )
        return await self._ask(_Connection(reader, writer), request)

    async def _ask(
        self, connection: _Connection, request: bytes
    ) -> tuple[_Connection, int, dict[str, str]]:
        is_answered = False
        try:
            connection.writer.write(request)
            async with asyncio.timeout(self._timeout_s):
                await connection.writer.drain()
                status, headers = await connection.head()
            is_answered = True
            return connection, status, headers
        finally:
            if not is_answered:
                connection.close()

    def close(self) -> None:
        """Close what is kept."""
        while self._idle:
            self._idle.pop().close()


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.is_reusable = False

    def close(self) -> None:
        self.writer.close()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers, whose names are in small letters."""
        self.is_reusable = False
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip("\r\n").split("\r\n")
        version, _, rest = first.partition(" ")
        status = rest[:3]
        if not version.startswith("HTTP/1.") or not status.isdigit():
            raise HTTPError(f"the server does not speak HTTP/1.1: {first[:100]!r}")
        pairs = [line.partition(":") for line in lines]
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if version == "HTTP/1.0":
            headers.setdefault("connection", "close")
        return int(status), headers

    async def body(
        self, headers: Mapping[str, str], timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        """The body piece by piece. Whole, it leaves the connection to the next request."""
        if "chunked" in headers.get("transfer-encoding", "").lower():
            while piece := await self._within(timeout_s, self._chunk()):
                yield piece
        elif "content-length" in headers:
            left = int(headers["content-length"])
            while left:
                piece = await self._within(timeout_s, self.reader.read(min(left, _READ_BYTES)))
                if not piece:
                    raise HTTPError(f"the answer broke off {left} bytes before its end")
                left -= len(piece)
                yield piece
        else:
            while piece := await self._within(timeout_s, self.reader.read(_READ_BYTES)):
                yield piece
            return
        self.is_reusable = headers.get("connection", "").lower() != "close"

    async def _chunk(self) -> bytes:
        """The next chunk; empty at the end, whose trailers are read too."""
        line = await self.reader.readuntil(b"\r\n")
        try:
            size = int(line.split(b";")[0], 16)
        except ValueError:
            raise HTTPError(f"a chunk begins with {line[:40]!r}") from None
        if size:
            return (await self.reader.readexactly(size + 2))[:-2]
        while await self.reader.readuntil(b"\r\n") != b"\r\n":
            pass
        return b""

    @staticmethod
    async def _within(timeout_s: float, reading: Awaitable[bytes]) -> bytes:
        async with asyncio.timeout(timeout_s):
            return await reading
