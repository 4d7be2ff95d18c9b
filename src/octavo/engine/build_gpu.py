"""An engine's mechanism on a CUDA device: weights, pool, kernels (see `octavo.engine.build`)."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from octavo.config import ConfigError, EngineConfig, KVMemory, ResourceError
from octavo.core.model_config import ModelLoadError
from octavo.core.plan import (
    Batch,
    KVCapacity,
    KVCommand,
    MapBlocks,
    RowInit,
    StepPlan,
    SwapIn,
    SwapOut,
    int_array,
)
from octavo.core.protocols import StepError
from octavo.core.sampling_params import SamplingParams
from octavo.engine.device_memory import DeviceMemory, share_out
from octavo.engine.gpu_parts import GPUParts
from octavo.engine.mechanism import Limits, Mechanism, SlotOptions, num_host_blocks
from octavo.execution import host
from octavo.execution.attention.flash3 import find_flash3
from octavo.execution.attention.flashinfer import (
    DTYPES,
    HEAD_DIMS,
    FlashInferError,
    find_flashinfer,
)
from octavo.execution.compiler_start import wait_for_compiler
from octavo.execution.device import CUDADevice
from octavo.execution.device_edits import most_bytes
from octavo.execution.executors.gpu import GPUExecutor
from octavo.execution.gpu_runner import GPURunner
from octavo.execution.kernels.ahead import compiling_ahead
from octavo.execution.kernels.row_state import scatter
from octavo.execution.models.loading import load_model
from octavo.execution.pages.interface import PageError

TOKEN_BUDGET = 8192
"""Tokens of a step on a GPU: enough for products at their full rate, 0.2 s of an 8B."""
MAX_NUM_SEQS = 1024
_FP8_CAPABILITY = (8, 9)
# What captured steps take, and libraries that are loaded later.
_GRAPH_BYTES = 5 * 2**28
# Sequences with penalties, biases or masks that memory is kept for; more take what is unused.
_EDITING_SEQS = 256
_SHORT_CHUNK = 32
# More rows than products of ours are for, fewer than where the kernels behind the library's change.
_MIDDLE_CHUNK = 192


def build_gpu(config: EngineConfig, limits: Limits) -> Mechanism:
    """Load the model and give the KV cache what it leaves.

    Raises:
        ConfigError: an option does not fit the model or the machine.
        ResourceError: the system refuses memory, addresses or mappings.
        ModelLoadError: the model cannot be loaded, or not on a GPU.
    """
    clock, start_s = time.perf_counter, {}
    attention = _attention(config)
    if attention != "triton" and config.deterministic:
        raise ConfigError(f"attention={attention} is not deterministic; use attention=triton")
    if config.weights not in ("auto", "bf16", "fp8"):
        raise ConfigError(f"weights={config.weights} is for CPUs; use auto, bf16 or fp8 on a GPU")
    started = clock()
    device = CUDADevice()
    _check_fp8(config, limits, torch.cuda.get_device_capability(device.torch_device))
    torch.zeros(1, device=device.torch_device)
    start_s["context"] = clock() - started
    has_compiler = _start_compiler(device)
    started = clock()
    model = load_model(
        limits.path,
        load_format=config.load_format,
        dtype=config.dtype,
        weights=config.weights,
        max_positions=limits.max_model_len,
        device=device.torch_device,
    )
    torch.cuda.synchronize()
    start_s["weights"] = clock() - started
    try:
        parts = GPUParts(
            model,
            device,
            config.block_size,
            limits,
            is_invariant=config.deterministic,
            kv=config.kv,
            attention=attention,
            kv_dtype=config.kv_dtype,
        )
        _check_attention(config.attention, parts)
        if attention == "flash3" and not parts.attends_densely:
            attention = "triton"
        started = clock()
        has_compiler.result()
        used_bytes = torch.cuda.memory_allocated()
        # Just large enough for the largest chunk.
        num_tokens = max(min(limits.max_num_batched_tokens, limits.max_model_len - 2), 1)
        runner = parts.runner(parts.layout.num_blocks(num_tokens + 2) + 1, capture=False)
        compile_kernels(parts, runner, num_tokens)
        start_s["kernels"] = clock() - started
        started = clock()
        workspace_bytes = _measured_workspace(parts, runner, num_tokens, used_bytes)
        del runner
        start_s["first forward"] = clock() - started
        started = clock()
        memory = _memory(config, parts, workspace_bytes)
        num_blocks = memory.kv_bytes // parts.layout.block_bytes
        host_blocks = num_host_blocks(
            config.swap_memory, parts.layout.block_bytes, host.available_bytes()
        )
        # Address space is free: the pool may grow to all that the device has.
        device_bytes = torch.cuda.get_device_properties(device.torch_device).total_memory
        max_blocks = max(num_blocks, device_bytes // parts.layout.block_bytes)
        runner = parts.runner(num_blocks, host_blocks, max_blocks=max_blocks)
        slots = None
        if runner.arena.slots is not None:
            # Forking by mapping costs 8 ms for 2K tokens here, and a copy-on-write waits.
            maps_forks = bool(config.map_forks)
            slots = SlotOptions(
                runner.arena.slots.max_mapped_blocks, limits.max_model_len, maps_forks
            )
        most_tokens = min(parts.layout.block_size * (num_blocks - 1), limits.max_model_len)
        warm_up(runner, min(_SHORT_CHUNK, most_tokens - 2))
        start_s["pool"] = clock() - started
    except PageError as error:
        raise ResourceError(f"kv=virtual: {error}; or use kv=paged") from error
    except FlashInferError as error:
        raise ConfigError(f"{error}; or use attention=triton") from error
    except StepError as error:
        raise ModelLoadError(
            f"{limits.path}: the model computes no numbers ({error}); its weights are damaged, or "
            f"do not fit {str(model.dtype).removeprefix('torch.')}"
        ) from error
    capacity = KVCapacity(
        num_blocks,
        parts.layout.block_size,
        parts.layout.block_bytes,
        host_blocks,
        max_blocks if parts.is_virtual else None,
    )
    num_measured = min(limits.max_num_batched_tokens, most_tokens - 2)
    return Mechanism(
        executor=GPUExecutor(runner, capacity),
        model=model,
        capacity=capacity,
        device=torch.cuda.get_device_name(),
        attention=attention,
        slots=slots,
        workspace_bytes=workspace_bytes,
        memory=memory,
        measure_rates=lambda: _measure_rates(runner, num_measured),
        start_s=start_s,
        kv_dtype=str(parts.kv_dtype).removeprefix("torch."),
        finds_prefix_groups=not limits.model_config.sliding_window
        and not config.deterministic
        and attention != "flashinfer",
    )


def _check_attention(asked: str, parts: GPUParts) -> None:
    """Raises ConfigError where what was asked for by name would not be used, or cannot read."""
    kv_dtype = str(parts.kv_dtype).removeprefix("torch.")
    head_dim = parts.model.head_dim
    if asked == "stock" and (
        parts.kv_dtype not in (torch.bfloat16, torch.float16)
        or parts.kv_dtype != parts.model.dtype
        or head_dim % 8
        or head_dim > 256
    ):
        raise ConfigError(
            "attention=stock reads bfloat16 or float16, as the model computes, and heads of a "
            f"multiple of 8 up to 256, not {kv_dtype} and {head_dim}; use attention=triton"
        )
    if asked == "flashinfer" and (
        parts.kv_dtype not in DTYPES
        or parts.kv_dtype != parts.model.dtype
        or head_dim not in HEAD_DIMS
    ):
        raise ConfigError(
            "attention=flashinfer reads bfloat16 or float16, as the model computes, and heads of "
            f"{', '.join(map(str, HEAD_DIMS))}, not {kv_dtype} and {head_dim}; use attention=triton"
        )
    if asked in ("flash3", "mixed") and not parts.attends_densely:
        raise ConfigError(
            f"attention={asked} is for long chunks in bfloat16 or float16, of heads of 64, 96 or "
            "128 without a sliding window, on Hopper GPUs and newer; use attention=triton"
        )


def _attention(config: EngineConfig) -> str:
    """The backend; ``auto`` takes FlashAttention-3 for long chunks where it is installed, and
    FlashInfer only when asked: of the works in docs/benchmarks-gpu.md it is faster in one decode.

    Raises:
        ConfigError: it is none for a GPU, or not installed.
    """
    if config.attention == "auto":
        return "triton" if config.deterministic or find_flash3() is None else "flash3"
    if config.attention not in ("triton", "flash3", "flashinfer", "stock", "mixed"):
        raise ConfigError(
            f"attention={config.attention} is for CPUs; use auto, triton, flash3, flashinfer, "
            "stock (with kv=virtual or contiguous) or mixed (with kv=virtual) on a GPU"
        )
    if config.attention == "flash3" and find_flash3() is None:
        raise ConfigError(
            "attention=flash3 needs FlashAttention-3, and flash_attn_interface cannot be imported; "
            "install it, or use attention=triton"
        )
    if config.attention == "flashinfer" and find_flashinfer() is None:
        raise ConfigError(
            "attention=flashinfer needs the package flashinfer-python, and flashinfer cannot be "
            "imported; install it, or use attention=triton"
        )
    return config.attention


def _check_fp8(config: EngineConfig, limits: Limits, capability: tuple[int, int]) -> None:
    """Refuse fp8 where the device has no such arithmetic.

    Raises:
        ConfigError: says what to use instead.
    """
    stored = limits.model_config.fp8
    for name, is_fp8, other in (
        ("weights", config.weights == "fp8" or (config.weights == "auto" and stored), "bf16"),
        (
            "kv_dtype",
            config.kv_dtype == "fp8" or (config.kv_dtype == "auto" and stored and stored.kv),
            "bf16",
        ),
    ):
        if is_fp8 and capability < _FP8_CAPABILITY:
            raise ConfigError(
                f"{name} in fp8 needs a GPU of compute capability 8.9 or later (Ada, Hopper), and "
                f"this one has {capability[0]}.{capability[1]}; use {name}={other}"
            )


def warm_up(runner: GPURunner, num_tokens: int) -> None:
    """Run a chunk of ``num_tokens`` and two decode steps on row 0 and the first blocks, which the
    first sequence writes anew: kernels are compiled, and a step of one row is captured.

    Raises:
        StepError: the model computes no numbers.
    """
    num_tokens = max(num_tokens, 1)
    num_blocks = runner.arena.layout.num_blocks(num_tokens + 2)
    init = RowInit(
        row=0,
        token_ids=int_array(np.zeros(num_tokens)),
        num_computed_tokens=0,
        block_ids=int_array(range(1, num_blocks + 1)),
        params=SamplingParams(temperature=0.0),
        seed=0,
    )
    rows = int_array([0])
    prefill = Batch.of(rows, int_array([num_tokens]), rows == 0)
    decode = Batch.decode(rows)
    commands = _mapping(runner, init)
    plan = StepPlan(step_id=0, batch=prefill, row_inits=(init,), commands=commands)
    runner.collect(runner.launch(plan))
    for _ in range(2):
        result = runner.collect(runner.launch(StepPlan(step_id=0, batch=decode)))
    if not result.is_finite:
        raise StepError("its logits are NaN or infinity")
    _hide(runner, init)


def _start_compiler(device: CUDADevice) -> Future[None]:
    """Have Triton do, beside the loading of weights, what it does before its first kernel, as far
    as that needs PyTorch and a device (`octavo.execution.compiler_start` does the rest)."""

    def work() -> None:
        wait_for_compiler()
        with torch.cuda.device(device.torch_device), compiling_ahead():
            ints = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
            scatter(ints, ints, ints)

    threads = ThreadPoolExecutor(1, "compile")
    started = threads.submit(work)
    threads.shutdown(wait=False)
    return started


def compile_kernels(parts: GPUParts, runner: GPURunner, num_tokens: int) -> None:
    """Compile, in parallel, what `warm_up` launches over ``runner`` for a chunk of ``num_tokens``,
    for a short and a middling one, and the widest head.

    Steps run without their kernels, so that states, keys and values are whatever memory held; rows,
    places and tokens by which anything is looked up are copied from the host, or zeros. What is not
    seen here is compiled when it is launched.

    Raises:
        KernelError: a kernel cannot be compiled.
    """
    with compiling_ahead():
        warm_up(parts.short_runner(runner, capture=False), num_tokens)
        # Captured steps are padded, and may be launched otherwise.
        for chunk in (_SHORT_CHUNK, _MIDDLE_CHUNK):
            warm_up(parts.short_runner(runner, capture=True), min(chunk, num_tokens))
        _run_widest_head(parts)


def _run_widest_head(parts: GPUParts) -> None:
    with torch.inference_mode():
        shape = (parts.limits.max_num_seqs, parts.model.config.hidden_size)
        device = parts.device.torch_device
        parts.gpu_model.logits(torch.zeros(shape, dtype=parts.model.dtype, device=device))


def _mapping(runner: GPURunner, init: RowInit) -> tuple[KVCommand, ...]:
    """What shows the row's blocks in its slot, where there are slots."""
    if runner.arena.slots is None:
        return ()
    places = int_array(range(len(init.block_ids)))
    return (MapBlocks(0 * places + init.row, places, init.block_ids),)


