"""The engine as an asyncio program sees it: `AsyncEngine` has the engine process started and talks
to it (`connection`). Owns the door (checks, the queue's bound) and all text; knows no HTTP and no
blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from octavo.config import EngineConfig
from octavo.core.request import AsleepError, FinishReason, QueueFullError, Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.background import in_thread
from octavo.engine.child import COMMAND, describe_exit
from octavo.engine.connection import EngineConnection
from octavo.engine.door import checked_request, states_of
from octavo.engine.messages import (
    Abort,
    AddRequest,
    Died,
    DropPrefix,
    FromEngine,
    PoolChanged,
    Ready,
    Rejected,
    ResetPrefixCache,
    Shutdown,
    StartFailed,
    StepMessage,
    ToEngine,
)
from octavo.engine.outstanding import Outstanding
from octavo.engine.pool import PoolSize, blocks_in, resized_report
from octavo.engine.pool_calls import PoolCalls
from octavo.engine.prefixes import PREFIX_PARAMS, Prefix, PrefixTable, limits_beside
from octavo.engine.report import EngineReport, EngineStats
from octavo.engine.stream import Observer, RequestStream
from octavo.scheduling.admission import Limits
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# After the process has ended, its last message may still be on its way.
_LAST_WORDS_S = 0.2
# An engine that was told to stop finishes its step first.
_STOP_TIMEOUT_S = 5.0


class EngineStartError(RuntimeError):
    """The engine could not start; the message is one line for a person."""


class EngineConfigError(EngineStartError, ValueError):
    """What was asked of it is at fault."""


class EngineDeadError(RuntimeError):
    """The engine died or is being stopped; no request can be served any more."""


class AsyncEngine:
    """A running engine. Make one with `start`; use it on that event loop only.

    ``limits`` and ``report`` say what it can serve, ``stats`` how it is (some 50 ms old while it
    runs, exact when it is idle). ``observer`` may be set before the first request.
    """

    def __init__(self) -> None:
        """Use `start`."""
        self.report: EngineReport
        self.limits: Limits
        self.tokenizer: Tokenizer | None = None
        self.stats = EngineStats()
        self.observer: Observer | None = None
        self.error: str | None = None
        self._loop = asyncio.get_running_loop()
        self._outstanding = Outstanding()
        self._prefixes = PrefixTable(self._send_drop)
        self._pool_calls = PoolCalls(self._send)
        self._next_number = 0
        # Since when the engine owes news, of a step or of being idle.
        self._owed_since_s: float | None = None
        self._ready: asyncio.Future[EngineReport] = self._loop.create_future()
        self._is_started = False
        self._is_closing = False
        self._stopping: asyncio.Task[None] | None = None
        self._connection = EngineConnection(self._digest, self._die, self._on_exit)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        tokenizer: Tokenizer | Callable[[], Tokenizer | None] | None = None,
        *,
        command: Sequence[str] = COMMAND,
        log_format: str = "text",
        log_level: str = "warning",
    ) -> AsyncEngine:
        """Start the engine process and wait until its model is loaded.

        ``tokenizer`` may be a function that loads it, on a thread beside the model; what it raises
        is raised here. Without a tokenizer there is no text: deltas carry token ids only.

        Raises:
            EngineStartError: the engine could not start; the message says why.
        """
        engine = cls()
        try:
            await engine._start(config, tokenizer, command, log_format, log_level)
        except BaseException:
            await engine.close()
            raise
        return engine

    async def _start(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | Callable[[], Tokenizer | None] | None,
        command: Sequence[str],
        log_format: str,
        log_level: str,
    ) -> None:
        self._connection.open(config, command, log_format, log_level)
        if tokenizer is None or isinstance(tokenizer, Tokenizer):
            self.tokenizer = tokenizer
            self.report = await self._ready
        else:
            self.report, self.tokenizer = await asyncio.gather(self._ready, in_thread(tokenizer))
        self._connection.remove_path()
        self.limits = self.report.limits
        if self.tokenizer is not None:
            eos = dict.fromkeys(self.limits.eos_token_ids + self.tokenizer.eos_token_ids)
            known = tuple(i for i in eos if i < self.limits.vocab_size)
            self.limits = replace(self.limits, eos_token_ids=known)
        self._is_started = True

    @property
    def is_healthy(self) -> bool:
        """Whether requests are welcome."""
        return self._is_started and self.error is None and not self._is_closing

    @property
    def death(self) -> str | None:
        """Why the engine is dead, in a line: how its process ended, or the error that ended it."""
        return None if self.error is None else _headline(self.error)

    @property
    def num_outstanding(self) -> int:
        """Requests that run or wait, as many as they have samples: each takes the place and the
        memory of a request of its own."""
        return len(self._outstanding)

    @property
    def max_outstanding(self) -> int:
        """Requests that may run and wait, counted as in `num_outstanding`; more are refused."""
        return self.report.max_num_seqs + self.report.max_queued_requests

    @property
    def silent_s(self) -> float:
        """How long the engine has had work without ending a step; 0 while it is idle."""
        if self._owed_since_s is None or self.error is not None:
            return 0.0
        return time.monotonic() - self._owed_since_s

    @property
    def pid(self) -> int | None:
        """The engine process."""
        return self._connection.pid

    def submit(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> RequestStream:
        """Take a request in, or say at once why not; nothing is kept of one that is refused.

        Raises:
            RequestError: it cannot be served as it is.
            ContextLengthError: it can never fit.
            QueueFullError: too many requests are under way.
            AsleepError: `sleep` gave its memory back.
            EngineDeadError: the engine is dead or closing.
        """
        return self.submit_samples(prompt_token_ids, params)[0]

    def submit_samples(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        n: int = 1,
        cache_salt: str = "",
    ) -> list[RequestStream]:
        """``n`` samples over one prefill, a stream each, with seeds that count up; or the ``n``
        best of a beam search, best first, each of which comes whole at the end. Raises as
        `submit`."""
        self._check_awake()
        return self._submit(self.resolve(prompt_token_ids, params, n, cache_salt))

    def _check_not_dead(self) -> None:
        if self.death is not None:
            raise EngineDeadError(self.death)

    def _check_alive(self) -> None:
        self._check_not_dead()
        if self._is_closing:
            raise EngineDeadError("the engine is shutting down")

    def _check_awake(self) -> None:
        self._check_alive()
        if self.is_asleep:
            raise AsleepError("the engine is asleep; wake it up to be served")

    def _submit(self, request: Request) -> list[RequestStream]:
        if self.num_outstanding + request.n > self.max_outstanding:
            raise QueueFullError(
                f"{self.num_outstanding} requests run or wait already, of at most "
                f"{self.max_outstanding} (max_num_seqs + max_queued_requests; each of a request's "
                "n choices counts as one); try again later"
            )
        self._next_number += request.num_sequences
        # A registration is an administrator's: no client's request, and its refusal no failure.
        observer = None if request.pins_prefix else self.observer
        states = states_of(request, self.tokenizer, observer)
        self._send(AddRequest.of(request))
        self._outstanding.add(states)
        return [RequestStream(state, self._abort) for state in states]

    def resolve(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        n: int = 1,
        cache_salt: str = "",
    ) -> Request:
        """What `submit_samples` would send, checked against the limits. Raises as `submit`."""
        return checked_request(
            self._next_number,
            prompt_token_ids,
            params,
            self.limits,
            self.tokenizer,
            n,
            cache_salt,
        )

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes but the registered; requests under way keep their blocks."""
        self._check_not_dead()
        if self.error is None and not self._is_closing:
            self._send(ResetPrefixCache())

    async def register_prefix(
        self, prompt_token_ids: Sequence[int], cache_salt: str = ""
    ) -> Prefix:
        """Compute a prompt and keep its full blocks in the prefix cache until `drop_prefix`.

        Raises:
            RequestError: it cannot be kept; the message says why. Else as `submit`.
        """
        self._check_awake()
        request = self.resolve(prompt_token_ids, PREFIX_PARAMS, 1, cache_salt)
        with self._prefixes.expecting(request.number) as take:
            (stream,) = self._submit(replace(request, pins_prefix=True))
            async with stream:
                async for _ in stream:
                    pass
            return take()

    def prefixes(self) -> list[Prefix]:
        """The registered prefixes, in the order of registration."""
        self._check_not_dead()
        return self._prefixes.listed()

    def drop_prefix(self, prefix_id: str) -> bool:
        """Stop keeping a prefix, whose blocks stay cached like others; False: there is none."""
        self._check_not_dead()
        return self._prefixes.remove(prefix_id)

    def _send_drop(self, number: int) -> None:
        if self.error is None and self._stopping is None:
            self._send(DropPrefix(number))

    @property
    def is_asleep(self) -> bool:
        """Whether `sleep` gave the KV cache's memory back."""
        return self.stats.is_asleep

    async def resize_kv(self, kv_memory: str | int) -> PoolSize:
        """See `octavo.engine.llm.LLM.resize_kv`; requests under way are served, and end first where
        the pool would be too small for them."""
        self._check_alive()
        changed = await self._pool_calls.ask("resize", blocks_in(kv_memory, self.report.capacity))
        return PoolSize.of(self.report.capacity, changed.num_blocks)

    async def sleep(self) -> None:
        """See `octavo.engine.llm.LLM.sleep`; refused while requests are under way."""
        self._check_alive()
        await self._pool_calls.ask("sleep")

    async def wake_up(self) -> None:
        """See `octavo.engine.llm.LLM.wake_up`."""
        self._check_alive()
        await self._pool_calls.ask("wake_up")

    async def close(self, drain_timeout_s: float = 0.0) -> None:
        """Refuse new requests, let those under way end for at most ``drain_timeout_s``, stop the
        process. A second call may shorten the wait of a first. Safe to repeat."""
        self._is_closing = True
        if drain_timeout_s > 0 and self.error is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_timeout_s):
                    await self._outstanding.wait_empty()
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(), name="octavo-engine-stop")
        await asyncio.shield(self._stopping)

    # ── messages ─────────────────────────────────────────────────────────────────────────────

    def _send(self, message: ToEngine) -> None:
        self._connection.send(message)
        if self._owed_since_s is None:
            self._owed_since_s = time.monotonic()

    def _digest(self, message: FromEngine) -> None:
        if isinstance(message, StepMessage):
            self._digest_step(message)
        elif isinstance(message, Rejected):
            for number in range(message.number, message.number + message.n):
                self._outstanding.end(number, message.error(), FinishReason.ERROR)
        elif isinstance(message, Ready):
            if not self._ready.done():
                self._ready.set_result(message.report)
        elif isinstance(message, StartFailed):
            if not self._ready.done():
                kind = EngineConfigError if message.is_asked else EngineStartError
                self._ready.set_exception(kind(message.reason))
        elif isinstance(message, PoolChanged):
            if message.drops_prefixes:
                self._prefixes.clear()
            self._pool_calls.receive(message)
        elif isinstance(message, Died):
            self._die(message.error)

    def _digest_step(self, message: StepMessage) -> None:
        if message.stats is not None:
            before, self.stats = self.stats, message.stats
            num_lasting = self.stats.num_lasting_blocks
            if self._is_started and (num_lasting, self.stats.num_pinned_blocks) != (
                before.num_lasting_blocks,
                before.num_pinned_blocks,
            ):
                self.report = resized_report(self.report, num_lasting)
                self.limits = limits_beside(self.limits, self.report, self.stats.num_pinned_blocks)
        for result in message.prefixes:
            self._prefixes.receive(result)
        now = time.monotonic()
        given_up = self._outstanding.digest(message, now)
        has_work = bool(self.num_outstanding or self.stats.num_running or self.stats.num_waiting)
        self._owed_since_s = now if has_work else None
        if given_up:
            self._send(Abort(given_up))

    def _abort(self, number: int) -> None:
        if not self._outstanding.end(number, None, FinishReason.ABORT):
            return
        if self.error is None and self._stopping is None:
            self._send(Abort((number,)))

    # ── the end ──────────────────────────────────────────────────────────────────────────────

    def _on_exit(self, code: int) -> None:
        if self._stopping is None:
            self._loop.call_later(_LAST_WORDS_S, self._die, describe_exit(code))

    def _die(self, error: str) -> None:
        if self.error is not None or self._stopping is not None:
            return
        self.error = error
        if not self._ready.done():
            self._ready.set_exception(EngineStartError(_headline(error)))
            return
        logger.error("the engine died: %s", _headline(error))
        self._connection.kill()
        # Nothing runs any more; counters stay what they were.
        self.stats = replace(
            self.stats,
            num_running=0,
            num_waiting=0,
            num_free_blocks=self.stats.num_usable_blocks,
        )
        self._outstanding.end_all(lambda: EngineDeadError(_headline(error)))
        self._pool_calls.end_all(lambda: EngineDeadError(_headline(error)))

    async def _stop(self) -> None:
        self._outstanding.end_all(
            lambda: EngineDeadError("the engine was stopped before the request ended")
        )
        self._pool_calls.end_all(lambda: EngineDeadError("the engine was stopped"))
        if self._connection.pid is not None:
            if self._is_started and self.error is None:
                self._send(Shutdown())
            else:  # it loads, or it is broken: nothing to wait for
                self._connection.kill()
            await self._connection.wait_exit(_STOP_TIMEOUT_S)
        self._ready.cancel()
        await self._connection.close()


def _headline(error: str) -> str:
    """The last line of a traceback, which says what happened; other texts have one line."""
    return error.strip().splitlines()[-1] if error.strip() else "no reason is known"
