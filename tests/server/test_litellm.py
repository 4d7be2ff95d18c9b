"""litellm, unchanged, as people put it before a server of their own."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from tiny_server import TinyServer

# Its prices come from the package, not from the network; read at import.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
import litellm

litellm.telemetry = False

# pydantic's remarks on litellm's own models
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

MESSAGES = [{"role": "user", "content": "Hello"}]


def options(server: TinyServer) -> dict[str, Any]:
    return {
        "model": "openai/tiny",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "max_tokens": 9,
        "temperature": 0,
        "num_retries": 0,
    }


def test_chats_whole_and_streamed(server: TinyServer) -> None:
    answer = litellm.completion(messages=MESSAGES, **options(server))
    text = answer.choices[0].message.content
    assert len(text) == 9
    assert answer.usage.completion_tokens == 9
    chunks = litellm.completion(
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        **options(server),
    )
    pieces, usage = [], None
    for chunk in chunks:
        usage = getattr(chunk, "usage", None) or usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(pieces) == text
    assert usage is not None
    assert usage.completion_tokens == 9


def test_asynchronous_chats(server: TinyServer) -> None:
    async def main() -> None:
        answers = await asyncio.gather(
            *(litellm.acompletion(messages=MESSAGES, **options(server)) for _ in range(4))
        )
        assert len({answer.choices[0].message.content for answer in answers}) == 1
        stream = await litellm.acompletion(messages=MESSAGES, stream=True, **options(server))
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == answers[0].choices[0].message.content

    asyncio.run(main())


def test_plain_completions(server: TinyServer) -> None:
    changed = options(server) | {"model": "text-completion-openai/tiny"}
    answer = litellm.text_completion(prompt="Hello", **changed)
    assert len(answer.choices[0].text) == 9


def test_errors_are_litellms_own(server: TinyServer) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=MESSAGES, **options(server) | {"temperature": -1})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=MESSAGES, **options(server) | {"model": "openai/other"})
    with pytest.raises(litellm.BadRequestError, match="maximum context length is"):
        litellm.completion(messages=MESSAGES, **options(server) | {"max_tokens": 5000})
