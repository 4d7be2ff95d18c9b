"""What the front end and the engine process say to each other: msgspec structs over msgpack.

Knows the wire's types and their checks; knows no sockets. Nothing here can run code: decoding
yields the types below or raises. What arrives is checked again on the engine's side, as if it came
from a stranger.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from octavo.config import EngineConfig
from octavo.core.request import (
    AsleepError,
    ContextLengthError,
    Finished,
    PoolBusyError,
    PoolSizeError,
    QueueFullError,
    RegisteredPrefix,
    Request,
    RequestError,
    StepOutputs,
)
from octavo.core.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from octavo.engine.report import EngineReport, EngineStats
from octavo.engine.wire import (
    INT64,
    WireBeam,
    WireLogprobs,
    WirePrompt,
    array_in,
    ints_in,
    ints_out,
)
from octavo.scheduling.admission import Limits, check_beams, check_length, check_sampling

# The longest prompt that a config allows is 2**24 tokens of four bytes, the largest step 2**20 of
# 180 bytes where all ask for the log probabilities of 20; the rest is small.
MAX_MESSAGE_BYTES = 192 * 2**20
# A beam brings all its tokens at once, 180 bytes each.
MAX_BEAM_TOKENS_A_MESSAGE = 2**18
MAX_START_BYTES = 2**20
# A model's own end-of-sequence ids join the client's.
_MAX_STOP_IDS = MAX_STOP_TOKEN_IDS + 1024

MAX_CACHE_SALT_BYTES = 1024

_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (RequestError, ContextLengthError, QueueFullError, AsleepError)
}


class MessageError(ValueError):
    """Bytes that are not a message of this protocol."""


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line on the engine's standard input, as JSON: where to connect, what to run."""

    address: str
    config: EngineConfig
    log_format: str = "text"
    log_level: str = "warning"


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    pass


# ── front end to engine ──────────────────────────────────────────────────────────────────────────


class AddRequest(_Message, frozen=True):
    """``prompt`` holds little-endian int32 token ids; ``params`` is an encoded `SamplingParams`,
    decoded late so that a wrong value refuses this request and not the connection."""

    number: int
    prompt: bytes
    params: msgspec.Raw
    max_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...]
    n: int = 1
    cache_salt: bytes = b""
    beam_width: int = 0
    pins_prefix: bool = False

    @classmethod
    def of(cls, request: Request) -> AddRequest:
        # Stop strings are the front end's business.
        params = replace(request.params, stop=())
        return cls(
            request.number,
            ints_out(request.prompt_token_ids),
            msgspec.Raw(_encoder.encode(params)),
            request.max_tokens,
            request.seed,
            request.stop_token_ids,
            request.n,
            request.cache_salt,
            request.beam_width,
            request.pins_prefix,
        )

    def request(self, limits: Limits) -> Request:
        """The request, checked.

        Raises:
            RequestError: a value is out of range.
            ContextLengthError: it is too long for what the pool is becoming.
        """
        try:
            params = _params_decoder.decode(self.params)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(f"wrong sampling parameters: {error}") from error
        prompt = ints_in(self.prompt)
        if not len(prompt):
            raise RequestError("the prompt is empty")
        if prompt.min() < 0 or prompt.max() >= limits.vocab_size:
            raise RequestError("a token id of the prompt is out of range")
        if not 1 <= self.n <= limits.max_num_seqs:
            raise RequestError(f"n {self.n} is out of range")
        if len(self.cache_salt) > MAX_CACHE_SALT_BYTES:
            raise RequestError("the cache salt is too long")
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens {self.max_tokens} is out of range")
        if not 0 <= self.seed < 2**64:
            raise RequestError(f"the seed {self.seed} is out of range")
        stops = self.stop_token_ids
        if len(stops) > _MAX_STOP_IDS or any(not 0 <= i < limits.vocab_size for i in stops):
            raise RequestError("stop_token_ids are too many or out of range")
        check_sampling(params, self.max_tokens, stops, limits.vocab_size)
        if self.beam_width < 0 or bool(self.beam_width) != params.use_beam_search:
            raise RequestError(f"beam_width {self.beam_width} is out of range")
        check_beams(self.beam_width, self.n, stops, limits)
        # Again, in the door's words: the pool may have shrunk since it was asked there.
        check_length(len(prompt), self.max_tokens, self.n, self.beam_width, limits)
        if self.pins_prefix and self.n > 1:
            raise RequestError("a prefix is registered by a request of one sample")
        return Request(
            number=self.number,
            prompt_token_ids=prompt,
            params=params,
            max_tokens=self.max_tokens,
            seed=self.seed,
            stop_token_ids=stops,
            cache_salt=self.cache_salt,
            n=self.n,
            beam_width=self.beam_width,
            pins_prefix=self.pins_prefix,
        )


class Abort(_Message, frozen=True):
    """Forget these requests; those that ended already are ignored."""

    numbers: tuple[int, ...]


class ResetPrefixCache(_Message, frozen=True):
    """Forget what the prefix cache holds, but for registered prefixes."""


class DropPrefix(_Message, frozen=True):
    """Stop keeping the prefix of request ``number``; one that is gone is ignored."""

    number: int


class ResizePool(_Message, frozen=True):
    """Have ``num_blocks`` beside the null block, or with ``action`` ``sleep`` or ``wake_up`` none,
    or all again. Answered by `PoolChanged` of the same ``number``, unless a later one takes its
    place."""

    number: int
    num_blocks: int
    action: Literal["resize", "sleep", "wake_up"] = "resize"


class Shutdown(_Message, frozen=True):
    """Stop now and exit."""


ToEngine: TypeAlias = AddRequest | Abort | ResetPrefixCache | DropPrefix | ResizePool | Shutdown


