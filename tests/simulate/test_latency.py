"""Loads counted from plans by hand, seconds computed by hand, and what scales with a shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo.core.model_config import ModelConfig
from octavo.core.plan import (
    Batch,
    CopyBlocks,
    FanOut,
    IntArray,
    MapBlocks,
    PrefixGroup,
    RowForks,
    RowInit,
    StepPlan,
    SwapIn,
    SwapOut,
    int_array,
)
from octavo.core.sampling_params import SamplingParams
from octavo.simulate.latency import Coefficients, LatencyModel
from octavo.simulate.load import LoadMeter, StepLoad
from octavo.simulate.shape import ModelShape

SHAPE = ModelShape(
    name="small",
    num_layers=4,
    hidden_size=8,
    num_kv_heads=2,
    layer_weights=1000.0,
    head_weights=100.0,
    weight_bytes=2.0,
    token_bytes=64.0,
    attention_width=32.0,
    max_position_embeddings=256,
)
AT = Coefficients(
    byte_rate=1e6,
    flop_rate=1e8,
    blend=1.0,
    kv_rate=64e3,
    attention_rate=128e3,
    step_s=1.0,
    layer_s=0.25,
    row_s=0.5,
    chunk_s=0.125,
    copy_rate=64.0 * 4,
    swap_rate=64.0 * 2,
    map_s=3.0,
)


def init(row: int, num_tokens: int, num_computed: int = 0) -> RowInit:
    tokens = int_array([1] * num_tokens)
    return RowInit(row, tokens, num_computed, int_array([]), SamplingParams(), 0)


def chunk(*pairs: tuple[int, int], samples: bool = True) -> Batch:
    rows, counts = int_array([p[0] for p in pairs]), int_array([p[1] for p in pairs])
    return Batch.of(rows, counts, np.full(len(pairs), samples))


def test_loads_are_counted() -> None:
    meter = LoadMeter()
    plan = StepPlan(1, chunk((0, 3), (90, 5)), row_inits=(init(0, 3), init(90, 9, 4)))
    # 3 tokens attend to 1 + 2 + 3 keys; 5 behind 4 others to 5 + 6 + 7 + 8 + 9.
    assert meter.measure(plan) == StepLoad(8, 2, 2, 2, 0, 6 + 35)
    decode = Batch.decode(int_array([0, 90]))
    assert meter.measure(StepPlan(2, decode)) == StepLoad(2, 2, 2, 0, 4 + 10)
    assert meter.measure(StepPlan(3, decode)) == StepLoad(2, 2, 2, 0, 5 + 11)
    # Another row joins: the positions of the others went on.
    joined = Batch.of(int_array([0, 90, 5]), int_array([1, 1, 2]), np.array([True, True, False]))
    plan = StepPlan(4, joined, row_inits=(init(5, 4),))
    assert meter.measure(plan) == StepLoad(4, 3, 2, 1, 6 + 12, 3)
    plan = StepPlan(5, Batch.decode(int_array([0, 90])))
    assert meter.measure(plan) == StepLoad(2, 2, 2, 0, 7 + 13)
    assert meter.measure(StepPlan(6, Batch.empty())) == StepLoad()
    forks = RowForks(int_array([0, 90]), int_array([90, 90]), int_array([1, 1]))
    plan = StepPlan(7, Batch.decode(int_array([0, 90])), row_forks=forks)
    assert meter.measure(plan) == StepLoad(2, 2, 2, 0, 14 + 14)


def test_shared_prefixes_are_read_once_and_fan_outs_sampled() -> None:
    meter = LoadMeter()
    inits = tuple(init(row, 11, 10) for row in range(3))
    groups = (PrefixGroup(int_array([0, 1, 2]), 8),)
    decode = replace(Batch.decode(int_array([0, 1, 2])), prefix_groups=groups)
    assert meter.measure(StepPlan(1, decode, row_inits=inits)).kv_tokens == 3 * 11 - 2 * 8
    assert meter.measure(StepPlan(2, decode)).kv_tokens == 3 * 12 - 2 * 8
    plan = StepPlan(3, chunk((7, 4)), row_inits=(init(7, 4),), fan_outs=(FanOut(7, (8, 9)),))
    assert meter.measure(plan).num_sampled == 3


def test_moved_blocks_are_counted() -> None:
    ids = int_array([1, 2, 3])
    commands = (
        CopyBlocks(ids, ids + 3),
        SwapOut(ids, ids),
        SwapIn(1, ids[:2], ids[:2]),
        MapBlocks(ids, ids, int_array([0, 5, 6])),
        MapBlocks(ids, ids, ids, is_ahead=True),
    )
    load = LoadMeter().measure(StepPlan(1, Batch.empty(), commands=commands))
    assert (load.copied_blocks, load.swapped_blocks, load.mapped_blocks) == (3, 5, 2)


def test_the_meter_agrees_with_counting_every_row() -> None:
    """Random batches, repeated a random number of times as the same object."""
    random = np.random.default_rng(0)
    meter, positions = LoadMeter(), np.zeros(16, dtype=np.int64)
    step_id = 0
    for _ in range(60):
        rows: IntArray = random.permutation(16)[: random.integers(1, 9)].astype(np.int32)
        counts = random.integers(1, 4, len(rows)) if random.random() < 0.3 else 1 + 0 * rows
        batch = Batch.of(rows, int_array(counts), np.ones(len(rows), dtype=np.bool_))
        for _ in range(random.integers(1, 4)):
            step_id += 1
            load = meter.measure(StepPlan(step_id, batch))
            kv = pairs = 0
            for row, count in zip(rows.tolist(), batch.num_scheduled_tokens.tolist(), strict=True):
                keys = sum(range(int(positions[row]) + 1, int(positions[row]) + count + 1))
                kv += keys if count == 1 else 0
                pairs += keys if count > 1 else 0
                positions[row] += count
            assert (load.kv_tokens, load.attention_pairs) == (kv, pairs)


def test_seconds_add_up() -> None:
    model = LatencyModel(SHAPE, AT, block_size=1)
    assert model.seconds(StepLoad()) == 0
    # Weights 2000 B and 10 × 2000 operations; the head's 200 B and 2 × 200 operations.
    layers, head = 2e-3 + 2e-4, 2e-4 + 4e-6
    load = StepLoad(num_tokens=10, num_rows=3, num_sampled=2, num_chunks=1, kv_tokens=7)
    expected = layers + head + 7e-3 + 1.0 + 4 * 0.25 + 3 * 0.5 + 0.125
    assert model.seconds(load) == pytest.approx(expected)
    load = replace(load, attention_pairs=5)
    assert model.seconds(load) == pytest.approx(expected + 4 * 32 * 5 / 128e3)
    moved = replace(load, copied_blocks=4, mapped_blocks=2, swapped_blocks=6)
    behind = model.seconds(load) + 1.0 + 6.0
    assert model.seconds(moved) == pytest.approx(behind + 3.0)
    beside = LatencyModel(SHAPE, replace(AT, swaps_beside=True), block_size=1)
    assert beside.seconds(moved) == pytest.approx(behind)
    assert beside.seconds(replace(moved, swapped_blocks=100)) == 50.0
    # What a step that copies, or maps, takes more, once.
    fixed = LatencyModel(SHAPE, replace(AT, copy_step_s=20.0, map_step_s=0.5), block_size=1)
    for copied, mapped, more in ((4, 2, 20.5), (1, 0, 20.0), (0, 9, 0.5), (0, 0, 0.0)):
        moved = replace(load, copied_blocks=copied, mapped_blocks=mapped)
        assert fixed.seconds(moved) == pytest.approx(model.seconds(moved) + more)


def test_a_large_blend_is_the_longer_of_the_two() -> None:
    model = LatencyModel(SHAPE, replace(AT, blend=64.0, step_s=0.0, layer_s=0.0, row_s=0.0))
    few, many = StepLoad(num_tokens=1), StepLoad(num_tokens=10_000)
    assert model.seconds(few) == pytest.approx(2000 / 1e6, rel=0.02)
    assert model.seconds(many) == pytest.approx(2 * 1000 * 10_000 / 1e8, rel=0.02)


def test_few_keys_do_not_fill_the_memorys_pipe() -> None:
    """A ramp in each layer: half of it at 48 bytes of a layer's, of which a token has 16."""
    flat = LatencyModel(SHAPE, AT)
    ramp = LatencyModel(SHAPE, replace(AT, ramp_s=0.5, ramp_bytes=48.0))
    for tokens, share in ((1, 0.25), (3, 0.5), (9, 0.75), (30_000, 1.0)):
        load = StepLoad(num_tokens=1, num_rows=1, kv_tokens=tokens)
        more = ramp.seconds(load) - flat.seconds(load)
        assert more == pytest.approx(4 * 0.5 * share, rel=1e-3)
    none = StepLoad(num_tokens=5, num_rows=1, num_chunks=1, attention_pairs=15)
    assert ramp.seconds(none) == flat.seconds(none)


