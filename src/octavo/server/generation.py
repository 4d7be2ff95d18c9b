"""The engine's streams behind one HTTP request: all started or none, merged, counted, ended."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.core.request import FinishReason
from octavo.core.sampling_params import SamplingParams
from octavo.engine.client import AsyncEngine
from octavo.engine.logprobs import TokenLogprobs
from octavo.engine.output import OutputDelta
from octavo.engine.stream import RequestStream
from octavo.server.answers import Usage
from octavo.server.errors import APIError


@dataclass(slots=True)
class Result:
    """One choice, complete."""

    finish_reason: FinishReason | None = None
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    score: float | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def mean_logprob(self) -> float:
        """Of its tokens, by the model's raw distribution."""
        total = sum(value.logprob for value in self.logprobs)
        return total / len(self.logprobs) if self.logprobs else -math.inf


class Generation:
    """``n`` choices for each prompt, in the order of the prompts: choice ``i`` answers prompt
    ``i // n``. With a seed, each prompt's choices have the seeds ``seed, seed + 1, ...``; with beam
    search they are the best beams, best first.

    Raises:
        RequestError, QueueFullError, EngineDeadError: a prompt was refused; none has been kept.
        APIError: there are more choices than the engine ever takes.
    """

    # The field that says how many.
    _field = "n"

    def __init__(
        self,
        engine: AsyncEngine,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        n: int = 1,
        cache_salt: str = "",
    ) -> None:
        self._n = n
        room = engine.max_outstanding
        if len(prompts) * n > room:
            raise APIError(
                f"the request asks for {len(prompts) * n} choices ({len(prompts)} prompts, "
                f"{self._field} {n}), "
                f"more than the {room} that this server runs and queues; ask for fewer",
                param=self._field if n > 1 else "prompt",
            )
        self._num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        self._streams: list[RequestStream] = []
        try:
            for prompt in prompts:
                self._streams += engine.submit_samples(prompt, params, n, cache_salt)
        except BaseException:
            self.abort()
            raise
        self._num_choices = len(self._streams)

    def prompt_logprobs(self, prompt: int) -> tuple[TokenLogprobs | None, ...]:
        """An entry for each token of a prompt, once it has a delta: the first is None. They must
        have been asked for."""
        found = self._streams[prompt * self._n].prompt_logprobs
        assert found is not None
        return found

    def usage(self) -> Usage:
        num_cached = sum(stream.num_cached_tokens for stream in self._streams[:: self._n])
        num_output = sum(stream.num_tokens for stream in self._streams)
        return Usage.of(self._num_prompt_tokens, num_output, num_cached)

    def abort(self) -> None:
        """End what still runs."""
        for stream in self._streams:
            stream.abort()

    async def deltas(self) -> AsyncIterator[tuple[int, OutputDelta]]:
        """Pairs of choice and delta, as they come. Leaving early ends the request.

        Raises:
            APIError: a step of the engine failed.
            RequestError, QueueFullError, EngineDeadError: as iterating a `RequestStream`.
        """
        try:
            async for index, delta in _merged(self._streams):
                if delta.finish_reason is FinishReason.ERROR:
                    raise APIError(
                        delta.error or "the engine failed to compute the request",
                        status=500,
                        kind="server_error",
                        code="step_failed",
                    )
                yield index, delta
        finally:
            self.abort()

    async def results(self) -> list[Result]:
        """Every choice, once all are complete. Raises as `deltas`."""
        results = [Result() for _ in range(self._num_choices)]
        try:
            async for index, delta in self.deltas():
                results[index].texts.append(delta.text)
                results[index].logprobs += delta.logprobs
                results[index].finish_reason = delta.finish_reason
                results[index].score = delta.score
        finally:
            self.abort()
        return results

    def summary(self) -> dict[str, Any]:
        """What the log says of it: counts, reasons and the longest times. No text."""
        usage = self.usage()
        reasons = {str(stream.finish_reason) for stream in self._streams if stream.finish_reason}
        lives = [stream.life() for stream in self._streams]
        times: dict[str, float] = {}
        for name in ("queue_s", "prefill_s", "decode_s"):
            known = [value for life in lives if (value := getattr(life, name)) is not None]
            if known:
                times[name] = round(max(known), 4)
        return {
            "choices": max(1, len(self._streams)),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "finish_reason": ",".join(sorted(reasons)) or None,
            **times,
        }


