"""FlashInfer's kernels over block tables, where the package is installed (Ye et al., MLSys 2025).

Its wrappers plan a step on the host, from lengths that the host knows, and then run a layer at a
time; which blocks a row has is listed on the device. Decode steps are captured, with wrappers for
each number of rows; all others run as they are. Under `virtual` it reads the pool's view. What rows
have in common is read once a row. Knows no policy::

    host:    lengths ──▶ plan ──▶ pinned memory ─┐ one copy, behind the step before
    device:  starts of rows, work of programs ◀──┘   tables ──▶ list of pages ──▶ run, each layer
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from octavo.core.layout import num_blocks_for
from octavo.core.plan import IntArray
from octavo.execution.attention.paged import PagedAttention, PagedStep
from octavo.execution.device import Device, Event
from octavo.execution.device_arena import DeviceArena
from octavo.execution.kernels.gpu import Product
from octavo.execution.kernels.page_lists import list_pages
from octavo.execution.models.norms import QueryKeyNorm
from octavo.execution.staging import Staging

logger = logging.getLogger(__name__)
_PACKAGE = "flashinfer"
_NEEDED = (
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "fast_decode_plan",
)
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
# Its recommendations for what parts of rows and plans take.
_MIN_FLOAT_BYTES = 128 << 20
_INT_BYTES = 8 << 20
# What a decode step's plan takes, at most: 24 bytes a tile and a few more a row.
_DECODE_INT_BYTES, _BYTES_PER_TILE = 1 << 18, 64
# Programs that it fills a GPU with, at least (of 160 multiprocessors), and queries of each.
_PROGRAMS, _TILE = 2 * 160, 128
_DECODE_TILES = (16, 64, 128)
# It keeps strides, in elements, as uint32.
_MAX_STRIDE = 2**32 - 1
_ALIGN = 16


class FlashInferError(RuntimeError):
    """It cannot read this pool, or its kernels cannot be compiled; the message says why."""


@cache
def find_flashinfer() -> Any | None:
    """The package; None: it is not installed, or cannot be used, which is logged."""
    if importlib.util.find_spec(_PACKAGE) is None:
        return None
    try:
        library = importlib.import_module(_PACKAGE)
    except Exception as error:
        # It looks for compilers, drivers and other packages as it is imported.
        logger.warning("%s is installed but cannot be imported: %s", _PACKAGE, error)
        return None
    missing = [name for name in _NEEDED if not hasattr(library, name)]
    if missing:
        logger.warning("%s is installed but has no %s", _PACKAGE, ", ".join(missing))
        return None
    return library


@dataclass(slots=True, eq=False)
class _Wrapper:
    """One of the library's, and when the device has read what it planned last: its plans lie in one
    piece of pinned memory, which is not to be written before."""

    own: Any
    event: Event
    is_planned: bool = False


class _Turns:
    """Wrappers that differ in their pinned memory alone, so that a step can be planned while those
    before it wait to be copied. What one planned any can run, at the same addresses."""

    def __init__(self, device: Device, depth: int) -> None:
        self._device = device
        self._wrappers: list[_Wrapper | None] = [None] * (depth + 1)
        self._turn = 0
        self.last: _Wrapper

    def next(self, make: Callable[[], Any]) -> _Wrapper:
        """The next turn's, once the device has read what it planned; made where there is none."""
        self._turn = (self._turn + 1) % len(self._wrappers)
        wrapper = self._wrappers[self._turn]
        if wrapper is None:
            wrapper = _Wrapper(make(), self._device.event())
            self._wrappers[self._turn] = wrapper
        wrapper.event.synchronize()
        self.last = wrapper
        return wrapper


