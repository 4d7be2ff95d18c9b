"""What a client reads when something goes wrong: OpenAI's error object and a status.

One table from the engine's exceptions to answers; knows no routes.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from octavo.core.request import (
    AsleepError,
    ContextLengthError,
    PoolBusyError,
    PoolSizeError,
    QueueFullError,
    RequestError,
)
from octavo.engine.client import EngineDeadError
from octavo.text.chat_template import ChatTemplateError
from octavo.text.tokenizer import TokenizerError

INVALID = "invalid_request_error"
# Fields that only the engine's limits can judge, and its word for them, with which its messages
# start.
_ENGINE_FIELDS = {
    "n": "n",
    "beam_width": "beam_width",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "logit_bias": "logit_bias",
    "min_tokens": "min_tokens",
    "allowed_token_ids": "allowed_token_ids",
    "bad_words": "bad_words",
    "bad_words_token_ids": "bad_words",
}


class APIError(Exception):
    """An answer other than 200. ``param`` names the field at fault."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """``{"error": {"message", "type", "param", "code"}}``."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(
            self.body(), self.status, media_type="application/json", headers=self.headers
        )


LARGE_HEAD = APIError(
    "the request's line and headers are larger than the server takes; send fewer or shorter ones, "
    "and what is long in the body",
    status=431,
    code="request_headers_too_large",
)


def unavailable(message: str) -> APIError:
    return APIError(message, status=503, kind="server_error", code="engine_unavailable")


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads the answer."""


def as_api_error(error: Exception) -> APIError:
    """The answer for whatever was raised while a request was served."""
    if isinstance(error, APIError):
        return error
    text = str(error)
    if isinstance(error, ContextLengthError):
        return APIError(text, code="context_length_exceeded")
    if isinstance(error, AsleepError):
        return APIError(text, status=503, kind="server_error", code="engine_asleep")
    if isinstance(error, PoolSizeError):
        return APIError(text, param="kv_memory")
    if isinstance(error, PoolBusyError):
        return APIError(text, status=409, code="kv_cache_busy")
    if isinstance(error, ChatTemplateError):
        return APIError(text, param="messages")
    if isinstance(error, RequestError | TokenizerError):
        word = text.partition(" ")[0].rstrip(":,")
        return APIError(text, param=_ENGINE_FIELDS.get(word))
    if isinstance(error, QueueFullError):
        return APIError(
            text,
            status=429,
            kind="rate_limit_error",
            code="queue_full",
            headers={"Retry-After": "1"},
        )
    if isinstance(error, EngineDeadError):
        return unavailable(text)
    return APIError(
        "the server met an internal error; its log says more",
        status=500,
        kind="server_error",
        code="internal_error",
    )


# Exceptions that `as_api_error` knows; anything else is a bug and is logged as one.
EXPECTED: tuple[type[Exception], ...] = (
    APIError,
    RequestError,
    TokenizerError,
    ChatTemplateError,
    QueueFullError,
    EngineDeadError,
    PoolSizeError,
    PoolBusyError,
)
