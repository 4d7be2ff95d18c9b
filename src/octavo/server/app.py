"""The HTTP application: routes, and one place where errors become answers."""

from __future__ import annotations

import time

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from octavo import __version__
from octavo.config import ServerConfig
from octavo.engine.client import AsyncEngine
from octavo.server.answers import Detokenized, ModelCard, ModelList, Status, Tokens, Version
from octavo.server.body import read_body
from octavo.server.chat import ChatShape, start_chat
from octavo.server.completions import CompletionShape, start_completion
from octavo.server.errors import EXPECTED, APIError, ClientGoneError, as_api_error, unavailable
from octavo.server.gate import Gate, KeyCheck
from octavo.server.metrics import CONTENT_TYPE, Metrics
from octavo.server.openapi import openapi
from octavo.server.pool import add_pool_routes
from octavo.server.prefixes import add_prefix_routes
from octavo.server.prompts import detokenize, tokenize
from octavo.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    R,
    TokenizeRequest,
    decode_request,
)
from octavo.server.streaming import json_response, respond

# Among the served names: any other name is taken too.
ANY_NAME = "*"
# What proxies use for a client that closed the connection; nobody reads it.
_CLIENT_CLOSED_REQUEST = 499


def create_app(engine: AsyncEngine, config: ServerConfig, *, model_name: str) -> ASGIApp:
    """The application that serves ``engine``. ``model_name`` is what the model itself is called."""
    app = FastAPI(title="Octavo", docs_url=None, redoc_url=None, openapi_url=None)
    metrics = Metrics(engine)
    engine.observer = metrics
    names = ModelNames(config.served_model_names or (model_name,), model_name)
    created = int(time.time())

    def card(name: str) -> ModelCard:
        # What is served at present: the pool may be smaller than the model's context.
        return ModelCard(name, created, model_name, engine.limits.max_length)

    async def read(request: Request, kind: type[R]) -> R:
        data = await read_body(request, config.max_request_bytes, config.client_timeout_s)
        return decode_request(data, kind)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read(request, CompletionRequest)
        name = names.check(body.model)
        generation, prompts = await start_completion(engine, body)
        metrics.on_choices(body.num_choices)
        request_id = request.state.request_id
        shape = CompletionShape(name, request_id, body, generation, prompts, engine.tokenizer)
        return await respond(request, body, generation, shape)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read(request, ChatRequest)
        name = names.check(body.model)
        generation = await start_chat(engine, body)
        metrics.on_choices(body.num_choices)
        shape = ChatShape(name, request.state.request_id, body, engine.tokenizer)
        return await respond(request, body, generation, shape)

    @app.post("/tokenize")
    async def tokenize_text(request: Request) -> Response:
        body = await read(request, TokenizeRequest)
        names.check(body.model)
        token_ids = await tokenize(body, engine.tokenizer, engine.limits.max_length)
        return json_response(Tokens(len(token_ids), engine.limits.max_length, token_ids))

    @app.post("/detokenize")
    async def detokenize_ids(request: Request) -> Response:
        body = await read(request, DetokenizeRequest)
        names.check(body.model)
        text = await detokenize(body.tokens, engine.tokenizer, engine.limits.vocab_size)
        return json_response(Detokenized(text))

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response(ModelList([card(name) for name in names.listed]))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_response(card(names.check(name)))

    @app.get("/health")
    async def health() -> Response:
        if problem := _health_problem(engine, config):
            raise unavailable(problem)
        return json_response(Status("ok"))

    @app.get("/ready")
    async def ready() -> Response:
        if problem := _health_problem(engine, config):
            raise unavailable(problem)
        if engine.num_outstanding >= engine.max_outstanding:
            raise unavailable(
                f"the queue is full: {engine.num_outstanding} requests run or wait (each of a "
                "request's n choices counts as one)"
            )
        if engine.is_asleep:
            raise unavailable("the engine is asleep; POST /wake_up")
        return json_response(Status("ready"))

    @app.get("/version")
    async def version() -> Response:
        return json_response(Version(__version__))

    admin = APIRouter()

    @admin.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        engine.reset_prefix_cache()
        return json_response(Status("ok"))

    add_prefix_routes(admin, engine, read, names.check)
    add_pool_routes(admin, engine, read)
    if config.admin_endpoints:
        app.include_router(admin)
    else:
        _refuse(app, admin)

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/openapi.json")
    async def openapi_page() -> Response:
        description = openapi(
            vocab_size=engine.limits.vocab_size,
            max_length=engine.limits.max_length,
            has_keys=bool(config.api_keys),
            is_admin=config.admin_endpoints,
        )
        return json_response(description)

    add_error_handlers(app)
    return _guarded(app, config)


class ModelNames:
    """The names that clients may use. ``default`` is what the model itself is called."""

    def __init__(self, served: tuple[str, ...], default: str) -> None:
        self._takes_any = ANY_NAME in served
        self.listed = tuple(name for name in served if name != ANY_NAME) or (default,)

    def check(self, name: str | None) -> str:
        """The name to answer with.

        Raises:
            APIError: there is no such model here.
        """
        if name is None:
            return self.listed[0]
        if name in self.listed or self._takes_any:
            return name
        listed = ", ".join(repr(known) for known in self.listed)
        raise APIError(
            f"the model {name[:200]!r} does not exist; this server has {listed}",
            status=404,
            param="model",
            code="model_not_found",
        )


def _refuse(app: FastAPI, admin: APIRouter) -> None:
    """Who asks for one of ``admin`` is told how there would be one."""

    async def refuse(request: Request) -> Response:
        raise APIError(
            f"{request.method[:20]} {request.url.path[:200]}: administrative endpoints are not "
            "served; start the server with --admin-endpoints",
            status=404,
            code="admin_endpoints_disabled",
        )

    for route in admin.routes:
        assert isinstance(route, APIRoute)
        app.add_api_route(route.path, refuse, methods=list(route.methods))


def _health_problem(engine: AsyncEngine, config: ServerConfig) -> str | None:
    if engine.death is not None:
        return f"the engine is dead and serves no more, restart the server: {engine.death}"
    if not engine.is_healthy:
        return "the engine is shutting down"
    if engine.silent_s > config.stall_timeout_s:
        return (
            f"the engine makes no progress: it has work and has ended no step for "
            f"{engine.silent_s:.0f} s"
        )
    return None


def _guarded(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    """Ids and logs outside, so that everything has them; then CORS, whose preflights have no key;
    then the keys."""
    if config.api_keys:
        app = KeyCheck(app, config.api_keys)
    if config.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    return Gate(app)


def add_error_handlers(app: FastAPI) -> None:
    """Answer whatever a route raises in OpenAI's shape."""

    async def answer(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        place = f"{request.method[:20]} {request.url.path[:200]}"
        text = f"{place}: {error.detail}; GET /openapi.json lists what is served"
        return APIError(text, status=error.status_code, headers=error.headers).response()

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    for kind in EXPECTED:
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(HTTPException, no_route)
    app.add_exception_handler(ClientGoneError, gone)
    # Whatever else is raised is a bug: answered with 500 here, and logged by the gate.
    app.add_exception_handler(Exception, answer)
