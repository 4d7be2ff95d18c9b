"""A server process over the tiny model: started, read, ended. No sleeps but polls to a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

DEADLINE_S = 60.0


def wait_for(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """The first true value of ``condition``."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"{what}: not within {deadline_s} s")


class TinyServer:
    """``serve()`` in a process of its own, on a free port."""

    def __init__(
        self,
        model: Path | str,
        *,
        engine: dict[str, Any] | None = None,
        server: dict[str, Any] | None = None,
        command: list[str] | None = None,
    ) -> None:
        options = {
            "engine": {"model": str(model), "kv_memory": "16MiB", "threads": 1} | (engine or {}),
            "server": {"port": 0, "served_model_names": ["tiny"], "log_level": "warning"}
            | (server or {}),
            "command": command,
        }
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("run_server.py")), json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=_collect, args=pair, daemon=True)
            for pair in (
                (self.process.stdout, self.lines),
                (self.process.stderr, self.errors),
            )
        ]
        for reader in self._readers:
            reader.start()
        self.url = ""
        self.engine_pid = 0

    def wait_ready(self) -> TinyServer:
        def url() -> str | None:
            assert self.process.poll() is None, "".join(self.errors)
            found = re.search(r"Listening on (http://\S+)\. Try:\ncurl .*\n", "".join(self.lines))
            return found[1] if found else None

        self.url = wait_for(url, "the server's address")
        self.engine_pid = self.children()[0].pid
        return self

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return host, int(port)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_exit(self) -> int:
        code = self.process.wait(DEADLINE_S)
        for reader in self._readers:
            reader.join(DEADLINE_S)
        return code

    def stop(self) -> None:
        """Whatever happened before, leave no process and no open pipe."""
        pids = [child.pid for child in self.children()] if self.process.poll() is None else []
        self.process.kill()
        for pid in {*pids, self.engine_pid} - {0}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait_exit()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()

    def metrics(self) -> dict[str, float]:
        text = httpx.get(f"{self.url}/metrics").raise_for_status().text
        pairs = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    def wait_idle(self) -> dict[str, float]:
        """The metrics once nothing runs and no block is in use."""

        def idle() -> dict[str, float] | None:
            metrics = self.metrics()
            gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            return None if any(metrics[f"octavo_{name}"] for name in gauges) else metrics

        return wait_for(idle, "the engine to be idle")


def _collect(stream: Any, lines: list[str]) -> None:
    for line in stream:
        lines.append(line)


def is_running(pid: int) -> bool:
    """Zombies do not run."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
