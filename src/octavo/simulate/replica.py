"""One simulated engine: the scheduler and the manager that serve, over a latency model."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.layout import num_blocks_for
from octavo.core.plan import KVCapacity
from octavo.core.request import Request, StepOutputs
from octavo.engine.core import EngineCore
from octavo.memory.paged import PagedManager
from octavo.memory.virtual import VirtualManager
from octavo.scheduling.preemption import PreemptionPolicy
from octavo.scheduling.scheduler import Scheduler, SchedulerConfig
from octavo.simulate.executor import Latency, SimulatedExecutor

_QUEUED = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """An engine's options, as `octavo.config.EngineConfig` names them; sizes in blocks.

    ``block_bytes`` are those of all ranks' together, for what decides between swapping and
    recomputing. ``num_blocks`` counts the null block.
    """

    num_blocks: int
    kv: str = "paged"
    block_size: int = 16
    block_bytes: int = 1
    num_host_blocks: int = 0
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131072
    prefix_caching: bool = False
    finds_prefix_groups: bool = False
    preemption: PreemptionPolicy = PreemptionPolicy()
    depth: int = 2

    @property
    def num_usable_tokens(self) -> int:
        """The longest that a sequence can become."""
        return min((self.num_blocks - 1) * self.block_size, self.max_model_len)


class Replica:
    """``step`` is called at a moment of the virtual clock and says what it brings and when."""

    def __init__(self, config: ReplicaConfig, latency: Latency) -> None:
        self.config = config
        sizes = (config.num_blocks, config.block_size, config.max_num_seqs)
        manager: PagedManager
        if config.kv == "virtual":
            # Every place of every row, so that no mapping has to be given up: on a GPU addresses
            # are plenty, on a CPU admission keeps below the system's limit.
            num_places = num_blocks_for(config.num_usable_tokens, config.block_size)
            manager = VirtualManager(
                *sizes,
                max_mapped_blocks=config.max_num_seqs * num_places,
                num_places=num_places,
                num_ahead=4,
                maps_forks=False,
                prefix_caching=config.prefix_caching,
                num_host_blocks=config.num_host_blocks,
            )
        else:
            manager = PagedManager(
                *sizes,
                prefix_caching=config.prefix_caching,
                num_host_blocks=config.num_host_blocks,
            )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=config.max_model_len,
                max_queued_requests=_QUEUED,
                preemption=config.preemption,
                finds_prefix_groups=config.finds_prefix_groups,
            ),
            manager,
        )
        capacity = KVCapacity(
            config.num_blocks, config.block_size, config.block_bytes, config.num_host_blocks
        )
        self.executor = SimulatedExecutor(capacity, latency)
        self._core = EngineCore(self.scheduler, self.executor, config.depth)

    @property
    def has_work(self) -> bool:
        return self._core.has_work

    def add(self, request: Request) -> None:
        """Queue a request. Raises as `octavo.scheduling.scheduler.Scheduler.add`."""
        self.scheduler.add(request)

    def step(self, now_s: float) -> tuple[float, StepOutputs]:
        """Launch what fits in the pipeline at ``now_s``; the results of the oldest step launched,
        and the moment at which they are there."""
        self.executor.now_s = now_s
        outputs = self._core.step()
        return self.executor.now_s, outputs
