"""An engine's mechanism on a CUDA device: weights, pool, kernels (see `octavo.engine.build`)."""

from __future__ import annotations

import time

import numpy as np
import torch

from octavo.config import ConfigError, EngineConfig, KVMemory
from octavo.core.layout import KVLayout
from octavo.core.model_config import ModelLoadError
from octavo.core.plan import Batch, KVCapacity, RowInit, StepPlan, SwapIn, SwapOut, int_array
from octavo.core.protocols import StepError
from octavo.core.sampling_params import SamplingParams
from octavo.engine.device_memory import DeviceMemory, share_out
from octavo.engine.mechanism import Limits, Mechanism, num_host_blocks
from octavo.execution import host
from octavo.execution.attention.paged import PagedAttention
from octavo.execution.device import CUDADevice, Device
from octavo.execution.device_arena import DeviceArena
from octavo.execution.device_edits import most_bytes
from octavo.execution.executors.gpu import GPUExecutor
from octavo.execution.gpu_runner import GPUModel, GPURunner
from octavo.execution.models.decoder import Decoder
from octavo.execution.models.fused import FusedDecoder, can_fuse
from octavo.execution.models.loading import load_model
from octavo.execution.models.unfused import UnfusedDecoder

TOKEN_BUDGET = 8192
"""Tokens of a step on a GPU: enough for products at their full rate, 0.2 s of an 8B."""
MAX_NUM_SEQS = 1024
# What captured steps take, and libraries that are loaded later.
_GRAPH_BYTES = 2**30
# Sequences with penalties, biases or masks that memory is kept for; more take what is unused.
_EDITING_SEQS = 256


class GPUParts:
    """A loaded model, and runners over pools of any size."""

    def __init__(
        self,
        model: Decoder,
        device: Device,
        block_size: int,
        limits: Limits,
        *,
        is_invariant: bool = False,
    ) -> None:
        self.model = model
        self.gpu_model: GPUModel
        if can_fuse(model):
            self.gpu_model = FusedDecoder(model, is_invariant=is_invariant)
        elif is_invariant:
            raise ConfigError(
                f"{limits.model_config.architecture} does not run deterministically on a GPU; "
                "leave deterministic out, or use device=cpu"
            )
        else:
            self.gpu_model = UnfusedDecoder(model)
        self.is_invariant = is_invariant
        self.device = device
        self.limits = limits
        self.layout = KVLayout(
            num_layers=limits.model_config.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype_bytes=model.dtype.itemsize,
            block_size=block_size,
        )

    def runner(self, num_blocks: int, num_host_blocks: int = 0, capture: bool = True) -> GPURunner:
        """A runner over a pool of ``num_blocks``, the null block included."""
        model, limits = self.model, self.limits
        arena = DeviceArena(
            self.layout, num_blocks, model.dtype, self.device, num_host_blocks, limits.depth
        )
        attention = PagedAttention(
            arena,
            model.num_heads,
            model.rope,
            model.dtype,
            max_decode=limits.max_num_seqs,
            sliding_window=limits.model_config.sliding_window or 0,
            is_invariant=self.is_invariant,
        )
        return GPURunner(
            self.gpu_model,
            arena,
            attention,
            self.device,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            vocab_size=limits.model_config.vocab_size,
            depth=limits.depth,
            capture=capture,
        )


