"""The GPU's runner under the scheduler gives the tokens of the CPU's, whatever the batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.tiny_engine import build, run
from execution.models.tiny_models import OPT_350M, tiny_opt, tiny_qwen3
from octavo.config import ConfigError, EngineConfig
from octavo.core.plan import KVCapacity, StepPlan, int_array
from octavo.core.request import BeamResult, Request, StepOutputs
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.engine.mechanism import resolve_limits
from octavo.execution import graphs
from octavo.execution.attention import paged
from octavo.execution.device import CUDADevice, Device, PlainDevice
from octavo.execution.kernels import decode_parts
from octavo.execution.kernels.decode_parts import DecodeTiling, decode_tiling
from octavo.execution.models import fused
from octavo.execution.models.loading import load_config, load_model
from octavo.memory import prefix_groups
from octavo.memory.contiguous import ContiguousManager
from octavo.memory.paged import PagedManager
from octavo.memory.reservation import Reservation
from octavo.memory.virtual import VirtualManager
from octavo.scheduling.preemption import PreemptionPolicy
from octavo.scheduling.scheduler import Scheduler, SchedulerConfig

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
BLOCK_SIZE = 4
MAX_NUM_SEQS = 4
ON_GPU = torch.cuda.is_available()


def gpu_engine(
    model: Path,
    *,
    num_blocks: int,
    depth: int,
    chunk: int,
    num_host_blocks: int = 0,
    dtype: str = "float32",
    is_invariant: bool = False,
    kv: str = "paged",
    attention: str = "triton",
    maps_forks: bool = False,
    weights: str = "bf16",
    kv_dtype: str = "auto",
    max_blocks: int | None = None,
    max_num_seqs: int = MAX_NUM_SEQS,
    block_size: int = BLOCK_SIZE,
) -> EngineCore:
    from octavo.engine.gpu_parts import GPUParts
    from octavo.execution.executors.gpu import GPUExecutor

    device: Device = CUDADevice() if ON_GPU else PlainDevice()
    config = EngineConfig(
        model=str(model), dtype="float32", max_num_seqs=max_num_seqs, max_num_batched_tokens=chunk,
        depth=depth,
    )  # fmt: skip
    limits = resolve_limits(
        config, str(model), load_config(model), max_num_seqs=1, max_num_batched_tokens=1, depth=1
    )
    decoder = load_model(
        model,
        dtype=dtype,
        weights=weights,
        device=device.torch_device,
        max_positions=limits.max_model_len,
    )
    is_virtual = kv == "virtual"
    parts = GPUParts(
        decoder, device, None if is_virtual else block_size, limits, is_invariant=is_invariant,
        kv=kv, attention=attention, kv_dtype=kv_dtype,
    )  # fmt: skip
    block_size = parts.layout.block_size
    runner = parts.runner(num_blocks, num_host_blocks, ON_GPU, max_blocks)
    capacity = KVCapacity(num_blocks, block_size, parts.layout.block_bytes, num_host_blocks)
    sizes = (num_blocks, block_size, max_num_seqs)
    options = {"prefix_caching": True, "num_host_blocks": num_host_blocks}
    manager: Any = PagedManager(*sizes, **options)
    if kv == "contiguous":
        manager = ContiguousManager(*sizes, Reservation("oracle", limits.max_model_len))
    if runner.arena.slots is not None:
        slots = runner.arena.slots
        manager = VirtualManager(
            *sizes, max_mapped_blocks=slots.max_mapped_blocks, num_places=slots.num_places,
            num_ahead=2, maps_forks=maps_forks, **options,
        )  # fmt: skip
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=chunk,
            max_model_len=limits.max_model_len,
            max_queued_requests=4 * max_num_seqs,
            preemption=PreemptionPolicy(mode="swap" if num_host_blocks else "recompute"),
            finds_prefix_groups=True,
            max_blocks=max_blocks,
        ),
        manager,
    )
    return EngineCore(scheduler, GPUExecutor(runner, capacity), depth)


def requests(max_tokens: int = 5) -> list[Request]:
    """Greedy, sampled as a group, penalized and scored, and a beam search."""
    kinds: list[tuple[dict[str, Any], int]] = [
        ({"temperature": 0.0}, 1),
        ({"temperature": 0.9}, 2),
        ({"temperature": 0.0, "repetition_penalty": 1.5, "logprobs": 2, "prompt_logprobs": 1}, 1),
        ({"temperature": 0.0, "use_beam_search": True, "beam_width": 2}, 1),
    ]
    random = np.random.default_rng(0)
    return [
        Request(
            number=10 * index,
            prompt_token_ids=int_array(random.integers(3, 96, length)),
            params=SamplingParams(max_tokens=max_tokens, **kind),
            max_tokens=max_tokens,
            seed=index,
            stop_token_ids=(),
            n=n,
            beam_width=kind.get("beam_width", 0),
        )
        for index, ((kind, n), length) in enumerate(zip(kinds, (9, 13, 3, 6), strict=True))
    ]


def test_few_rows_are_read_otherwise_once_one_is_long(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that grows beyond the bound goes on with another captured step and the same tokens."""
    asked = replace(requests()[0], max_tokens=6)
    core = gpu_engine(model, num_blocks=9, depth=1, chunk=16)
    whole = run(core, [asked], beams={})
    core.close()
    seen: list[int] = []

    def told(max_tokens: int, *others: Any) -> DecodeTiling:
        if max_tokens:
            seen.append(others[3])
        return decode_tiling(max_tokens, *others)

    for room in (paged, decode_parts):
        monkeypatch.setattr(room, "LONG_ROW", 12)
    monkeypatch.setattr(paged, "decode_tiling", told)
    core = gpu_engine(model, num_blocks=9, depth=1, chunk=16)
    assert run(core, [asked], beams={}) == whole
    core.close()
    # Decoding begins with 10 tokens; the first class is bounded, the other as long as any row.
    assert seen == sorted(seen)
    assert set(seen) > {12}


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, list[int]]:
    core, _ = build(model, max_num_seqs=MAX_NUM_SEQS, block_size=BLOCK_SIZE)
    found = run(core, requests(), beams={})
    core.close()
    return found


