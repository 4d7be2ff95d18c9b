"""The engine process and the socket to it, as the front end holds them: opened, read, closed.

Knows messages as a whole and none of them; what they say is `client`'s affair.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio

from octavo.config import EngineConfig
from octavo.engine.child import ChildProcess, private_socket_path, remove_socket_path
from octavo.engine.messages import (
    MAX_MESSAGE_BYTES,
    FromEngine,
    ToEngine,
    decode_from_engine,
    encode,
)

logger = logging.getLogger(__name__)


class EngineConnection:
    """``digest`` gets each message; ``on_error`` a line that says why one could not be digested;
    ``on_exit`` the exit code. All are called on the event loop that it is made on."""

    def __init__(
        self,
        digest: Callable[[FromEngine], None],
        on_error: Callable[[str], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self._digest = digest
        self._on_error = on_error
        self._on_exit = on_exit
        self._exited = asyncio.Event()
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, 0)
        # Nothing is dropped and nothing blocks: the door bounds what is under way.
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._path = private_socket_path()
        self._child: ChildProcess | None = None
        self._reader: asyncio.Task[None] | None = None

    def open(
        self, config: EngineConfig, command: Sequence[str], log_format: str, log_level: str
    ) -> None:
        """Start the process and read what it says."""
        address = f"ipc://{self._path}"
        self._socket.bind(address)
        self._child = ChildProcess(
            config, address, self._note_exit, command, log_format=log_format, log_level=log_level
        )
        self._reader = asyncio.create_task(self._read(), name="octavo-engine-reader")

    def remove_path(self) -> None:
        """Both ends are connected and never reconnect: leave nothing behind, even after SIGKILL."""
        remove_socket_path(self._path)

    @property
    def pid(self) -> int | None:
        """The engine process; None before `open`."""
        return None if self._child is None else self._child.pid

    def send(self, message: ToEngine) -> None:
        """At once: the queue has no bound. To a dead process nothing needs to be sent."""
        self._socket.send(encode(message))

    async def _read(self) -> None:
        while True:
            data = await self._socket.recv()
            try:
                self._digest(decode_from_engine(data))
            except Exception as error:  # without a reader every request would wait for ever
                logger.exception("a message of the engine cannot be digested")
                self._on_error(f"{type(error).__name__}: {error}")

    def _note_exit(self, code: int) -> None:
        self._exited.set()
        self._on_exit(code)

    def kill(self) -> None:
        assert self._child is not None
        self._child.kill()

    async def wait_exit(self, timeout_s: float) -> None:
        """Wait until the process has ended; after ``timeout_s`` it is killed."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._exited.wait()
        except TimeoutError:
            self.kill()
            await self._exited.wait()

    async def close(self) -> None:
        """Read no more and leave no socket behind."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close(linger=0)
        self._context.term()
        remove_socket_path(self._path)