def _hide(runner: GPURunner, init: RowInit) -> None:
    """The manager starts with slots that show nothing."""
    if runner.arena.slots is not None:
        places = int_array(range(len(init.block_ids)))
        runner.arena.slots.order(MapBlocks(0 * places + init.row, places, 0 * places))
        runner.arena.slots.mapper.wait()


def _measured_workspace(
    parts: GPUParts, runner: GPURunner, num_tokens: int, used_bytes: int
) -> int:
    """Bytes that a step takes beside weights and pool: the largest forward pass, of ``num_tokens``,
    and the widest head are run once. ``used_bytes`` were allocated before ``runner`` was made."""
    # Driver pages are not the allocator's.
    pool_bytes = 0 if parts.is_virtual else runner.arena.kv.nbytes
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    warm_up(runner, num_tokens)
    _run_widest_head(parts)
    torch.cuda.synchronize()
    return max(torch.cuda.max_memory_allocated() - used_bytes - pool_bytes, 0)


def _memory(config: EngineConfig, parts: GPUParts, workspace_bytes: int) -> DeviceMemory:
    """What becomes of the device's memory."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    limits = parts.limits
    vocab_size = limits.model_config.vocab_size
    # State of the rows that edit, and a copy of the logits of all.
    sampling_bytes = most_bytes(min(limits.max_num_seqs, _EDITING_SEQS), vocab_size)
    sampling_bytes += limits.max_num_seqs * vocab_size * parts.model.dtype.itemsize
    return share_out(
        KVMemory.parse(config.kv_memory),
        total_bytes=total,
        free_bytes=free,
        weight_bytes=parts.model.weight_bytes(),
        workspace_bytes=workspace_bytes,
        graph_bytes=_GRAPH_BYTES,
        sampling_bytes=sampling_bytes,
        block_bytes=parts.layout.block_bytes,
        block_size=parts.layout.block_size,
    )


def _measure_rates(runner: GPURunner, num_tokens: int) -> tuple[float, float]:
    """Bytes and tokens a second: blocks copied to host memory and back, a chunk prefilled."""
    arena = runner.arena
    assert arena.host is not None
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        warm_up(runner, num_tokens)
        seconds.append(time.perf_counter() - started)
    count = min(len(arena.host), arena.num_blocks, 33) - 1
    ids = int_array(range(1, count + 1))
    empty = Batch.empty()
    copies = []
    for number in range(1, 4):
        started = time.perf_counter()
        for commands in ((SwapOut(ids, ids),), (SwapIn(-number, ids, ids),)):
            plan = StepPlan(step_id=0, batch=empty, commands=commands)
            runner.collect(runner.launch(plan))
        torch.cuda.synchronize()
        copies.append((time.perf_counter() - started) / 2)
    return count * arena.layout.block_bytes / min(copies), num_tokens / min(seconds)
