"""The HTTP application: routes, and one place where errors become answers."""

from __future__ import annotations

import time

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo.config import ServerConfig
from octavo.engine.client import AsyncEngine
from octavo.server.body import read_body
from octavo.server.chat import ChatShape, start_chat
from octavo.server.completions import CompletionShape, start_completion
from octavo.server.errors import EXPECTED, APIError, ClientGoneError, as_api_error
from octavo.server.metrics import CONTENT_TYPE, Metrics
from octavo.server.protocol import ChatRequest, CompletionRequest, decode_request
from octavo.server.streaming import json_response, respond

# What proxies use for a client that closed the connection; nobody reads it.
_CLIENT_CLOSED_REQUEST = 499


def create_app(engine: AsyncEngine, config: ServerConfig, *, model_name: str) -> FastAPI:
    """The application that serves ``engine`` under ``model_name``."""
    app = FastAPI(title="Octavo", docs_url=None, redoc_url=None, openapi_url=None)
    metrics = Metrics(lambda: engine.stats)
    engine.observer = metrics
    card = {
        "id": model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "octavo",
        "max_model_len": engine.report.max_model_len,
    }

    def check_model(name: str | None) -> None:
        if name is not None and name != model_name:
            raise APIError(
                f"the model {name[:200]!r} does not exist; this server has {model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        data = await read_body(request, config.max_request_bytes)
        body = decode_request(data, CompletionRequest)
        check_model(body.model)
        return await respond(
            request,
            await start_completion(engine, body),
            CompletionShape(model_name),
            stream=bool(body.stream),
            include_usage=body.include_usage,
        )

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        data = await read_body(request, config.max_request_bytes)
        body = decode_request(data, ChatRequest)
        check_model(body.model)
        return await respond(
            request,
            await start_chat(engine, body),
            ChatShape(model_name),
            stream=bool(body.stream),
            include_usage=body.include_usage,
        )

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        check_model(name)
        return json_response(card)

    @app.get("/health")
    async def health() -> Response:
        if engine.is_healthy:
            return json_response({"status": "ok"})
        raise APIError(
            "the engine is shutting down" if engine.error is None else "the engine is dead",
            status=503,
            kind="server_error",
            code="engine_unavailable",
        )

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    _add_error_handlers(app)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        place = f"{request.method} {request.url.path[:200]}"
        text = f"{place}: {error.detail}; see GET /v1/models, POST /v1/chat/completions"
        return APIError(text, status=error.status_code, headers=error.headers).response()

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    for kind in EXPECTED:
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(HTTPException, no_route)
    app.add_exception_handler(ClientGoneError, gone)
    # Whatever else is raised is a bug: answered with 500, and logged by the server.
    app.add_exception_handler(Exception, answer)
