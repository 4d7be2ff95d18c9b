"""Starting a step waits for nothing that the device still has to do, whatever its rows ask for."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.tiny_engine import build, run
from execution.gpu import test_gpu_engine
from execution.gpu.fake_flashinfer import FakeFlashInfer
from execution.gpu.test_gpu_engine import BLOCK_SIZE, MAX_NUM_SEQS, ON_GPU, gpu_engine
from octavo.core.plan import StepPlan, StepResult, int_array
from octavo.core.request import BeamResult, Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine import gpu_parts
from octavo.engine.build_gpu import warm_up
from octavo.execution.device import CUDADevice, Device, PlainDevice
from octavo.execution.gpu_runner import PendingStep

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


class Watch:
    """Which steps were collected, and whether one is being launched now."""

    def __init__(self) -> None:
        self.num_launched = self.num_collected = self.num_waits = 0
        self.is_launching = False
        self.most_in_flight = 0

    def refuse(self, what: str) -> None:
        if self.is_launching:
            raise AssertionError(f"launch waits: {what}")

    def event(self, own: Any) -> Any:
        watch = self

        class Event:
            number = -1

            def record(self) -> None:
                self.number = watch.num_launched
                own.record()

            def synchronize(self) -> None:
                if self.number > watch.num_collected:
                    watch.refuse(f"for step {self.number}, collected {watch.num_collected}")
                own.synchronize()

            def query(self) -> bool:
                return bool(own.query())

        return Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While a step is launched, Octavo's own code may not ask a tensor for its values."""
        watched = ("cpu", "item", "tolist", "__bool__", "__int__", "__float__", "nonzero")
        kept = {name: getattr(torch.Tensor, name) for name in watched}

        def guarded(name: str) -> Callable[..., Any]:
            def call(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
                if str(sys._getframe(1).f_globals.get("__name__")).startswith("octavo"):
                    self.refuse(f"Tensor.{name}")
                return kept[name](tensor, *args, **options)

            return call

        for name in watched:
            setattr(torch.Tensor, name, guarded(name))
        try:
            yield
        finally:
            for name in watched:
                setattr(torch.Tensor, name, kept[name])


def watched_device(watch: Watch) -> Device:
    base: Any = CUDADevice if ON_GPU else PlainDevice

    class Watched(base):  # type: ignore[misc]
        def event(self) -> Any:
            return watch.event(super().event())

    device: Device = Watched()
    return device


def requests() -> list[Request]:
    kinds: list[dict[str, Any]] = [
        {
            "temperature": 0.0,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.3,
            "repetition_penalty": 1.3,
            "logprobs": 3,
            "prompt_logprobs": 2,
        },
        {
            "temperature": 0.8,
            "logit_bias": {7: 3.0, 8: -2.0},
            "bad_words_token_ids": ((5,), (7, 7)),
        },
        {"temperature": 0.0, "min_tokens": 4, "allowed_token_ids": (7, 9, 11, 2)},
        {"temperature": 0.0, "use_beam_search": True, "beam_width": 2, "min_tokens": 2},
    ]
    random = np.random.default_rng(3)
    return [
        Request(
            number=10 * index,
            prompt_token_ids=int_array(random.integers(3, 96, length)),
            params=SamplingParams(max_tokens=6, **kind),
            max_tokens=6,
            seed=index,
            stop_token_ids=(2, 7),
            beam_width=kind.get("beam_width", 0),
        )
        for index, (kind, length) in enumerate(zip(kinds, (7, 5, 9, 6), strict=True))
    ]


@pytest.mark.parametrize(
    "attention",
    [
        "triton",
        pytest.param(
            "flashinfer",
            marks=pytest.mark.skipif(ON_GPU, reason="the stand-in reads the device"),
        ),
    ],
)
def test_no_launch_waits(model: Path, monkeypatch: pytest.MonkeyPatch, attention: str) -> None:
    monkeypatch.setattr(gpu_parts, "find_flashinfer", FakeFlashInfer)
    watch = Watch()
    monkeypatch.setattr(
        test_gpu_engine, "CUDADevice" if ON_GPU else "PlainDevice", lambda: watched_device(watch)
    )
    core = gpu_engine(model, num_blocks=14, depth=2, chunk=8, attention=attention)
    runner = core.executor.runner  # type: ignore[attr-defined]
    # As at an engine's start; what sequences find afterwards is as if nothing had been.
    warm_up(runner, 3)
    launch, collect = runner.launch, runner.collect

    def watched_launch(plan: StepPlan) -> PendingStep:
        watch.num_launched += 1
        watch.is_launching = True
        watch.most_in_flight = max(watch.most_in_flight, watch.num_launched - watch.num_collected)
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("error")
        try:
            pending: PendingStep = launch(plan)
            return pending
        finally:
            watch.is_launching = False
            if ON_GPU:
                torch.cuda.set_sync_debug_mode("default")

    def watched_collect(pending: PendingStep) -> StepResult:
        result: StepResult = collect(pending)
        watch.num_collected += 1
        return result

    monkeypatch.setattr(runner, "launch", watched_launch)
    monkeypatch.setattr(runner, "collect", watched_collect)
    beams: dict[int, BeamResult] = {}
    with watch.watching():
        found = run(core, requests(), beams=beams)
    core.close()
    plain, _ = build(model, max_num_seqs=MAX_NUM_SEQS, block_size=BLOCK_SIZE)
    expected_beams: dict[int, BeamResult] = {}
    assert found == run(plain, requests(), beams=expected_beams)
    plain.close()
    assert {n: pytest.approx(beam.score, abs=1e-4) for n, beam in beams.items()} == {
        n: beam.score for n, beam in expected_beams.items()
    }
    assert beams
    assert watch.most_in_flight == 2
    assert runner.edits.nbytes


def test_the_watch_sees_waiting() -> None:
    watch = Watch()
    device = watched_device(watch)
    event = device.event()
    watch.num_launched, watch.is_launching = 1, True
    event.record()
    with pytest.raises(AssertionError, match="for step 1"):
        event.synchronize()
    watch.num_collected = 1
    event.synchronize()
