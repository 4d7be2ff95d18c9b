"""From configs to a running server and back to nothing: sockets, signals, the order of things."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import math
import resource
import shlex
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from octavo.config import ConfigError, EngineConfig, ResourceError, ServerConfig
from octavo.engine.background import in_thread
from octavo.engine.child import COMMAND
from octavo.engine.client import AsyncEngine
from octavo.engine.logs import configure_logs
from octavo.model_store import KNOWN_MODELS, ensure_model, hub_name
from octavo.server.app import ANY_NAME, create_app
from octavo.server.connections import limited_protocol
from octavo.server.gate import MAX_HEAD_BYTES
from octavo.server.prefixes import read_prefix_files, register_files
from octavo.server.protocol import PrefixRequest
from octavo.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer

logger = logging.getLogger(__name__)

_BACKLOG = 2048
# Beyond the drain: time to write the last answers.
_LAST_ANSWERS_S = 5
_TICK_S = 1.0
_OTHER_DESCRIPTORS = 256
# SmolLM2 on a CPU listens with 20 and no less than 19 will do; some for clients, for those who are
# refused while others are connected, and for other libraries than these.
_FEWEST_DESCRIPTORS = 32
_HURRIED_ANSWERS_S = 1
# What looking up a host says where it is not the host's name that is at fault.
_NOT_NOW = (socket.EAI_AGAIN, socket.EAI_MEMORY, socket.EAI_SYSTEM)


def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    engine_command: Sequence[str] = COMMAND,
) -> int:
    """Serve until SIGTERM or SIGINT, then drain and return the exit code: 0, or 1 where the engine
    had died and requests were refused.

    A second signal cuts the drain short.

    Raises:
        ConfigError: the address cannot be listened on, or a prefix's file cannot be read (both
            found before the model is loaded), or a prefix cannot be kept.
        ModelStoreError, TokenizerError, ChatTemplateError: the model's files are not usable.
        DownloadError: the model could not be fetched.
        ResourceError: this process may open too few files.
        EngineStartError: the engine could not start.
    """
    configure_logs(server_config.log_format, server_config.log_level)
    _check_descriptors()
    bodies = read_prefix_files(engine_config, server_config.prefixes)
    allowed = _allow_descriptors(2 * server_config.max_connections) // 2
    if allowed < server_config.max_connections:
        logger.warning(
            "the limit of open files (ulimit -n) leaves room for %d connections, not for "
            "--max-connections %d; more are answered 503",
            allowed,
            server_config.max_connections,
        )
        server_config = replace(server_config, max_connections=allowed)
    with contextlib.closing(listen(server_config.host, server_config.port)) as listener:
        is_whole = asyncio.run(
            _serve(engine_config, server_config, bodies, listener, engine_command)
        )
    return 0 if is_whole else 1


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Clients that connect while the model loads wait for it.

    Raises:
        OSError: the port is taken, the address is not this machine's, or names cannot be looked up
            now.
        ConfigError: there is no such host.
    """
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        text = f"host {host!r} cannot be used: {error.strerror or error}"
        is_asked = isinstance(error, socket.gaierror) and error.errno not in _NOT_NOW
        is_asked |= error.errno == errno.EAFNOSUPPORT
        raise (ConfigError(text) if is_asked else OSError(text)) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Its connections inherit this: a token's event must not wait for the last one's receipt.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another port (0 takes "
            "a free one) or host"
        ) from error
    return listener


def model_name_of(engine_config: EngineConfig, server_config: ServerConfig) -> str:
    """What clients call the model: as configured, a known name, or its file's or folder's name."""
    for name in server_config.served_model_names:
        if name != ANY_NAME:
            return name
    if engine_config.model in KNOWN_MODELS:
        return engine_config.model
    if (hub := hub_name(engine_config.model)) is not None:
        return hub.repo
    path = Path(engine_config.model).expanduser().resolve()
    return path.name.removesuffix(".gguf") or engine_config.model


