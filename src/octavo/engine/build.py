"""The composition root: the one place where policy meets mechanism.

Turns an `EngineConfig` into a running `EngineCore` and a report of what it chose. Heavy imports
happen inside the functions, so that importing the package stays cheap.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.config import ConfigError, EngineConfig, KVMemory, parse_size
from octavo.core.layout import KVLayout
from octavo.core.model_config import ModelLoadError
from octavo.core.plan import Batch, KVCapacity, RowInit, StepPlan, SwapIn, SwapOut, int_array
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.engine.report import EngineReport
from octavo.memory.paged import PagedManager
from octavo.model_store import resolve_model
from octavo.scheduling.preemption import PreemptionPolicy
from octavo.scheduling.scheduler import Scheduler, SchedulerConfig

if TYPE_CHECKING:
    import torch

    from octavo.execution.arena import Arena
    from octavo.execution.attention.interface import AttentionBackend
    from octavo.execution.models.decoder import Decoder
    from octavo.execution.runner import Runner

logger = logging.getLogger(__name__)

# Tokens a step computes at most beside decoding rows. A larger budget prefills no faster on a CPU
# and makes decoding rows wait longer.
_CPU_TOKEN_BUDGET = 512
# What `auto` takes for the KV cache on a CPU: a laptop's other programs live there too.
_CPU_KV_BYTES = 4 * 2**30
_CPU_KV_FRACTION = 0.5


def build_engine(config: EngineConfig) -> tuple[EngineCore, EngineReport]:
    """Load the model, size the KV cache and put the engine together.

    Raises:
        ConfigError: an option does not fit the model or the machine.
        ModelLoadError: the model cannot be loaded.
    """
    started = time.perf_counter()
    import torch

    from octavo.execution import host
    from octavo.execution.arena import Arena
    from octavo.execution.executors.in_process import InProcessExecutor
    from octavo.execution.models.loading import load_config, load_model
    from octavo.execution.runner import Runner

    # One core is left to the front end, whose threads would otherwise make computing ones wait.
    num_threads = config.threads or max(host.num_physical_cores() - 1, 1)
    torch.set_num_threads(num_threads)
    path = resolve_model(config.model)
    model_config = load_config(path)
    max_model_len = _max_model_len(config, model_config.max_position_embeddings)
    budget = config.max_num_batched_tokens or max(_CPU_TOKEN_BUDGET, config.max_num_seqs)
    model = load_model(
        path,
        load_format=config.load_format,
        dtype=config.dtype,
        weights=config.weights,
        max_positions=max_model_len,
    )
    layout = KVLayout(
        num_layers=model_config.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype_bytes=model.dtype.itemsize,
        block_size=config.block_size,
    )
    workspace_bytes = _workspace_bytes(config.max_num_seqs, budget, model)
    num_blocks = _num_blocks(
        KVMemory.parse(config.kv_memory),
        layout,
        available=host.available_bytes() - workspace_bytes,
        # Without a cache, more than all rows at their longest could never be used.
        most_tokens=None
        if config.prefix_caching and config.sharing
        else config.max_num_seqs * max_model_len,
    )
    num_host_blocks = _num_host_blocks(
        config.swap_memory,
        layout.block_bytes,
        host.available_bytes() - workspace_bytes - num_blocks * layout.block_bytes,
    )
    arena = Arena(layout, num_blocks, model.dtype, num_host_blocks)
    attention_name, attention = _attention(
        config.attention, arena, model, model_config.sliding_window or 0
    )
    runner = Runner(
        model, arena, attention, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len
    )
    try:
        _warm_up(runner, num_tokens=min(32, layout.block_size * (num_blocks - 1), max_model_len))
    except FloatingPointError as error:
        raise ModelLoadError(
            f"{path}: the model computes no numbers ({error}); its weights are damaged, or do not "
            f"fit {_dtype_name(model.dtype)}"
        ) from error
    capacity = KVCapacity(num_blocks, layout.block_size, layout.block_bytes, num_host_blocks)
    depth = config.depth or 1
    executor = InProcessExecutor(runner, capacity, threaded=depth > 1)
    manager = PagedManager(
        num_blocks,
        layout.block_size,
        config.max_num_seqs,
        prefix_caching=config.prefix_caching,
        num_host_blocks=num_host_blocks,
        sharing=config.sharing,
    )
    scheduler_config = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        max_queued_requests=config.max_queued_requests,
        preemption=_preemption_policy(config.preemption, runner, budget, max_model_len),
    )
    core = EngineCore(Scheduler(scheduler_config, manager), executor, depth)
    report = EngineReport(
        model=config.model,
        architecture=model_config.architecture,
        dtype=_dtype_name(model.dtype),
        weights=model.weight_kinds(),
        device="cpu",
        attention=attention_name,
        num_threads=num_threads,
        depth=depth,
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        max_queued_requests=config.max_queued_requests,
        eos_token_ids=model_config.eos_token_ids,
        capacity=capacity,
        weight_bytes=model.weight_bytes(),
        workspace_bytes=workspace_bytes,
        load_s=time.perf_counter() - started,
        sharing=config.sharing,
    )
    return core, report


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _max_model_len(config: EngineConfig, longest: int) -> int:
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the model's own limit of "
            f"{longest} positions; ask for at most that"
        )
    return config.max_model_len


def _workspace_bytes(max_num_seqs: int, budget: int, model: Decoder) -> int:
    """An upper estimate of a step's own memory: activations of the widest moment (the MLP's
    gate, up and product beside the residual and the norm) and the sampler's fp32 copies of the
    logits."""
    config = model.config
    widest = 3 * config.intermediate_size + 4 * config.hidden_size
    activations = budget * widest * model.dtype.itemsize
    logits = max_num_seqs * config.vocab_size * 4 * 4
    return activations + logits


def _num_blocks(
    memory: KVMemory, layout: KVLayout, *, available: int, most_tokens: int | None
) -> int:
    """Blocks of the pool, the null block included."""
    if memory.num_bytes is not None:
        wanted = memory.num_bytes
        if wanted > available:
            raise ConfigError(
                f"kv_memory asks for {wanted / 2**30:.2f} GiB but {available / 2**30:.2f} GiB "
                "remain after weights and workspace; ask for less"
            )
    elif memory.fraction is not None:
        wanted = int(memory.fraction * available)
    else:
        wanted = min(_CPU_KV_BYTES, int(_CPU_KV_FRACTION * available))
    num_blocks = wanted // layout.block_bytes
    if most_tokens is not None:
        num_blocks = min(num_blocks, layout.num_blocks(most_tokens) + 1)
    if num_blocks < 2:
        raise ConfigError(
            f"the KV cache needs at least two blocks of {layout.block_bytes} bytes "
            f"({layout.block_size} tokens each), but kv_memory leaves room for "
            f"{max(num_blocks, 0)}; give more memory or a smaller block_size"
        )
    return num_blocks


def _num_host_blocks(swap_memory: str, block_bytes: int, available: int) -> int:
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


def _preemption_policy(
    mode: str, runner: Runner, budget: int, max_model_len: int
) -> PreemptionPolicy:
    """For ``auto``, with the rates of this machine: a chunk prefilled and a block copied."""
    arena = runner.arena
    block_bytes = arena.layout.block_bytes
    if mode != "auto":
        return PreemptionPolicy(mode=mode, block_bytes=block_bytes)
    num_tokens = min(budget, max_model_len, arena.layout.block_size * (arena.num_blocks - 1))
    prefill_s = min(_timed(lambda: _warm_up(runner, num_tokens)) for _ in range(2))
    one = int_array([1])
    swap = (SwapOut(one, one), SwapIn(0, one, one))
    copy_s = min(_timed(lambda: arena.obey(swap)) for _ in range(5)) / 2
    return PreemptionPolicy(
        mode=mode,
        block_bytes=block_bytes,
        copy_bytes_per_s=block_bytes / copy_s,
        prefill_tokens_per_s=num_tokens / prefill_s,
    )


def _timed(work: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _attention(
    name: str, arena: Arena, model: Decoder, sliding_window: int
) -> tuple[str, AttentionBackend]:
    """The backend and its name. ``auto`` takes the compiled kernels wherever numba is installed."""
    from octavo.execution.attention.gather import GatherAttention

    if name in ("auto", "compiled"):
        try:
            from octavo.execution.attention.cpu import CPUAttention
        except ImportError as error:
            if name == "compiled":
                raise ConfigError(
                    f"attention=compiled needs numba, which cannot be imported ({error}); "
                    "install it or use attention=gather"
                ) from error
            logger.warning("numba is not installed: attention falls back to gathering, slower")
        else:
            return "compiled", CPUAttention(arena, model.num_heads, model.rope, sliding_window)
    return "gather", GatherAttention(arena, model.num_heads, model.rope, sliding_window)


def _warm_up(runner: Runner, num_tokens: int) -> None:
    """Run a chunk and a decode step once, so that no request pays for compiling kernels.

    They use row 0 and the first blocks, which the first sequence writes anew.
    """
    num_blocks = runner.arena.layout.num_blocks(num_tokens)
    rows, token_ids = int_array([0]), int_array([0] * (num_tokens - 1))
    init = RowInit(
        row=0,
        token_ids=token_ids,
        num_computed_tokens=0,
        block_ids=int_array(range(1, num_blocks + 1)),
        params=SamplingParams(temperature=0.0),
        seed=0,
    )
    prefill = Batch.of(rows, int_array([len(token_ids)]), rows == 0)
    if len(token_ids):
        runner.run(StepPlan(step_id=0, batch=prefill, row_inits=(init,)))
    runner.run(StepPlan(step_id=0, batch=Batch.decode(rows)))
