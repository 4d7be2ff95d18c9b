"""Builds a scheduler over a toy executor and runs requests to their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.core.layout import num_blocks_for
from octavo.core.plan import KVCommand, MapBlocks, StepPlan
from octavo.core.request import BeamResult, Finished, RegisteredPrefix, Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.memory.contiguous import ContiguousManager
from octavo.memory.paged import PagedManager
from octavo.memory.reservation import Reservation
from octavo.memory.virtual import VirtualManager
from octavo.scheduling.preemption import PreemptionPolicy
from octavo.scheduling.scheduler import Scheduler, SchedulerConfig
from toy_executor import POISON, ToyExecutor, ToyMMU, as_ids


def request(
    number: int,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    seed: int = 0,
    stops: tuple[int, ...] = (),
    salt: bytes = b"",
    n: int = 1,
    pins_prefix: bool = False,
) -> Request:
    return Request(
        number=number,
        prompt_token_ids=as_ids(list(prompt)),
        params=SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
        seed=seed,
        stop_token_ids=stops,
        cache_salt=salt,
        n=n,
        pins_prefix=pins_prefix,
    )


def beam_request(
    number: int,
    prompt: Sequence[int],
    max_tokens: int,
    width: int,
    *,
    n: int | None = None,
    stops: tuple[int, ...] = (),
    salt: bytes = b"",
    **params: Any,
) -> Request:
    return Request(
        number=number,
        prompt_token_ids=as_ids(list(prompt)),
        params=SamplingParams(max_tokens=max_tokens, use_beam_search=True, **params),
        max_tokens=max_tokens,
        seed=0,
        stop_token_ids=stops,
        cache_salt=salt,
        n=width if n is None else n,
        beam_width=width,
    )


def moves(plan: StepPlan) -> list[KVCommand]:
    """What a plan copies or swaps, whichever the translation."""
    return [command for command in plan.commands if not isinstance(command, MapBlocks)]


class Harness:
    """An engine core on the toy executor, with every output collected."""

    # The translation where a test does not say, see conftest.py; "ahead" is `virtual` as on a GPU:
    # places are mapped ahead, and rows that forked are read through their tables.
    kv = "paged"

    def __init__(
        self,
        *,
        num_blocks: int = 33,
        block_size: int = 4,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 256,
        max_queued_requests: int = 100,
        depth: int = 1,
        eager: bool = True,
        prefix_caching: bool = False,
        num_host_blocks: int = 0,
        preemption: str = "recompute",
        sharing: bool = True,
        kv: str | None = None,
        max_mapped_blocks: int | None = None,
        max_blocks: int | None = 200,
        reserve: str | None = None,
        is_static: bool = False,
    ) -> None:
        options: dict[str, Any] = {
            "prefix_caching": prefix_caching,
            "num_host_blocks": num_host_blocks,
            "sharing": sharing,
        }
        self.mmu: ToyMMU | None = None
        self.manager: Any = PagedManager(num_blocks, block_size, max_num_seqs, **options)
        if reserve is not None:
            self.manager = ContiguousManager(
                num_blocks, block_size, max_num_seqs, Reservation(reserve, max_model_len)
            )
        elif (kv or self.kv) != "paged":
            num_places = num_blocks_for(max_model_len, block_size)
            limit = max_mapped_blocks or max_num_seqs * num_places
            self.mmu = ToyMMU(max_num_seqs, limit)
            if (kv or self.kv) == "ahead":
                options |= {"num_ahead": 2, "num_places": num_places, "maps_forks": False}
            self.manager = VirtualManager(
                num_blocks, block_size, max_num_seqs, max_mapped_blocks=limit, **options
            )
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            max_queued_requests=max_queued_requests,
            preemption=PreemptionPolicy(mode=preemption),
            max_blocks=max_blocks,
            is_static=is_static,
        )
        self.scheduler = Scheduler(config, self.manager)
        self.executor = ToyExecutor(num_blocks, block_size, max_num_seqs, eager=eager, mmu=self.mmu)
        self.core = EngineCore(self.scheduler, self.executor, depth)
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.beams: dict[int, BeamResult] = {}
        self.prefixes: dict[int, RegisteredPrefix] = {}

    def add(self, *requests: Request) -> None:
        for item in requests:
            self.scheduler.add(item)
            for number in range(item.number, item.number + item.n):
                self.tokens[number] = []

    def step(self) -> None:
        outputs = self.core.step()
        for number, token in zip(outputs.numbers.tolist(), outputs.token_ids.tolist(), strict=True):
            assert number not in self.finished, "a token after the end"
            assert token != POISON, "a token made of what a failed step left behind"
            self.tokens[number].append(token)
        self.prefixes |= {prefix.number: prefix for prefix in outputs.prefixes}
        for beam in outputs.beams:
            assert not self.tokens[beam.number], "a beam comes once"
            self.tokens[beam.number] = beam.token_ids.tolist()
            self.beams[beam.number] = beam
        for finished in outputs.finished:
            assert finished.number not in self.finished, "a request ended twice"
            assert finished.num_tokens == len(self.tokens[finished.number])
            self.finished[finished.number] = finished
        self.scheduler.check()
        if self.mmu is not None and not self.core._in_flight:
            self.check_slots()

    def check_slots(self) -> None:
        """The manager and the hardware agree on what is mapped."""
        assert isinstance(self.manager, VirtualManager)
        assert self.mmu is not None
        for row, shown in enumerate(self.mmu.slots):
            assert [shown[p] for p in range(len(shown))] == self.manager.slot(row).tolist()

    def run(self, max_steps: int = 3000) -> None:
        for _ in range(max_steps):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, "the engine did not finish"
        num_kept = self.manager.num_pinned_blocks
        assert self.manager.num_free_blocks == self.manager.num_usable_blocks - num_kept
        assert self.scheduler.rows.num_used == 0
        if isinstance(self.manager, ContiguousManager):
            return
        space = self.manager.swap_space
        assert space.num_free == space.num_blocks, "host blocks are left behind"
