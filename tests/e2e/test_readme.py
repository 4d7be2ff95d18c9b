"""README and docs are true: every command in them is run, every relative link leads somewhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
STARTUP_S = 120


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    lines = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip()]


def test_every_kind_of_command_has_a_test() -> None:
    known = ("make serve", "make test", "curl ", ".venv/bin/octavo ")
    assert all(command.startswith(known) for command in commands()), commands()


def test_make_serve_answers_the_curl_line() -> None:
    (curl,) = [command for command in commands() if command.startswith("curl ")]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert "make serve" in commands()
    server = subprocess.Popen(
        ["make", "serve", f"PORT={port}"], cwd=ROOT, start_new_session=True, text=True
    )
    try:
        wait_until_healthy(server, port)
        curl = curl.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        done = subprocess.run(shlex.split(curl), capture_output=True, text=True, check=True)
        answer = json.loads(done.stdout)
        assert answer["choices"][0]["message"]["content"].strip()
        assert answer["usage"]["completion_tokens"] > 0
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=60)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def wait_until_healthy(server: subprocess.Popen[str], port: int) -> None:
    deadline = time.monotonic() + STARTUP_S
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended while it was starting"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"not healthy within {STARTUP_S} s")


@pytest.mark.parametrize("target", ["test", "test-long"])
def test_make_knows_the_test_targets(target: str) -> None:
    assert f"make {target}" in commands()
    done = subprocess.run(
        ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "pytest" in done.stdout


@pytest.mark.parametrize(
    "command", [c for c in commands() if c.startswith(".venv/bin/octavo ")], ids=str
)
def test_octavo_commands_run(command: str) -> None:
    arguments = shlex.split(command)[1:]
    done = subprocess.run(
        [sys.executable, "-m", "octavo", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if "--json" in arguments:
        json.loads(done.stdout)


def test_the_python_example_answers() -> None:
    (example,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@pytest.mark.parametrize("path", ["README.md", *map(str, sorted((ROOT / "docs").rglob("*.md")))])
def test_relative_links_lead_somewhere(path: str) -> None:
    page = ROOT / path
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
