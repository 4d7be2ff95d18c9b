"""The seam of the figures: an engine of each manager, under one clock, simulated or real.

A figure asks `engines_of` for engines and runs requests through them; it does not know which kind
it got. `simulated` and `real` are the two.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeAlias

from octavo.bench.paper.managers import MANAGERS, Pool, pool_of
from octavo.core.plan import IntArray
from octavo.core.request import Finished, FinishReason, Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.scheduling.preemption import PreemptionPolicy
from octavo.workload.items import WorkItem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.bench.paper.report import PaperOptions

STATIC = "fastertransformer"
"""Buffers of the longest sequence and static batches."""
SHARED = "-shared"
"""At the end of a manager's name: with prefix caching, which is off otherwise."""
ALL_MANAGERS = (STATIC, *MANAGERS)
WARM_UP_MOST = 256
"""Requests that a warm-up makes use of."""


class Engine(Protocol):
    """One manager's engine, idle at first, and its clock. Tokens are below ``vocab_size``."""

    core: EngineCore
    pool: Pool
    vocab_size: int

    @property
    def now_s(self) -> float:
        """Seconds since `start`."""

    def start(self) -> None:
        """Set the clock to 0 and forget cached prefixes."""

    def wait_until(self, time_s: float) -> None:
        """Let the clock go on to ``time_s``, if it is not there yet."""

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Run what a machine does only once, on some of ``requests``, cut short: at most
        ``WARM_UP_MOST``."""

    def prompt(self, number: int, num_tokens: int) -> IntArray:
        """The prompt of request ``number``."""


class Engines(Protocol):
    """Makes engines, one at a time, over pools as large as ``pool``, that of paging.

    ``length_scale`` multiplies a trace's lengths. ``conditions`` say, after a run, what ran.
    """

    pool: Pool
    length_scale: float

    @property
    def block_sizes(self) -> Sequence[int]:
        """Those that are worth comparing."""

    @property
    def device(self) -> str:
        """Whose kernels are compared: ``cpu`` or ``cuda``."""

    @property
    def conditions(self) -> str: ...

    def open(self, name: str) -> AbstractContextManager[Engine]:
        """An engine of one of ``ALL_MANAGERS``, perhaps with ``SHARED``; closed at the end."""


MakeRequest: TypeAlias = Callable[["Engine", int, WorkItem], Request]


def engines_of(
    options: PaperOptions, names: Sequence[str], *, preemption: str = "recompute"
) -> Engines:
    """Those of a real model where one is named, else simulated ones; ``names`` will be opened. To
    swap, they have as much memory of the host as the pool has.

    Raises:
        ConfigError, ModelStoreError, WorkloadError: there can be no such engine or pool, which
            is found before any model is loaded.
    """
    if options.model is not None:
        from octavo.bench.paper.real import RealEngines

        return RealEngines(
            options.model,
            device=options.device,
            threads=options.threads,
            num_blocks=options.num_blocks,
            block_size=options.block_size,
            max_model_len=options.max_model_len,
            names=names,
            preemption=preemption,
        )
    from octavo.bench.paper.machine import paper_opt13b_a100
    from octavo.bench.paper.simulated import SimulatedEngines

    pool = pool_of(options.scale, options.num_blocks, options.block_size)
    return SimulatedEngines(
        pool,
        paper_opt13b_a100(pool.block_size),
        scale=options.scale,
        preemption=PreemptionPolicy(mode=preemption),
        num_host_blocks=pool.num_blocks if preemption == "swap" else 0,
    )


def plain_request(engine: Engine, number: int, item: WorkItem) -> Request:
    """One greedy sequence of the item's lengths."""
    params = SamplingParams(max_tokens=item.num_output_tokens, ignore_eos=True, temperature=0.0)
    prompt = engine.prompt(number, item.num_prompt_tokens)
    return Request(number, prompt, params, item.num_output_tokens, seed=0)


def check_ended(finished: Sequence[Finished]) -> None:
    """Raises RuntimeError where a request failed: a figure would leave it out."""
    for each in finished:
        if each.reason is FinishReason.ERROR:
            raise RuntimeError(f"request {each.number} failed: {each.error}")
