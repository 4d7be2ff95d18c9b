"""A recorded run of the real engine replays under the simulator, plan by plan and field by field.

A tiny random model on the CPU: arrivals between steps, preemption, swaps, samples, beams, shared
prefixes, aborts, ends by stop tokens, and a step that fails, under every manager, and in static
batches, which nobody joins.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.test_beams import reference
from engine.test_virtual import SIZE
from engine.tiny_engine import TOKEN_BYTES, build, pool
from octavo.bench.prediction import replica_config
from octavo.core.plan import Batch, CopyBlocks, SwapIn, SwapOut, int_array
from octavo.core.protocols import StepError
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.simulate.executor import FixedLatency
from octavo.simulate.load import StepLoad
from octavo.simulate.recording import (
    HostClock,
    Recorder,
    Recording,
    TimingExecutor,
    difference,
    replay,
)
from octavo.simulate.replica import Replica

WAYS = ("paged", "virtual")
# Each of these reserves whole runs: nothing is preempted, swapped or found in a cache.
RESERVED: dict[str, dict[str, Any]] = {
    "contiguous": {"reserve": "oracle"},
    "contiguous of the longest": {"reserve": "max"},
    "static": {"reserve": "max", "scheduler": "static"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flat")
    reference("llama").save_pretrained(folder)
    return folder


def options(kv: str, num_blocks: int = 30) -> dict[str, Any]:
    if kv in RESERVED:
        # Room for five of the longest, a beam's two or a request's three among them.
        mine = {"kv": "contiguous", "kv_memory": pool(130, 4), **RESERVED[kv]}
        return options("paged") | mine
    size = SIZE if kv == "virtual" else 4
    return {
        "kv": kv,
        "block_size": size,
        "attention": "auto" if kv == "virtual" else "gather",
        "kv_memory": pool(num_blocks if kv == "paged" else num_blocks // 2, size),
        "max_model_len": 96,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 24,
    }


def requests(vocab_size: int, seed: int) -> list[Request]:
    """Plain, sampled, of several samples and beams, half of them beginning alike."""
    random = np.random.default_rng(seed)
    common = random.integers(0, vocab_size, 13)
    found, number = [], 0
    for index in range(14):
        own = random.integers(0, vocab_size, int(random.integers(1, 20)))
        prompt = int_array(np.concatenate([common, own]) if index % 2 else own)
        params = SamplingParams(temperature=1.0, max_tokens=40)
        request = Request(number, prompt, params, int(random.integers(2, 30)), seed=index)
        if index % 5 == 2:
            request = replace(request, n=3)
        elif index % 5 == 4:
            params = SamplingParams(use_beam_search=True, max_tokens=40)
            request = replace(request, params=params, n=1, beam_width=2)
        elif index % 5 == 3:
            request = replace(request, stop_token_ids=tuple(range(0, vocab_size, 7)))
        found.append(request)
        number += request.num_sequences
    return found


def record(model: Path, seed: int, **changes: Any) -> tuple[Recording, dict[str, int]]:
    """Requests come at steps of their own; one is aborted."""
    core, report = build(model, **changes)
    recorder = Recorder(core)
    waiting = requests(report.vocab_size, seed)
    arrivals = np.random.default_rng(seed + 1)
    for step in itertools.count():
        while waiting and arrivals.random() < 0.4:
            recorder.add(waiting.pop(0))
        if step == 9:
            recorder.abort(0)
        if not waiting and not recorder.has_work:
            break
        recorder.step()
        core.scheduler.check()
    found = {
        "preemptions": core.scheduler.num_preemptions,
        "swaps": core.scheduler.num_swaps,
        "fan_outs": sum(len(plan.fan_outs) for plan in recorder.recording.plans),
        "forks": sum(len(plan.row_forks) for plan in recorder.recording.plans),
        "cached": sum(
            init.num_computed_tokens > 0
            for plan in recorder.recording.plans
            for init in plan.row_inits
        ),
    }
    core.close()
    return recorder.recording, found


@pytest.mark.parametrize("kv", WAYS)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [1, 2])
def test_plans_of_a_recorded_run_are_made_again(
    model: Path, kv: str, preemption: str, depth: int
) -> None:
    given = options(kv) | {"preemption": preemption, "depth": depth}
    if preemption == "swap":
        given["swap_memory"] = str(64 * TOKEN_BYTES * 16)
    recording, found = record(model, 3, **given)
    assert len(recording.plans) > 50
    assert all(found[name] for name in ("preemptions", "fan_outs", "forks", "cached")), found
    assert (found["swaps"] > 0) == (preemption == "swap")
    commands = {type(command) for plan in recording.plans for command in plan.commands}
    assert {SwapIn, SwapOut} <= commands or preemption == "recompute"
    fresh, _ = build(model, **given)
    replayed = replay(recording, fresh.scheduler)
    fresh.close()
    assert len(replayed) == len(recording.plans)
    for real, simulated in zip(recording.plans, replayed, strict=True):
        assert difference(real, simulated, f"plan {real.step_id}") is None


@pytest.mark.parametrize("kv", RESERVED)
@pytest.mark.parametrize("depth", [1, 2])
def test_reservations_and_static_batches_are_made_again(model: Path, kv: str, depth: int) -> None:
    given = options(kv) | {"depth": depth}
    recording, found = record(model, 3, **given)
    plans = recording.plans
    assert len(plans) > 50
    assert found["fan_outs"]
    assert found["forks"]
    assert not found["preemptions"]
    assert not found["swaps"]
    assert any(isinstance(command, CopyBlocks) for plan in plans for command in plan.commands)
    begin = [step for step, plan in enumerate(plans) if plan.row_inits]
    assert len(begin) > 2, "somebody waited"
    fresh, _ = build(model, **given)
    replayed = replay(recording, fresh.scheduler)
    fresh.close()
    assert len(replayed) == len(plans)
    for real, simulated in zip(plans, replayed, strict=True):
        assert difference(real, simulated, f"plan {real.step_id}") is None
    # The comparison tells ways of scheduling, and of reserving, apart.
    for other in RESERVED:
        if other != kv:
            fresh, _ = build(model, **options(other), depth=depth)
            assert not _is_made_again(recording, fresh)
            fresh.close()


def _is_made_again(recording: Recording, core: EngineCore) -> bool:
    try:
        replayed = replay(recording, core.scheduler)
    except AssertionError:
        return False
    pairs = list(zip(recording.plans, replayed, strict=False))
    is_same = all(difference(*pair) is None for pair in pairs)
    return is_same and len(replayed) == len(recording.plans)


@pytest.mark.parametrize("kv", [*WAYS, *RESERVED])
def test_a_failed_step_replays_too(model: Path, kv: str) -> None:
    core, report = build(model, **options(kv))
    executor, collects = core.executor, itertools.count()
    collect = executor.collect

    def failing() -> Any:
        result = collect()
        if next(collects) == 7:
            raise StepError("out of luck")
        return result

    executor.collect = failing  # type: ignore[method-assign]
    recorder = Recorder(core)
    for request in requests(report.vocab_size, 5):
        recorder.add(request)
    errors = []
    while recorder.has_work:
        errors += [finished.error for finished in recorder.step().finished if finished.error]
    assert errors
    fresh, _ = build(model, **options(kv))
    replayed = replay(recorder.recording, fresh.scheduler)
    pairs = zip(recorder.recording.plans, replayed, strict=True)
    assert [difference(*pair) for pair in pairs] == [None] * len(replayed)


def test_a_replica_is_the_engines_twin(model: Path) -> None:
    """What the planner simulates makes the plans that the engine makes."""
    given = options("paged") | {"prefix_caching": False, "depth": 2}
    recording, _ = record(model, 11, **given)
    _, report = build(model, **given)
    replica = Replica(replica_config(report), FixedLatency())
    replayed = replay(recording, replica.scheduler)
    pairs = zip(recording.plans, replayed, strict=True)
    assert [difference(*pair) for pair in pairs] == [None] * len(replayed)


def test_other_options_make_other_plans(model: Path) -> None:
    """The comparison is not blind: a pool of another size plans otherwise."""
    recording, _ = record(model, 3, **options("paged"))
    fresh, _ = build(model, **options("paged", num_blocks=33))
    with pytest.raises(AssertionError, match="samples other rows than recorded"):
        replay(recording, fresh.scheduler)


def test_differences_are_named() -> None:
    first = Batch.decode(int_array([1, 2]))
    assert difference(first, Batch.decode(int_array([1, 2]))) is None
    found = difference(first, Batch.decode(int_array([1, 3])))
    assert found is not None
    assert found.startswith("plan.rows: [1 2]")
    longer = replace(first, num_tokens=3)
    assert difference(first, longer, "batch") == "batch.num_tokens: 2 against 3"
    wider = replace(first, rows=first.rows.astype(np.int64))
    assert difference(first, wider) is not None, "dtypes count"
    assert difference((1, 2), (1,)) == "plan: 2 against 1 of them"
    assert difference(1, None) == "plan: int against NoneType"


def test_steps_are_timed_from_the_end_of_the_one_before(model: Path) -> None:
    core, _ = build(model, **options("paged"))
    ticks = itertools.count()
    timing = TimingExecutor(core.executor, HostClock(lambda: float(next(ticks) ** 2)))
    core.executor = timing
    prompt, params = int_array([1, 2, 3]), SamplingParams(ignore_eos=True)
    core.scheduler.add(Request(0, prompt, params, 3, 0))
    timing.resume()
    while core.has_work:
        core.step()
    # The clock was read at 0 (made), 1 (resumed), then once at the end of each step: squares.
    assert [step.seconds for step in timing.steps] == [3.0, 5.0, 7.0]
    assert [step.load for step in timing.steps] == [
        StepLoad(num_tokens=3, num_rows=1, num_sampled=1, num_chunks=1, attention_pairs=6),
        StepLoad(num_tokens=1, num_rows=1, num_sampled=1, kv_tokens=4),
        StepLoad(num_tokens=1, num_rows=1, num_sampled=1, kv_tokens=5),
    ]


def test_what_the_host_takes_is_timed_beside_the_step_before(model: Path) -> None:
    core, _ = build(model, **(options("paged") | {"depth": 2}))
    ends, host = itertools.count(0, 100), itertools.count()
    timing = TimingExecutor(
        core.executor, HostClock(lambda: float(next(ends))), lambda: float(next(host) ** 2)
    )
    core.executor = timing
    prompt, params = int_array([1, 2, 3]), SamplingParams(ignore_eos=True)
    core.scheduler.add(Request(0, prompt, params, 4, 0))
    timing.resume()
    while core.has_work:
        core.step()
    # Read when made, resumed, launched twice, then at each result and launch in turn: squares.
    first, *others = timing.steps
    assert (first.host_s, first.hidden_s) == (3.0, 0.0)
    assert [step.host_s for step in others] == [5.0, 9.0, 13.0]
    # Of the first step's 100 seconds 3 were the host's.
    assert first.device_s == 97.0
    assert [step.hidden_s for step in others] == [97.0, 100.0, 100.0]
    assert [step.device_s for step in others] == [100.0, 100.0, 100.0]
