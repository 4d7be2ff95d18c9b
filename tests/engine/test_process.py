"""The engine's loop over a socket, in this process; and what its messages refuse."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
import zmq

from engine.toy_process import toy_report
from octavo.config import EngineConfig
from octavo.core.plan import StepResult
from octavo.core.request import (
    ContextLengthError,
    FinishReason,
    Request,
    RequestError,
    StepOutputs,
)
from octavo.core.sampling_params import SamplingParams
from octavo.engine.messages import (
    Abort,
    AddRequest,
    Died,
    MessageError,
    PoolChanged,
    Ready,
    Rejected,
    ResizePool,
    Shutdown,
    Start,
    Started,
    StepMessage,
    ToEngine,
    decode_from_engine,
    decode_start,
    decode_to_engine,
    encode,
    encode_start,
)
from octavo.engine.process import EngineLoop, run_engine
from octavo.engine.report import EngineStats
from octavo.scheduling.admission import Limits
from scheduling.harness import Harness, request
from toy_executor import VOCAB, expected_tokens

LIMITS = Limits(vocab_size=VOCAB, max_model_len=256, num_kv_tokens=128)


class Front:
    """The other end of the loop's socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.stats: list[EngineStats] = []
        self.started: list[Started] = []
        self.others: list[object] = []

    def send(self, message: ToEngine | bytes) -> None:
        self._socket.send(message if isinstance(message, bytes) else encode(message))

    def receive(self, until: Callable[[], object]) -> None:
        while not until():
            assert self._socket.poll(20_000), "the engine is silent"
            message = decode_from_engine(self._socket.recv())
            if not isinstance(message, StepMessage):
                self.others.append(message)
                continue
            for number, token in message.tokens():
                self.tokens.setdefault(number, []).append(token)
            for end in message.finished:
                self.reasons[end.number] = end.reason
            self.started += message.started
            if message.stats is not None:
                self.stats.append(message.stats)


@contextmanager
def sockets() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context = zmq.Context()
    front, back = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    front.bind("inproc://engine")
    back.connect("inproc://engine")
    try:
        yield front, back
    finally:
        context.destroy(linger=0)


@contextmanager
def running(harness: Harness) -> Iterator[Front]:
    """The loop on a thread; every step reports stats."""
    with sockets() as (front, back):
        loop = EngineLoop(
            harness.core, toy_report(harness.core), back, clock=itertools.count().__next__
        )
        thread = threading.Thread(target=loop.run)
        thread.start()
        yield Front(front)
        front.send(encode(Shutdown()))
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_of_all_sizes_get_their_tokens_and_the_pool_is_whole_again(depth: int) -> None:
    harness = Harness(depth=depth, max_queued_requests=2)
    prompts = {number: [number] * (1 + number % 7) for number in range(12)}
    with running(harness) as front:
        for number, prompt in prompts.items():
            front.send(AddRequest.of(request(number, prompt, 5 + number, seed=number)))
        front.receive(lambda: len(front.reasons) == len(prompts))
        front.receive(lambda: front.stats[-1].num_running == 0)
    for number, prompt in prompts.items():
        assert front.tokens[number] == expected_tokens(prompt, 5 + number, number)
    assert set(front.reasons.values()) == {FinishReason.LENGTH}
    assert not front.others
    assert front.stats[-1].num_free_blocks == front.stats[-1].num_usable_blocks
    assert max(stats.num_waiting for stats in front.stats) > 2  # a backlog before the queue


