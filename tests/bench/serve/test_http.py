"""The small HTTP client against servers that answer byte by byte as told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from octavo.bench.serve.http import HTTPClient, HTTPError

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
Use = Callable[[HTTPClient], Awaitable[object]]


def serve(answers: list[bytes], use: Use, timeout_s: float = 30.0) -> tuple[object, list[int]]:
    """What ``use`` returns, and how many requests each connection brought. Each answer is for one
    request; one that ends with ``|`` is followed by the connection's end."""
    left = list(answers)
    counts: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place = len(counts)
        counts.append(0)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                assert head.startswith(b"POST /base/x HTTP/1.1\r\nHost: 127.0.0.1:")
                assert b"\r\nX-Key: k\r\n" in head
                assert await reader.readexactly(4) == b"body"
                counts[place] += 1
                answer = left.pop(0)
                for byte in answer.removesuffix(b"|"):
                    writer.write(bytes([byte]))
                await writer.drain()
                if answer.endswith(b"|"):
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async def run() -> object:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = HTTPClient(
            f"http://127.0.0.1:{port}/base", headers={"X-Key": "k"}, timeout_s=timeout_s
        )
        try:
            async with asyncio.timeout(30):
                return await use(client)
        finally:
            client.close()
            server.close()

    return asyncio.run(run()), counts


async def post(client: HTTPClient) -> tuple[int, list[bytes]]:
    async with client.post("/x", b"body") as response:
        return response.status, [piece async for piece in response.pieces]


async def post_three_times(client: HTTPClient) -> list[tuple[int, list[bytes]]]:
    return [await post(client) for _ in range(3)]


def test_chunks_come_one_by_one_and_the_connection_is_kept() -> None:
    body = CHUNKED + b"3;x=y\r\nabc\r\nA\r\n0123456789\r\n0\r\nTrailer: t\r\n\r\n"
    found, counts = serve([body] * 3, post_three_times)
    assert found == [(200, [b"abc", b"0123456789"])] * 3
    assert counts == [3]


def test_sized_bodies_and_bodies_up_to_the_end() -> None:
    until_end = b"HTTP/1.1 503 No\r\nConnection: close\r\n\r\nall|"
    found, counts = serve([SIZED + b"12345", until_end, SIZED + b"12345"], post_three_times)
    assert [(status, b"".join(pieces)) for status, pieces in found] == [  # type: ignore[attr-defined]
        (200, b"12345"),
        (503, b"all"),
        (200, b"12345"),
    ]
    assert counts == [2, 1]


def test_an_idle_connection_that_the_server_closed_is_replaced() -> None:
    found, counts = serve([SIZED + b"12345|"] * 3, post_three_times)
    assert len(found) == 3  # type: ignore[arg-type]
    assert counts == [1, 1, 1]


def test_an_answer_that_is_not_read_to_its_end_closes_its_connection() -> None:
    async def leave(client: HTTPClient) -> None:
        for _ in range(2):
            async with client.post("/x", b"body") as response:
                assert response.status == 200

    assert serve([SIZED + b"12345"] * 2, leave)[1] == [1, 1]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"|", "broke off"),
        (CHUNKED + b"5\r\nab|", "broke off"),
        (CHUNKED + b"xyz\r\n|", "a chunk begins with b'xyz"),
        (SIZED + b"12|", "broke off 3 bytes before its end"),
        (b"SSH-2.0\r\n\r\n|", "does not speak HTTP/1.1"),
    ],
)
def test_an_answer_that_cannot_be_read(answer: bytes, message: str) -> None:
    with pytest.raises(HTTPError, match=message):
        serve([answer], post)


def test_a_server_that_falls_silent() -> None:
    with pytest.raises(HTTPError, match="took too long"):
        serve([CHUNKED + b"1\r\na\r\n"], post, timeout_s=0.2)


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(HTTPError, match="9"):
        asyncio.run(post(HTTPClient("http://127.0.0.1:9", timeout_s=1.0)))


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:8000", "http://"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ValueError, match="is not like http://host:port"):
        HTTPClient(url, timeout_s=1.0)
