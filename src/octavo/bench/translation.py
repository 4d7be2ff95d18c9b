"""`paged` against `virtual` on a GPU: one engine, one work, blocks found in one way or the other.

::

    pages      the driver's calls, and how fast blocks are mapped
    prefill    one prompt of N tokens
    decode     rows of 1024 tokens, ms a step: wall clock, and CPU time
    hits       a prompt whose first N tokens are cached, in a slot that shows them still or has to
               be mapped, and one of as many that are computed anew
    offline    requests with the lengths of arXiv papers and their summaries, all at once
    load       the same arriving one by one: median and P99 of time to first token and to the end
    mapping    decode steps while every block is mapped in the background, and when all are mapped

The kinds are ``paged``; ``virtual`` with our kernels over slots; ``mixed``, slots for long chunks
and tables elsewhere; ``stock``, FlashAttention-2 and cuDNN over slots and nothing else; and, where
they are installed, FlashAttention-3 for long chunks over either and FlashInfer over tables.

Run it as ``octavo bench translation`` or, with PyTorch alone,
``python -m octavo.bench.translation``.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.bench import works
from octavo.bench.percentiles import summary
from octavo.bench.timed_steps import timed_steps
from octavo.core.plan import int_array
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.workload.traces import load_trace

if TYPE_CHECKING:
    from octavo.engine.llm import LLM
    from octavo.execution.slots import Slots

SHAPES = ("llama-3-8b-200k", "yi-6b-200k")
KINDS: dict[str, dict[str, Any]] = {
    "paged": {"kv": "paged", "block_size": 16, "attention": "triton"},
    "virtual": {"kv": "virtual", "attention": "triton"},
    "mixed": {"kv": "virtual", "attention": "mixed"},
    "stock": {"kv": "virtual", "attention": "stock"},
    "paged-fa3": {"kv": "paged", "block_size": 16, "attention": "flash3"},
    "virtual-fa3": {"kv": "virtual", "attention": "flash3"},
    "flashinfer": {"kv": "paged", "block_size": 16, "attention": "flashinfer"},
}
SECTIONS = ("pages", "prefill", "decode", "offline", "load", "mapping", "hits")
PREFILL_TOKENS = (8192, 32768, 65536, 131072, 196608)
DECODE_ROWS = (1, 8, 32, 64, 128, 256)
HIT_TOKENS = (16, 32, 64, 256, 1024)
_CONTEXT, _STEPS = 1024, 64
_NUM_OFFLINE, _NUM_ONLINE, _RATE = 32, 48, 6.0

Row = dict[str, Any]
"""``work``, ``kind``, and figures by name."""


def measure(
    shape: str,
    sections: Sequence[str],
    kinds: Sequence[str],
    emit: Callable[[Row], None],
    prefill_tokens: Sequence[int] = PREFILL_TOKENS,
) -> list[Row]:
    """Every kind's figures, told as they come."""
    rows: list[Row] = []

    def tell(work: str, kind: str, **figures: float) -> None:
        rows.append({"work": work, "kind": kind, **figures})
        emit(rows[-1])

    if "pages" in sections:
        tell("pages", "driver", **page_calls())
    for kind in kinds:
        with opened(shape, kind) as llm:
            if "decode" in sections:
                for count in DECODE_ROWS:
                    tell(f"decode {count}", kind, **decode(llm, count))
            if "prefill" in sections:
                for count in prefill_tokens:
                    tell(f"prefill {count}", kind, ms=prefill_ms(llm, count))
            if "offline" in sections:
                tell("offline", kind, **offline(llm))
            if "load" in sections:
                tell("load", kind, **under_load(llm))
            if "mapping" in sections and KINDS[kind]["kv"] == "virtual":
                tell("mapping", kind, **background_mapping(llm))
        if "hits" in sections:
            with opened(shape, kind, prefix_caching=True) as llm:
                for count in HIT_TOKENS:
                    tell(f"hits {count}", kind, **prefix_hits(llm, count))
    return rows


@contextmanager
def opened(shape: str, kind: str, *, prefix_caching: bool = False) -> Iterator[LLM]:
    """An engine of one kind, whose memory is given back at the end."""
    path = resources.files("octavo.bench") / "shapes" / f"{shape}.json"
    llm = works.open_llm(str(path), prefix_caching=prefix_caching, max_num_seqs=256, **KINDS[kind])
    with llm:
        yield llm
    works.forget(llm)


