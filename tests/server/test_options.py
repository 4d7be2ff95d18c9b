"""The server's options: what the command line passes on, and what is refused by name."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.cli import app
from octavo.config import ConfigError, EngineConfig, ServerConfig
from octavo.server import run
from octavo.server.run import model_name_of


def test_every_option_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def serve(engine: EngineConfig, server: ServerConfig) -> int:
        seen.append(server)
        return 0

    monkeypatch.setattr(run, "serve", serve)
    monkeypatch.setenv("OCTAVO_API_KEY", "from-the-environment")
    options = (
        "--host ::1 --port 9 --served-model-name a --served-model-name * --cors-origin https://x "
        "--drain-timeout 1 --stall-timeout 2 --client-timeout 3 --max-request-bytes 4096 "
        "--max-connections 5 --log-format json --log-level debug --prefix a.txt --prefix b.json"
    )
    expected = ServerConfig(
        host="::1",
        port=9,
        served_model_names=("a", "*"),
        api_keys=("from-the-environment",),
        cors_origins=("https://x",),
        drain_timeout_s=1,
        stall_timeout_s=2,
        client_timeout_s=3,
        max_request_bytes=4096,
        max_connections=5,
        log_format="json",
        log_level="debug",
        prefixes=("a.txt", "b.json"),
    )
    runner = CliRunner()
    result = runner.invoke(app, ["serve", "model", *options.split()])
    assert (result.exit_code, result.output) == (0, "")
    runner.invoke(app, ["serve", "model", "--api-key", "one", "--api-key", "two"])
    assert seen[0] == expected
    assert seen[1].api_keys == ("one", "two")


def test_every_option_of_the_engine_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each field has its option, with the field's own default."""
    seen: list[EngineConfig] = []
    monkeypatch.setattr(run, "serve", lambda engine, server: seen.append(engine) or 0)
    options = (
        "--device cpu --load-format dummy --dtype float32 --weights int8 --kv virtual "
        "--kv-dtype bf16 --block-size 32 --kv-memory 1GiB --no-prefix-caching --no-sharing "
        "--preemption swap --swap-memory 1MiB --max-model-len 128 --max-num-seqs 3 "
        "--max-num-batched-tokens 64 --max-queued-requests 5 --depth 2 --threads 1 "
        "--deterministic --attention contiguous --no-map-forks --scheduler static"
    )
    runner = CliRunner()
    result = runner.invoke(app, ["serve", "model", *options.split()])
    assert (result.exit_code, result.output) == (0, "")
    assert runner.invoke(app, ["serve"]).exit_code == 0
    # The one that goes with another manager only.
    reserving = runner.invoke(app, ["serve", "--kv", "contiguous", "--reserve", "oracle"])
    assert reserving.exit_code == 0, reserving.output
    given, default, other = seen
    assert default == EngineConfig()
    assert other.reserve == "oracle"
    same = [f.name for f in fields(given) if getattr(given, f.name) == getattr(default, f.name)]
    assert same == ["reserve"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("served_model_names", "name"),
        ("served_model_names", ("",)),
        ("api_keys", (1,)),
        ("api_keys", ("fine", "clé")),
        ("api_keys", ("two words",)),
        ("api_keys", ("line\n",)),
        ("cors_origins", ("",)),
        ("cors_origins", ("app.example",)),
        ("cors_origins", ("https://app.example/",)),
        ("cors_origins", ("*", "https://app.example/index.html")),
        ("cors_origins", ("https://App.example",)),
        ("cors_origins", ("https://app.example:443",)),
        ("prefixes", ("",)),
        ("stall_timeout_s", 0.0),
        ("client_timeout_s", float("nan")),
        ("drain_timeout_s", 1e9),
        ("max_connections", 0),
        ("log_format", "xml"),
        ("log_level", "loud"),
    ],
)
def test_a_wrong_option_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        ServerConfig(**{field: value})


def test_origins_as_browsers_write_them_are_taken() -> None:
    origins = ("*", "null", "https://x", "http://127.0.0.1:3000", "http://[::1]:8443")
    origins += ("chrome-extension://abc", "https://xn--caf-dma.example")
    assert ServerConfig(cors_origins=origins).cors_origins == origins


@pytest.mark.parametrize(
    ("names", "expected"),
    [((), "folder"), (("*",), "folder"), (("*", "a", "b"), "a")],
)
def test_the_model_is_called_by_its_first_name(names: tuple[str, ...], expected: str) -> None:
    config = EngineConfig(model="/somewhere/folder")
    assert model_name_of(config, ServerConfig(served_model_names=names)) == expected


@pytest.mark.parametrize(("limit", "room"), [(60, 18), (4096, 3840), (1 << 20, 8192)])
def test_connections_are_as_many_as_descriptors_allow(
    monkeypatch: pytest.MonkeyPatch, limit: int, room: int
) -> None:
    """The soft limit is raised to the hard one, if need be."""
    limits = [min(limit, 1024), limit]
    monkeypatch.setattr(run.resource, "getrlimit", lambda which: tuple(limits))

    def raise_limit(which: int, new: tuple[int, int]) -> None:
        limits[:] = new

    monkeypatch.setattr(run.resource, "setrlimit", raise_limit)
    assert run._allow_descriptors(8192) == room


def test_too_few_files_for_a_server_are_named_at_the_door() -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (14, 14))\n"
    code += "from octavo.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "no-such-model", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == (
        "octavo: the limit of open files (ulimit -n) is 14, and a server needs at least 32, and "
        "two for each connection; raise it\n"
    )


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), ConfigError),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), OSError),
        (OSError(errno.EMFILE, "Too many open files"), OSError),
    ],
)
def test_a_host_that_cannot_be_looked_up_now_is_not_a_wrong_one(
    monkeypatch: pytest.MonkeyPatch, error: OSError, kind: type[Exception]
) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise error

    monkeypatch.setattr(run.socket, "getaddrinfo", refuse)
    with pytest.raises(kind, match=f"host 'h' cannot be used: {error.strerror}") as caught:
        run.listen("h", 0)
    assert isinstance(caught.value, ValueError) == (kind is ConfigError)