class BestOf(Generation):
    """Of ``best_of`` samples for each prompt the ``n`` whose tokens have the highest mean log
    probability, best first. All of them count.

    Raises as `Generation`.
    """

    _field = "best_of"

    def __init__(
        self,
        engine: AsyncEngine,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        n: int = 1,
        cache_salt: str = "",
        *,
        best_of: int,
    ) -> None:
        if best_of > engine.limits.max_num_seqs:
            raise APIError(
                f"best_of is {best_of}, but at most {engine.limits.max_num_seqs} sequences run at "
                "once (--max-num-seqs); ask for fewer",
                param="best_of",
            )
        if params.logprobs is None:
            params = replace(params, logprobs=0)
        self._num_best = n
        super().__init__(engine, prompts, params, best_of, cache_salt)

    async def results(self) -> list[Result]:
        results = await super().results()
        best: list[Result] = []
        for start in range(0, len(results), self._n):
            samples = results[start : start + self._n]
            samples.sort(key=lambda result: result.mean_logprob, reverse=True)
            best += samples[: self._num_best]
        return best


class ScoredPrompts(Generation):
    """Computes prompts for their log probabilities and shows no more: the answer to ``max_tokens``
    0 with ``echo`` and ``logprobs``. The one token that each samples is dropped.

    Raises as `Generation`.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        n: int = 1,
        cache_salt: str = "",
    ) -> None:
        params = replace(params.without_beams(), logprobs=None)
        super().__init__(engine, prompts, params, 1, cache_salt)
        self._num_shown = n
        self._num_choices *= n

    def usage(self) -> Usage:
        num_cached = sum(stream.num_cached_tokens for stream in self._streams)
        return Usage.of(self._num_prompt_tokens, 0, num_cached)

    async def deltas(self) -> AsyncIterator[tuple[int, OutputDelta]]:
        async for prompt, delta in super().deltas():
            if delta.finish_reason is not None:
                for choice in range(self._num_shown):
                    yield (
                        prompt * self._num_shown + choice,
                        OutputDelta("", (), FinishReason.LENGTH),
                    )


class EchoedPrompts(Generation):
    """Generates nothing: the answer to ``max_tokens`` 0 with ``echo``.

    Raises:
        RequestError: a prompt could not be served either way.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        n: int = 1,
        cache_salt: str = "",
    ) -> None:
        for prompt in prompts:
            engine.resolve(prompt, replace(params.without_beams(), max_tokens=1))
        super().__init__(engine, (), params)
        self._num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        self._num_choices = len(prompts) * n

    async def deltas(self) -> AsyncIterator[tuple[int, OutputDelta]]:
        for index in range(self._num_choices):
            yield index, OutputDelta("", (), FinishReason.LENGTH)

    async def results(self) -> list[Result]:
        return [Result(FinishReason.LENGTH) for _ in range(self._num_choices)]


async def _merged(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, OutputDelta]]:
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return

    async def step(index: int) -> tuple[int, OutputDelta | None]:
        return index, await anext(streams[index], None)

    pending = {asyncio.ensure_future(step(index)) for index in range(len(streams))}
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            # Every failure is looked at, though one is raised: asyncio logs those that nobody saw.
            failures = [error for task in done if (error := task.exception()) is not None]
            if failures:
                raise failures[0]
            for index, news in sorted((task.result() for task in done), key=lambda pair: pair[0]):
                if news is not None:
                    yield index, news
                    pending.add(asyncio.ensure_future(step(index)))
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
