"""From what a client sent to prompt token ids, without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from octavo.core.request import ContextLengthError
from octavo.server.errors import APIError
from octavo.text.tokenizer import Tokenizer

T = TypeVar("T")

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_PROMPTS = 128
# Below this a text is tokenized at once (well under a millisecond), above on a thread.
_THREAD_CHARS = 4096
# The longest tokens of common vocabularies are runs of 128 spaces. A text with more characters a
# token than that is refused before it is tokenized.
_MAX_CHARS_PER_TOKEN = 128

Prompt = str | list[str | int | list[int]] | None


async def completion_prompts(
    prompt: Prompt, tokenizer: Tokenizer | None, max_length: int
) -> list[list[int]]:
    """The token ids of each prompt.

    Raises:
        APIError: it is not a text, token ids, or a list of either.
        ContextLengthError: a text is far too long.
    """
    return [
        await _encode_text(item, tokenizer, max_length) if isinstance(item, str) else item
        for item in _prompt_list(prompt)
    ]


async def chat_prompt(
    messages: Sequence[Mapping[str, Any]] | None, tokenizer: Tokenizer | None, max_length: int
) -> list[int]:
    """The token ids of a conversation, up to where the assistant's answer begins.

    Raises:
        APIError: the messages are malformed, or the model has no chat template.
        ChatTemplateError: the template refuses them.
        ContextLengthError: they are far too long.
    """
    _check_messages(messages)
    assert messages is not None
    if tokenizer is None or tokenizer.chat_template is None:
        raise APIError(
            "this model has no chat template; use /v1/completions with a plain prompt",
            param="messages",
            code="no_chat_template",
        )
    template, encode = tokenizer.chat_template, tokenizer.encode
    num_chars = sum(_num_chars(message) for message in messages)
    _check_length(num_chars, max_length)
    return await _maybe_on_thread(
        num_chars, lambda: encode(template.render(messages), add_special_tokens=False)
    )


def _prompt_list(prompt: Prompt) -> list[str | list[int]]:
    if prompt is None:
        raise APIError("prompt is missing; send a text or token ids", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise APIError("prompt is an empty list; send a text or token ids", param="prompt")
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    if int in kinds:
        raise APIError("prompt mixes token ids with texts or lists; send one kind", param="prompt")
    if len(prompt) > MAX_PROMPTS:
        raise APIError(
            f"prompt has {len(prompt)} prompts; send at most {MAX_PROMPTS} in a request",
            param="prompt",
        )
    return prompt  # type: ignore[return-value]


async def _encode_text(text: str, tokenizer: Tokenizer | None, max_length: int) -> list[int]:
    if tokenizer is None:
        raise APIError("this model has no tokenizer; send token ids as prompt", param="prompt")
    _check_length(len(text), max_length)
    encode = tokenizer.encode
    return await _maybe_on_thread(len(text), lambda: encode(text))


def _check_messages(messages: Sequence[Mapping[str, Any]] | None) -> None:
    if not messages:
        raise APIError("messages is missing or empty; send at least one message", param="messages")
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise APIError(
                f"messages[{index}].role must be one of {', '.join(ROLES)}", param="messages"
            )
        if content is None and (role != "assistant" or not message.get("tool_calls")):
            raise APIError(
                f"messages[{index}].content is missing; send a text or text parts",
                param="messages",
            )


def _num_chars(message: Mapping[str, Any]) -> int:
    """About what a message adds to the prompt: its text and some for its frame."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return 16 + sum(16 + len(text) if isinstance(text, str) else 16 for text in texts)


def _check_length(num_chars: int, max_length: int) -> None:
    limit = _MAX_CHARS_PER_TOKEN * max_length
    if num_chars > limit:
        raise ContextLengthError(
            f"the prompt has {num_chars} characters, far more than {max_length} tokens, the most "
            "that fit; shorten it"
        )


async def _maybe_on_thread(num_chars: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if num_chars > _THREAD_CHARS else work()