class FlashInferKernels:
    """Plans and runs attention over pools of one shape.

    A plan counts until the next one, of any number of rows: all use the same device memory, in the
    order of the device's queue. Lengths are at least 1.
    """

    def __init__(
        self,
        library: Any,
        kv_layer: torch.Tensor,
        num_heads: int,
        device: Device,
        *,
        max_rows: int,
        max_row_pages: int,
        sliding_window: int = 0,
        depth: int = 2,
    ) -> None:
        """``kv_layer [block, token, K|V, kv_head, head_dim]`` is any layer of the pool, in the
        dtype of queries. ``sliding_window`` 0 means none.

        Raises:
            FlashInferError: the pool's strides are too long for it.
        """
        check_strides(kv_layer)
        self._library = library
        self._device, self._depth = device, depth
        self.num_heads = num_heads
        _, self.page_size, _, self.num_kv_heads, self.head_dim = kv_layer.shape
        self.dtype = kv_layer.dtype
        self._window_left = sliding_window - 1 if sliding_window else -1
        place = device.torch_device
        num_tiles, tile = self._decode_tiles(max_rows)
        # Float32 parts of rows and their weights, for the most programs of any plan.
        queries = max(num_tiles * tile, -(-_PROGRAMS // self.num_kv_heads) * _TILE)
        num_bytes = 4 * num_heads * queries * (self.head_dim + 1) + 4096
        num_bytes = max(num_bytes, _MIN_FLOAT_BYTES)
        self._floats = torch.zeros(num_bytes, dtype=torch.uint8, device=place)
        self._num_decode_ints = _DECODE_INT_BYTES + _BYTES_PER_TILE * num_tiles
        self._ints = torch.zeros(
            max(_INT_BYTES, self._num_decode_ints), dtype=torch.uint8, device=place
        )
        # Where pages of rows begin in the list, and then how full their last ones are.
        self._width = -(-(max_rows + 1) // _ALIGN) * _ALIGN
        self._rows = Staging(device, depth)
        self._rows.reserve(2 * self._width)
        self._pages = torch.zeros(max_rows * max_row_pages, dtype=torch.int32, device=place)
        self._decoders: dict[int, _Turns] = {}
        self._chunks = _Turns(device, depth)

    def _decode_tiles(self, max_rows: int) -> tuple[int, int]:
        """Tiles of queries of a captured step, at most, and how many are in one."""
        group = self.num_heads // self.num_kv_heads
        tile = next((tile for tile in _DECODE_TILES if group <= tile), _DECODE_TILES[-1])
        return -(-max_rows * group // tile) + max_rows + _PROGRAMS // self.num_kv_heads, tile

    def _make_chunks(self) -> Any:
        wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(self._floats)
        wrapper.reset_workspace_buffer(self._floats, self._ints)
        return wrapper

    def _make_decoder(self, size: int) -> Any:
        """For ``size`` rows. All it has stays where it is, as captured steps need."""
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._floats,
            use_cuda_graph=True,
            # They take any number of query heads a KV head.
            use_tensor_cores=True,
            paged_kv_indptr_buffer=self._rows.device[: size + 1],
            paged_kv_indices_buffer=self._pages,
            paged_kv_last_page_len_buffer=self._rows.device[self._width :][:size],
        )
        # Pinned memory is as large, for each wrapper.
        wrapper.reset_workspace_buffer(self._floats, self._ints[: self._num_decode_ints])
        return wrapper

    def plan_decode(self, lengths: IntArray) -> None:
        """The next step has a token of each row; ``lengths`` count it."""
        size = len(lengths)
        if size not in self._decoders:
            self._decoders[size] = _Turns(self._device, self._depth)
        wrapper = self._decoders[size].next(partial(self._make_decoder, size))
        starts, last = self._send_rows(lengths)
        plan = wrapper.own.plan
        if wrapper.is_planned:
            # The same without copies, and without going through lengths one by one in Python,
            # once kernels are known.
            plan = partial(self._library.fast_decode_plan, wrapper.own)
        self._plan(
            wrapper,
            plan,
            torch.from_numpy(starts),
            self._pages[: starts[-1]],
            torch.from_numpy(last),
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.page_size,
        )

    def plan_chunks(self, counts: IntArray, lengths: IntArray) -> None:
        """The next step has the last ``counts`` tokens of rows of these ``lengths``."""
        wrapper = self._chunks.next(self._make_chunks)
        starts, last = self._send_rows(lengths)
        first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self._plan(
            wrapper,
            wrapper.own.plan,
            torch.from_numpy(first),
            torch.from_numpy(starts),
            self._pages[: starts[-1]],
            torch.from_numpy(last),
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.page_size,
            causal=True,
            max_token_per_sequence=int(counts.max()),
        )

    def _send_rows(self, lengths: IntArray) -> tuple[IntArray, IntArray]:
        """Where the rows' pages begin and how full their last ones are, on the host; also sent."""
        count, pages = len(lengths), -(-lengths // self.page_size)
        host, _ = self._rows.take(self._width + count)
        host[0] = 0
        np.cumsum(pages, out=host[1 : count + 1])
        host[self._width :][:count] = lengths - (pages - 1) * self.page_size
        starts, last = host[: count + 1].copy(), host[self._width :][:count].copy()
        self._rows.send()
        return starts, last

    def _plan(
        self, wrapper: _Wrapper, plan: Callable[..., None], *sizes: Any, **options: Any
    ) -> None:
        plan(
            *sizes,
            window_left=self._window_left,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
            sm_scale=self.head_dim**-0.5,
            **options,
        )
        wrapper.event.record()
        wrapper.is_planned = True

    def list_pages(self, tables: torch.Tensor, rows: torch.Tensor) -> None:
        """The blocks of ``rows``, those that were planned for; once a step, before it is run."""
        list_pages(tables, rows, self._rows.device[: len(rows) + 1], self._pages)

    def decode(self, queries: torch.Tensor, kv_layer: torch.Tensor) -> torch.Tensor:
        """``[rows, num_heads, head_dim]`` of the step that `plan_decode` planned."""
        return self._run(self._decoders[len(queries)].last, queries, kv_layer)

    def attend_chunks(self, queries: torch.Tensor, kv_layer: torch.Tensor) -> torch.Tensor:
        """``[tokens, num_heads, head_dim]`` of the step that `plan_chunks` planned."""
        return self._run(self._chunks.last, queries, kv_layer)

    def _run(
        self, wrapper: _Wrapper, queries: torch.Tensor, kv_layer: torch.Tensor
    ) -> torch.Tensor:
        keys_and_values = (kv_layer[:, :, 0], kv_layer[:, :, 1])
        out = torch.empty_like(queries)
        wrapper.own.run(queries, keys_and_values, out=out)
        return out

    def compile(self) -> None:
        """Have the library compile its kernels, which takes minutes where they are not cached.

        Raises:
            FlashInferError: it could not; the cause is its own error.
        """
        one: IntArray = np.ones(1, dtype=np.int32)
        try:
            self.plan_decode(one)
            self.plan_chunks(one, one)
        except Exception as error:
            raise FlashInferError(f"FlashInfer cannot prepare its kernels: {error}") from error


class FlashInferAttention(PagedAttention):
    """Reads rows through their block tables with FlashInfer's kernels; writes as others do."""

    def __init__(
        self,
        arena: DeviceArena,
        *args: Any,
        library: Any,
        device: Device,
        depth: int = 2,
        **options: Any,
    ) -> None:
        """``library`` is what `find_flashinfer` found; the rest as `PagedAttention`.

        Raises:
            FlashInferError: it cannot read the pool, or compile its kernels.
        """
        super().__init__(arena, *args, **options)
        # Steps are those over tables, under either translation, and whole.
        self.has_slots = False
        self.has_dense = False
        with device.context():
            self.kernels = FlashInferKernels(
                library,
                self.layers[0],
                self.num_heads,
                device,
                # Captured steps have a few rows more, as padding.
                max_rows=-(-self.max_decode // _ALIGN) * _ALIGN,
                max_row_pages=num_blocks_for(self.max_length, arena.layout.block_size),
                sliding_window=self.sliding_window,
                depth=depth,
            )
            self.kernels.compile()

    def wants_spans(self, in_slots: bool) -> bool:
        return True

    def length_class(self, longest: int, num_decode: int) -> int:
        """What is captured knows no lengths: plans say them."""
        return self.max_length

    def prepare_decode(self, lengths: IntArray) -> None:
        self.kernels.plan_decode(lengths)

    def plan(self, step: PagedStep) -> Callable[..., torch.Tensor]:
        if step.spans is None:
            # Every row runs one token, and was planned for: captured, or about to be.
            rows, attend = step.token_rows, self.kernels.decode
        else:
            rows, attend = step.spans.rows[:-1], self.kernels.attend_chunks
            _, ends, first = step.spans.on_host
            self.kernels.plan_chunks(np.diff(first), ends[:-1])
        self.kernels.list_pages(step.tables, rows)

        def run(
            layer: int,
            qkv: Product,
            norm: QueryKeyNorm | None = None,
        ) -> torch.Tensor:
            queries = self.rotate_and_write(step, layer, qkv, norm)
            return attend(queries, self.layers[layer]).view(len(queries), -1)

        return run


def check_strides(kv_layer: torch.Tensor) -> None:
    """Raises FlashInferError where it would read other blocks than are meant."""
    longest = max(kv_layer.stride())
    if longest > _MAX_STRIDE:
        raise FlashInferError(
            f"FlashInfer counts at most {_MAX_STRIDE} elements from a block to the next, and here "
            f"they are {longest} apart; use a smaller block_size"
        )
