"""An engine's mechanism on a CPU: weights, pool, attention kernels (see `octavo.engine.build`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.config import BLOCK_SIZE, ConfigError, EngineConfig, KVMemory
from octavo.core.layout import KVLayout
from octavo.core.model_config import ModelLoadError
from octavo.core.plan import (
    Batch,
    KVCapacity,
    MapBlocks,
    RowInit,
    StepPlan,
    SwapIn,
    SwapOut,
    int_array,
)
from octavo.core.sampling_params import SamplingParams
from octavo.engine.mechanism import Limits, Mechanism, SlotOptions, num_host_blocks
from octavo.engine.slots import build_slots, mappable_layout
from octavo.execution import host
from octavo.execution.arena import Arena
from octavo.execution.attention.contiguous import ContiguousAttention, RunAttention
from octavo.execution.executors.in_process import InProcessExecutor
from octavo.execution.models.loading import load_model
from octavo.execution.pages.interface import host_page_bytes
from octavo.execution.runner import Runner
from octavo.execution.virtual_arena import VirtualArena

if TYPE_CHECKING:
    from octavo.execution.attention.interface import AttentionBackend
    from octavo.execution.models.decoder import Decoder

logger = logging.getLogger(__name__)

MAX_NUM_SEQS = 64
TOKEN_BUDGET = 512
"""Tokens a step computes at most beside decoding rows. A larger budget prefills no faster on a CPU
and makes decoding rows wait longer."""
# What `auto` takes for the KV cache on a CPU: a laptop's other programs live there too.
_CPU_KV_BYTES = 4 * 2**30
_CPU_KV_FRACTION = 0.5


def build_cpu(config: EngineConfig, limits: Limits) -> Mechanism:
    """Load the model and size the KV cache.

    Raises:
        ConfigError: an option does not fit the model or the machine.
        ResourceError: the system refuses memory, addresses or mappings.
        ModelLoadError: the model cannot be loaded.
    """
    if config.deterministic:
        raise ConfigError(
            "deterministic is for GPUs: products on a CPU round by how many rows they have, in "
            "float32 too, where scores differ in the fifth decimal; leave it out"
        )
    if config.attention in ("triton", "flash3", "flashinfer", "stock", "mixed"):
        raise ConfigError(f"attention={config.attention} needs a GPU; use attention=auto on a CPU")
    if config.map_forks is False:
        raise ConfigError("map_forks=False needs a GPU; leave it out on a CPU")
    if config.kv_dtype == "fp8":
        raise ConfigError("kv_dtype=fp8 is for GPUs; use kv_dtype=auto on a CPU")
    if config.weights == "fp8":
        raise ConfigError(
            "weights=fp8 is for GPUs; on a CPU weights=auto runs an fp8 checkpoint in the model's "
            "dtype, and weights=int8 takes as little memory"
        )
    started = time.perf_counter()
    model = load_model(
        limits.path,
        load_format=config.load_format,
        dtype=config.dtype,
        weights=config.weights,
        max_positions=limits.max_model_len,
    )
    weights_s = time.perf_counter() - started
    kv_dtype = str(model.dtype).removeprefix("torch.")
    if config.kv_dtype not in ("auto", {"bfloat16": "bf16", "float16": "fp16"}.get(kv_dtype)):
        raise ConfigError(
            f"kv_dtype={config.kv_dtype}, but on a CPU keys and values are kept as the model "
            f"computes, in {kv_dtype}; use kv_dtype=auto, or another dtype"
        )
    layout = KVLayout(
        num_layers=limits.model_config.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype_bytes=model.dtype.itemsize,
        block_size=config.block_size or BLOCK_SIZE,
    )
    if config.kv == "virtual":
        layout = mappable_layout(layout, config.block_size, limits.max_model_len, host_page_bytes())
    workspace_bytes = _workspace_bytes(limits.max_num_seqs, limits.max_num_batched_tokens, model)
    available = host.available_bytes() - workspace_bytes
    if available < 2 * layout.block_bytes:
        raise ConfigError(
            f"no memory remains for the KV cache beside weights and {workspace_bytes / 2**30:.2f} "
            f"GiB for a step of max_num_seqs {limits.max_num_seqs} and max_num_batched_tokens "
            f"{limits.max_num_batched_tokens}; lower one of these, or free memory"
        )
    num_blocks = _num_blocks(
        KVMemory.parse(config.kv_memory),
        layout,
        available=available,
        # Without a cache, more than all rows at their longest could never be used.
        most_tokens=None
        if config.kv == "contiguous" or config.caches_prefixes
        else limits.max_num_seqs * limits.max_model_len,
    )
    host_blocks = num_host_blocks(
        config.swap_memory,
        layout.block_bytes,
        host.available_bytes() - workspace_bytes - num_blocks * layout.block_bytes,
    )
    sliding_window = limits.model_config.sliding_window or 0
    slots: SlotOptions | None = None
    if config.kv == "virtual":
        arena = build_slots(layout, num_blocks, model.dtype, host_blocks, limits)
        # There is no kernel here that would read the rows of one batch in two ways.
        slots = SlotOptions(arena.max_mapped_blocks, limits.max_model_len, maps_forks=True)
    else:
        arena = Arena(layout, num_blocks, model.dtype, host_blocks)
    attention: AttentionBackend
    if config.kv != "paged" and config.attention in ("auto", "contiguous"):
        attention_name = "contiguous"
        kind = ContiguousAttention if isinstance(arena, VirtualArena) else RunAttention
        attention = kind(arena, model.num_heads, model.rope, sliding_window)
    else:
        # Under `virtual` through the pool view, which has every block in order.
        attention_name, attention = _attention(config.attention, arena, model, sliding_window)
    runner = Runner(
        model,
        arena,
        attention,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
    )
    most_tokens = min(layout.block_size * (num_blocks - 1), limits.max_model_len)
    try:
        _warm_up(runner, num_tokens=min(32, most_tokens))
    except FloatingPointError as error:
        raise ModelLoadError(
            f"{limits.path}: the model computes no numbers ({error}); its weights are damaged, or "
            f"do not fit {str(model.dtype).removeprefix('torch.')}"
        ) from error
    capacity = KVCapacity(
        num_blocks,
        layout.block_size,
        layout.block_bytes,
        host_blocks,
        arena.max_blocks if isinstance(arena, VirtualArena) else None,
    )
    num_measured = min(limits.max_num_batched_tokens, most_tokens)
    return Mechanism(
        executor=InProcessExecutor(runner, capacity, threaded=limits.depth > 1),
        model=model,
        capacity=capacity,
        device="cpu",
        attention=attention_name,
        workspace_bytes=workspace_bytes,
        measure_rates=lambda: _measure_rates(runner, num_measured),
        start_s={"weights": weights_s},
        slots=slots,
        kv_dtype=kv_dtype,
    )


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


def _measure_rates(runner: Runner, num_tokens: int) -> tuple[float, float]:
    """Bytes and tokens a second: a block copied to host memory and back, a chunk prefilled."""
    arena = runner.arena
    prefill_s = min(_timed(lambda: _warm_up(runner, num_tokens)) for _ in range(2))
    one = int_array([1])
    swap = (SwapOut(one, one), SwapIn(0, one, one))
    copy_s = min(_timed(lambda: arena.obey(swap)) for _ in range(5)) / 2
    return arena.layout.block_bytes / copy_s, num_tokens / prefill_s


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

    Raises:
        FloatingPointError: the model computes no numbers.
    """
    arena = runner.arena
    num_blocks = arena.layout.num_blocks(num_tokens)
    block_ids = int_array(range(1, num_blocks + 1))
    if isinstance(arena, VirtualArena):
        places = int_array(range(num_blocks))
        arena.obey((MapBlocks(0 * places, places, block_ids),))
    rows, token_ids = int_array([0]), int_array([0] * (num_tokens - 1))
    init = RowInit(
        row=0,
        token_ids=token_ids,
        num_computed_tokens=0,
        block_ids=block_ids,
        params=SamplingParams(temperature=0.0),
        seed=0,
    )
    prefill = Batch.of(rows, int_array([len(token_ids)]), rows == 0)
    if len(token_ids):
        runner.run(StepPlan(step_id=0, batch=prefill, row_inits=(init,)))
    if not runner.run(StepPlan(step_id=0, batch=Batch.decode(rows))).is_finite:
        raise FloatingPointError("its logits are NaN or infinity")
    if isinstance(arena, VirtualArena):
        # The manager starts with slots that show nothing.
        arena.obey((MapBlocks(0 * places, places, 0 * places),))
        arena.settle()