def test_rows_are_padded_to_captured_sizes() -> None:
    at = replace(AT, padded_sizes=(1, 4, 16), row_s=0.0)
    model, plain = LatencyModel(SHAPE, at), LatencyModel(SHAPE, replace(at, padded_sizes=()))

    def seconds(of: LatencyModel, tokens: float, sampled: float) -> float:
        return of.seconds(StepLoad(num_tokens=tokens, num_rows=1, num_sampled=sampled))

    assert seconds(model, 5, 3) == seconds(plain, 16, 4)
    assert seconds(model, 3.5, 1) == seconds(plain, 4, 1)
    assert seconds(model, 17, 2) == seconds(plain, 17, 4)


HOST = replace(
    AT, padded_sizes=(8,), host_s=1.0, host_row_s=0.25, host_mixed_s=4.0, host_layer_s=8.0
)


def test_the_host_shows_as_far_as_it_outlasts_the_step_before() -> None:
    model = LatencyModel(SHAPE, HOST)
    decode = StepLoad(num_tokens=4, num_rows=4)
    assert model.host_seconds(decode) == 2.0
    chunk = StepLoad(num_tokens=8, num_rows=1, num_chunks=1)
    assert model.host_seconds(chunk) == 5.25
    assert model.with_host(10.0, decode, 0.0) == 12.0
    assert model.with_host(10.0, decode, 1.5) == 10.5
    assert model.with_host(10.0, decode, 3.0) == 10.0
    # More than any captured step: its kernels run while the others are launched.
    long = StepLoad(num_tokens=9, num_rows=1, num_chunks=1)
    assert model.host_seconds(long) == 5.25 + 4 * 8.0
    assert model.with_host(30.0, long, 3.0) == 34.25
    assert model.with_host(40.0, long, 3.0) == 40.0


