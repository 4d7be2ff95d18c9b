"""What an engine says about itself once it is ready, and while it runs. Plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from octavo.core.plan import KVCapacity
from octavo.engine.device_memory import DeviceMemory
from octavo.memory.reservation import Reservation
from octavo.scheduling.admission import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """Where memory went and what fits. Sizes in bytes, times in seconds: ``load_s`` from the first
    import to the last warm-up, ``start_s`` of its phases. ``memory`` is a device's own (None: there
    is none)."""

    model: str
    architecture: str
    dtype: str
    weights: str
    device: str
    attention: str
    num_threads: int
    depth: int
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int
    eos_token_ids: tuple[int, ...]
    capacity: KVCapacity
    weight_bytes: int
    workspace_bytes: int
    load_s: float
    start_s: dict[str, float] = field(default_factory=dict)
    sharing: bool = True
    prefix_caching: bool = True
    kv: str = "paged"
    reserve: str | None = None
    scheduler: str = "continuous"
    kv_dtype: str = "bfloat16"
    max_mapped_blocks: int | None = None
    memory: DeviceMemory | None = None

    @property
    def limits(self) -> Limits:
        return Limits.of(
            self.capacity,
            self.vocab_size,
            self.max_model_len,
            self.eos_token_ids,
            self.max_num_seqs,
            self.sharing,
            self.max_mapped_blocks,
            self.reservation,
        )

    @property
    def reservation(self) -> Reservation | None:
        """What every sequence is given at admission; None: blocks as they are needed."""
        return Reservation(self.reserve, self.max_model_len) if self.reserve else None

    @property
    def kv_bytes(self) -> int:
        return self.capacity.num_blocks * self.capacity.block_bytes

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that fit in the KV cache."""
        return self.limits.num_kv_tokens

    def fields(self) -> dict[str, Any]:
        """Everything as plain values, for a log."""
        values: dict[str, Any] = asdict(self)
        capacity = values.pop("capacity")
        if self.memory is None:
            del values["memory"]
        values |= capacity
        return values | {"kv_bytes": self.kv_bytes, "num_kv_tokens": self.num_kv_tokens}

    def __str__(self) -> str:
        num_blocks = self.capacity.num_blocks - 1
        kv = f"{self.kv}, reserve {self.reserve}" if self.reserve else self.kv
        lines = [
            f"{self.model}: {self.architecture}, {self.dtype} with {self.weights} weights on "
            f"{self.device} (threads {self.num_threads}, {self.attention} attention, depth "
            f"{self.depth}), ready in {self.load_s:.1f} s",
            f"Memory: weights {_size(self.weight_bytes)}, workspace {_size(self.workspace_bytes)}, "
            f"{self.kv_dtype} KV cache {_size(self.kv_bytes)} = {self.num_kv_tokens} tokens "
            f"(blocks {num_blocks}, {self.capacity.block_size} tokens each), {kv}",
            f"Up to {self.max_num_seqs} sequences at once, of {self.max_model_len} tokens at most",
        ]
        if self.scheduler != "continuous":
            lines[-1] += f", in {self.scheduler} batches"
        longest = self.limits.max_length
        if longest < self.max_model_len:
            lines[-1] += f"; longer than {longest} are refused, for which kv_memory is too small"
        if self.memory is not None:
            parts = " + ".join(
                f"{name} {_size(value)}" for name, value in self.memory.parts().items()
            )
            lines.append(f"GPU memory: {_size(self.memory.total_bytes)} = {parts}")
        lines.append(f"Start: {self.phases()}")
        return "\n".join(lines)

    def phases(self) -> str:
        """The times of the start, as a line."""
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.start_s.items())


def _size(num_bytes: int) -> str:
    unit = "GiB" if num_bytes >= 2**30 else "MiB"
    return f"{num_bytes / (2**30 if unit == 'GiB' else 2**20):.2f} {unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A moment of the engine: gauges, and counters since its start. ``num_running`` and
    ``num_waiting`` count sequences. ``num_lasting_blocks`` are
    those that requests may count on: fewer than ``num_usable_blocks`` while the pool shrinks, more
    while it is asleep. ``captured_bytes`` of a GPU's memory are what captured steps have taken."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_usable_blocks: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_steps: int = 0
    num_pinned_blocks: int = 0
    num_lasting_blocks: int = 0
    is_asleep: bool = False
    captured_bytes: int = 0

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pool's blocks that are in use, 0 to 1."""
        if not self.num_usable_blocks:
            return 0.0
        return 1 - self.num_free_blocks / self.num_usable_blocks