# ── engine to front end ──────────────────────────────────────────────────────────────────────────


class Ready(_Message, frozen=True):
    """The model is loaded; requests are welcome."""

    report: EngineReport


class StartFailed(_Message, frozen=True):
    """The engine cannot start; ``reason`` is one line for a person. ``is_asked`` where what was
    asked for is at fault, not the world."""

    reason: str
    is_asked: bool = False


class Started(NamedTuple):
    """A request ran for the first time, after ``waited_s`` seconds in the engine. The first
    ``num_cached_tokens`` of its prompt came from the prefix cache; where it ended in the same step
    `Finished` says how many."""

    number: int
    waited_s: float
    num_cached_tokens: int


class StepMessage(_Message, frozen=True):
    """What a step brought: ``token_ids[i]`` (int32) is for request ``numbers[i]`` (int64).

    ``logprobs`` and ``prompt_logprobs`` are for the requests that asked, ``beams`` the results of
    searches that have ended, ``prefixes`` of requests that pin theirs.
    """

    numbers: bytes
    token_ids: bytes
    finished: tuple[Finished, ...]
    stats: EngineStats | None
    started: tuple[Started, ...] = ()
    logprobs: WireLogprobs | None = None
    prompt_logprobs: tuple[WirePrompt, ...] = ()
    beams: tuple[WireBeam, ...] = ()
    prefixes: tuple[RegisteredPrefix, ...] = ()

    @classmethod
    def of(
        cls,
        outputs: StepOutputs,
        stats: EngineStats | None,
        started: tuple[Started, ...] = (),
    ) -> StepMessage:
        return cls(
            outputs.numbers.astype(INT64, copy=False).tobytes(),
            ints_out(outputs.token_ids),
            outputs.finished,
            stats,
            started,
            None if outputs.logprobs is None else WireLogprobs.of(outputs.logprobs),
            tuple([WirePrompt.of(piece) for piece in outputs.prompt_logprobs]),
            tuple([WireBeam.of(beam) for beam in outputs.beams]),
            outputs.prefixes,
        )

    @staticmethod
    def parts(outputs: StepOutputs) -> list[StepOutputs]:
        """A step's outputs, in several pieces where many long beams end in it."""
        if sum(len(beam.token_ids) for beam in outputs.beams) <= MAX_BEAM_TOKENS_A_MESSAGE:
            return [outputs]
        ends = {finished.number: finished for finished in outputs.finished}
        none = outputs.numbers[:0], outputs.token_ids[:0]
        pieces = [
            StepOutputs(*none, (ends.pop(beam.number),), beams=(beam,)) for beam in outputs.beams
        ]
        return [replace(outputs, finished=tuple(ends.values()), beams=()), *pieces]

    def outputs(self) -> StepOutputs:
        """What `of` was given."""
        return StepOutputs(
            array_in(self.numbers, INT64, np.dtype(np.int64)),
            ints_in(self.token_ids),
            self.finished,
            None if self.logprobs is None else self.logprobs.logprobs(),
            tuple([piece.piece() for piece in self.prompt_logprobs]),
            tuple([beam.beam() for beam in self.beams]),
            self.prefixes,
        )

    def tokens(self) -> zip[tuple[int, int]]:
        """Pairs of request number and token id."""
        numbers = array_in(self.numbers, INT64, np.dtype(np.int64)).tolist()
        return zip(numbers, ints_in(self.token_ids).tolist(), strict=True)


class Rejected(_Message, frozen=True):
    """A request of ``n`` samples was refused; ``kind`` names the error class of
    `octavo.core.request`."""

    number: int
    kind: str
    reason: str
    n: int = 1

    @classmethod
    def of(cls, number: int, error: Exception, n: int = 1) -> Rejected:
        kind = type(error).__name__
        return cls(number, kind if kind in _ERRORS else RequestError.__name__, str(error), n)

    def error(self) -> Exception:
        return _ERRORS.get(self.kind, RequestError)(self.reason)


class PoolChanged(_Message, frozen=True):
    """Resize ``number`` has ended: requests may count on ``num_blocks``, or will when the engine
    wakes up. With an ``error`` of ``kind``, a class of `octavo.core.request`, the pool is what it
    was. ``drops_prefixes``: registered prefixes went on the way, as for a sleep, also one that came
    to nothing."""

    number: int
    num_blocks: int
    drops_prefixes: bool
    error: str | None = None
    kind: str = PoolBusyError.__name__

    def raise_error(self) -> None:
        """Raises `PoolSizeError` or `PoolBusyError` where it came to nothing."""
        if self.error is not None:
            is_size = self.kind == PoolSizeError.__name__
            raise (PoolSizeError if is_size else PoolBusyError)(self.error)


class Died(_Message, frozen=True):
    """The engine met an error that it cannot go on from; ``error`` holds the traceback."""

    error: str


FromEngine: TypeAlias = Ready | StartFailed | StepMessage | Rejected | PoolChanged | Died

_encoder = msgspec.msgpack.Encoder()
_params_decoder = msgspec.msgpack.Decoder(SamplingParams)
_to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises `MessageError` for anything else."""
    try:
        return _to_engine_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"not a message to the engine: {error}") from error


def decode_from_engine(data: bytes) -> FromEngine:
    """Raises `MessageError` for anything else."""
    try:
        return _from_engine_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"not a message of the engine: {error}") from error


def encode_start(start: Start) -> bytes:
    """One line of JSON."""
    return msgspec.json.encode(start) + b"\n"


def decode_start(line: bytes) -> Start:
    """Raises `MessageError`, also when the config in it is refused."""
    try:
        return msgspec.json.decode(line, type=Start)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"not a start message: {error}") from error
