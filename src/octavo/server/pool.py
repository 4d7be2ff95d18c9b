"""The KV cache's memory, for administrators: resize it, give all of it back, take it again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.client import AsyncEngine
from octavo.server.answers import PoolCard, Sleeping, Status
from octavo.server.errors import APIError
from octavo.server.protocol import ResizeRequest
from octavo.server.streaming import json_response


def add_pool_routes(
    routes: APIRouter,
    engine: AsyncEngine,
    read: Callable[[Request, type[ResizeRequest]], Awaitable[ResizeRequest]],
) -> None:
    """``POST /kv/resize``, and vLLM's ``/sleep``, ``/wake_up`` and ``/is_sleeping``."""

    @routes.post("/kv/resize")
    async def resize(request: Request) -> Response:
        body = await read(request, ResizeRequest)
        size = await engine.resize_kv(body.kv_memory)
        return json_response(
            PoolCard(size.num_blocks, size.block_size, size.num_tokens, size.num_bytes)
        )

    @routes.post("/sleep")
    async def sleep(request: Request) -> Response:
        # vLLM's level 2 drops the weights too.
        level = request.query_params.get("level", "1")
        if level != "1":
            raise APIError(
                f"level {level[:20]!r}: sleeping gives the KV cache's memory back and keeps the "
                "weights, which is level 1",
                param="level",
            )
        await engine.sleep()
        return json_response(Status("ok"))

    @routes.post("/wake_up")
    async def wake_up(request: Request) -> Response:
        # vLLM wakes up by parts; weights are always there.
        tags = request.query_params.getlist("tags")
        if unknown := [tag for tag in tags if tag not in ("weights", "kv_cache")]:
            raise APIError(
                f"tags: {unknown[0][:20]!r} is unknown; weights and kv_cache can be woken up",
                param="tags",
            )
        if not tags or "kv_cache" in tags:
            await engine.wake_up()
        return json_response(Status("ok"))

    @routes.get("/is_sleeping")
    async def is_sleeping() -> Response:
        return json_response(Sleeping(engine.is_asleep))
