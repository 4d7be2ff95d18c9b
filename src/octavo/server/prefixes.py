"""Registered prefixes: the administrative endpoints, and the files of ``octavo serve --prefix``."""

from __future__ import annotations

import codecs
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.config import ConfigError, EngineConfig
from octavo.core.request import QueueFullError, RequestError
from octavo.engine.client import AsyncEngine
from octavo.engine.prefixes import Prefix
from octavo.server.answers import PrefixCard, PrefixDropped, PrefixList
from octavo.server.errors import APIError, as_api_error
from octavo.server.prompts import chat_prompt, completion_prompts
from octavo.server.protocol import PrefixRequest, decode_request
from octavo.server.streaming import json_response
from octavo.text.chat_template import ChatTemplateError

R = TypeVar("R", bound=msgspec.Struct)

_MAX_FILE_BYTES = 16 * 2**20


def add_prefix_routes(
    routes: APIRouter,
    engine: AsyncEngine,
    read: Callable[[Request, type[PrefixRequest]], Awaitable[PrefixRequest]],
    check_model: Callable[[str | None], str],
) -> None:
    """``POST``, ``GET`` and ``DELETE`` for ``/prefixes``."""

    @routes.post("/prefixes")
    async def register_prefix(request: Request) -> Response:
        body = await read(request, PrefixRequest)
        check_model(body.model)
        return json_response(_card(await register(engine, body)))

    @routes.get("/prefixes")
    async def list_prefixes() -> Response:
        return json_response(PrefixList([_card(prefix) for prefix in engine.prefixes()]))

    @routes.delete("/prefixes/{prefix_id}")
    async def drop_prefix(prefix_id: str) -> Response:
        if not engine.drop_prefix(prefix_id):
            raise APIError(
                f"there is no prefix {prefix_id[:100]!r}; GET /prefixes lists them",
                status=404,
                param="id",
                code="prefix_not_found",
            )
        return json_response(PrefixDropped(prefix_id))


async def register(engine: AsyncEngine, body: PrefixRequest) -> Prefix:
    """Compute the prefix and keep it.

    Raises:
        APIError: it cannot be made or kept; names the field that holds it.
        QueueFullError, EngineDeadError: as for any request.
    """
    field, limit = "messages", engine.limits.max_length
    try:
        if body.messages is None:
            field = "prompt"
            (token_ids,) = await completion_prompts(body.prompt, engine.tokenizer, limit)  # type: ignore[arg-type]
        else:
            token_ids = await chat_prompt(
                body.messages, engine.tokenizer, limit, add_generation_prompt=False
            )
        return await engine.register_prefix(token_ids, body.cache_salt or "")
    except RequestError as error:
        answer = as_api_error(error)
        answer.param = answer.param or field
        raise answer from error


def _card(prefix: Prefix) -> PrefixCard:
    return PrefixCard(prefix.id, prefix.num_tokens, prefix.num_pinned_tokens)


# ── files ────────────────────────────────────────────────────────────────────────────────────────


def read_prefix_files(config: EngineConfig, paths: Sequence[str]) -> list[PrefixRequest]:
    """What each file asks for: a text as it is or, where its name ends in ``.json``, a list of chat
    messages, or an object as ``POST /prefixes`` takes it.

    Raises:
        ConfigError: a file cannot be used, or the engine will cache no prefixes.
    """
    if paths and config.kv == "contiguous":
        raise ConfigError("prefix needs prefix caching, which kv=contiguous has not; use kv=paged")
    if paths and not config.caches_prefixes:
        raise ConfigError(
            "prefix needs prefix caching; leave out --no-prefix-caching and --no-sharing"
        )
    return [_read_file(Path(path)) for path in paths]


def _read_file(path: Path) -> PrefixRequest:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise ConfigError(f"prefix {path}: larger than {_MAX_FILE_BYTES} bytes")
        data = data.removeprefix(codecs.BOM_UTF8)  # an editor's, and no part of the text
        if path.suffix.lower() != ".json":
            return PrefixRequest(prompt=data.decode())
        if data.lstrip().startswith(b"["):
            data = b'{"messages": %b}' % data
        return decode_request(data, PrefixRequest)
    except OSError as error:
        raise ConfigError(f"prefix {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"prefix {path} is not UTF-8 text: {error}") from error
    except APIError as error:
        raise ConfigError(f"prefix {path}: {error.message}") from error


async def register_files(
    engine: AsyncEngine, paths: Sequence[str], bodies: Sequence[PrefixRequest]
) -> list[Prefix]:
    """Register what `read_prefix_files` found.

    Raises:
        ConfigError: one cannot be kept; the message names its file.
    """
    prefixes = []
    for path, body in zip(paths, bodies, strict=True):
        try:
            prefixes.append(await register(engine, body))
        except (APIError, ChatTemplateError, QueueFullError) as error:
            raise ConfigError(f"prefix {path}: {as_api_error(error).message}") from error
    return prefixes