@pytest.mark.parametrize("depth", [1, 2])
def test_what_waits_behind_a_queue_that_ends_in_one_step_is_served(depth: int) -> None:
    """All of it has arrived before the loop looks for the first time, and nothing comes later."""
    harness = Harness(depth=depth, max_queued_requests=1)
    with sockets() as (front_socket, back):
        front = Front(front_socket)
        for number in range(5):
            front.send(AddRequest.of(request(number, [number + 1], 1)))
        loop = EngineLoop(harness.core, toy_report(harness.core), back)
        thread = threading.Thread(target=loop.run)
        thread.start()
        front.receive(lambda: len(front.reasons) == 5)
        front.send(encode(Shutdown()))
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("depth", [1, 2])
def test_an_aborted_request_gives_its_blocks_back_within_two_steps(depth: int) -> None:
    harness = Harness(depth=depth)
    collect, steps, is_aborted = harness.executor.collect, itertools.count(1), threading.Event()

    def collect_after_abort() -> StepResult:
        if next(steps) == 5:
            assert is_aborted.wait(20)
        return collect()

    harness.executor.collect = collect_after_abort  # type: ignore[method-assign]
    with running(harness) as front:
        front.send(AddRequest.of(request(1, [1, 2, 3], 100)))
        front.receive(lambda: front.stats and front.stats[-1].num_steps == 4)
        front.send(Abort((1, 77)))
        is_aborted.set()
        front.receive(lambda: front.stats[-1].num_running == 0)
        front.receive(lambda: front.stats[-1].kv_cache_usage == 0)
    # The abort arrives before the fifth step or during it; two more may follow.
    assert 4 <= front.stats[-1].num_steps <= 7
    assert not front.reasons


def test_a_request_in_the_backlog_can_be_aborted() -> None:
    harness = Harness(max_num_seqs=1, max_queued_requests=1)
    with running(harness) as front:
        for number in range(4):
            front.send(AddRequest.of(request(number, [number + 1], 20)))
        front.send(Abort((2, 3)))
        front.receive(lambda: len(front.reasons) == 2)
    assert front.reasons.keys() == {0, 1}


def test_a_request_that_can_never_fit_is_rejected_and_the_others_go_on() -> None:
    harness = Harness(num_blocks=5)
    with running(harness) as front:
        front.send(AddRequest.of(request(1, [1] * 10, 16)))
        front.send(AddRequest.of(request(2, [1], 3)))
        front.receive(lambda: 2 in front.reasons)
    (rejected,) = front.others
    assert isinstance(rejected, Rejected)
    assert rejected.number == 1
    assert "KV cache" in str(rejected.error())


def test_waiting_is_told_once_with_the_first_step() -> None:
    harness = Harness(max_num_seqs=1)
    with running(harness) as front:
        for number in range(3):
            front.send(AddRequest.of(request(number, [number + 1], 4)))
        front.send(AddRequest.of(request(9, [1], 4)))
        front.send(Abort((9,)))
        front.receive(lambda: len(front.reasons) == 3)
    numbers = [started.number for started in front.started]
    assert numbers == [0, 1, 2]
    waits = [started.waited_s for started in front.started]
    assert waits == sorted(waits)  # the clock ticks with every look at it


def test_every_message_is_answered_before_the_engine_rests() -> None:
    harness = Harness()
    with running(harness) as front:
        front.receive(lambda: len(front.stats) == 1)  # it rests for the first time
        front.send(Abort((1,)))
        front.receive(lambda: len(front.stats) == 2)
        front.send(AddRequest.of(request(2, [1], 4)))
        front.send(Abort((2,)))
        front.receive(lambda: len(front.stats) > 2 and front.stats[-1].num_running == 0)


def test_a_failed_step_fails_its_requests_and_not_the_engine() -> None:
    harness = Harness()
    harness.executor.fail_steps.add(2)
    with running(harness) as front:
        front.send(AddRequest.of(request(1, [1], 9)))
        front.receive(lambda: 1 in front.reasons)
        front.send(AddRequest.of(request(2, [1], 9)))
        front.receive(lambda: 2 in front.reasons)
    assert front.reasons == {1: FinishReason.ERROR, 2: FinishReason.LENGTH}


