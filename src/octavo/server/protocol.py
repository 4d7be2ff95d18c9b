"""The bodies of OpenAI's API that are read: which fields there are and what is refused.

msgspec structs: strict types, no NaN, the first error only, so that a hostile body costs no more
than its length. Unknown fields are ignored; known ones that would change the output and are not
supported are refused by name.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from octavo.core.sampling_params import MAX_BEAM_WIDTH, MAX_LOGPROBS, SamplingParams
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
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "include_stop_str_in_output",
    "bad_words",
    "allowed_token_ids",
    "use_beam_search",
    "beam_width",
    "length_penalty",
    "early_stopping",
)

# Field -> values that ask for nothing. Everything else is refused.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
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
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    # llama.cpp's; the last two are max_tokens and repetition_penalty here.
    "grammar": ("",),
    "json_schema": (),
    "n_predict": (),
    "repeat_penalty": (1.0, 1),
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
    # Of so many samples the n likeliest are the choices.
    best_of: int | None = None
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
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    # vLLM's; the width of the search is n where nothing else is asked for.
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    # Any text here, for `SamplingParams` says which words there are.
    early_stopping: bool | str | None = None
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

    @property
    def num_samples(self) -> int:
        """For each prompt; at least `num_choices`."""
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told beside each token; None: nothing is told."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for each token of the prompt."""
        return None

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer tells of any."""
        return self.num_logprobs is not None or self.num_prompt_logprobs is not None

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
        if self.use_beam_search and self.num_choices > MAX_BEAM_WIDTH:
            raise APIError(
                f"n must be from 1 to {MAX_BEAM_WIDTH} with use_beam_search, got {self.n}",
                param="n",
            )
        _check_range("best_of", self.best_of, self.num_choices, MAX_CHOICES)
        if self.best_of is not None and self.use_beam_search:
            raise APIError(
                "best_of does not work with use_beam_search; send beam_width", param="best_of"
            )
        if self.stream and self.num_samples > self.num_choices:
            raise APIError(
                "best_of cannot be streamed: which samples are best is known at the end; leave "
                "stream or best_of out",
                param="best_of",
            )
        _check_salt(self.cache_salt)
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
                logprobs=self.num_logprobs,
                prompt_logprobs=self.num_prompt_logprobs,
                **given,
            )
        except ValueError as error:
            raise APIError(_short_text(str(error)), param=_field_of(str(error))) from error


class CompletionRequest(GenerationRequest, kw_only=True):
    """A body of ``POST /v1/completions``; ``prompt`` is a text, token ids, or a list of either."""

    supported: ClassVar[frozenset[str]] = frozenset({"echo", "prompt_logprobs"})

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """An echoed prompt is told of like the rest of the text."""
        asked = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((number for number in asked if number is not None), default=None)

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        for name in ("logprobs", "prompt_logprobs"):
            _check_range(name, getattr(self, name), 0, MAX_LOGPROBS)


class ChatRequest(GenerationRequest, kw_only=True):
    """A body of ``POST /v1/chat/completions``. ``max_tokens`` is the older name of
    ``max_completion_tokens``, which wins."""

    supported: ClassVar[frozenset[str]] = frozenset({"top_logprobs"})

    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        _check_range("top_logprobs", self.top_logprobs, 0, MAX_LOGPROBS)
        if self.top_logprobs and not self.logprobs:
            raise APIError(
                "top_logprobs needs logprobs: true; send it or leave top_logprobs out",
                param="top_logprobs",
            )


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


class PrefixRequest(msgspec.Struct, kw_only=True):
    """A body of ``POST /prefixes``: a ``prompt``, text or token ids, or the ``messages`` that
    conversations begin with."""

    model: str | None = None
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    cache_salt: str | None = None

    def check(self) -> None:
        """Raises `APIError` naming the field."""
        if (self.prompt is None) == (self.messages is None):
            raise APIError("send either prompt or messages", param="prompt")
        _check_salt(self.cache_salt)


class ResizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /kv/resize``: bytes, or a size such as ``2GiB``."""

    kv_memory: str | int


# Of UTF-8, and of UTF-16 and UTF-32 in either order.
_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
R = TypeVar("R", bound=msgspec.Struct)
# Escapes of a JSON text, one after the other; the group is half of a pair without the other.
_ESCAPES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)


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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # older msgspec: bad UTF-8
        if body.startswith(_MARKS):
            raise APIError(
                "the body is not valid JSON: it begins with a byte order mark; send it in UTF-8, "
                "without one"
            ) from error
        half = next((found for found in _ESCAPES.finditer(body) if found[1]), None)
        if half is not None:
            raise APIError(
                f"the body is not valid JSON: {half[1].decode()} (byte {half.start()}) is half of "
                "a surrogate pair; send both halves, or the character as it is"
            ) from error
        raise APIError(_short_text(f"the body is not valid JSON: {error}")) from error
    except RecursionError:
        raise APIError("the body is nested too deeply") from None
    if isinstance(request, GenerationRequest):
        request.refuse_unsupported()
    elif isinstance(request, PrefixRequest):
        request.check()
    return request


def _check_salt(salt: str | None) -> None:
    if salt is not None and not 1 <= len(salt) <= MAX_CACHE_SALT_CHARS:
        raise APIError(
            f"cache_salt must have 1 to {MAX_CACHE_SALT_CHARS} characters", param="cache_salt"
        )


def _check_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise APIError(f"{name} must be from {low} to {high}, got {_short(value)}", param=name)


def _field_of(message: str) -> str | None:
    """The field that a message of `SamplingParams` is about."""
    name = message.split(maxsplit=1)[0].rstrip(":")
    if name in ChatRequest.__struct_fields__:
        return name
    return "stop" if "stop string" in message else None


def _short(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."


def _short_text(text: str) -> str:
    return text if len(text) <= 500 else text[:497] + "..."
