"""The four calls on real mappings: offsets, growth, reuse, reclamation, failures, nothing left."""

from __future__ import annotations

import gc
import os
import re
import runpy
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from execution.pages.fake_driver import FakeDriver
from octavo.execution.pages import cuda
from octavo.execution.pages.interface import PageError, host_page_bytes
from octavo.execution.pages.memfd import MemfdPages
from octavo.vattention import OutOfMemoryError, VirtualKVCache

LAYERS, BATCH, CONTEXT, HEADS, DIM = 3, 4, 300, 2, 16
PAGE = host_page_bytes()
# 128 bytes a token.
TOKENS = PAGE // (HEADS * DIM * 4)
PIECE = 2 * LAYERS * PAGE


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make(**options: Any) -> VirtualKVCache:
    defaults: dict[str, Any] = {
        "page_size_kb": PAGE // 1024,
        "dtype": torch.float32,
        "device": "cpu",
        "memory_limit": 40 * PIECE,
        "eager_tokens": 0,
        "reclaim_threshold": 1.0,
    }
    return VirtualKVCache.init(LAYERS, BATCH, CONTEXT, HEADS, DIM, **(defaults | options))


def pages_of(cache: VirtualKVCache) -> MemfdPages:
    pages = cache._stack.pages
    assert isinstance(pages, MemfdPages)
    return pages


def settle(cache: VirtualKVCache) -> None:
    cache._mapper.wait()


def lengths(**by_id: int) -> list[int]:
    found = [0] * BATCH
    for name, length in by_id.items():
        found[int(name[1:])] = length
    return found


def fill(cache: VirtualKVCache, req_id: int, length: int, value: float) -> None:
    for index, tensor in enumerate(cache.tensors):
        tensor[req_id, :length] = value + index


def holds(cache: VirtualKVCache, req_id: int, length: int, value: float) -> bool:
    return all(
        bool((tensor[req_id, :length] == value + index).all())
        for index, tensor in enumerate(cache.tensors)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "meta"}, "device must be auto, cpu"),
        ({"device": "cpu:3"}, "device must be auto, cpu"),
        ({"device": "foo"}, "device must be auto, cpu"),
        ({"dtype": "float32"}, "dtype must be a torch.dtype"),
        ({"memory_limit": "1GiB"}, "memory_limit must be a number of bytes"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, **changes}
    with pytest.raises(ValueError, match=message):
        VirtualKVCache.init(2, 4, 100, 2, 16, 64, **options)


def test_lengths_are_whole_numbers_and_a_closed_cache_says_so() -> None:
    cache = VirtualKVCache.init(2, 2, 100, 2, 16, 64, device="cpu", dtype=torch.float32)
    cache.alloc_reqid()
    for lengths in ([10.9, 0], [10**30, 0], torch.tensor([3.0, 0.0])):
        with pytest.raises(ValueError, match="whole numbers"):
            cache.step(lengths)
    cache.step(torch.tensor([3, 0]))
    cache.close()
    with pytest.raises(RuntimeError, match="closed"):
        cache.num_mapped_tokens(0)


