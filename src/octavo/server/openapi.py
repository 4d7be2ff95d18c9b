"""The OpenAPI description of the server: made from the structs that are read and answered.

msgspec gives the types; the ranges that are checked by hand are added here, so that what the
description allows is what the server takes (but for prompts that are too long, unknown models,
templates that refuse and fields that others bound, which their descriptions tell).
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo import __version__
from octavo.core.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BEAM_WIDTH,
    MAX_LENGTH_PENALTY,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from octavo.server.answers import (
    Answer,
    ChatChoice,
    CompletionChoice,
    Detokenized,
    Error,
    ModelCard,
    ModelList,
    PoolCard,
    PrefixCard,
    PrefixDropped,
    PrefixList,
    Sleeping,
    Status,
    Tokens,
    Version,
)
from octavo.server.gate import OPEN_PATHS
from octavo.server.prompts import MAX_PROMPTS, ROLES
from octavo.server.protocol import (
    MAX_CACHE_SALT_CHARS,
    MAX_CHOICES,
    UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PrefixRequest,
    ResizeRequest,
    TokenizeRequest,
)

Schema = dict[str, Any]

_ANSWERS = {
    "Completion": Answer[CompletionChoice],
    "ChatCompletion": Answer[ChatChoice],
    "ModelCard": ModelCard,
    "ModelList": ModelList,
    "Tokens": Tokens,
    "Detokenized": Detokenized,
    "Status": Status,
    "Version": Version,
    "Error": Error,
}
_ADMIN_ANSWERS = {
    "PrefixCard": PrefixCard,
    "PrefixList": PrefixList,
    "PrefixDropped": PrefixDropped,
    "PoolCard": PoolCard,
    "Sleeping": Sleeping,
}
_REQUESTS = {
    "CompletionRequest": CompletionRequest,
    "ChatRequest": ChatRequest,
    "TokenizeRequest": TokenizeRequest,
    "DetokenizeRequest": DetokenizeRequest,
}
# Each event of a stream.
_EVENT: Schema = {
    "type": "object",
    "description": "A chunk as JSON or, where it failed midway, an Error; [DONE] ends the stream.",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
# What any endpoint that reads a body may answer.
_BODY_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503)
_POOL_ERRORS = (400, 401, 409, 503)


def openapi(*, vocab_size: int, max_length: int, has_keys: bool, is_admin: bool = False) -> Schema:
    """The description for a model of ``vocab_size`` ids and sequences of ``max_length``; with the
    administrative endpoints where ``is_admin``."""
    names: dict[str, Any] = _ANSWERS | _REQUESTS
    if is_admin:
        names |= _ADMIN_ANSWERS | {"PrefixRequest": PrefixRequest, "ResizeRequest": ResizeRequest}
    references, schemas = msgspec.json.schema_components(
        names.values(), ref_template="#/components/schemas/{name}"
    )
    for name, reference in zip(names, references, strict=True):
        schemas.setdefault(name, reference)
    _describe_requests(schemas, vocab_size, max_length)
    document: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": __version__},
        "paths": _paths() | (_admin_paths() if is_admin else {}),
        "components": {"schemas": schemas},
    }
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        for path in OPEN_PATHS:
            document["paths"][path]["get"]["security"] = []
    return document


def _paths() -> Schema:
    return {
        "/v1/completions": _post("CompletionRequest", "Completion", is_streamed=True),
        "/v1/chat/completions": _post("ChatRequest", "ChatCompletion", is_streamed=True),
        "/tokenize": _post("TokenizeRequest", "Tokens"),
        "/detokenize": _post("DetokenizeRequest", "Detokenized"),
        "/v1/models": _get("ModelList", (401,)),
        "/v1/models/{name}": _get(
            "ModelCard",
            (401, 404),
            parameters=[
                {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            ],
        ),
        "/health": _get("Status", (503,)),
        "/ready": _get("Status", (503,)),
        "/version": _get("Version", ()),
        "/metrics": {
            "get": {
                "responses": {
                    "200": {
                        "description": "Prometheus' text format",
                        "content": {"text/plain": {"schema": {"type": "string"}}},
                    }
                }
            }
        },
    }


def _admin_paths() -> Schema:
    name = {"name": "prefix_id", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "/reset_prefix_cache": {"post": _get("Status", (401,))["get"]},
        "/prefixes": _post("PrefixRequest", "PrefixCard") | _get("PrefixList", (401,)),
        "/prefixes/{prefix_id}": {
            "delete": _get("PrefixDropped", (401, 404), parameters=[name])["get"]
        },
        "/kv/resize": _post("ResizeRequest", "PoolCard", errors=(409,)),
        "/sleep": {"post": _get("Status", _POOL_ERRORS, parameters=[_query("level", "1")])["get"]},
        "/wake_up": {
            "post": _get(
                "Status", _POOL_ERRORS, parameters=[_query("tags", "weights", "kv_cache")]
            )["get"]
        },
        "/is_sleeping": _get("Sleeping", (401,)),
    }


def _query(name: str, *values: str) -> Schema:
    return {"name": name, "in": "query", "schema": {"enum": list(values)}}


def _post(
    request: str, answer: str, *, is_streamed: bool = False, errors: tuple[int, ...] = ()
) -> Schema:
    content = _json(answer)
    if is_streamed:
        content["text/event-stream"] = {"schema": _EVENT}
    return {
        "post": {
            "requestBody": {"required": True, "content": _json(request)},
            "responses": {"200": {"description": answer, "content": content}}
            | _errors((*_BODY_ERRORS, *errors)),
        }
    }


def _get(answer: str, errors: tuple[int, ...], **rest: Any) -> Schema:
    good = {"200": {"description": answer, "content": _json(answer)}}
    return {"get": {"responses": good | _errors((*errors, 500)), **rest}}


def _errors(statuses: tuple[int, ...]) -> Schema:
    return {
        str(status): {"description": "An error", "content": _json("Error")} for status in statuses
    }


def _json(name: str) -> Schema:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _describe_requests(schemas: Schema, vocab_size: int, max_length: int) -> None:
    token = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    tokens = {"type": "array", "items": token, "minItems": 1, "maxItems": max_length}
    text = {"type": "string", "minLength": 1}
    stop = text | {"maxLength": MAX_STOP_STRING_CHARS}
    limit = {"type": "integer", "minimum": 1, "maximum": max_length}
    penalty = {"type": "number", "minimum": -MAX_PENALTY, "maximum": MAX_PENALTY}
    top = {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}
    message = {
        "type": "object",
        "properties": {"role": {"enum": list(ROLES)}, "content": _content()},
        "required": ["role", "content"],
    }
    messages = {"type": "array", "items": message, "minItems": 1}
    ranges: Schema = {
        "n": {"type": "integer", "minimum": 1, "maximum": MAX_CHOICES},
        "cache_salt": {"type": "string", "minLength": 1, "maxLength": MAX_CACHE_SALT_CHARS},
        "temperature": {"type": "number", "minimum": 0, "maximum": 100},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "min_p": {"type": "number", "minimum": 0, "maximum": 1},
        "top_k": {"type": "integer", "minimum": -1, "maximum": 2**31 - 1},
        "seed": {"type": "integer", "minimum": -MAX_SEED - 1, "maximum": MAX_SEED},
        "stop_token_ids": {"type": "array", "items": token, "maxItems": MAX_STOP_TOKEN_IDS},
        "stop": {
            "anyOf": [
                stop | {"minLength": 0},  # an empty text stops nothing
                {"type": "array", "items": stop, "maxItems": MAX_STOP_STRINGS},
            ]
        },
        "logit_bias": {
            "type": "object",
            "description": f"Token id to what is added to its logit; at most {MAX_LOGIT_BIASES}.",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
            "additionalProperties": {
                "type": "number",
                "minimum": -MAX_LOGIT_BIAS,
                "maximum": MAX_LOGIT_BIAS,
            },
            "maxProperties": MAX_LOGIT_BIASES,
        },
        "presence_penalty": penalty,
        "frequency_penalty": penalty,
        "repetition_penalty": {
            "type": "number",
            "exclusiveMinimum": 0,
            "maximum": MAX_REPETITION_PENALTY,
        },
        "min_tokens": {
            "type": "integer",
            "description": "At most max_tokens.",
            "minimum": 0,
            "maximum": max_length,
        },
        "bad_words": {
            "type": "array",
            "items": text | {"maxLength": MAX_BAD_WORD_CHARS},
            "maxItems": MAX_BAD_WORDS,
        },
        "allowed_token_ids": {
            "type": "array",
            "items": token,
            "minItems": 1,
            "maxItems": MAX_ALLOWED_TOKEN_IDS,
        },
        "best_of": {
            "type": "integer",
            "description": "Of so many samples the n likeliest are the choices. At least n; more "
            "than n cannot be streamed.",
            "minimum": 1,
            "maximum": MAX_CHOICES,
        },
        "use_beam_search": {
            "type": "boolean",
            "description": "Look for the likeliest sequences instead of sampling; the choices are "
            "the n best, whole at the end. Goes with a temperature of 0 or 1, stop_token_ids, "
            "min_tokens and log probabilities; stop, best_of and what else shapes sampling is "
            "refused.",
        },
        "beam_width": {
            "type": "integer",
            "description": "Candidates of a beam search, at least n, which is the default.",
            "minimum": 1,
            "maximum": MAX_BEAM_WIDTH,
        },
        "length_penalty": {
            "type": "number",
            "description": "Beams are ranked by the sum of their log probabilities over their "
            "length to this power. Needs use_beam_search: true, unless it is 1.",
            "minimum": -MAX_LENGTH_PENALTY,
            "maximum": MAX_LENGTH_PENALTY,
        },
        "early_stopping": {
            "enum": [True, False, "never"],
            "description": "When a beam search ends: as soon as beam_width have ended, when no "
            "candidate is better at its length, or when none could become better at any length. "
            "Needs use_beam_search: true, unless it is false.",
        },
        "prompt_logprobs": top,
        "top_logprobs": top | {"description": "Needs logprobs: true."},
        "max_tokens": limit,
        "max_completion_tokens": limit,
        "messages": messages,
    }
    for kind in (CompletionRequest, ChatRequest):
        properties = schemas[kind.__name__]["properties"]
        for field, schema in ranges.items():
            if field in properties:
                properties[field] = _or_null(schema)
        for field, harmless in UNSUPPORTED.items():
            if field in kind.supported:
                continue
            properties[field] = {
                "description": f"Not supported yet: leave {field} out.",
                "enum": [*harmless[:1], None],
            }
    prompts = [text, tokens]
    prompt_list = [
        {"type": "array", "items": p, "minItems": 1, "maxItems": MAX_PROMPTS} for p in prompts
    ]
    completion = schemas["CompletionRequest"]
    completion["properties"]["prompt"] = {"anyOf": [*prompts, *prompt_list]}
    completion["properties"]["logprobs"] = _or_null(top)
    completion["properties"]["max_tokens"] = _or_null(limit | {"minimum": 0})
    completion["required"] = ["prompt"]
    schemas["ChatRequest"]["properties"]["messages"] = messages
    schemas["ChatRequest"]["required"] = ["messages"]
    given = {"prompt": {"type": "string"}, "messages": messages}
    schemas["TokenizeRequest"]["oneOf"] = _one_of(given)
    if (prefix := schemas.get("PrefixRequest")) is not None:
        prefix["description"] = "At least a block of tokens, which the pool has room to keep."
        prefix["properties"]["cache_salt"] = _or_null(ranges["cache_salt"])
        prefix["oneOf"] = _one_of(given | {"prompt": {"anyOf": prompts}})
    if (resize := schemas.get("ResizeRequest")) is not None:
        resize["description"] = "Where the pool's memory comes in pages (--kv virtual)."
        size = {"type": "string", "pattern": "^[1-9][0-9]{0,5}(KiB|MiB|GiB|TiB)$"}
        number = {"type": "integer", "minimum": 1}
        resize["properties"]["kv_memory"] = {"anyOf": [size, number]}
    schemas["DetokenizeRequest"]["properties"]["tokens"] = {"type": "array", "items": token}


def _one_of(given: Schema) -> list[Schema]:
    """One of the fields, and none of the others."""
    return [
        {
            "properties": {**{other: {"type": "null"} for other in given}, name: given[name]},
            "required": [name],
        }
        for name in given
    ]


def _content() -> Schema:
    part = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    }
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}
