"""The papers' baselines give the tokens that ``kv=paged`` gives: only memory and time differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.test_beams import alone as mixed_alone
from engine.test_beams import mixed, reference
from engine.test_equality import REQUESTS, alone
from engine.tiny_engine import build, pool, run, save_llama
from octavo.config import ConfigError
from octavo.core.plan import int_array
from octavo.core.request import ContextLengthError, Request
from octavo.core.sampling_params import SamplingParams
from octavo.memory.contiguous import ContiguousManager
from octavo.memory.reservation import RESERVES
from octavo.scheduling.admission import resolve_request


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("tiny"))


def options(**changes: Any) -> dict[str, Any]:
    """Room for three of the longest at a time, where the longest is reserved."""
    base: dict[str, Any] = {
        "kv": "contiguous",
        "attention": "auto",
        "block_size": 4,
        "kv_memory": pool(50, 4),
        "max_model_len": 64,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 9,
    }
    return base | changes


@pytest.mark.parametrize("reserve", RESERVES)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("scheduler", ["continuous", "static"])
def test_the_same_tokens(model: Path, reserve: str, depth: int, scheduler: str) -> None:
    changes = options(reserve=reserve, depth=depth, scheduler=scheduler)
    core, report = build(model, **changes)
    assert (report.kv, report.reserve, report.attention) == ("contiguous", reserve, "contiguous")
    assert (report.scheduler, report.sharing) == (scheduler, False)
    assert run(core, REQUESTS) == alone()
    assert core.scheduler.num_preemptions == 0
    usage = core.scheduler.usage()
    assert usage.free == usage.capacity
    core.close()


@pytest.mark.parametrize("kv", ["paged", "virtual"])
def test_static_batches_of_blocks(model: Path, kv: str) -> None:
    core, _ = build(model, kv=kv, attention="auto", scheduler="static", max_num_seqs=7)
    assert run(core, REQUESTS) == alone()
    core.close()


@pytest.mark.parametrize("attention", ["compiled", "gather"])
def test_kernels_over_tables_read_runs_too(model: Path, attention: str) -> None:
    core, report = build(model, **options(attention=attention, reserve="oracle"))
    assert report.attention == attention
    assert run(core, REQUESTS) == alone()
    core.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_samples_and_beams(tmp_path: Path, depth: int) -> None:
    reference("llama").save_pretrained(tmp_path)
    core, _ = build(tmp_path, **options(reserve="oracle", depth=depth, kv_memory=pool(64, 4)))
    assert run(core, mixed()) == mixed_alone("llama")
    core.close()


def test_the_longest_sequence_is_what_is_reserved_unless_asked_otherwise(model: Path) -> None:
    core, report = build(model, **options())
    assert report.reserve == "max"
    assert "contiguous, reserve max" in str(report)
    assert isinstance(core.scheduler.manager, ContiguousManager)
    core.close()


@pytest.mark.parametrize("reserve", RESERVES)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_what_the_door_lets_in_can_be_served(model: Path, reserve: str, n: int) -> None:
    """The longest that it allows, and no token more, is what the manager can reserve."""
    core, report = build(model, **options(reserve=reserve, max_model_len=40, kv_memory=pool(45, 4)))
    longest = report.limits.longest(8, n)
    fits = longest > 8
    if fits:
        params = SamplingParams(max_tokens=longest - 8, ignore_eos=True)
        request = resolve_request(0, [5] * 8, params, report.limits, random_seed=0, n=n)
        assert len(run(core, [request])[n - 1]) == longest - 8
    params = SamplingParams(max_tokens=max(longest - 8, 0) + 1)
    with pytest.raises(ContextLengthError, match=f"{n} samples .*--reserve {reserve}|maximum"):
        resolve_request(10, [5] * 8, params, report.limits, random_seed=0, n=n)
    if longest < 40:
        with pytest.raises(ContextLengthError):
            core.scheduler.add(Request(20, int_array([5] * 8), params, max(longest - 7, 1), 0, n=n))
    assert (n < 5) <= fits
    core.close()


def test_a_pool_without_room_for_one_reservation_says_so(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"64 tokens, a run of 16 blocks, .* has 15; lower max"):
        build(model, **options(kv_memory=pool(15, 4)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv": "paged", "reserve": "max"}, "reserve is for kv=contiguous"),
        ({"reserve": "all"}, "reserve must be one of max, pow2, oracle"),
        ({"scheduler": "dynamic"}, "scheduler must be one of continuous, static"),
        ({"swap_memory": "1MiB"}, "never preempts"),
        ({"preemption": "swap"}, "leave out preemption=swap"),
        ({"attention": "mixed"}, "mixed does not go with kv=contiguous"),
        ({"attention": "stock"}, "stock needs a GPU; use attention=auto"),
        ({"kv": "paged", "attention": "stock"}, "contiguous addresses, which kv=paged has not"),
        ({"kv": "paged", "attention": "contiguous"}, "does not go with kv=paged"),
    ],
)
def test_what_does_not_go_together_is_refused(
    model: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(model, **options(**changes))