def answers_to(harness: Harness, *messages: ToEngine) -> list[object]:
    """What the engine says of ``messages``, all of which it reads before its first step."""
    with sockets() as (front_socket, back):
        front = Front(front_socket)
        for message in messages:
            front.send(message)
        loop = EngineLoop(harness.core, toy_report(harness.core), back)
        thread = threading.Thread(target=loop.run)
        thread.start()
        front.receive(lambda: len(front.others) == len(messages) - len(served(messages)))
        front.send(Shutdown())
        thread.join(20)
        assert not thread.is_alive()
    return sorted(front.others, key=lambda answer: answer.number)  # type: ignore[attr-defined]


def served(messages: tuple[ToEngine, ...]) -> list[AddRequest]:
    """Requests that are served: those of the numbers below 100."""
    return [m for m in messages if isinstance(m, AddRequest) and m.number < 100]


def test_waking_up_who_is_awake_leaves_a_resize_alone() -> None:
    answers = answers_to(
        Harness(),
        AddRequest.of(request(1, [1] * 40, 60)),
        ResizePool(1, 5),
        ResizePool(2, 0, "wake_up"),
        ResizePool(3, 0, "wake_up"),
    )
    assert answers == [PoolChanged(number, 5, False, None, ANY) for number in (1, 2, 3)]


def test_a_resize_that_changes_nothing_has_ended_before_the_next_begins() -> None:
    harness = Harness()
    same = harness.manager.num_usable_blocks
    first, second = answers_to(harness, ResizePool(1, same), ResizePool(2, same + 3))
    assert first == PoolChanged(1, same, False, None, ANY)
    assert second == PoolChanged(2, same + 3, False, None, ANY)


def test_a_sleep_drops_prefixes_even_where_it_fails() -> None:
    for fails in (False, True):
        harness = Harness()
        harness.executor.fail_steps |= {1} if fails else set()
        refused, slept = answers_to(harness, ResizePool(1, 10**9), ResizePool(2, 0, "sleep"))
        assert (refused.drops_prefixes, slept.drops_prefixes) == (False, True)
        assert (slept.error is not None) == fails


def test_a_request_that_crosses_a_shrink_is_refused_in_the_doors_words() -> None:
    late = AddRequest.of(request(101, [1] * 10, 60))
    _, rejected = answers_to(Harness(), ResizePool(1, 5), late)
    assert isinstance(rejected, Rejected)
    assert isinstance(rejected.error(), ContextLengthError)
    assert "holds 20 tokens" in rejected.reason
    assert "ask for at most 11 tokens" in rejected.reason


def test_what_the_core_does_not_foresee_ends_the_engine_with_its_last_words() -> None:
    harness = Harness()
    with sockets() as (front_socket, back):
        front = Front(front_socket)
        front.send(b"\x93not a message")
        assert run_engine(harness.core, toy_report(harness.core), back) == 1
        front.receive(lambda: len(front.others) == 2)
    ready, died = front.others
    assert ready == Ready(toy_report(harness.core))
    assert isinstance(died, Died)
    assert "MessageError" in died.error


def add(**changes: object) -> AddRequest:
    good = AddRequest.of(request(1, [1, 2], 4, stops=(5,)))
    return AddRequest(**{name: getattr(good, name) for name in good.__struct_fields__} | changes)


def params(**values: object) -> bytes:
    import msgspec

    return msgspec.Raw(msgspec.msgpack.encode(values))  # type: ignore[return-value]


def test_a_request_survives_the_wire() -> None:
    sent = Request(
        number=2**60,
        prompt_token_ids=np.arange(90, dtype=np.int32),
        params=SamplingParams(
            temperature=0.5, seed=-3, stop="x", stop_token_ids=(1,), logit_bias={3: 0.5}
        ),
        max_tokens=30,
        seed=2**64 - 1,
        stop_token_ids=(1, 2),
    )
    message = decode_to_engine(encode(AddRequest.of(sent)))
    assert isinstance(message, AddRequest)
    got = message.request(LIMITS)
    assert got.prompt_token_ids.tolist() == list(range(90))
    assert got.params == SamplingParams(
        temperature=0.5, seed=-3, stop_token_ids=(1,), logit_bias=((3, 0.5),)
    )
    assert (got.number, got.max_tokens, got.seed) == (2**60, 30, 2**64 - 1)
    assert got.stop_token_ids == (1, 2)