async def _serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    prefixes: Sequence[PrefixRequest],
    listener: socket.socket,
    engine_command: Sequence[str],
) -> bool:
    """Whether the engine lived until it was to stop."""
    stop = _Stop()
    name = model_name_of(engine_config, server_config)
    print(f"Loading {name} ...", flush=True)
    starting = asyncio.create_task(
        _start_engine(engine_config, server_config, prefixes, engine_command)
    )
    stopping = asyncio.create_task(stop.first.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return True
        engine = starting.result()
    finally:
        stopping.cancel()
    try:
        app = create_app(engine, server_config, model_name=name)
        url = _url(server_config.host, listener)

        def announce() -> None:
            print(replace(engine.report, model=name), flush=True)
            curl = _curl(url, name, engine.tokenizer, bool(server_config.api_keys))
            print(f"Listening on {url}. Try:\n{curl}", flush=True)
            if server_config.log_format == "json":
                logger.info("ready", extra=engine.report.fields() | {"model": name, "url": url})

        server = _Server(app, server_config, announce)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        closing = asyncio.create_task(_close_on_signal(stop, server, engine, server_config))
        try:
            await serving
        finally:
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
    finally:
        error = engine.error
        await engine.close()
    return error is None


async def _start_engine(
    config: EngineConfig,
    server_config: ServerConfig,
    prefixes: Sequence[PrefixRequest],
    command: Sequence[str],
) -> AsyncEngine:
    """Fetch the model where it is a known one, load it and its tokenizer side by side, then
    register ``prefixes``."""
    path = await in_thread(lambda: ensure_model(config.model))

    def load() -> Tokenizer | None:
        try:
            return load_tokenizer(path)
        except TokenizerError:
            if config.load_format == "dummy":
                return None
            raise

    engine = await AsyncEngine.start(
        replace(config, model=str(path)),
        load,
        command=command,
        log_format=server_config.log_format,
        log_level=_engine_log_level(server_config.log_level),
    )
    paths = server_config.prefixes
    try:
        kept = await register_files(engine, paths, prefixes)
    except BaseException:
        await engine.close()
        raise
    for file, prefix in zip(paths, kept, strict=True):
        print(
            f"Registered {file} as {prefix.id}: {prefix.num_pinned_tokens} of {prefix.num_tokens} "
            "tokens are kept",
            flush=True,
        )
    return engine


async def _close_on_signal(
    stop: _Stop, server: _Server, engine: AsyncEngine, config: ServerConfig
) -> None:
    await stop.first.wait()
    server.exit()
    if engine.num_outstanding and config.drain_timeout_s > 0:
        print(
            f"Finishing {engine.num_outstanding} requests, for at most {config.drain_timeout_s:g} "
            "s; stop again to end them now",
            flush=True,
        )
    drain = asyncio.create_task(engine.close(config.drain_timeout_s))
    second = asyncio.create_task(stop.second.wait())
    try:
        await asyncio.wait({drain, second}, return_when=asyncio.FIRST_COMPLETED)
        await engine.close()
        await stop.second.wait()
        await asyncio.sleep(_HURRIED_ANSWERS_S)
        server.force_exit = True  # whoever still reads an answer is too slow
    finally:
        drain.cancel()
        second.cancel()


class _Stop:
    """The first and the second signal to stop."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._set)

    def _set(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handling, which ends the process by the signal's death."""

    def __init__(self, app: ASGIApp, limits: ServerConfig, on_started: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            http=limited_protocol(limits.max_connections, limits.client_timeout_s),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            # Of the loop: how many it accepts at once. It goes on through all of them when it runs
            # out of descriptors, with a traceback each. The kernel's is set behind it.
            backlog=1,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_graceful_shutdown=math.ceil(limits.drain_timeout_s) + _LAST_ANSWERS_S,
        )
        super().__init__(config)
        self._on_started = on_started
        self._exit = asyncio.Event()

    def exit(self) -> None:
        """Stop listening, and end once the connections have."""
        self.should_exit = True
        self._exit.set()

    async def main_loop(self) -> None:
        """Wakes once a second, for the answers' Date, where uvicorn's wakes ten times."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._exit.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _url(host: str, listener: socket.socket) -> str:
    """Where a client on this machine reaches the server."""
    port = listener.getsockname()[1]
    if host == "0.0.0.0":
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _curl(url: str, model: str, tokenizer: Tokenizer | None, has_keys: bool) -> str:
    """A command that works as it stands."""
    body: dict[str, object] = {"model": model}
    if tokenizer is not None and tokenizer.chat_template is not None:
        path = "/v1/chat/completions"
        body |= {"messages": [{"role": "user", "content": "What is a KV cache?"}]}
    elif tokenizer is not None:
        path, body["prompt"] = "/v1/completions", "A KV cache is"
    else:
        path, body["prompt"] = "/v1/completions", [1, 2, 3]
    body["max_tokens"] = 32
    data = shlex.quote(json.dumps(body))
    key = " -H 'Authorization: Bearer KEY'" if has_keys else ""
    return f"curl {url}{path} -H 'Content-Type: application/json'{key} -d {data}"


def _engine_log_level(level: str) -> str:
    """Requests are the front end's to log: at its level info the engine tells what is wrong."""
    return "warning" if level == "info" else level


def _check_descriptors() -> None:
    """Raises ResourceError where this user may not open the files of a server without clients."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _FEWEST_DESCRIPTORS:
        raise ResourceError(
            f"the limit of open files (ulimit -n) is {hard}, and a server needs at least "
            f"{_FEWEST_DESCRIPTORS}, and two for each connection; raise it"
        )


def _allow_descriptors(count: int) -> int:
    """Raise the limit of open files for ``count`` connections, as far as this user may. Returns
    for how many there is room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return count
    return max(min(count, soft - min(_OTHER_DESCRIPTORS, soft // 2 + 12)), 2)
