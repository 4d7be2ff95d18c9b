"""A model on a GPU, and what runs it over pools of any size: arenas, attention, runners."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch

from octavo.config import BLOCK_SIZE, ConfigError
from octavo.core.layout import KVLayout
from octavo.engine.mechanism import Limits
from octavo.engine.slots import mappable_layout
from octavo.execution.attention.dense import is_supported
from octavo.execution.attention.flash3 import find_flash3
from octavo.execution.attention.flashinfer import FlashInferAttention, find_flashinfer
from octavo.execution.attention.paged import PagedAttention
from octavo.execution.attention.stock import StockRunAttention, StockSlotAttention
from octavo.execution.device import CUDADevice, Device
from octavo.execution.device_arena import DeviceArena
from octavo.execution.gpu_runner import GPUModel, GPURunner
from octavo.execution.kernels.prefill_attention import MOST_ROWS
from octavo.execution.models.decoder import Decoder
from octavo.execution.models.fp8 import E4M3
from octavo.execution.models.fused import FusedDecoder, can_fuse
from octavo.execution.models.unfused import UnfusedDecoder
from octavo.execution.pages.cuda import CudaPages, cuda_page_bytes
from octavo.execution.pages.interface import host_page_bytes
from octavo.execution.pages.memfd import MemfdPages
from octavo.execution.virtual_device_arena import VirtualDeviceArena

# What stock kernels read, by the KV manager.
_STOCK = {"virtual": StockSlotAttention, "contiguous": StockRunAttention}


class GPUParts:
    """A loaded model, and runners over pools of any size."""

    def __init__(
        self,
        model: Decoder,
        device: Device,
        block_size: int | None,
        limits: Limits,
        *,
        is_invariant: bool = False,
        kv: str = "paged",
        attention: str = "triton",
        kv_dtype: str = "auto",
    ) -> None:
        """``block_size`` None: 16, or the next that can be mapped under ``virtual``. ``kv_dtype``
        is one of `octavo.config.KV_DTYPES`.

        Raises:
            ConfigError: a block of this size cannot be mapped, too many query heads share a KV
                head, or the model is not deterministic.
        """
        self.model = model
        if is_invariant and not can_fuse(model):
            raise ConfigError(
                f"{limits.model_config.architecture} does not run deterministically on a GPU; "
                "leave deterministic out, or use device=cpu"
            )
        group = model.num_heads // model.num_kv_heads
        if group > MOST_ROWS:
            raise ConfigError(
                f"{limits.model_config.architecture} with {group} query heads for each KV head "
                f"does not run on a GPU, whose kernels take up to {MOST_ROWS}; use device=cpu"
            )
        self.gpu_model = _gpu_model(model, is_invariant)
        self.is_invariant = is_invariant
        self.device = device
        self.limits = limits
        self.kv_dtype = resolve_kv_dtype(kv_dtype, model)
        self.kv_scales: torch.Tensor | None = None
        if self.kv_dtype == E4M3:
            self.kv_scales = model.kv_scales
            if self.kv_scales is None:
                shape = (limits.model_config.num_layers, 2, model.num_kv_heads)
                self.kv_scales = torch.ones(shape, device=device.torch_device)
        self.layout = KVLayout(
            num_layers=limits.model_config.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype_bytes=self.kv_dtype.itemsize,
            block_size=block_size or BLOCK_SIZE,
        )
        self.kv = kv
        self.is_virtual = kv == "virtual"
        self.attention = attention
        self.flash3 = find_flash3() if attention == "flash3" else None
        if self.is_virtual:
            page_bytes = _page_bytes(device)
            self.layout = mappable_layout(self.layout, block_size, limits.max_model_len, page_bytes)

    @property
    def attends_densely(self) -> bool:
        """Whether long chunks may go to kernels that know no blocks."""
        return not self.limits.model_config.sliding_window and is_supported(
            self.model.dtype, self.model.head_dim, self.device.torch_device
        )

    def runner(
        self,
        num_blocks: int,
        num_host_blocks: int = 0,
        capture: bool = True,
        max_blocks: int | None = None,
    ) -> GPURunner:
        """A runner over a pool of ``num_blocks``, the null block included; under ``virtual`` one
        that can grow to ``max_blocks``."""
        arena = self._arena(num_blocks, num_host_blocks, max_blocks)
        return self._runner(self.gpu_model, arena, self._attention(arena), capture)

    def short_runner(self, runner: GPURunner, capture: bool) -> GPURunner:
        """Rows of its own over the pool of ``runner``, and a model of the first two layers and the
        last: they launch every kernel that the whole does, where all layers are alike."""
        short = copy.copy(self.model)
        short.layers = [*short.layers[:2], *short.layers[2:][-1:]]
        # Not made anew: where norms are is decided by all layers.
        model = self.gpu_model.over(short)
        return self._runner(model, runner.arena, runner.attention, capture)

    def _runner(
        self, model: GPUModel, arena: DeviceArena, attention: PagedAttention, capture: bool
    ) -> GPURunner:
        limits = self.limits
        return GPURunner(
            model,
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

    def _attention(self, arena: DeviceArena) -> PagedAttention:
        model, limits = self.model, self.limits
        backend: Callable[..., PagedAttention] = PagedAttention
        if self.attention == "stock":
            backend = _STOCK[self.kv]
        elif self.attention == "flashinfer":
            backend = partial(
                FlashInferAttention,
                library=find_flashinfer(),
                device=self.device,
                depth=limits.depth,
            )
        return backend(
            arena,
            model.num_heads,
            model.rope,
            model.dtype,
            max_decode=limits.max_num_seqs,
            max_length=limits.max_model_len,
            only_dense_in_slots=self.attention == "mixed",
            sliding_window=limits.model_config.sliding_window or 0,
            is_invariant=self.is_invariant,
            kv_scales=self.kv_scales,
            flash3=self.flash3,
        )

    def _arena(self, num_blocks: int, num_host_blocks: int, max_blocks: int | None) -> DeviceArena:
        limits = self.limits
        sizes = (self.layout, num_blocks, self.kv_dtype, self.device, num_host_blocks)
        if not self.is_virtual:
            return DeviceArena(*sizes)
        kind = CudaPages if isinstance(self.device, CUDADevice) else MemfdPages
        return VirtualDeviceArena(
            *sizes,
            num_slots=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            pages=kind(self.layout.block_bytes),
            max_blocks=max_blocks,
        )


def _gpu_model(model: Decoder, is_invariant: bool) -> FusedDecoder | UnfusedDecoder:
    if can_fuse(model):
        return FusedDecoder(model, is_invariant=is_invariant)
    return UnfusedDecoder(model)


def _page_bytes(device: Device) -> int:
    return cuda_page_bytes() if isinstance(device, CUDADevice) else host_page_bytes()


def resolve_kv_dtype(asked: str, model: Decoder) -> torch.dtype:
    """What keys and values are kept in. ``auto`` is the model's own dtype, or fp8 where its
    checkpoint was calibrated for that."""
    if asked == "auto":
        return E4M3 if model.config.fp8 is not None and model.config.fp8.kv else model.dtype
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": E4M3}[asked]
