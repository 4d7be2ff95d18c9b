"""Registered prefixes as those outside the engine see them: ids, a table, and how to bring one in.

Knows requests and their ends; knows no sockets and no blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from octavo.core.request import RegisteredPrefix, Request, RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.engine.report import EngineReport
from octavo.scheduling.admission import Limits

# What computes a prefix: one token, which nobody reads.
PREFIX_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Of ``num_tokens`` the first ``num_pinned_tokens``, those of full blocks, are kept."""

    id: str
    num_tokens: int
    num_pinned_tokens: int

    @classmethod
    def of(cls, result: RegisteredPrefix) -> Prefix:
        """Raises `RequestError` where nothing was pinned."""
        if result.error is not None:
            raise RequestError(result.error)
        return cls(prefix_id(result.number), result.num_tokens, result.num_pinned_tokens)


def prefix_id(number: int) -> str:
    """The id of what request ``number`` registered."""
    return f"prefix-{number}"


def prefix_number(text: str) -> int | None:
    """What `prefix_id` was given; None: the text is no id."""
    if not isinstance(text, str):
        return None
    number = text.removeprefix("prefix-")
    is_id = number.isdecimal() and len(number) < 20 and text == prefix_id(int(number))
    return int(number) if is_id else None


def limits_beside(limits: Limits, report: EngineReport, num_pinned_blocks: int) -> Limits:
    """What can be served while so many blocks are pinned."""
    num_pinned_tokens = num_pinned_blocks * report.capacity.block_size
    most = report.limits.most_kv_tokens
    return replace(
        limits,
        num_kv_tokens=report.num_kv_tokens - num_pinned_tokens,
        most_kv_tokens=None if most is None else most - num_pinned_tokens,
    )


def register(core: EngineCore, request: Request, between_steps: Callable[[], None]) -> Prefix:
    """Run a request that pins its prompt on an idle engine.

    Raises:
        RequestError: the prefix cannot be kept; the message says why.
    """
    core.scheduler.add(request)
    try:
        result = None
        while core.has_work:
            for found in core.step().prefixes:
                result = found
            between_steps()
    except BaseException:
        core.scheduler.abort(request.number)
        core.scheduler.drop_prefix(request.number)
        raise
    assert result is not None, "a request that pins its prompt ended without a word"
    return Prefix.of(result)


class PrefixTable:
    """The prefixes of an engine in another process, by id. ``drop(number)`` tells the engine."""

    def __init__(self, drop: Callable[[int], None]) -> None:
        self._drop = drop
        self._prefixes: dict[str, Prefix] = {}
        self._coming: dict[int, RegisteredPrefix | None] = {}

    def listed(self) -> list[Prefix]:
        """In the order of registration."""
        return list(self._prefixes.values())

    @contextmanager
    def expecting(self, number: int) -> Iterator[Callable[[], Prefix]]:
        """While request ``number`` registers its prompt. Yields what lists the result once the
        request has ended, raising `RequestError` where nothing was pinned. A result that nobody
        takes, even one that comes later, is dropped."""
        self._coming[number] = None
        is_taken = False

        def take() -> Prefix:
            nonlocal is_taken
            result = self._coming[number]
            if result is None:
                raise RequestError("the request ended before its prefix was registered")
            prefix = Prefix.of(result)
            self._prefixes[prefix.id] = prefix
            is_taken = True
            return prefix

        try:
            yield take
        finally:
            result = self._coming.pop(number)
            if result is not None and result.error is None and not is_taken:
                self._drop(number)

    def clear(self) -> None:
        """The engine was put to sleep and keeps none any more, not even one whose news came in the
        same read and was not taken yet."""
        self._prefixes.clear()
        for number, result in self._coming.items():
            if result is not None and result.error is None:
                why = "the engine was put to sleep, which drops prefixes; register it once more"
                self._coming[number] = replace(result, error=why)

    def receive(self, result: RegisteredPrefix) -> None:
        """News of the engine."""
        if result.number in self._coming:
            self._coming[result.number] = result
        elif result.error is None:
            self._drop(result.number)

    def remove(self, text: str) -> bool:
        """Whether there was a prefix of this id."""
        if self._prefixes.pop(text, None) is None:
            return False
        number = prefix_number(text)
        assert number is not None
        self._drop(number)
        return True
