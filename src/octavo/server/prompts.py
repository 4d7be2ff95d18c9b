"""From what a client sent to prompt token ids, without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from octavo.core.request import ContextLengthError
from octavo.core.sampling_params import SamplingParams
from octavo.server.errors import APIError
from octavo.server.protocol import TokenizeRequest
from octavo.text.bad_words import with_bad_word_tokens
from octavo.text.tokenizer import Tokenizer, TokenizerError

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


async def prompt_texts(prompt: Prompt, tokenizer: Tokenizer | None) -> list[str]:
    """Each prompt as text, to be echoed.

    Raises:
        APIError: there are token ids and no tokenizer.
    """
    items = _prompt_list(prompt)
    if tokenizer is None and not all(isinstance(item, str) for item in items):
        raise APIError("this model has no tokenizer; leave echo out", param="echo")

    def text(item: str | list[int]) -> str:
        if isinstance(item, str):
            return item
        assert tokenizer is not None
        return tokenizer.decode(item)

    num_parts = sum(len(item) for item in items)
    return await _maybe_on_thread(num_parts, lambda: [text(item) for item in items])


async def with_bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """``params`` with the tokens of its ``bad_words``.

    Raises:
        APIError: there is no tokenizer, or a word cannot be forbidden.
    """
    if not params.bad_words:
        return params
    if tokenizer is None:
        raise APIError("this model has no tokenizer; leave bad_words out", param="bad_words")
    num_chars = sum(map(len, params.bad_words))
    try:
        return await _maybe_on_thread(num_chars, lambda: with_bad_word_tokens(params, tokenizer))
    except TokenizerError as error:
        raise APIError(str(error), param="bad_words") from error


async def tokenize(
    body: TokenizeRequest, tokenizer: Tokenizer | None, max_length: int
) -> list[int]:
    """The token ids of a text or a conversation.

    Raises:
        APIError: neither or both are given, or there is no tokenizer; else as `chat_prompt`.
    """
    if (body.prompt is None) == (body.messages is None):
        raise APIError("send either prompt or messages", param="prompt")
    if body.messages is not None:
        return await chat_prompt(
            body.messages,
            tokenizer,
            max_length,
            add_generation_prompt=body.add_generation_prompt is not False,
            add_special_tokens=bool(body.add_special_tokens),
        )
    assert body.prompt is not None
    with_special = body.add_special_tokens is not False
    return await _encode_text(body.prompt, tokenizer, max_length, with_special)


async def detokenize(token_ids: Sequence[int], tokenizer: Tokenizer | None, vocab_size: int) -> str:
    """The text of token ids, special tokens spelled out.

    Raises:
        APIError: an id is out of range, or there is no tokenizer.
    """
    if tokenizer is None:
        raise APIError("this model has no tokenizer", param="tokens")
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise APIError(
                f"token id {_short(token_id)} is out of range: the model's vocabulary has ids 0 to "
                f"{vocab_size - 1}",
                param="tokens",
            )
    decode = tokenizer.decode
    return await _maybe_on_thread(
        len(token_ids), lambda: decode(token_ids, skip_special_tokens=False)
    )


async def chat_prompt(
    messages: Sequence[Mapping[str, Any]] | None,
    tokenizer: Tokenizer | None,
    max_length: int,
    *,
    add_generation_prompt: bool = True,
    add_special_tokens: bool = False,
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
        num_chars,
        lambda: encode(
            template.render(messages, add_generation_prompt=add_generation_prompt),
            add_special_tokens=add_special_tokens,
        ),
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


async def _encode_text(
    text: str, tokenizer: Tokenizer | None, max_length: int, add_special_tokens: bool = True
) -> list[int]:
    if tokenizer is None:
        raise APIError("this model has no tokenizer; send token ids as prompt", param="prompt")
    _check_length(len(text), max_length)
    encode = tokenizer.encode
    return await _maybe_on_thread(len(text), lambda: encode(text, add_special_tokens))


def _check_messages(messages: Sequence[Mapping[str, Any]] | None) -> None:
    if not messages:
        raise APIError("messages is missing or empty; send at least one message", param="messages")
    for index, message in enumerate(messages):
        if message.get("role") not in ROLES:
            raise APIError(
                f"messages[{index}].role must be one of {', '.join(ROLES)}", param="messages"
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


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**30 else "of many digits"


async def _maybe_on_thread(num_chars: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if num_chars > _THREAD_CHARS else work()
