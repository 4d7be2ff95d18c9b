"""What the composition root gets from a device: a model behind an executor, and its sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.config import ConfigError, EngineConfig, parse_size
from octavo.core.model_config import ModelConfig
from octavo.core.plan import KVCapacity
from octavo.core.protocols import Executor
from octavo.engine.device_memory import DeviceMemory

if TYPE_CHECKING:
    from octavo.execution.models.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What was asked, with the device's own choices for what was left open."""

    path: str
    model_config: ModelConfig
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    depth: int


@dataclass(frozen=True, slots=True)
class SlotOptions:
    """How policy uses slots: at most ``max_mapped_blocks`` places shown at once, ``max_tokens`` in
    a slot, ``num_ahead`` places mapped ahead of need for whoever comes next. Without ``maps_forks``
    rows that forked are read through their block tables."""

    max_mapped_blocks: int
    max_tokens: int
    maps_forks: bool
    num_ahead: int = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mechanism:
    """``measure_rates`` runs a chunk and copies blocks: bytes a second to host memory or back, and
    tokens a second of prefill. ``start_s`` says how long the parts of the start took,
    ``finds_prefix_groups`` whether the executor reads a prefix that rows share only once,
    ``slots`` what there is of them (None: under `paged`), ``kv_dtype`` what keys and values are
    kept in, ``memory`` what becomes of a device's own memory."""

    executor: Executor
    model: Decoder
    capacity: KVCapacity
    device: str
    attention: str
    workspace_bytes: int
    measure_rates: Callable[[], tuple[float, float]]
    start_s: dict[str, float]
    finds_prefix_groups: bool = False
    slots: SlotOptions | None = None
    memory: DeviceMemory | None = None
    kv_dtype: str


def num_host_blocks(swap_memory: str, block_bytes: int, available: int) -> int:
    """Blocks of host memory to swap to.

    Raises:
        ConfigError: there is less memory, or no block fits.
    """
    num_bytes = parse_size("swap_memory", swap_memory)
    if num_bytes > max(available, 0):
        raise ConfigError(
            f"swap_memory asks for {num_bytes / 2**30:.2f} GiB but {available / 2**30:.2f} GiB "
            "remain after weights, workspace and KV cache; ask for less"
        )
    if num_bytes and num_bytes < block_bytes:
        raise ConfigError(
            f"swap_memory {swap_memory} holds no block of {block_bytes} bytes; give more, or 0"
        )
    return num_bytes // block_bytes


def resolve_limits(
    config: EngineConfig,
    path: str,
    model_config: ModelConfig,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    depth: int,
) -> Limits:
    """The keywords are the device's choices for options that were left open.

    Raises:
        ConfigError: ``max_model_len`` is more than the model's own.
    """
    longest = model_config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the model's own limit of "
            f"{longest} positions; ask for at most that"
        )
    num_seqs = config.max_num_seqs
    if num_seqs is None:
        num_seqs = min(max_num_seqs, config.max_num_batched_tokens or max_num_seqs)
    return Limits(
        path=path,
        model_config=model_config,
        max_model_len=config.max_model_len or longest,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens
        or max(max_num_batched_tokens, num_seqs),
        depth=config.depth or depth,
    )
