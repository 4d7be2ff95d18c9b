"""Clients that are slow, silent, deaf or many, against our protocol in this process."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.body import read_body
from octavo.server.connections import limited_protocol
from octavo.server.errors import APIError
from octavo.server.streaming import EventStream

DEADLINE_S = 30.0
SHORT_S = 0.2
CHUNK = b"x" * 65536


class App:
    """``/body`` reads one, ``/stream`` sends for ever, ``/large`` much at once, ``/burst`` many
    small chunks once the client has left, anything else says ok."""

    def __init__(self) -> None:
        self.num_chunks = 0
        self.leave: Callable[[], None] = lambda: None
        self.has_ended = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        response: Response = Response(b"ok")
        if scope["path"] == "/stream":
            response = EventStream(self._chunks())
        elif scope["path"] == "/burst":
            response = EventStream(self._burst())
        elif scope["path"] == "/body":
            try:
                await read_body(request, 1000, SHORT_S)
            except APIError as error:
                response = error.response()
        elif scope["path"] == "/large":
            response = Response(CHUNK * 512)
        await response(scope, receive, send)
        if scope["path"] == "/large":
            self.has_ended.set()

    async def _chunks(self) -> AsyncIterator[bytes]:  # type: ignore[misc]
        try:
            while True:
                self.num_chunks += 1
                yield CHUNK
                await asyncio.sleep(0)
        finally:
            self.has_ended.set()

    async def _burst(self) -> AsyncIterator[bytes]:  # type: ignore[misc]
        yield b"begin"
        self.leave()
        for _ in range(50):
            yield b"more"
        self.has_ended.set()


Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@asynccontextmanager
async def serving(
    max_connections: int = 100, client_timeout_s: float = SHORT_S
) -> AsyncIterator[tuple[App, Connect, uvicorn.Server]]:
    app = App()
    config = uvicorn.Config(
        app,
        http=limited_protocol(max_connections, client_timeout_s),
        port=0,
        lifespan="off",
        log_config=None,
        timeout_keep_alive=1000,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    port = server.servers[0].sockets[0].getsockname()[1]
    writers = []

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        # A small buffer on this side: what is not read stays with the server.
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writers.append(writer)
        return reader, writer

    try:
        yield app, connect, server
    finally:
        for writer in writers:
            writer.close()
        server.force_exit = True
        await server.shutdown()


def run(test: Coroutine[Any, Any, None]) -> None:
    async def within_deadline() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test

    asyncio.run(within_deadline())


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Status and body of an answer after which the connection closes."""
    head, _, body = (await reader.read(1 << 20)).partition(b"\r\n\r\n")
    while data := await reader.read(1 << 20):
        body += data
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nHost:", b"G"])
def test_a_head_that_does_not_end_is_408(sent: bytes) -> None:
    async def test() -> None:
        async with serving() as (_, connect, _server):
            reader, writer = await connect()
            writer.write(sent)
            status, error = await read_answer(reader)
            assert (status, error["code"]) == (408, "request_timeout")

    run(test())


def test_a_silent_connection_is_closed() -> None:
    async def test() -> None:
        async with serving() as (_, connect, server):
            reader, _writer = await connect()
            assert await reader.read() == b""
            assert not server.server_state.connections

    run(test())


