"""The bodies of OpenAI's API that are read: which fields there are and what is refused.

msgspec structs: strict types, no NaN, the first error only, so that a hostile body costs no more
than its length. Unknown fields are ignored; known ones that would change the output and are not
supported are refused by name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from octavo.core.sampling_params import SamplingParams
from octavo.server.errors import APIError

MAX_CHOICES = 128
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "ignore_eos",
    "logit_bias",
)

# Field -> values that ask for nothing. Everything else is refused.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}

if TYPE_CHECKING:

    class _Unsupported(msgspec.Struct, kw_only=True): ...

else:
    _Unsupported = msgspec.defstruct(
        "_Unsupported", [(name, Any, None) for name in UNSUPPORTED], kw_only=True
    )


MAX_CACHE_SALT_CHARS = 256


class StreamOptions(msgspec.Struct):
    """``continuous_usage_stats`` (vLLM's) puts the usage so far into every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(_Unsupported, kw_only=True):
    """What completions and chat completions have in common."""

    # Fields of UNSUPPORTED that a subclass supports.
    supported: ClassVar[frozenset[str]] = frozenset()

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Only requests of the same salt share cached prefixes.
    cache_salt: str | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def num_choices(self) -> int:
        """For each prompt."""
        return 1 if self.n is None else self.n

    def refuse_unsupported(self) -> None:
        """Raises `APIError` naming a field that asks for something that is not supported."""
        for name, harmless in UNSUPPORTED.items():
            value = getattr(self, name)
            if value is None or name in self.supported:
                continue
            if any(value == v and type(value) is type(v) for v in harmless):
                continue
            allowed = " or ".join(msgspec.json.encode(v).decode() for v in harmless[:1])
            raise APIError(
                f"{name} {_short(value)} is not supported; leave {name} out"
                + (f" or send {allowed}" if allowed else ""),
                param=name,
                code="unsupported_parameter",
            )
        if not 1 <= self.num_choices <= MAX_CHOICES:
            raise APIError(f"n must be from 1 to {MAX_CHOICES}, got {self.n}", param="n")
        if self.cache_salt is not None and not 1 <= len(self.cache_salt) <= MAX_CACHE_SALT_CHARS:
            raise APIError(
                f"cache_salt must have 1 to {MAX_CACHE_SALT_CHARS} characters", param="cache_salt"
            )
        if self.stream_options is not None and not self.stream:
            raise APIError(
                "stream_options needs stream: true; send it or leave stream_options out",
                param="stream_options",
            )

    def sampling_params(self, max_tokens: int | None) -> SamplingParams:
        """Raises `APIError` naming the field that is out of range."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        stop = self.stop or ()
        try:
            return SamplingParams(
                max_tokens=max_tokens,
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                **given,
            )
        except ValueError as error:
            raise APIError(_short_text(str(error)), param=_field_of(str(error))) from error


class CompletionRequest(GenerationRequest, kw_only=True):
    """A body of ``POST /v1/completions``; ``prompt`` is a text, token ids, or a list of either."""

    supported: ClassVar[frozenset[str]] = frozenset({"echo"})

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    best_of: int | None = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.best_of is not None and self.best_of != self.num_choices:
            raise APIError(
                f"best_of {self.best_of} is not supported; leave best_of out or send n",
                param="best_of",
                code="unsupported_parameter",
            )


class ChatRequest(GenerationRequest, kw_only=True):
    """A body of ``POST /v1/chat/completions``. ``max_tokens`` is the older name of
    ``max_completion_tokens``, which wins."""

    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A body of ``POST /tokenize``: ``prompt`` or ``messages``, as the two endpoints read them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """A body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


R = TypeVar("R", bound=msgspec.Struct)


def decode_request(body: bytes, kind: type[R]) -> R:
    """A request of ``kind``.

    Raises:
        APIError: the body is not JSON, has a wrong type somewhere, or asks for what is not
            supported.
    """
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at ")
        place = place.rpartition("`$")[2].rstrip("`").lstrip(".")
        param = re.split(r"[.\[]", place, maxsplit=1)[0] or None
        text = f"{place}: {problem}" if place else f"the body: {problem}"
        raise APIError(_short_text(text), param=param) from error
    except msgspec.DecodeError as error:
        raise APIError(_short_text(f"the body is not valid JSON: {error}")) from error
    except RecursionError:
        raise APIError("the body is nested too deeply") from None
    if isinstance(request, GenerationRequest):
        request.refuse_unsupported()
    return request


def _field_of(message: str) -> str | None:
    """The field that a message of `SamplingParams` is about."""
    name = message.split(maxsplit=1)[0].rstrip(":")
    if name in GenerationRequest.__struct_fields__:
        return name
    return "stop" if "stop string" in message else None


def _short(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."


def _short_text(text: str) -> str:
    return text if len(text) <= 500 else text[:497] + "..."