@pytest.mark.parametrize(
    "message",
    [
        add(prompt=b""),
        add(prompt=b"abc"),
        add(prompt=np.array([VOCAB], dtype="<i4").tobytes()),
        add(prompt=np.array([-1], dtype="<i4").tobytes()),
        add(max_tokens=0),
        add(max_tokens=1000),
        add(seed=-1),
        add(stop_token_ids=(VOCAB,)),
        add(stop_token_ids=(1,) * 5000),
        add(params=params(temperature=-1.0)),
        add(params=params(temperature="hot")),
        add(params=params(logit_bias=[(VOCAB, 1.0)])),
        add(params=params(allowed_token_ids=[VOCAB])),
        add(params=params(allowed_token_ids=[])),
        add(params=params(allowed_token_ids=[5], min_tokens=1)),
        add(params=params(bad_words_token_ids=[[1, VOCAB]])),
        add(params=params(bad_words=["not converted"])),
        add(params=params(min_tokens=5)),
        add(params=params(logprobs=21)),
        add(params=params(logit_bias=[(1, float("inf"))])),
        add(params=params(top_p=float("nan"))),
    ],
)
def test_wrong_values_refuse_the_request(message: AddRequest) -> None:
    arrived = decode_to_engine(encode(message))
    assert isinstance(arrived, AddRequest)
    with pytest.raises(RequestError):
        arrived.request(LIMITS)


@pytest.mark.parametrize(
    "data", [b"", b"\x80", b"\x91\xa7Unknown", b"\xff" * 100, b"\x91" * 5000, encode(Died("x"))]
)
def test_other_bytes_are_not_a_message(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode_to_engine(data)


def test_outputs_survive_the_wire() -> None:
    outputs = StepOutputs(np.array([3, 2**40]), np.array([7, 9], dtype=np.int32))
    message = decode_from_engine(encode(StepMessage.of(outputs, EngineStats(num_running=2))))
    assert isinstance(message, StepMessage)
    assert list(message.tokens()) == [(3, 7), (2**40, 9)]
    assert message.stats == EngineStats(num_running=2)
    assert (message.logprobs, message.prompt_logprobs) == (None, ())


def test_a_config_is_checked_again_on_the_other_side() -> None:
    line = encode_start(Start("ipc:///tmp/x", EngineConfig(depth=2)))
    assert decode_start(line).config == EngineConfig(depth=2)
    with pytest.raises(MessageError, match="depth must be an integer from 1 to 2, got 3"):
        decode_start(line.replace(b'"depth":2', b'"depth":3'))


@pytest.mark.parametrize("line", [b"", b"no json\n", b"{}\n"])
def test_the_process_refuses_a_wrong_start_line(line: bytes) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "octavo.engine.process"],
        input=line,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    assert b"cannot start: not a start message" in done.stderr
    assert not done.stdout


def test_the_process_ends_when_its_standard_input_does(tmp_path: Path) -> None:
    """Also where the kernel has no signal for the death of a parent: this one lives on."""
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    address = f"ipc://{tmp_path}/engine"
    socket.bind(address)
    script = str(Path(__file__).with_name("toy_process.py"))
    process = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE)
    try:
        assert process.stdin is not None
        process.stdin.write(encode_start(Start(address, EngineConfig(model="toy"))))
        process.stdin.flush()
        assert socket.poll(20_000)
        assert isinstance(decode_from_engine(socket.recv()), Ready)
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(20) == 1
    finally:
        process.kill()
        process.wait()
        context.destroy(linger=0)


def test_the_front_end_loads_no_torch() -> None:
    code = (
        "import sys, octavo.engine.client, octavo.engine.process, octavo.server.run\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'numba', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
