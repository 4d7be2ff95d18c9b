"""What garbage collections leave out: all of an engine's process, and of others while they wait."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from engine.tiny_engine import make_llm, save_gguf
from engine.toy_process import toy_report
from octavo.core.sampling_params import SamplingParams
from octavo.engine.heap import frozen_meanwhile
from octavo.engine.messages import Ready, decode_from_engine
from octavo.engine.process import EngineLoop, run_engine
from scheduling.harness import Harness


class Ring:
    """Garbage that only a collection finds, once it is dropped."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_an_engines_process_leaves_out_what_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is announced, and what is garbage by then goes first."""
    harness, found = Harness(), []
    ring = weakref.ref(Ring())

    def run(loop: EngineLoop) -> None:
        found.append((gc.get_freeze_count(), ring()))

    monkeypatch.setattr(EngineLoop, "run", run)
    context = zmq.Context()
    front, back = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    try:
        front.bind("inproc://engine")
        back.connect("inproc://engine")
        assert run_engine(harness.core, toy_report(harness.core), back) == 0
        assert isinstance(decode_from_engine(front.recv()), Ready)
    finally:
        context.destroy(linger=0)
    ((count, garbage),) = found
    assert count > 10_000
    assert garbage is None


def test_a_callers_heap_is_as_it_was_after_a_call(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    with make_llm(save_gguf(tmp_path / "model.gguf")) as llm:
        counts, step = [], llm._core.step

        def counting() -> object:
            counts.append(gc.get_freeze_count())
            return step()

        llm._core.step = counting  # type: ignore[method-assign, assignment]
        llm.generate(["hello"], params)
        llm.chat([{"role": "user", "content": "hello"}], params)
        assert min(counts) > 10_000
        assert gc.get_freeze_count() == 0
        counts.clear()
        for _ in llm.stream_chat([{"role": "user", "content": "hello"}], params):
            # Between pieces the caller's own code runs, for as long as it likes.
            assert gc.get_freeze_count() == 0
        assert not any(counts)

        def failing() -> object:
            raise KeyboardInterrupt

        llm._core.step = failing  # type: ignore[method-assign, assignment]
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["hello"], params)
        llm._core.step = step  # type: ignore[method-assign]
    assert gc.get_freeze_count() == 0


def test_what_was_dropped_before_a_call_goes_after_it() -> None:
    """As does what is dropped meanwhile: an engine that nobody holds any more gives its memory
    back."""
    held, ring = Ring(), weakref.ref(Ring())
    other = weakref.ref(held)
    with frozen_meanwhile():
        assert gc.get_freeze_count()
        del held
        gc.collect()
        assert other() is not None
    gc.collect()
    assert ring() is None
    assert other() is None


def test_the_young_are_not_lost_count_of() -> None:
    """Calls one after the other: what became garbage between two is found, though every call makes
    all that is there old."""
    gc.collect()
    for _ in range(3):
        ring = weakref.ref(Ring())
        with frozen_meanwhile():
            assert ring() is None


def test_what_is_frozen_already_stays_so() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with frozen_meanwhile():
        later = Ring()
        assert gc.is_tracked(later)
    # What other tests left may die meanwhile; thawed, there would be none.
    assert count // 2 < gc.get_freeze_count() <= count