def test_tensors_are_the_papers_and_a_request_is_at_its_offset() -> None:
    with make() as cache:
        assert len(cache.keys) == len(cache.values) == LAYERS
        assert len(cache.tensors) == 2 * LAYERS
        places = -(-CONTEXT // TOKENS)
        assert cache.request_bytes == places * PAGE
        for tensor in cache.tensors:
            assert tensor.shape == (BATCH, CONTEXT, HEADS, DIM)
            assert tensor.stride() == (cache.request_bytes // 4, HEADS * DIM, DIM, 1)
            for req_id in range(BATCH):
                offset = tensor[req_id].data_ptr() - tensor.data_ptr()
                assert offset == req_id * cache.request_bytes
        spans = sorted(
            (t.data_ptr(), t.data_ptr() + BATCH * cache.request_bytes) for t in cache.tensors
        )
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_tokens_need_not_fill_a_page() -> None:
    """240 bytes a token: one lies across each page's end."""
    cache = VirtualKVCache.init(
        2, 2, 100, 3, 20, PAGE // 1024, dtype=torch.float32, device="cpu", memory_limit=1 << 20
    )
    req_id = cache.alloc_reqid()
    other = cache.alloc_reqid()
    cache.step([100, 1])
    fill(cache, req_id, 100, 1.0)
    fill(cache, other, 1, 9.0)
    assert holds(cache, req_id, 100, 1.0)
    assert cache.request_bytes == -(-100 * 240 // PAGE) * PAGE
    cache.close()


def test_memory_grows_with_the_request_and_is_zero() -> None:
    cache = make()
    req_id = cache.alloc_reqid()
    assert cache.mapped_bytes == 0
    assert cache.num_mapped_tokens(req_id) == 0
    for length in (1, TOKENS - 1, TOKENS, TOKENS + 1, 3 * TOKENS, CONTEXT):
        cache.step(lengths(**{f"r{req_id}": length}))
        for tensor in cache.tensors:
            new = tensor[req_id, :length]
            assert bool(((new == 0) | (new == 7)).all())
            new.fill_(7)
        settle(cache)
        needed = -(-length // TOKENS)
        ahead = -(-min(length + 1, CONTEXT) // TOKENS)
        assert cache.mapped_bytes == ahead * PIECE
        assert length <= cache.num_mapped_tokens(req_id) == min(ahead * TOKENS, CONTEXT)
        assert needed <= ahead
        assert pages_of(cache).num_handles == ahead * 2 * LAYERS
    cache.close()


def test_pages_are_reused_and_nothing_is_mapped_for_it() -> None:
    cache = make()
    first, second = cache.alloc_reqid(), cache.alloc_reqid()
    cache.step(lengths(**{f"r{first}": 50, f"r{second}": 100}))
    fill(cache, second, 100, 3.0)
    settle(cache)
    before = pages_of(cache).num_handles
    cache.free_reqid(second)
    cache.free_reqid(first)
    assert cache.alloc_reqid() == second, "most is mapped there"
    calls: list[object] = []
    pages_of(cache).map = lambda *arguments: calls.append(arguments)  # type: ignore[method-assign]
    cache.step(lengths(**{f"r{second}": 100}))
    settle(cache)
    assert not calls
    assert pages_of(cache).num_handles == before
    assert holds(cache, second, 100, 3.0), "stale, until it is overwritten"
    cache.close()


def test_under_pressure_pages_move_to_whoever_needs_them() -> None:
    cache = make(memory_limit=6 * PIECE)
    idle, running = cache.alloc_reqid(), cache.alloc_reqid()
    cache.step(lengths(**{f"r{idle}": 3 * TOKENS - 1, f"r{running}": 3 * TOKENS - 1}))
    fill(cache, running, 3 * TOKENS - 1, 5.0)
    cache.free_reqid(idle)
    cache.step(lengths(**{f"r{running}": 6 * TOKENS}))
    settle(cache)
    assert holds(cache, running, 3 * TOKENS - 1, 5.0)
    fill(cache, running, 6 * TOKENS, 6.0)
    assert holds(cache, running, 6 * TOKENS, 6.0)
    assert pages_of(cache).num_handles == 6 * 2 * LAYERS
    assert pages_of(cache).num_mappings <= 6 * 2 * LAYERS + 2 * LAYERS * (BATCH + 1)
    cache.close()


def test_too_little_memory_is_told_and_everything_stays() -> None:
    cache = make(memory_limit=4 * PIECE)
    a, b = cache.alloc_reqid(), cache.alloc_reqid()
    cache.step(lengths(**{f"r{a}": 2 * TOKENS, f"r{b}": TOKENS}))
    fill(cache, a, 2 * TOKENS, 1.0)
    with pytest.raises(OutOfMemoryError, match=r"of 4 .* free .*raise memory_limit"):
        cache.step(lengths(**{f"r{a}": 3 * TOKENS, f"r{b}": 2 * TOKENS}))
    assert holds(cache, a, 2 * TOKENS, 1.0)
    cache.free_reqid(b)
    cache.step(lengths(**{f"r{a}": 4 * TOKENS}))
    assert holds(cache, a, 2 * TOKENS, 1.0)
    cache.close()


def test_idle_pages_go_back_to_the_system_after_a_time() -> None:
    clock = Clock()
    cache = make(reclaim_after_s=5.0, clock=clock)
    a, b = cache.alloc_reqid(), cache.alloc_reqid()
    cache.step(lengths(**{f"r{a}": 2 * TOKENS - 1, f"r{b}": 4 * TOKENS - 1}))
    fill(cache, b, 4 * TOKENS - 1, 2.0)
    settle(cache)
    used = pages_of(cache).resident_bytes
    cache.free_reqid(b)
    clock.now_s = 4.9
    cache.step(lengths(**{f"r{a}": 10}))
    settle(cache)
    assert pages_of(cache).resident_bytes == used
    clock.now_s = 5.0
    cache.step(lengths(**{f"r{a}": 10}))
    settle(cache)
    assert pages_of(cache).num_handles == 2 * 2 * LAYERS
    assert pages_of(cache).resident_bytes <= 2 * PIECE
    assert cache.alloc_reqid() == b
    cache.step(lengths(**{f"r{a}": 10, f"r{b}": 5}))
    assert bool((cache.keys[0][b, :5] == 0).all()), "new pages are zeros"
    cache.close()


def test_above_the_threshold_idle_pages_are_unmapped() -> None:
    cache = make(memory_limit=10 * PIECE, reclaim_threshold=0.5)
    a, b = cache.alloc_reqid(), cache.alloc_reqid()
    cache.step(lengths(**{f"r{a}": 4 * TOKENS - 1, f"r{b}": 4 * TOKENS - 1}))
    cache.free_reqid(b)
    cache.step(lengths(**{f"r{a}": 4 * TOKENS - 1}))
    settle(cache)
    assert cache.mapped_bytes == 5 * PIECE
    assert len(cache._stack.addresses.handles) == 5
    cache.close()


def test_the_next_request_finds_pages_mapped() -> None:
    cache = make(eager_tokens=2 * TOKENS)
    a = cache.alloc_reqid()
    cache.step(lengths(**{f"r{a}": 3}))
    settle(cache)
    b = cache.alloc_reqid()
    assert cache.num_mapped_tokens(b) == 2 * TOKENS
    cache.step(lengths(**{f"r{b}": 2 * TOKENS}))
    cache.close()


def test_the_next_page_is_mapped_in_the_background() -> None:
    cache = make()
    a = cache.alloc_reqid()
    threads: set[int] = set()
    real = cache._stack.map

    def noting(*arguments: Any) -> None:
        threads.add(threading.get_ident())
        real(*arguments)

    cache._stack.map = noting  # type: ignore[method-assign]
    cache.step(lengths(**{f"r{a}": TOKENS}))
    settle(cache)
    assert cache.num_mapped_tokens(a) == 2 * TOKENS
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    cache.close()


def test_a_mapping_that_fails_is_told_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make()
    a, b = cache.alloc_reqid(), cache.alloc_reqid()
    cache.step(lengths(**{f"r{a}": TOKENS - 1}))
    fill(cache, a, TOKENS - 1, 4.0)
    settle(cache)
    pages = pages_of(cache)
    at_start = (pages.num_handles, pages.num_mappings, cache.mapped_bytes)
    allowed, pages._max_mappings = pages._max_mappings, pages.num_mappings + 3
    for _ in range(2):
        with pytest.raises(PageError, match=r"cannot be mapped: .* raise vm.max_map_count"):
            cache.step(lengths(**{f"r{a}": TOKENS - 1, f"r{b}": 2 * TOKENS}))
        settle(cache)
        assert (pages.num_handles, pages.num_mappings, cache.mapped_bytes) == at_start
    assert holds(cache, a, TOKENS - 1, 4.0)
    pages._max_mappings = allowed
    cache.step(lengths(**{f"r{a}": TOKENS - 1, f"r{b}": 2 * TOKENS}))
    fill(cache, b, 2 * TOKENS, 8.0)
    assert holds(cache, a, TOKENS - 1, 4.0)
    assert holds(cache, b, 2 * TOKENS, 8.0)
    cache.close()


def test_what_fails_in_the_background_is_told_when_it_is_needed() -> None:
    cache = make()
    a = cache.alloc_reqid()
    real = cache._stack.map

    def broken(*arguments: Any) -> None:
        if arguments[1] % cache._slots.num_places:
            raise ZeroDivisionError("nobody thought of it")
        real(*arguments)

    cache._stack.map = broken  # type: ignore[method-assign]
    cache.step(lengths(**{f"r{a}": TOKENS}))
    settle(cache)
    with pytest.raises(PageError, match="ZeroDivisionError: nobody thought of it"):
        cache.step(lengths(**{f"r{a}": TOKENS + 1}))
    cache._stack.map = real  # type: ignore[method-assign]
    cache.step(lengths(**{f"r{a}": TOKENS + 1}))
    fill(cache, a, TOKENS + 1, 1.0)
    cache.close()


def test_misuse_is_refused() -> None:
    cache = make()
    with pytest.raises(ValueError, match="there is no request 0"):
        cache.step(lengths(r0=1))
    with pytest.raises(ValueError, match="there is no request 2"):
        cache.free_reqid(2)
    a = cache.alloc_reqid()
    with pytest.raises(ValueError, match="has 3 lengths, but there is one for each of 4"):
        cache.step([1, 0, 0])
    for length in (-1, CONTEXT + 1):
        with pytest.raises(ValueError, match=rf"from 0 to {CONTEXT} \(max_context_len\)"):
            cache.step(lengths(**{f"r{a}": length}))
    for _ in range(BATCH - 1):
        cache.alloc_reqid()
    assert cache.num_free_reqids == 0
    with pytest.raises(RuntimeError, match="all 4 request ids are taken"):
        cache.alloc_reqid()
    cache.free_reqid(a)
    with pytest.raises(ValueError, match="there is no request"):
        cache.free_reqid(a)
    cache.close()
    cache.close()
    for call in (cache.alloc_reqid, lambda: cache.step([0] * BATCH), lambda: cache.free_reqid(1)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"page_size_kb": 0}, "page_size_kb must be a whole number"),
        ({"reclaim_threshold": 0.0}, "reclaim_threshold"),
        ({"reclaim_after_s": -1.0}, "must not be negative"),
        ({"memory_limit": PIECE - 1}, "holds no page for each of 6 tensors"),
    ],
)
def test_options_out_of_range(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make(**changes)


def test_a_page_that_the_driver_has_not_names_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 KiB, the paper's own with its patched driver."""
    monkeypatch.setattr(cuda, "_import_driver", FakeDriver)
    with pytest.raises(PageError, match=r"maps pages of 2,048 KiB .* pass page_size_kb=2048$"):
        VirtualKVCache.init(2, 2, 100, 2, 16, device="cuda")
    with pytest.raises(PageError, match="pass page_size_kb=4096"):
        VirtualKVCache.init(2, 2, 100, 2, 16, 2049, device="cuda:1")
    with pytest.raises(PageError, match=f"page_size_kb=1: .* pass page_size_kb={PAGE // 1024}"):
        make(page_size_kb=1)


def num_maps() -> int:
    return sum(1 for line in Path("/proc/self/maps").open() if "octavo-blocks" in line)


def test_churn_leaves_nothing_behind() -> None:
    """Thousands of steps of requests that come, grow and go; each reads its own tokens."""
    gc.collect()
    before = (num_maps(), len(os.listdir("/proc/self/fd")), threading.active_count())
    clock = Clock()
    cache = make(
        memory_limit=14 * PIECE, reclaim_threshold=0.85, reclaim_after_s=3.0, clock=clock,
        eager_tokens=TOKENS,
    )  # fmt: skip
    generator = np.random.default_rng(0)
    running: dict[int, tuple[int, float]] = {}
    num_refused = 0
    for step in range(1500):
        clock.now_s += float(generator.random()) / 4
        if cache.num_free_reqids and generator.random() < 0.3:
            running[cache.alloc_reqid()] = (0, float(step))
        if running and generator.random() < 0.2:
            req_id = int(generator.choice(sorted(running)))
            cache.free_reqid(req_id)
            del running[req_id]
        wanted = [0] * BATCH
        for req_id, (length, _) in running.items():
            wanted[req_id] = min(length + int(generator.integers(1, 40)), CONTEXT)
        try:
            cache.step(wanted)
        except OutOfMemoryError:
            num_refused += 1
            continue
        for req_id, (length, value) in running.items():
            probe = cache.values[LAYERS - 1][req_id]
            assert bool((probe[:length, 1, 3] == value).all())
            for tensor in cache.tensors:
                tensor[req_id, length : wanted[req_id]] = value
            running[req_id] = (wanted[req_id], value)
        cache._slots.check()
    assert num_refused > 20
    settle(cache)
    shown = sorted(cache._stack.addresses.handles.values())
    assert shown == sorted(piece for slot in cache._slots.slots for piece in slot)
    assert len(set(shown)) == len(shown) <= 14
    assert pages_of(cache).num_handles <= 14 * 2 * LAYERS
    assert pages_of(cache).resident_bytes <= cache.memory_limit
    cache.close()
    assert (num_maps(), len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    other = make()
    other.alloc_reqid()
    other.step(lengths(r0=5))
    del other, cache
    gc.collect()
    assert (num_maps(), len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_the_example_agrees_with_dense_attention(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = Path(__file__).parents[1] / "examples" / "vattention_sdpa.py"
    monkeypatch.setattr(sys, "argv", [str(example), "--device", "cpu", "--steps", "40"])
    runpy.run_path(str(example), run_name="__main__")
    assert "agrees with dense attention" in capsys.readouterr().out


def test_the_page_about_it_is_true() -> None:
    page = (Path(__file__).parents[1] / "docs" / "vattention.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["keys"].shape == found["values"].shape == (1000, 8, 128)
    assert found["cache"].num_free_reqids == 64
    found["cache"].close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.alone
def test_flash_attention_reads_up_to_an_unmapped_page() -> None:
    """Stock FlashAttention over rows whose last mapped page is full: the next one is missing."""
    layers, heads, dim = 2, 8, 128
    page_kb = 2048
    tokens = page_kb * 1024 // (heads * dim * 2)
    cache = VirtualKVCache.init(
        layers, 4, 16 * tokens, heads, dim, page_kb, dtype=torch.bfloat16, device="cuda",
        memory_limit=2 << 30, eager_tokens=0,
    )  # fmt: skip
    a, b = cache.alloc_reqid(), cache.alloc_reqid()
    wanted = [0, 0, 0, 0]
    wanted[a], wanted[b] = 2 * tokens - 1, tokens - 1
    cache.step(wanted)
    settle(cache)
    wanted[a], wanted[b] = 2 * tokens, tokens
    # What is mapped ahead is taken away again: the frontier is the last token.
    cache._slots.look_ahead = lambda following: {}  # type: ignore[method-assign]
    cache.step(wanted)
    settle(cache)
    assert cache.num_mapped_tokens(a) == 2 * tokens
    assert cache.num_mapped_tokens(b) == tokens
    for tensor in cache.tensors:
        assert bool((tensor[a, : 2 * tokens] == 0).all())
        tensor[a, : 2 * tokens].normal_()
        tensor[b, :tokens].normal_()
    for req_id in (a, b):
        query = torch.randn(1, 1, heads, dim, device="cuda", dtype=torch.bfloat16)
        k, v = (t[1][req_id, : wanted[req_id]][None] for t in (cache.keys, cache.values))
        out = torch.ops.aten._flash_attention_forward(
            query, k, v, None, None, 1, wanted[req_id], 0.0, False, False
        )[0]
        scores = (query.float().transpose(1, 2) @ k.float().permute(0, 2, 3, 1)) * dim**-0.5
        expected = (scores.softmax(-1) @ v.float().transpose(1, 2)).transpose(1, 2)
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-3)
    torch.cuda.synchronize()
    free, held = torch.cuda.mem_get_info()[0], cache._stack.num_bytes
    assert held == 3 * 2 * layers * page_kb * 1024
    cache.close()
    assert torch.cuda.mem_get_info()[0] >= free + held


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_example_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = Path(__file__).parents[1] / "examples" / "vattention_sdpa.py"
    monkeypatch.setattr(sys, "argv", [str(example), "--device", "cuda"])
    runpy.run_path(str(example), run_name="__main__")
    assert "agrees with dense attention" in capsys.readouterr().out