def page_calls(count: int = 256, page_bytes: int = 2 << 20) -> dict[str, float]:
    """Microseconds of each call, and GB/s of mapping in order: with one call for access, and block
    by block as a slot grows."""
    from octavo.execution.pages.cuda import CudaPages

    pages = CudaPages(page_bytes)
    found: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any], calls: int = count) -> Any:
        started = time.perf_counter()
        result = work()
        found[name] = (time.perf_counter() - started) / calls * 1e6
        return result

    view = timed("reserve_us", lambda: pages.reserve(count), 1)
    huge = timed("reserve_12TiB_us", lambda: pages.reserve((12 << 40) // page_bytes), 1)
    handles = timed("create_us", lambda: pages.create(count))
    pages.map(view, 0, handles)
    pages.set_access(view, 0, count)  # zeroes them
    timed("map_us", lambda: pages.map(huge, 0, handles))
    timed("set_access_us", lambda: pages.set_access(huge, 0, count))
    timed("unmap_us", lambda: pages.unmap(huge, 0, count))

    def one_by_one() -> None:
        for place, handle in enumerate(handles):
            pages.map(huge, place, [handle])
            pages.set_access(huge, place, 1)

    timed("grow_us", one_by_one)
    found["in_order_GBps"] = page_bytes / (found["map_us"] + found["set_access_us"]) / 1e3
    found["one_by_one_GBps"] = page_bytes / found["grow_us"] / 1e3
    pages.unmap(huge, 0, count)
    pages.unmap(view, 0, count)
    timed("release_us", lambda: pages.release(handles))
    pages.close()
    return found


def prefill_ms(llm: LLM, num_tokens: int) -> float:
    """Of a long prompt the first run: its launches are hidden, and its kernels have run before."""
    is_long = num_tokens > 50_000
    return (
        min(works.generate(llm, [(num_tokens, 1)], seed) for seed in range(1 if is_long else 3))
        * 1e3
    )


def decode(llm: LLM, rows: int) -> dict[str, float]:
    """Milliseconds a step with rows of 1024 tokens, over the steps in which every row decodes.

    ``ms`` and ``host_ms``, of the host's work in it, are medians of the wall clock. CPU times are
    means, since few steps map: ``cpu_ms`` of all threads of the process; of that ``waiting_cpu_ms``
    of the engine's own thread while it waits for the device, which may be spinning, and
    ``mapping_cpu_ms`` of the mapping thread, 0 where there is none.
    """
    works.generate(llm, [(_CONTEXT, 4)] * rows, 1)
    with timed_steps(llm) as steps:
        works.generate(llm, [(_CONTEXT, _STEPS + 1)] * rows, 2)
    full = [step for step in steps if step.num_rows == rows and not step.has_chunks][4:]
    return {
        "ms": float(np.median([step.seconds for step in full])) * 1e3,
        "host_ms": float(np.median([step.seconds - step.waited_s for step in full])) * 1e3,
        "cpu_ms": float(np.mean([step.cpu_s for step in full])) * 1e3,
        "waiting_cpu_ms": float(np.mean([step.waiting_cpu_s for step in full])) * 1e3,
        "mapping_cpu_ms": float(np.mean([step.mapping_cpu_s for step in full])) * 1e3,
    }


def _lengths(count: int) -> list[tuple[int, int]]:
    path = resources.files("octavo.bench") / "data" / "arxiv_lengths_200.csv"
    items = load_trace(str(path))[:count]
    return [(item.num_prompt_tokens, item.num_output_tokens) for item in items]


def offline(llm: LLM) -> dict[str, float]:
    """The better of two runs after one that is not counted, in which kernels are compiled and steps
    captured: each kind begins alike, whichever ran before it."""
    lengths = _lengths(_NUM_OFFLINE)
    works.generate(llm, lengths, 5)
    seconds = min(works.generate(llm, lengths, seed) for seed in (6, 7))
    total = sum(prompt + output for prompt, output in lengths)
    return {"seconds": seconds, "tokens_per_s": total / seconds}


def prefix_hits(llm: LLM, num_tokens: int, own: int = 17, repeats: int = 12) -> dict[str, float]:
    """Milliseconds to the first token of a prompt whose first ``num_tokens`` (whole blocks) are
    cached, with ``own`` more, and of one as long of which nothing is: medians, by turns.

    Under ``virtual`` a hit costs the mapping of its blocks before the step can begin, unless it is
    given a slot that shows the prefix still, as the one that had it last does: so hits are of two
    kinds there, ``hit_shown_ms`` of the latter and ``hit_mapped_ms`` where no slot shows anything.
    None does either before a prompt that is computed anew, which maps all its blocks as well.
    """
    # Each count has prompts of its own: nothing of them is cached from the one before.
    random = np.random.default_rng((11, num_tokens))

    def tokens(count: int) -> list[int]:
        drawn: list[int] = random.integers(0, llm.report.vocab_size, count).tolist()
        return drawn

    def first_token_ms(prompt: list[int], num_cached: int) -> float:
        started = time.perf_counter()
        [output] = llm.generate([prompt], params)
        seconds = time.perf_counter() - started
        if output.num_cached_tokens != num_cached:
            raise RuntimeError(f"{output.num_cached_tokens} tokens were cached, not {num_cached}")
        return seconds * 1e3

    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    common = tokens(num_tokens)
    first_token_ms(common + tokens(own), 0)
    has_slots = llm.report.kv == "virtual"
    # A hit leaves its prefix in its slot, for the one that comes next.
    hits = ("hit_mapped_ms", "hit_shown_ms") if has_slots else ("hit_ms",)
    found: dict[str, list[float]] = {name: [] for name in (*hits, "computed_ms")}
    for _ in range(repeats):
        for name, times in found.items():
            if has_slots and name != "hit_shown_ms":
                forget_mappings(llm, 0)
            if name == "computed_ms":
                times.append(first_token_ms(tokens(num_tokens + own), 0))
            else:
                times.append(first_token_ms(common + tokens(own), num_tokens))
    return {name: float(np.median(times)) for name, times in found.items()}


def under_load(llm: LLM) -> dict[str, float]:
    """Poisson arrivals, in process."""
    random = np.random.default_rng(7)
    lengths = _lengths(_NUM_ONLINE)
    arrivals = np.cumsum(random.exponential(1 / _RATE, len(lengths)))
    requests = [
        Request(
            number,
            int_array(random.integers(0, llm.report.vocab_size, prompt)),
            SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True),
            output,
            seed=0,
        )
        for number, (prompt, output) in enumerate(lengths)
    ]
    core = llm._core
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    started = time.perf_counter()
    waiting = 0
    while len(last) < len(requests):
        now = time.perf_counter() - started
        while waiting < len(requests) and arrivals[waiting] <= now:
            core.scheduler.add(requests[waiting])
            waiting += 1
        if not core.has_work:
            time.sleep(max(float(arrivals[waiting]) - now, 0.0))
            continue
        outputs = core.step()
        now = time.perf_counter() - started
        for number in outputs.numbers.tolist():
            first.setdefault(number, now)
        for finished in outputs.finished:
            last[finished.number] = now
    found: dict[str, float] = {}
    for name, times in (("ttft", first), ("latency", last)):
        seconds = [times[number] - arrivals[number] for number in range(len(requests))]
        spread = summary(seconds)
        found |= {f"{name}_{part}_ms": spread[part] * 1e3 for part in ("p50", "p99")}
    return found


def background_mapping(llm: LLM, rows: int = 256) -> dict[str, float]:
    """Decode steps that map, against the same steps when every place shows its block already. By
    turns, in one engine."""
    lengths = [(_CONTEXT, _STEPS + 1)] * rows
    means: dict[str, list[float]] = {"mapping": [], "mapped": []}
    num_calls = 0
    works.generate(llm, lengths, 1)
    slots = _slots(llm)
    for seed in range(3):
        forget_mappings(llm, _CONTEXT)
        before = slots.num_mapped_blocks
        for name, found in means.items():
            with timed_steps(llm) as steps:
                works.generate(llm, lengths, seed)
            full = [step for step in steps if step.num_rows == rows and not step.has_chunks][4:]
            found.append(float(np.mean([step.seconds for step in full])) * 1e3)
            if name == "mapping":
                num_calls = slots.num_mapped_blocks - before
    mapping, mapped = (min(times) for times in means.values())
    return {
        "mapping_ms": mapping,
        "mapped_ms": mapped,
        "ratio": mapping / mapped,
        "blocks_mapped": num_calls,
    }


def forget_mappings(llm: LLM, num_tokens: int) -> None:
    """Unmap what slots show behind their first ``num_tokens`` tokens: growing maps it again."""
    manager = llm._core.scheduler.manager
    command = manager.forget_places(num_tokens // manager.block_size)  # type: ignore[attr-defined]
    if command is not None:
        _slots(llm).order(command)
        _slots(llm).mapper.wait()


def _slots(llm: LLM) -> Slots:
    """Of a GPU's executor or a CPU's."""
    executor: Any = llm._core.executor
    runner = executor.runner if hasattr(executor, "runner") else executor._runner
    slots: Slots = runner.arena._slots
    return slots


def line(row: Row) -> str:
    figures = "  ".join(
        f"{name} {value:,.{2 if abs(value) >= 1 else 3}f}"
        for name, value in row.items()
        if name not in _KEYS
    )
    return f"{row['work']:<16} {row['kind']:<8} {figures}"


_KEYS = ("work", "kind")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure both translations on a GPU.")
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument("--model", default=SHAPES[0], choices=SHAPES)
    parser.add_argument("--kinds", default="paged,virtual,mixed,stock", help=", ".join(KINDS))
    parser.add_argument("--tokens", default=",".join(map(str, PREFILL_TOKENS)), help="of prefill")
    parser.add_argument("--library", help="of FlashAttention-3, to be loaded first")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    works.load_library(given.library)
    emit: Callable[[Row], None] = (
        (lambda row: None) if given.json else (lambda row: print(line(row), flush=True))
    )
    tokens = [int(count) for count in given.tokens.split(",")]
    rows = measure(given.model, given.sections, given.kinds.split(","), emit, tokens)
    if given.json:
        print(json.dumps({"model": given.model, "versions": works.versions(), "rows": rows}))
    gc.collect()


if __name__ == "__main__":
    main()