@pytest.mark.parametrize(
    ("num_blocks", "depth", "chunk", "num_host_blocks"),
    [(60, 1, 32, 0), (9, 2, 5, 0), (9, 2, 32, 16)],
)
def test_tokens_are_those_of_the_cpu(
    model: Path,
    expected: dict[int, list[int]],
    num_blocks: int,
    depth: int,
    chunk: int,
    num_host_blocks: int,
) -> None:
    core = gpu_engine(
        model, num_blocks=num_blocks, depth=depth, chunk=chunk, num_host_blocks=num_host_blocks
    )
    beams: dict[int, BeamResult] = {}
    assert run(core, requests(), beams=beams) == expected
    assert beams
    if num_blocks < 20:
        assert core.scheduler.num_preemptions
    assert bool(core.scheduler.num_swaps) == bool(num_host_blocks)


@pytest.mark.parametrize(
    ("attention", "maps_forks", "depth", "chunk", "num_host_blocks"),
    [("triton", False, 2, 32, 0), ("triton", True, 2, 32, 16), ("mixed", True, 1, 32, 16)],
)
def test_tokens_are_the_same_through_slots(
    model: Path,
    expected: dict[int, list[int]],
    attention: str,
    maps_forks: bool,
    depth: int,
    chunk: int,
    num_host_blocks: int,
) -> None:
    """In real mappings: of memory files here, of driver pages on a GPU."""
    core = gpu_engine(
        model, num_blocks=6, depth=depth, chunk=chunk, num_host_blocks=num_host_blocks,
        kv="virtual", attention=attention, maps_forks=maps_forks,
    )  # fmt: skip
    beams: dict[int, BeamResult] = {}
    assert run(core, requests(), beams=beams) == expected
    assert beams
    manager = core.scheduler.manager
    assert isinstance(manager, VirtualManager)
    slots = core.executor.runner.arena.slots  # type: ignore[attr-defined]
    assert slots.num_mapped_blocks == manager.num_mapped_blocks > 0
    if not ON_GPU:  # a page of a GPU holds all of these tokens
        assert core.scheduler.num_preemptions
    core.close()


def test_tokens_are_the_same_while_the_pool_changes(
    model: Path, expected: dict[int, list[int]]
) -> None:
    """Captured steps keep their addresses; memory behind them comes and goes."""
    core = gpu_engine(
        model, num_blocks=12, depth=2, chunk=32, num_host_blocks=16, kv="virtual", max_blocks=40
    )  # fmt: skip
    resizing, step = core.scheduler.resizing, core.step
    sizes = [(12, 5), (9, 20), (5, 5), (2, 30)]

    def resizing_step() -> StepOutputs:
        outputs = step()
        if sizes and core.scheduler.state.step_id >= sizes[-1][0]:
            resizing.resize(sizes.pop()[1])
        return outputs

    core.step = resizing_step  # type: ignore[method-assign]
    assert run(core, requests()) == expected
    arena = core.executor.runner.arena  # type: ignore[attr-defined]
    assert arena.pages.num_handles == core.scheduler.manager.num_usable_blocks + 1
    resizing.sleep()
    while core.has_work:
        core.step()
    assert arena.pages.num_handles == 1
    resizing.wake_up()
    while core.has_work:
        core.step()
    assert arena.pages.num_handles == core.scheduler.manager.num_usable_blocks + 1 == 6
    assert not sizes
    core.close()


