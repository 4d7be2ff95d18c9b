"""FlashInfer plans on the host and reads block tables: against a stand-in everywhere, and against
the reference with the package itself where it is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.tiny_engine import build, run
from execution.gpu.fake_flashinfer import FakeFlashInfer
from execution.gpu.references import assert_attends, attend, ints, make_pool
from execution.gpu.test_gpu_engine import BLOCK_SIZE, MAX_NUM_SEQS, ON_GPU, gpu_engine, requests
from execution.models.tiny_models import tiny_qwen3
from octavo.core.plan import int_array
from octavo.core.request import BeamResult, Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine import gpu_parts
from octavo.execution.attention.flashinfer import (
    FlashInferError,
    FlashInferKernels,
    check_strides,
    find_flashinfer,
)
from octavo.execution.device import CUDADevice, Device, PlainDevice
from octavo.execution.kernels.page_lists import list_pages

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
with_package = pytest.mark.skipif(
    not ON_GPU or find_flashinfer() is None, reason="needs a GPU and flashinfer-python"
)
LENGTHS = [1, 4, 5, 37, 16, 3]


@pytest.mark.parametrize("counts", [[1], [3, 1, 7], [1200, 2]])
def test_lists_of_pages(counts: list[int], device: torch.device) -> None:
    width = max(counts) + 3
    tables = torch.randint(1, 10_000, (len(counts) + 4, width), dtype=torch.int32, device=device)
    rows = torch.randperm(len(tables), device=device)[: len(counts)].int()
    starts = ints([0, *np.cumsum(counts)], device)
    pages = torch.full((sum(counts) + 5,), -1, dtype=torch.int32, device=device)
    list_pages(tables, rows, starts, pages)
    expected = [tables[row, :count] for row, count in zip(rows.tolist(), counts, strict=True)]
    assert torch.equal(pages[: sum(counts)], torch.cat(expected))
    assert (pages[sum(counts) :] == -1).all()


def check(library: Any, device: Device, dtype: torch.dtype, shape: dict[str, int]) -> None:
    """Rows of one token, chunks, and rows of one token again, against the reference."""
    heads, window = shape["heads"], shape["window"]
    pool = make_pool(
        LENGTHS, num_kv_heads=shape["kv_heads"], head_dim=shape["head_dim"],
        block_size=shape["block_size"], dtype=dtype, device=device.torch_device,
    )  # fmt: skip
    kernels = FlashInferKernels(
        library, pool.kv_layer, heads, device, max_rows=16, max_row_pages=pool.tables.shape[1],
        sliding_window=window,
    )  # fmt: skip
    for picked, counts in (
        ([3, 0, 5], [1, 1, 1]),
        ([4, 3, 1], [7, 20, 1]),
        ([1, 2, 4], [1, 1, 1]),
        ([3], [37]),
        ([2], [1]),
    ):
        lengths = int_array([LENGTHS[row] for row in picked])
        queries = torch.randn(
            sum(counts), heads, shape["head_dim"], dtype=dtype, device=device.torch_device
        )
        is_decode = max(counts) == 1
        if is_decode:
            kernels.plan_decode(lengths)
        else:
            kernels.plan_chunks(int_array(counts), lengths)
        kernels.list_pages(pool.tables, ints(picked, device.torch_device))
        attended = kernels.decode if is_decode else kernels.attend_chunks
        found = attended(queries, pool.kv_layer)
        first = 0
        for row, count in zip(picked, counts, strict=True):
            own = slice(first, first + count)
            expected = attend(queries[own], pool, row, LENGTHS[row] - count, window)
            assert_attends(found[own], expected, dtype)
            first += count


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the package itself is tested")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window"),
    [(4, 2, 16, 4, 0), (7, 1, 8, 3, 0), (6, 6, 16, 16, 5), (4, 2, 16, 1, 1)],
)
def test_arguments_say_what_is_meant(
    heads: int, kv_heads: int, head_dim: int, block_size: int, window: int
) -> None:
    shape = {
        "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size,
        "window": window,
    }  # fmt: skip
    check(FakeFlashInfer(), PlainDevice(), torch.float32, shape)


class Late(PlainDevice):
    """Nothing that was sent has been read until somebody waits for it."""

    def __init__(self) -> None:
        self.num_waits = 0

    def event(self) -> Any:
        device = self

        class Event:
            is_pending = False

            def record(self) -> None:
                self.is_pending = True

            def synchronize(self) -> None:
                device.num_waits += self.is_pending
                self.is_pending = False

        return Event()


def test_plans_of_steps_in_flight_are_kept() -> None:
    """Two may wait to be copied while a third is made; what a fourth overwrites is waited for.
    Captured steps find the memory of all at one place."""
    library, device = FakeFlashInfer(), Late()
    pool = make_pool(
        LENGTHS, num_kv_heads=2, head_dim=16, block_size=4, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    kernels = FlashInferKernels(
        library, pool.kv_layer, 4, device, max_rows=16, max_row_pages=20, depth=2
    )
    plans = []
    for step in range(4):
        kernels.plan_decode(int_array([5 + step, 9]))
        plans.append([wrapper.num_plans for wrapper in library.made])
        if step < 3:
            assert device.num_waits == 0
    assert plans == [[1], [1, 1], [1, 1, 1], [2, 1, 1]]
    # One wait is for the wrapper's plan, one for the rows' own numbers.
    assert device.num_waits == 2
    addresses = {
        tuple(
            buffer.data_ptr()
            for buffer in (
                wrapper.floats, wrapper.ints, wrapper.paged_kv_indptr_buffer,
                wrapper.paged_kv_indices_buffer, wrapper.paged_kv_last_page_len_buffer,
            )
        )
        for wrapper in library.made
    }  # fmt: skip
    assert len(addresses) == 1


def test_strides_that_it_cannot_count_are_refused() -> None:
    shape, rest = (2, 4, 2, 1, 8), (16, 8, 8, 1)
    check_strides(torch.empty_strided(shape, (2**32 - 1, *rest), device="meta"))
    with pytest.raises(FlashInferError, match="4294967296 apart; use a smaller block_size"):
        check_strides(torch.empty_strided(shape, (2**32, *rest), device="meta"))


def test_kernels_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeFlashInfer()

    def plan(self: Any, *sizes: Any, **options: Any) -> None:
        raise OSError("nvcc is not there")

    monkeypatch.setattr(library.BatchDecodeWithPagedKVCacheWrapper, "plan", plan, raising=False)
    pool = make_pool(
        [3], num_kv_heads=1, head_dim=8, block_size=4, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    kernels = FlashInferKernels(
        library, pool.kv_layer, 1, PlainDevice(), max_rows=16, max_row_pages=1
    )
    with pytest.raises(FlashInferError, match="cannot prepare its kernels: nvcc is not there"):
        kernels.compile()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise OSError('no driver')", "cannot be imported: no driver"),
        ("fast_decode_plan = None", "has no BatchDecode.*, BatchPrefill"),
    ],
)
def test_a_package_that_cannot_be_used_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    source: str, message: str,
) -> None:  # fmt: skip
    import re
    import sys

    (tmp_path / "flashinfer.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    assert find_flashinfer.__wrapped__() is None
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    assert re.search(f"flashinfer is installed but {message}", caplog.text)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    # Where the package runs, heads of a size that it takes.
    tiny_qwen3(head_dim=128 if ON_GPU else 16).save_pretrained(folder)
    return folder


@pytest.mark.skipif(ON_GPU, reason="the stand-in reads the device, so it cannot be captured")
@pytest.mark.parametrize(
    ("kv", "num_blocks", "depth", "chunk", "num_host_blocks"),
    [("paged", 9, 2, 5, 0), ("virtual", 6, 2, 32, 16)],
)
def test_tokens_are_those_of_the_cpu(
    model: Path, monkeypatch: pytest.MonkeyPatch, kv: str, num_blocks: int, depth: int,
    chunk: int, num_host_blocks: int,
) -> None:  # fmt: skip
    """Samples, beams, penalties, preemption and swapping."""
    library = FakeFlashInfer()
    monkeypatch.setattr(gpu_parts, "find_flashinfer", lambda: library)
    plain, _ = build(model, max_num_seqs=MAX_NUM_SEQS, block_size=BLOCK_SIZE)
    expected = run(plain, requests(), beams={})
    plain.close()
    core = gpu_engine(
        model, num_blocks=num_blocks, depth=depth, chunk=chunk, num_host_blocks=num_host_blocks,
        kv=kv, attention="flashinfer",
    )  # fmt: skip
    beams: dict[int, BeamResult] = {}
    assert run(core, requests(), beams=beams) == expected
    assert beams
    assert core.scheduler.num_preemptions
    num_plans = Counter[str]()
    for wrapper in library.made:
        num_plans[type(wrapper).__name__] += wrapper.num_plans
    # One of each kind compiles kernels.
    assert min(num_plans["Decode"], num_plans["Prefill"]) > 1
    core.close()


@pytest.mark.gpu
@with_package
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window"),
    [
        (32, 8, 128, 16, 0),
        (7, 1, 128, 16, 0),
        (8, 8, 128, 1, 0),
        (16, 4, 128, 32, 9),
    ],
)
def test_the_installed_package(
    heads: int, kv_heads: int, head_dim: int, block_size: int, window: int
) -> None:
    """Of few dtypes and head sizes, since each is compiled for minutes."""
    shape = {
        "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size,
        "window": window,
    }  # fmt: skip
    device = CUDADevice()
    torch.cuda.synchronize()
    with device.context():
        check(find_flashinfer(), device, torch.bfloat16, shape)


@pytest.mark.gpu
@with_package
@pytest.mark.parametrize("kv", ["paged", "virtual"])
def test_scores_are_those_of_our_kernels(model: Path, kv: str) -> None:
    """In captured steps, many of each size, of rows of all lengths: after every token the same ones
    are likeliest, or as good as."""
    random = np.random.default_rng(3)
    asked = [
        Request(
            number=index,
            prompt_token_ids=int_array(random.integers(3, 96, length)),
            params=SamplingParams(temperature=0.0, max_tokens=24, logprobs=3),
            max_tokens=24,
            seed=0,
            stop_token_ids=(),
        )
        for index, length in enumerate((1, 45, 17, 64))
    ]
    scores: list[dict[int, list[tuple[int, float]]]] = []
    for attention in ("triton", "flashinfer"):
        core = gpu_engine(
            model, num_blocks=200, depth=2, chunk=40, dtype="bfloat16", kv=kv, attention=attention
        )
        found: dict[int, list[tuple[int, float]]] = {request.number: [] for request in asked}
        for request in asked:
            core.scheduler.add(request)
        while core.has_work:
            outputs = core.step()
            if outputs.logprobs is None:
                continue
            for number, token, logprob in zip(
                outputs.numbers, outputs.token_ids, outputs.logprobs.scores.logprobs, strict=True
            ):
                found[int(number)].append((int(token), float(logprob)))
        scores.append(found)
        core.close()
    ours, theirs = scores
    num_equal = 0
    for number, tokens in ours.items():
        assert len(tokens) == len(theirs[number]) == 24
        for (token, logprob), (other, other_logprob) in zip(tokens, theirs[number], strict=True):
            # Where they part two were as good; what follows has another past.
            assert abs(logprob - other_logprob) < 0.1
            if token != other:
                break
            num_equal += 1
    assert num_equal > 4 * 24 / 2