def test_the_host_works_beside_the_device() -> None:
    """The same plans one at a time, and each launched while the one before runs."""
    model = LatencyModel(SHAPE, replace(HOST, host_s=2.0))
    plan = StepPlan(1, chunk((0, 3), (1, 3)), row_inits=(init(0, 3), init(1, 3)))
    decode = Batch.decode(int_array([0, 1]))
    plans = [plan, StepPlan(2, decode), StepPlan(3, decode)]
    meter = LoadMeter()
    device = [model.seconds(meter.measure(each)) for each in plans]
    assert min(device) > 2.5
    step_time = model.stepper()
    assert [step_time(each) for each in plans] == [
        (pytest.approx(device_s), host_s, True)
        for device_s, host_s in zip(device, (6.5, 2.5, 2.5), strict=True)
    ]
    long = StepPlan(1, chunk((0, 9)), row_inits=(init(0, 9),))
    _, host_s, is_captured = model.stepper()(long)
    assert (host_s, is_captured) == (6.25 + 4 * 8.0, False)
    # Of a device without a host of its own.
    assert LatencyModel(SHAPE, AT).stepper()(plan).host_s == 0.0


def test_few_rows_only_read_the_weights() -> None:
    at = replace(AT, padded_sizes=(1, 4, 16), few_rows=4, row_s=0.0)
    model, plain = LatencyModel(SHAPE, at), LatencyModel(SHAPE, replace(at, few_rows=0))

    def seconds(of: LatencyModel, tokens: float, sampled: float) -> float:
        return of.seconds(StepLoad(num_tokens=tokens, num_rows=1, num_sampled=sampled))

    products = 2 * 1000.0 * 4 / 1e8, 2 * 100.0 * 4 / 1e8
    assert seconds(plain, 3, 3) - seconds(model, 3, 3) == pytest.approx(sum(products))
    assert seconds(plain, 5, 3) - seconds(model, 5, 3) == pytest.approx(products[1])
    assert seconds(plain, 5, 5) == seconds(model, 5, 5)


def test_keys_that_are_read_beside_chunks_take_longer() -> None:
    model, plain = LatencyModel(SHAPE, replace(AT, mixed_kv_rate=32e3)), LatencyModel(SHAPE, AT)
    mixed = StepLoad(num_tokens=9, num_rows=2, num_chunks=1, kv_tokens=100, attention_pairs=50)
    assert model.seconds(mixed) - plain.seconds(mixed) == pytest.approx(100 * 64 / 32e3)
    decode = StepLoad(num_tokens=2, num_rows=2, kv_tokens=100)
    assert model.seconds(decode) == plain.seconds(decode)


def test_ranks_share_the_work_and_pay_for_it() -> None:
    at = replace(AT, link_rate=1e5, link_s=0.01)
    whole, half = LatencyModel(SHAPE, at), LatencyModel(SHAPE.split(2), at)
    load = StepLoad(num_tokens=10, num_rows=10, num_sampled=10, kv_tokens=100)
    reduces = 2 * 4 * (0.01 + 10 * (2 * 8 * 2 / 2) / 1e5)
    shared = whole.seconds(load) - 1.0 - 4 * 0.25 - 10 * 0.5
    assert half.seconds(load) == pytest.approx(whole.seconds(load) - shared / 2 + reduces)
    with pytest.raises(ValueError, match="2 key-value heads, which 4 ranks cannot share"):
        SHAPE.split(4)


def test_shapes_are_counted_from_a_configuration() -> None:
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_attention_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
    )
    shape = ModelShape.of("8b", config)
    assert shape.memory_bytes == pytest.approx(16.06e9, rel=1e-3)
    assert shape.token_bytes == 128 * 1024
    assert shape.attention_width == 32 * 4096
    assert ModelShape.of("8b", config, weight_bytes=1, kv_bytes=1).token_bytes == 64 * 1024
    tied = ModelShape.of("8b", replace(config, tie_word_embeddings=True))
    assert tied.memory_bytes == shape.memory_bytes - 128256 * 4096 * 2


@pytest.mark.parametrize(
    "change",
    [
        {"byte_rate": 0.0},
        {"blend": 0.5},
        {"row_s": -1.0},
        {"step_s": float("nan")},
        {"ramp_bytes": 0.0},
        {"host_s": float("inf")},
        {"padded_sizes": (4, 4)},
        {"padded_sizes": (0, 4)},
    ],
)
def test_nonsense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(AT, **change)