def test_tokens_are_the_same_in_contiguous_runs(
    model: Path, expected: dict[int, list[int]]
) -> None:
    """Kernels over block tables read consecutive blocks; samples and beams copy."""
    core = gpu_engine(model, num_blocks=18, depth=2, chunk=32, kv="contiguous")
    forking = [request for request in requests() if request.num_sequences > 1]
    found = run(core, forking)
    assert len(found) == 3
    assert found == {number: expected[number] for number in found}
    assert core.scheduler.num_preemptions == 0
    assert core.scheduler.manager.num_free_blocks == 17
    core.close()


def test_rows_that_begin_alike_read_it_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_groups, "MIN_SAVED_TOKENS", 8)
    random = np.random.default_rng(1)
    common = random.integers(3, 96, 10)
    asked = [
        Request(
            number=index,
            prompt_token_ids=int_array([*common, *random.integers(3, 96, own)]),
            params=SamplingParams(temperature=0.0, max_tokens=5),
            max_tokens=5,
            seed=0,
            stop_token_ids=(),
        )
        for index, own in enumerate((3, 1, 6))
    ]
    plain, _ = build(model, max_num_seqs=MAX_NUM_SEQS, block_size=BLOCK_SIZE)
    core = gpu_engine(model, num_blocks=60, depth=2, chunk=64)
    launch, groups = core.executor.launch, []

    def seen(plan: StepPlan) -> None:
        groups.extend(plan.batch.prefix_groups or ())
        launch(plan)

    monkeypatch.setattr(core.executor, "launch", seen)
    assert run(core, asked) == run(plain, asked)
    assert {(tuple(group.places), group.num_tokens) for group in groups} == {((0, 1, 2), 8)}
    core.close()
    plain.close()


@pytest.mark.parametrize("changes", [{}, OPT_350M], ids=["125m", "350m"])
def test_learned_positions_and_layer_norms(tmp_path: Path, changes: dict[str, Any]) -> None:
    """OPT, its prompts in chunks; norms before its parts, and after them."""
    tiny_opt(**changes).save_pretrained(tmp_path)
    plain, _ = build(tmp_path, max_num_seqs=MAX_NUM_SEQS, block_size=BLOCK_SIZE)
    expected = run(plain, requests(3))
    plain.close()
    core = gpu_engine(tmp_path, num_blocks=60, depth=2, chunk=7)
    assert run(core, requests(3)) == expected
    core.close()
    with pytest.raises(ConfigError, match="OPTForCausalLM does not run deterministically on a GPU"):
        gpu_engine(tmp_path, num_blocks=9, depth=2, chunk=16, is_invariant=True)


def test_more_query_heads_of_a_kv_head_than_a_tile_has_rows(tmp_path: Path) -> None:
    shape = {"num_attention_heads": 129, "num_key_value_heads": 1, "head_dim": 16}
    tiny_qwen3(**shape, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"129 query heads for each KV head .* device=cpu"):
        gpu_engine(tmp_path, num_blocks=60, depth=2, chunk=7)


def test_the_last_layer_computes_what_is_sampled(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps that are not captured; all tokens of a prompt that is scored."""
    monkeypatch.setattr(graphs, "MAX_CAPTURED_TOKENS", 0)
    num_rows: list[int] = []
    plain_linear = fused.gated_linear

    def counted(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        num_rows.append(len(x))
        return plain_linear(x, *args, **options)

    monkeypatch.setattr(fused, "gated_linear", counted)
    core = gpu_engine(model, num_blocks=60, depth=1, chunk=8)
    (request, _, scored, _) = requests(max_tokens=1)
    assert run(core, [request])
    # Nine tokens in two chunks, of which the first samples nothing; two layers.
    assert num_rows == [8, 1, 1]
    num_rows.clear()
    assert run(core, [scored])
    assert num_rows == [3, 3]
    core.close()


def test_a_row_without_numbers_fails_its_step_only(model: Path) -> None:
    core = gpu_engine(model, num_blocks=60, depth=2, chunk=32)
    runner = core.executor.runner  # type: ignore[attr-defined]
    weight = runner.model.model.norm.weight
    sound = weight.clone()
    with torch.inference_mode():
        weight.fill_(float("nan"))
    (request, *_) = requests()
    core.scheduler.add(request)
    errors = []
    while core.has_work:
        errors += [finished.error for finished in core.step().finished]
    assert [("not finite" in (error or "")) for error in errors] == [True]
    with torch.inference_mode():
        weight.copy_(sound)
    assert len(run(core, [request])[request.number]) == request.max_tokens
    core.close()
