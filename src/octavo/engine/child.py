"""The engine process as its parent sees it: started, watched, ended. Knows no messages but one."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from octavo.config import EngineConfig
from octavo.engine.messages import Start, encode_start

# sun_path has 108 bytes on Linux and 104 elsewhere.
_MAX_ADDRESS_PATH = 100

# -P: modules are never taken from the directory where the server was started.
COMMAND = (sys.executable, "-P", "-m", "octavo.engine.process")


class ChildProcess:
    """A running engine process, which ends when this object's process does.

    ``on_exit`` is called on the event loop with the exit code, once. Make one on the thread that
    runs the event loop: the kernel ends the child when the thread that started it ends.
    """

    def __init__(
        self,
        config: EngineConfig,
        address: str,
        on_exit: Callable[[int], None],
        command: Sequence[str],
        *,
        log_format: str = "text",
        log_level: str = "warning",
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        # Its own session: a Ctrl-C in the terminal reaches the front end only, which drains.
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone; its exit says so
            start = Start(address, config, log_format, log_level)
            self._process.stdin.write(encode_start(start))
            self._process.stdin.flush()
        threading.Thread(target=self._watch, name="octavo-engine-watch", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def _watch(self) -> None:
        code = self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._on_exit, code)


def describe_exit(code: int) -> str:
    """Why a process ended, for a person."""
    if code >= 0:
        return f"the engine process ended with exit code {code}; its last messages say why"
    name = signal.Signals(-code).name
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"the engine process was ended by {name}{hint}"


def private_socket_path() -> Path:
    """A place for a socket in a new directory that only this user may enter."""
    folder = Path(tempfile.mkdtemp(prefix="octavo-"))
    if len(str(folder)) > _MAX_ADDRESS_PATH - len("/engine"):
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="octavo-", dir="/tmp"))
    return folder / "engine"


def remove_socket_path(path: Path) -> None:
    shutil.rmtree(path.parent, ignore_errors=True)