def test_a_body_that_drips_is_408() -> None:
    async def test() -> None:
        async with serving(client_timeout_s=100) as (_, connect, server):
            reader, writer = await connect()
            writer.write(b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n")

            async def drip() -> None:
                while True:
                    writer.write(b" ")
                    await asyncio.sleep(0.02)

            dripping = asyncio.create_task(drip())
            status, error = await read_answer(reader)
            dripping.cancel()
            assert (status, error["code"]) == (408, "request_timeout")
            while server.server_state.connections:
                await asyncio.sleep(0.01)

    run(test())


def test_a_too_large_body_that_waits_to_be_asked_for_is_refused_unread() -> None:
    async def test() -> None:
        async with serving(client_timeout_s=100) as (_, connect, _server):
            reader, writer = await connect()
            head = "POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\nExpect: 100-continue"
            writer.write(head.encode() + b"\r\n\r\n")
            status, error = await read_answer(reader)
            assert (status, error["code"]) == (413, "request_too_large")

    run(test())


def test_what_is_not_http_is_400() -> None:
    async def test() -> None:
        async with serving() as (_, connect, _server):
            reader, writer = await connect()
            writer.write(b"\x16\x03\x01 hello\r\n\r\n")
            status, error = await read_answer(reader)
            assert (status, error["code"]) == (400, "invalid_http")

    run(test())


@pytest.mark.parametrize("is_line", [True, False])
def test_a_head_that_is_too_large_is_told_so(is_line: bool) -> None:
    long = b"x" * 70_000
    head = b"GET /%b HTTP/1.1\r\n" % long if is_line else b"GET / HTTP/1.1\r\nA: %b\r\n" % long

    async def test() -> None:
        async with serving() as (_, connect, server):
            reader, writer = await connect()
            writer.write(head)  # and more would follow
            status, error = await read_answer(reader)
            assert (status, error["code"]) == (431, "request_headers_too_large")
            assert "shorter" in error["message"]
            while server.server_state.connections:
                await asyncio.sleep(0.01)

    run(test())


def test_a_client_that_never_reads_is_cut_off_and_holds_little() -> None:
    async def test() -> None:
        async with serving() as (app, connect, server):
            _reader, writer = await connect()
            writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
            await app.has_ended.wait()
            # What the kernel's buffers on both sides take, and one full buffer of the transport.
            assert app.num_chunks * len(CHUNK) < 32 * 2**20
            while server.server_state.connections or server.server_state.tasks:
                await asyncio.sleep(0.01)

    run(test())


def test_what_is_written_to_a_client_that_left_fills_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The chunks of many choices that are there at once, before the loop hears of the loss."""

    async def test() -> None:
        async with serving() as (app, _, server):
            client = socket.create_connection(server.servers[0].sockets[0].getsockname())
            reset = struct.pack("ii", 1, 0)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            app.leave = client.close
            client.sendall(b"GET /burst HTTP/1.1\r\nHost: x\r\n\r\n")
            await app.has_ended.wait()
            while server.server_state.connections or server.server_state.tasks:
                await asyncio.sleep(0.01)

    run(test())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_an_answer_that_nobody_reads_does_not_keep_its_connection() -> None:
    async def test() -> None:
        async with serving() as (app, connect, server):
            _reader, writer = await connect()
            writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            await app.has_ended.wait()
            assert server.server_state.connections
            while server.server_state.connections:
                await asyncio.sleep(0.01)

    run(test())


def test_more_connections_than_allowed_are_503_and_twice_as_many_are_cut_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with serving(max_connections=2, client_timeout_s=100) as (_, connect, server):
            kept = [await connect() for _ in range(2)]
            while len(server.server_state.connections) < 2:
                await asyncio.sleep(0.01)
            surplus = [await connect() for _ in range(2)]
            reader, writer = surplus[0]
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            status, error = await read_answer(reader)
            assert (status, error["code"]) == (503, "too_many_connections")
            await connect()
            cut_off, _ = await connect()
            with suppress(ConnectionResetError):
                assert await cut_off.read() == b""
            again, _ = await connect()
            with suppress(ConnectionResetError):
                assert await again.read() == b""
            reader, writer = kept[0]
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert b"200" in await reader.readline()

    with caplog.at_level(logging.INFO):
        run(test())
    lines = [record for record in caplog.records if record.name == "octavo.server.gate"]
    assert [(line.getMessage(), line.status) for line in lines] == [("GET /", 503)]  # type: ignore[attr-defined]
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "twice --max-connections: 1 were cut off" in warning.getMessage()