def build_gpu(config: EngineConfig, limits: Limits) -> Mechanism:
    """Load the model and give the KV cache what it leaves.

    Raises:
        ConfigError: an option does not fit the model or the machine.
        ModelLoadError: the model cannot be loaded, or not on a GPU.
    """
    clock, start_s = time.perf_counter, {}
    if config.attention not in ("auto", "triton"):
        raise ConfigError(f"attention={config.attention} is for CPUs; use auto or triton on a GPU")
    if config.weights not in ("auto", "bf16"):
        raise ConfigError(f"weights={config.weights} is for CPUs; use auto or bf16 on a GPU")
    started = clock()
    device = CUDADevice()
    torch.zeros(1, device=device.torch_device)
    start_s["context"] = clock() - started
    started = clock()
    model = load_model(
        limits.path,
        load_format=config.load_format,
        dtype=config.dtype,
        weights="bf16",
        max_positions=limits.max_model_len,
        device=device.torch_device,
    )
    torch.cuda.synchronize()
    start_s["weights"] = clock() - started
    parts = GPUParts(model, device, config.block_size, limits, is_invariant=config.deterministic)
    try:
        started = clock()
        workspace_bytes = _measured_workspace(parts)
        start_s["first forward"] = clock() - started
        started = clock()
        memory = _memory(config, parts, workspace_bytes)
        num_blocks = memory.kv_bytes // parts.layout.block_bytes
        host_blocks = num_host_blocks(
            config.swap_memory, parts.layout.block_bytes, host.available_bytes()
        )
        runner = parts.runner(num_blocks, host_blocks)
        most_tokens = min(parts.layout.block_size * (num_blocks - 1), limits.max_model_len)
        warm_up(runner, min(32, most_tokens - 2))
        warm_up_sampling(runner)
        start_s["pool"] = clock() - started
    except StepError as error:
        raise ModelLoadError(
            f"{limits.path}: the model computes no numbers ({error}); its weights are damaged, or "
            f"do not fit {str(model.dtype).removeprefix('torch.')}"
        ) from error
    capacity = KVCapacity(
        num_blocks, parts.layout.block_size, parts.layout.block_bytes, host_blocks
    )
    num_measured = min(limits.max_num_batched_tokens, most_tokens - 2)
    return Mechanism(
        executor=GPUExecutor(runner, capacity),
        model=model,
        capacity=capacity,
        device=torch.cuda.get_device_name(),
        attention="triton",
        workspace_bytes=workspace_bytes,
        memory=memory,
        measure_rates=lambda: _measure_rates(runner, num_measured),
        start_s=start_s,
        finds_prefix_groups=not limits.model_config.sliding_window and not config.deterministic,
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
    runner.collect(runner.launch(StepPlan(step_id=0, batch=prefill, row_inits=(init,))))
    for _ in range(2):
        runner.collect(runner.launch(StepPlan(step_id=0, batch=decode)))


def warm_up_sampling(runner: GPURunner) -> None:
    """Sample one token on row 0 with all that a request may ask for, so that no request pays for
    compiling it."""
    params = SamplingParams(
        temperature=1.0,
        presence_penalty=0.1,
        logit_bias={0: 0.1},
        bad_words_token_ids=((0, 0),),
    )
    init = RowInit(
        row=0,
        token_ids=int_array([0]),
        num_computed_tokens=0,
        block_ids=int_array([1]),
        params=params,
        seed=0,
        num_logprobs=1,
    )
    batch = Batch.decode(int_array([0]))
    runner.collect(runner.launch(StepPlan(step_id=0, batch=batch, row_inits=(init,))))


def _measured_workspace(parts: GPUParts) -> int:
    """Bytes that a step takes beside weights and pool: the largest forward pass and the widest head
    are run once, over a pool just large enough."""
    layout, limits = parts.layout, parts.limits
    num_tokens = max(min(limits.max_num_batched_tokens, limits.max_model_len - 2), 1)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    runner = parts.runner(layout.num_blocks(num_tokens + 2) + 1, capture=False)
    pool_bytes = runner.arena.kv.nbytes
    warm_up(runner, num_tokens)
    with torch.inference_mode():
        shape = (limits.max_num_seqs, parts.model.config.hidden_size)
        device = parts.device.torch_device
        parts.gpu_model.logits(torch.zeros(shape, dtype=parts.model.dtype, device=device))
    torch.cuda.synchronize()
    return max(torch.cuda.max_memory_allocated() - before - pool_bytes, 0)


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
