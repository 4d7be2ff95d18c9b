"""The engine in its own process: ``python -m octavo.engine.process``, started by `engine.client`.

Reads one `Start` line from standard input, builds the engine, then serves messages over a private
ipc socket until told to stop. Dies with its parent, however the parent dies. Knows no text.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

import zmq

from octavo.config import EngineConfig, ResourceError
from octavo.core.request import (
    PoolBusyError,
    PoolSizeError,
    QueueFullError,
    Request,
    RequestError,
)
from octavo.engine.core import EngineCore
from octavo.engine.heap import freeze_process
from octavo.engine.logs import configure_logs
from octavo.engine.messages import (
    MAX_MESSAGE_BYTES,
    MAX_START_BYTES,
    Abort,
    AddRequest,
    Died,
    DropPrefix,
    FromEngine,
    PoolChanged,
    Ready,
    Rejected,
    ResetPrefixCache,
    ResizePool,
    Shutdown,
    Started,
    StartFailed,
    StepMessage,
    decode_start,
    decode_to_engine,
    encode,
)
from octavo.engine.pool import resized_report
from octavo.engine.report import EngineReport, EngineStats
from octavo.scheduling.admission import Limits

logger = logging.getLogger(__name__)

Build = Callable[[EngineConfig], tuple[EngineCore, EngineReport]]

STATS_INTERVAL_S = 0.05
# How long the last message may take to leave when the process ends.
_LINGER_MS = 1000
_PR_SET_PDEATHSIG = 1
_LOG_PREFIX = "octavo engine: "


class EngineLoop:
    """Messages in, steps, messages out. Uses no CPU while there is nothing to do."""

    def __init__(
        self,
        core: EngineCore,
        report: EngineReport,
        socket: zmq.Socket[bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._report = report
        self._limits = report.limits
        self._socket = socket
        self._clock = clock
        # Requests that the scheduler's queue has no room for yet; the front end bounds them.
        self._backlog: dict[int, Request] = core.scheduler.state.promised
        # Samples of requests in the backlog that are not wanted any more.
        self._given_up: dict[int, set[int]] = {}
        # Requests that no step has run yet, in the order of arrival, and when they came.
        self._arrived_s: dict[int, tuple[float, int]] = {}
        self._num_steps = 0
        self._stats_due = 0.0
        self._sent_stats: EngineStats | None = None
        self._is_stopping = False
        # The resize that is under way, by the front end's number, and whether it is a sleep.
        self._resize_number: int | None = None
        self._is_sleep = False
        core.on_plan = self._tell_plan

    # Every message of the front end is answered by stats before the loop goes idle, so that it can
    # tell an engine that is done from one that hangs.

    def run(self) -> None:
        """Serve until a `Shutdown` arrives. Whatever the core raises ends the loop."""
        while True:
            # All of the queue may end in one step, and leave others behind it.
            is_backlog_due = self._backlog and self._core.scheduler.has_room
            if not self._core.has_work and not is_backlog_due:
                self._send_last_stats()
                self._socket.poll()
            self._receive()
            if self._is_stopping:
                return
            self._admit_backlog()
            if self._core.has_work:
                self._step()
            self._tell_resized()

    def _step(self) -> None:
        planned_s = self._clock()
        outputs = self._core.step()
        self._num_steps += 1
        started = self._started(planned_s) if self._arrived_s else ()
        stats = None
        now = self._clock()
        # What is pinned bounds what the front end may let in.
        if now >= self._stats_due or not self._core.has_work or outputs.prefixes:
            self._stats_due = now + STATS_INTERVAL_S
            self._sent_stats = stats = self._stats()
        if stats is not None or started or not outputs.is_empty:
            first, *more = StepMessage.parts(outputs)
            self._send(StepMessage.of(first, stats, started))
            for part in more:
                self._send(StepMessage.of(part, None))

    def _tell_plan(self) -> None:
        """Gauges at the start of a step, when they are due: it may take long."""
        now = self._clock()
        if now < self._stats_due:
            return
        stats = self._stats()
        if self._sent_stats is None or stats.num_running != self._sent_stats.num_running:
            self._stats_due = now + STATS_INTERVAL_S
            self._send(StepMessage(b"", b"", (), stats))

    def _started(self, planned_s: float) -> tuple[Started, ...]:
        """Requests that got their first row in the step planned at ``planned_s``. The queue is
        first come, first served: the first that still waits ends the search."""
        scheduler = self._core.scheduler
        rows = scheduler.rows
        started = []
        done = []
        for number, (arrived_s, n) in self._arrived_s.items():
            # A search has more beams than results, but its first has a row whenever one has.
            is_own = (rows.number >= number) & (rows.number < number + n)
            if not (is_own & (rows.last_step > 0)).any():
                break
            done.append(number)
            waited_s, num_cached = planned_s - arrived_s, scheduler.num_cached_tokens(number)
            started += [Started(number + index, waited_s, num_cached) for index in range(n)]
        for number in done:
            del self._arrived_s[number]
        return tuple(started)

    def _receive(self) -> None:
        """Everything that has arrived, without waiting."""
        while not self._is_stopping:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = decode_to_engine(data)
            self._sent_stats = None
            if isinstance(message, AddRequest):
                self._add(message)
            elif isinstance(message, Abort):
                for number in message.numbers:
                    self._abort(number)
            elif isinstance(message, ResetPrefixCache):
                self._core.scheduler.reset_prefix_cache()
            elif isinstance(message, DropPrefix):
                self._core.scheduler.drop_prefix(message.number)
            elif isinstance(message, ResizePool):
                self._resize(message)
            elif isinstance(message, Shutdown):
                self._is_stopping = True

    def _resize(self, message: ResizePool) -> None:
        resizing = self._core.scheduler.resizing
        if message.action == "wake_up" and not resizing.is_asleep:
            # Nothing to do, whatever resize is under way.
            self._send(self._pool_changed(message.number, None, ""))
            return
        try:
            if message.action == "wake_up":
                resizing.wake_up()
            elif message.action == "resize":
                resizing.resize(message.num_blocks)
            elif self._backlog:
                raise PoolBusyError(f"{len(self._backlog)} requests and more wait; let them end")
            else:
                resizing.sleep()
        except (PoolSizeError, PoolBusyError) as error:
            kind = type(error).__name__
            self._send(self._pool_changed(message.number, str(error), kind))
            return
        if (earlier := self._resize_number) is not None:
            text = "another resize of the KV cache took this one's place"
            self._send(self._pool_changed(earlier, text, PoolBusyError.__name__))
        self._resize_number, self._is_sleep = message.number, message.action == "sleep"
        self._limits = self._current_limits()
        # One that had nothing to do has ended before the next message is read.
        self._tell_resized()

    def _current_limits(self) -> Limits:
        """What may still be asked for."""
        num_blocks = self._core.scheduler.resizing.num_lasting_blocks
        return resized_report(self._report, num_blocks).limits

    def _tell_resized(self) -> None:
        if self._resize_number is None:
            return
        ended = self._core.scheduler.resizing.take_ended()
        if ended is None:
            return
        number, self._resize_number = self._resize_number, None
        self._limits = self._current_limits()
        # What it changes is known before anybody hears that it has ended.
        self._sent_stats = self._stats()
        self._send(StepMessage(b"", b"", (), self._sent_stats))
        kind = PoolBusyError.__name__
        self._send(self._pool_changed(number, ended.error, kind, drops_prefixes=self._is_sleep))

    def _pool_changed(
        self, number: int, error: str | None, kind: str, *, drops_prefixes: bool = False
    ) -> PoolChanged:
        num_blocks = self._core.scheduler.resizing.num_lasting_blocks
        return PoolChanged(number, num_blocks, drops_prefixes, error, kind)

    def _add(self, message: AddRequest) -> None:
        try:
            request = message.request(self._limits)
            if self._backlog or not self._core.scheduler.has_room:
                self._backlog[request.number] = request
            else:
                self._core.scheduler.add(request)
            self._arrived_s[request.number] = (self._clock(), request.n)
        except (RequestError, QueueFullError) as error:
            self._send(Rejected.of(message.number, error, message.n))

    def _abort(self, number: int) -> None:
        """Forget one sequence, wherever it is."""
        request = next(
            (r for r in self._backlog.values() if r.number <= number < r.number + r.n), None
        )
        if request is not None:
            given_up = self._given_up.setdefault(request.number, set())
            given_up.add(number)
            if len(given_up) == request.n:
                del self._backlog[request.number], self._given_up[request.number]
                self._arrived_s.pop(request.number, None)
            return
        self._core.scheduler.abort(number)
        if self._arrived_s.get(number, (0.0, 0))[1] == 1:
            del self._arrived_s[number]
        elif self._arrived_s:
            self._forget_unstarted()

    def _forget_unstarted(self) -> None:
        """Requests of several samples that were all given up before any step ran them."""
        for number, (_, n) in list(self._arrived_s.items()):
            is_known = any(self._core.scheduler.knows(number + index) for index in range(n))
            if n > 1 and number not in self._backlog and not is_known:
                del self._arrived_s[number]

    def _admit_backlog(self) -> None:
        while self._backlog and self._core.scheduler.has_room:
            number = next(iter(self._backlog))
            request = self._backlog.pop(number)
            try:
                self._core.scheduler.add(request, is_promised=True)
            except RequestError as error:
                self._arrived_s.pop(number, None)
                self._send(Rejected.of(number, error, request.n))
            for given_up in self._given_up.pop(number, ()):
                self._core.scheduler.abort(given_up)

    def _stats(self) -> EngineStats:
        scheduler = self._core.scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting_sequences
            + sum(request.num_sequences for request in self._backlog.values()),
            num_free_blocks=scheduler.manager.num_free_blocks,
            num_usable_blocks=scheduler.manager.num_usable_blocks,
            num_preemptions=scheduler.num_preemptions,
            num_swaps=scheduler.num_swaps,
            num_steps=self._num_steps,
            num_pinned_blocks=scheduler.manager.num_pinned_blocks,
            num_lasting_blocks=scheduler.resizing.num_lasting_blocks,
            is_asleep=scheduler.resizing.is_asleep,
            captured_bytes=self._core.captured_bytes,
        )

    def _send_last_stats(self) -> None:
        """Before going idle, unless the front end knows."""
        stats = self._stats()
        if stats != self._sent_stats:
            self._sent_stats = stats
            self._send(StepMessage(b"", b"", (), stats))

    def _send(self, message: FromEngine) -> None:
        self._socket.send(encode(message))


def run_engine(core: EngineCore, report: EngineReport, socket: zmq.Socket[bytes]) -> int:
    """Announce the engine on ``socket`` and serve until the end; returns the exit code."""
    freeze_process()
    try:
        socket.send(encode(Ready(report)))
        EngineLoop(core, report, socket).run()
    except Exception:
        error = traceback.format_exc()
        logger.critical("the engine died:\n%s", error)
        socket.send(encode(Died(error)))
        return 1
    finally:
        with contextlib.suppress(Exception):
            core.close()
    return 0


def run_process(build: Build) -> int:
    """The life of an engine process: standard input says what to build and where to connect."""
    _die_with_parent()
    # Whoever signals the whole process group means the front end, which drains and then says so.
    # (A handler, not SIG_IGN: the latter would be inherited by compilers that libraries start.)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    os.dup2(2, 1)  # a library's prints are not the server's output
    try:
        start = decode_start(_read_line())
        configure_logs(start.log_format, start.log_level, _LOG_PREFIX)
        _watch_parent()
        context = zmq.Context()
        socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        socket.set(zmq.LINGER, _LINGER_MS)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.RCVHWM, 0)
        socket.connect(start.address)
    except Exception as error:
        print(f"the engine process cannot start: {error}", file=sys.stderr)
        return 1
    try:
        try:
            core, report = build(start.config)
        except Exception as error:
            socket.send(encode(StartFailed(_reason(error), isinstance(error, ValueError))))
            return 1
        return run_engine(core, report, socket)
    finally:
        socket.close()
        context.term()


def _reason(error: Exception) -> str:
    """One line for a person; where the error is not made for one, its traceback is logged."""
    text = " ".join(str(error).split())
    if _is_readable(error):
        return text
    logger.error("the engine cannot start", exc_info=error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_readable(error: Exception) -> bool:
    """Whether the error is of ours and made for a person: about what was asked for, or about what
    the machine has not."""
    is_ours = type(error).__module__.startswith("octavo.")
    return is_ours and isinstance(error, ValueError | ResourceError)


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends, where it can (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch_parent() -> None:
    """End this process when standard input closes: the parent holds its other end."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        os._exit(1)

    threading.Thread(target=watch, name="octavo-parent-watch", daemon=True).start()


def _read_line() -> bytes:
    with open(0, "rb", buffering=0, closefd=False) as stream:
        return stream.readline(MAX_START_BYTES)


def main() -> int:
    from octavo.engine.build import build_engine

    return run_process(build_engine)


if __name__ == "__main__":
    sys.exit(main())
