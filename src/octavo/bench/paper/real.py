"""Engines of a real model, as `octavo.engine.build` makes them, on the wall clock.

A model is anything that serves, or a shape of `octavo.bench.works` or a ``config.json``, which get
random weights. Each engine loads the weights anew: the builders own them, and a manager decides how
the pool beside them is laid out.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

import numpy as np

from octavo.bench.paper.engines import SHARED, STATIC, WARM_UP_MOST, Engine, check_ended
from octavo.bench.paper.managers import MAX_MODEL_LEN, SCALES, Pool
from octavo.bench.works import SHAPES, check_shape, shape
from octavo.config import BLOCK_SIZE, DEVICES, ConfigError, EngineConfig
from octavo.core.layout import BlockSizeError, mappable_block, num_blocks_for
from octavo.core.model_config import ModelConfig
from octavo.core.plan import IntArray, int_array
from octavo.core.request import Request
from octavo.engine.core import EngineCore
from octavo.engine.report import EngineReport
from octavo.execution.pages.interface import host_page_bytes
from octavo.layout_command import load_config, token_layout

# Of the longest sequence, in tokens: several reservations fit, as in the paper's pool.
_POOL_SEQUENCES = SCALES["opt-13b"].num_blocks * SCALES["opt-13b"].block_size / MAX_MODEL_LEN
_CPU_MAX_MODEL_LEN = 512
# A GPU's kernels are for blocks of 8 tokens and more.
_BLOCK_SIZES = {"cpu": (1, 4, 16, 64, 256), "cuda": (8, 16, 32, 64, 128)}


class RealEngine:
    """Implements `octavo.bench.paper.engines.Engine`."""

    def __init__(self, core: EngineCore, report: EngineReport, novel: IntArray | None) -> None:
        self.core = core
        self.vocab_size = report.vocab_size
        capacity = report.capacity
        self.pool = Pool(
            num_blocks=capacity.num_blocks - 1,
            block_size=capacity.block_size,
            max_model_len=report.max_model_len,
            token_bytes=capacity.block_bytes // capacity.block_size,
        )
        self._novel = novel
        # A GPU compiles and captures steps of each size that it meets: as many rows as may run.
        on_gpu = min(max(self.pool.num_blocks // 24, 8), WARM_UP_MOST)
        self._num_warm_up = 2 if report.device == "cpu" else on_gpu
        self._started = time.perf_counter()

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self._started

    def start(self) -> None:
        self.core.scheduler.reset_prefix_cache()
        # A collection of what lives for the whole run would stop it now and then.
        gc.collect()
        gc.freeze()
        self._started = time.perf_counter()

    def wait_until(self, time_s: float) -> None:
        time.sleep(max(time_s - self.now_s, 0.0))

    def warm_up(self, requests: Sequence[Request]) -> None:
        """All at once and one after the other, each with another length of output: batches of many
        sizes are met, twice."""
        few = [
            replace(request, max_tokens=min(request.max_tokens, 2 + place))
            for place, request in enumerate(requests[: self._num_warm_up])
        ]
        for is_together in (True, False) * 2:
            for request in few:
                self.core.scheduler.add(request)
                if not is_together:
                    check_ended(self.core.step().finished)
            while self.core.has_work:
                check_ended(self.core.step().finished)

    def prompt(self, number: int, num_tokens: int) -> IntArray:
        """A piece of a novel, from anywhere; under random weights random tokens."""
        random = np.random.default_rng((0, number))
        if self._novel is None:
            return int_array(random.integers(0, self.vocab_size, num_tokens))
        first = int(random.integers(len(self._novel)))
        return np.take(self._novel, range(first, first + num_tokens), mode="wrap")

    def close(self) -> None:
        """Give all memory back before the next engine takes what there is."""
        gc.unfreeze()
        self.core.close()
        del self.core
        gc.collect()


class RealEngines:
    """Implements `octavo.bench.paper.engines.Engines`.

    What is None is chosen: the longest sequence of 512 tokens on a CPU and of 2048 on a GPU, blocks
    of 16 tokens, and as many of them as hold 7.7 of the longest sequences, like the paper's pool.

    Raises:
        ConfigError, ModelStoreError, WorkloadError: there is no such model or device, the pool is
            too small, or one of a GPU's shapes would run on a CPU that was not asked for.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "auto",
        threads: int | None = None,
        num_blocks: int | None = None,
        block_size: int | None = None,
        max_model_len: int | None = None,
        names: Sequence[str] = (),
        preemption: str = "recompute",
    ) -> None:
        self._name = model
        self._is_random = model in SHAPES or model.endswith(".json")
        self._path = shape(model) if model in SHAPES else model
        if device not in DEVICES:
            raise ConfigError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
        config = load_config(self._path)
        longest = config.max_position_embeddings
        if max_model_len is not None and max_model_len > longest:
            raise ConfigError(
                f"max_model_len {max_model_len} is more than the model's own limit of {longest} "
                "positions; ask for at most that"
            )
        # The first that takes time.
        from octavo.engine.build import choose_device

        self.device = choose_device(device)
        check_shape(model, device)
        if max_model_len is None:
            most = _CPU_MAX_MODEL_LEN if self.device == "cpu" else MAX_MODEL_LEN
            max_model_len = min(most, config.max_position_embeddings)
        self._block_size = block_size
        self._threads = threads
        self._preemption = preemption
        size = block_size or BLOCK_SIZE
        self.pool = Pool(
            num_blocks=num_blocks or num_blocks_for(int(_POOL_SEQUENCES * max_model_len), size),
            block_size=size,
            max_model_len=max_model_len,
            token_bytes=token_layout(config, 1, "auto").token_bytes,
        )
        self.length_scale = min(1.0, max_model_len / MAX_MODEL_LEN)
        self._check_managers(names, config)
        self._report: EngineReport | None = None
        self._other_pools: dict[str, Pool] = {}

    def _check_managers(self, names: Sequence[str], config: ModelConfig) -> None:
        """Raises `ConfigError` where one cannot run this model here, before the others have."""
        if self.device == "cpu" and find_spec("numba") is None:
            raise ConfigError(
                "a CPU compares managers by the compiled kernel, which needs numba: install it"
            )
        others = [name for name in names if name.removesuffix(SHARED) != "virtual"]
        if len(others) == len(names) or self._block_size is None:
            return
        page_bytes = host_page_bytes()
        if self.device == "cuda":
            from octavo.execution.pages.cuda import cuda_page_bytes

            page_bytes = cuda_page_bytes()
        layout = replace(token_layout(config, 1, "auto"), block_size=self._block_size)
        try:
            mappable_block(layout, page_bytes)
        except BlockSizeError as error:
            raise ConfigError(
                f"the manager virtual cannot run here: {error}; leave block_size out, or name "
                f"other managers: {','.join(others) or 'paged'}"
            ) from error

    @property
    def block_sizes(self) -> Sequence[int]:
        return _BLOCK_SIZES[self.device]

    @property
    def conditions(self) -> str:
        pool, report = self.pool, self._report
        text = (
            f"{pool.num_blocks} blocks of {pool.block_size} tokens, sequences of at most "
            f"{pool.max_model_len}. The engine itself"
        )
        if report is not None:
            kind = "random weights" if self._is_random else f"{report.weights} weights"
            where = report.device
            if where == "cpu":
                threads = report.num_threads
                where = f"this CPU, {threads} thread{'' if threads == 1 else 's'}"
            text += f": {self._name} ({kind}) in {report.dtype} on {where}"
        for name, other in self._other_pools.items():
            text += f"; {name}: {other.num_blocks} blocks of {other.block_size} tokens"
        return f"{text}. Times are of the wall clock."

    @contextmanager
    def open(self, name: str) -> Iterator[Engine]:
        from octavo.engine.build import build_engine

        core, report = build_engine(EngineConfig(**self._options(name)))
        engine = RealEngine(core, report, self._novel)
        del core
        self._report = report
        found = engine.pool
        if (found.num_blocks, found.block_size) != (self.pool.num_blocks, self.pool.block_size):
            self._other_pools[name] = found
        try:
            yield engine
        finally:
            engine.close()
            if self.device == "cuda":
                import torch

                torch.cuda.empty_cache()

    def _options(self, name: str) -> dict[str, Any]:
        base = name.removesuffix(SHARED)
        options: dict[str, Any] = {
            "model": self._path,
            "device": self.device,
            "threads": self._threads,
            "load_format": "dummy" if self._is_random else "auto",
            "block_size": self._block_size,
            "kv_memory": str(self.pool.num_bytes + self.pool.block_size * self.pool.token_bytes),
            "max_model_len": self.pool.max_model_len,
            "max_queued_requests": 1_000_000,
            "prefix_caching": name.endswith(SHARED),
            "preemption": self._preemption,
        }
        if self._preemption == "swap":
            options["swap_memory"] = str(self.pool.num_bytes)
        if base in ("paged", "virtual"):
            options["kv"] = base
        else:
            reserve = "max" if base == STATIC else base.removeprefix("orca-")
            options |= {"kv": "contiguous", "reserve": reserve}
        if base == STATIC:
            options["scheduler"] = "static"
        if self.device == "cpu":
            # The kernel of paging for reservations and slots, too: only memory differs.
            options["attention"] = "compiled"
        return options

    @cached_property
    def _novel(self) -> IntArray | None:
        if self._is_random:
            return None
        from octavo.model_store import resolve_model
        from octavo.text.tokenizer import load_tokenizer

        text = (files("octavo.bench") / "data" / "alice.txt").read_text(encoding="utf-8")
        return int_array(load_tokenizer(resolve_model(self._path)).encode(text))
