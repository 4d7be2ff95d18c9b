"""Bodies made from our own OpenAPI description, valid and not: never a 5xx, always as described.

Bounded and the same on every run; ``--long`` looks at a hundred times as many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tiny_model import write_tiny_model
from tiny_server import TinyServer

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)
# Short sequences: a random valid body often asks for the longest answer.
MAX_MODEL_LEN = 48
MAX_EXAMPLES, LONG_EXAMPLES = 12, 1250


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    # Takes every role and makes no prompt too long.
    template = "{% for message in messages[:3] %}> {{ message.content[:2] }}{% endfor %}"
    server = TinyServer(
        write_tiny_model(tmp_path_factory.mktemp("tiny"), template=template),
        engine={"max_model_len": MAX_MODEL_LEN, "max_queued_requests": 4096, "attention": "gather"},
        server={"served_model_names": ["tiny", "*"], "admin_endpoints": True},
    )
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def operations(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [(path, method) for path, item in document["paths"].items() for method in item]


def test_bodies_from_the_description(server: TinyServer, request: pytest.FixtureRequest) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    is_long = request.config.getoption("--long")
    statuses: dict[str, Counter[int]] = {}
    for path, method in operations(schema.raw_schema):
        operation = schema[path][method.upper()]
        modes = schemathesis.GenerationMode
        has_body = "requestBody" in schema.raw_schema["paths"][path][method]
        for mode in (modes.POSITIVE, modes.NEGATIVE) if has_body else (modes.POSITIVE,):
            strategy = operation.as_strategy(generation_mode=mode)
            found = statuses.setdefault(f"{method} {path} {mode.value}", Counter())
            _check_all(strategy, server, found, LONG_EXAMPLES if is_long else MAX_EXAMPLES)
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        # The description cannot say how long a text is in tokens, nor that 1.0 is no integer.
        assert statuses[f"post {path} positive"][200] > 0, statuses
        assert statuses[f"post {path} negative"].keys() & {400, 415}, statuses
    for prefix in httpx.get(f"{server.url}/prefixes").json()["data"]:
        assert httpx.delete(f"{server.url}/prefixes/{prefix['id']}").status_code == 200
    server.wait_idle()
    assert not server.errors, "".join(server.errors)
    assert httpx.get(f"{server.url}/health").status_code == 200


def _check_all(strategy: Any, server: TinyServer, found: Counter[int], max_examples: int) -> None:
    from hypothesis import given

    @settings(
        max_examples=max_examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def check(case: Any) -> None:
        response = case.call(base_url=server.url)
        found[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    check()
