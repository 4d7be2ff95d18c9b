"""The composition root: the one place where policy meets mechanism.

Turns an `EngineConfig` into a running `EngineCore` and a report of what it chose. Heavy imports
happen inside the functions, so that importing the package stays cheap.
"""

from __future__ import annotations

import time
from typing import Any

from octavo.config import ConfigError, EngineConfig
from octavo.core.layout import num_blocks_for
from octavo.core.plan import KVCapacity
from octavo.core.protocols import KVManager
from octavo.engine.core import EngineCore
from octavo.engine.mechanism import Mechanism, resolve_limits
from octavo.engine.report import EngineReport
from octavo.memory.contiguous import ContiguousManager
from octavo.memory.paged import PagedManager
from octavo.memory.reservation import Reservation
from octavo.memory.virtual import VirtualManager
from octavo.model_store import resolve_model
from octavo.scheduling.preemption import PreemptionPolicy
from octavo.scheduling.scheduler import Scheduler, SchedulerConfig


def build_engine(config: EngineConfig) -> tuple[EngineCore, EngineReport]:
    """Load the model, size the KV cache and put the engine together.

    Raises:
        ConfigError: an option does not fit the model or the machine.
        ResourceError: the system refuses memory, addresses or mappings.
        ModelLoadError: the model cannot be loaded.
    """
    started = time.perf_counter()
    if config.device in ("auto", "cuda"):
        from octavo.execution.compiler_start import start_compiler

        start_compiler()
    import torch

    from octavo.execution import host
    from octavo.execution.models.loading import load_config

    device = choose_device(config.device)
    # One core is left to the front end, whose threads would otherwise make computing ones wait.
    num_threads = config.threads or max(host.num_physical_cores() - 1, 1)
    torch.set_num_threads(num_threads)
    path = resolve_model(config.model)
    model_config = load_config(path)
    if device == "cuda":
        from octavo.engine import build_gpu

        import_s = time.perf_counter() - started
        limits = resolve_limits(
            config,
            str(path),
            model_config,
            max_num_seqs=build_gpu.MAX_NUM_SEQS,
            max_num_batched_tokens=build_gpu.TOKEN_BUDGET,
            depth=2,
        )
        mechanism = build_gpu.build_gpu(config, limits)
    else:
        from octavo.engine import build_cpu

        import_s = time.perf_counter() - started
        limits = resolve_limits(
            config,
            str(path),
            model_config,
            max_num_seqs=build_cpu.MAX_NUM_SEQS,
            max_num_batched_tokens=build_cpu.TOKEN_BUDGET,
            depth=1,
        )
        mechanism = build_cpu.build_cpu(config, limits)
    capacity = mechanism.capacity
    reservation = _reservation(config, limits.max_model_len, capacity)
    manager = _manager(config, limits.max_num_seqs, mechanism, reservation)
    scheduler_config = SchedulerConfig(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        max_queued_requests=config.max_queued_requests,
        preemption=_preemption_policy(config.preemption, mechanism),
        finds_prefix_groups=mechanism.finds_prefix_groups and manager.sharing,
        max_blocks=capacity.max_blocks,
        is_static=config.scheduler == "static",
    )
    core = EngineCore(Scheduler(scheduler_config, manager), mechanism.executor, limits.depth)
    report = EngineReport(
        model=config.model,
        architecture=model_config.architecture,
        dtype=str(mechanism.model.dtype).removeprefix("torch."),
        weights=mechanism.model.weight_kinds(),
        device=mechanism.device,
        attention=mechanism.attention,
        num_threads=num_threads,
        depth=limits.depth,
        vocab_size=model_config.vocab_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_queued_requests=config.max_queued_requests,
        eos_token_ids=model_config.eos_token_ids,
        capacity=capacity,
        weight_bytes=mechanism.model.weight_bytes(),
        workspace_bytes=mechanism.workspace_bytes,
        load_s=time.perf_counter() - started,
        start_s={"import": import_s, **mechanism.start_s},
        memory=mechanism.memory,
        sharing=manager.sharing,
        prefix_caching=config.caches_prefixes,
        kv=config.kv,
        reserve=reservation and reservation.reserve,
        scheduler=config.scheduler,
        kv_dtype=mechanism.kv_dtype,
        max_mapped_blocks=mechanism.slots and mechanism.slots.max_mapped_blocks,
    )
    return core, report


def _manager(
    config: EngineConfig,
    max_num_seqs: int,
    mechanism: Mechanism,
    reservation: Reservation | None,
) -> KVManager:
    capacity = mechanism.capacity
    if reservation is not None:
        return ContiguousManager(
            capacity.num_blocks, capacity.block_size, max_num_seqs, reservation
        )
    options: dict[str, Any] = {
        "prefix_caching": config.caches_prefixes,
        "num_host_blocks": capacity.num_host_blocks,
        "sharing": config.shares_blocks,
    }
    sizes = (capacity.num_blocks, capacity.block_size, max_num_seqs)
    slots = mechanism.slots
    if slots is None:
        return PagedManager(*sizes, **options)
    return VirtualManager(
        *sizes,
        max_mapped_blocks=slots.max_mapped_blocks,
        num_places=num_blocks_for(slots.max_tokens, capacity.block_size),
        num_ahead=slots.num_ahead,
        maps_forks=slots.maps_forks,
        **options,
    )


def _reservation(
    config: EngineConfig, max_model_len: int, capacity: KVCapacity
) -> Reservation | None:
    """What ``kv=contiguous`` gives each sequence."""
    if config.kv != "contiguous":
        return None
    reservation = Reservation(config.reserve or "max", max_model_len)
    num_blocks = capacity.num_blocks - 1
    if reservation.longest(1, num_blocks, capacity.block_size) < 2:
        needed = reservation.num_blocks(1, max_model_len, capacity.block_size)
        raise ConfigError(
            f"kv=contiguous with reserve={reservation.reserve} gives each sequence {max_model_len} "
            f"tokens, a run of {needed} blocks, but the KV cache has {num_blocks}; lower "
            f"max_model_len, or give kv_memory {(needed + 1) * capacity.block_bytes} bytes"
        )
    return reservation


def choose_device(asked: str) -> str:
    """``cpu`` or ``cuda``; ``auto`` takes a GPU where there is one."""
    import torch

    has_gpu = torch.cuda.is_available()
    if asked == "cuda" and not has_gpu:
        raise ConfigError(
            "device=cuda, but PyTorch finds no CUDA device here; install a PyTorch built for "
            "CUDA, or use device=cpu"
        )
    if asked == "auto":
        return "cuda" if has_gpu else "cpu"
    return asked


def _preemption_policy(mode: str, mechanism: Mechanism) -> PreemptionPolicy:
    """For ``auto``, with the rates of this machine."""
    block_bytes = mechanism.capacity.block_bytes
    if mode != "auto":
        return PreemptionPolicy(mode=mode, block_bytes=block_bytes)
    copy_rate, prefill_rate = mechanism.measure_rates()
    return PreemptionPolicy(
        mode=mode,
        block_bytes=block_bytes,
        copy_bytes_per_s=copy_rate,
        prefill_tokens_per_s=prefill_rate,
    )
