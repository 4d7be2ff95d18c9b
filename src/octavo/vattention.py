"""vAttention's four calls for engines of their own (Prabhu et al., ASPLOS 2025, Table 4).

Keys and values of every layer are ordinary tensors ``[max_batch, max_context_len, num_kv_heads,
head_dim]`` whose memory is mapped page by page as requests grow, so that kernels which know nothing
of pages run on them::

    cache = VirtualKVCache.init(num_layers=32, max_batch=64, max_context_len=131072,
                                num_kv_heads=8, head_dim=128, page_size_kb=2048)
    req_id = cache.alloc_reqid()
    lengths = [0] * 64
    lengths[req_id] = 1000                    # the prompt
    cache.step(lengths)                       # now 1000 tokens may be written and read
    k, v = cache.keys[0][req_id, :1000], cache.values[0][req_id, :1000]
    ...
    cache.free_reqid(req_id)

Needs no engine: a second composition root, over the same pages as ``--kv virtual``. Unlike there a
request's memory is its own: nothing is shared, and there is no prefix cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from octavo.core.plan import int_array
from octavo.execution import host
from octavo.execution.pages.cuda import CudaPages, cuda_page_bytes
from octavo.execution.pages.interface import PageError, Pages, host_page_bytes
from octavo.execution.pages.memfd import MemfdPages
from octavo.execution.slots import Mapper
from octavo.execution.stacked_pages import StackedPages
from octavo.execution.virtual_arena import close_at_end
from octavo.memory.request_slots import OutOfPiecesError, RequestSlots

__all__ = ["OutOfMemoryError", "PageError", "VirtualKVCache"]

# Of the memory that is free at the start, where no limit is given.
_SHARE_OF_GPU, _SHARE_OF_HOST = 0.9, 0.5
# Tokens that are mapped ahead for the next request, unless that is less than a page.
_EAGER_TOKENS = 512


class OutOfMemoryError(RuntimeError):
    """The requests need more memory than ``memory_limit``, beside what idle ones could give."""


class VirtualKVCache:
    """``keys`` and ``values``: for each layer a tensor ``[max_batch, max_context_len, num_kv_heads,
    head_dim]``. Request ``req_id`` is row ``req_id``, at byte ``req_id * request_bytes`` of each.

    A token may be touched once `step` was told of a length that reaches it; behind that a page may
    be missing, and reading it ends the process (CPU) or the context (GPU). Kernels that load whole
    tiles by a tensor's shape get a slice, ``keys[0][req_id, :cache.num_mapped_tokens(req_id)]``.

    Calls come from one thread. Make one with `init`; it is a context manager.
    """

    def __init__(
        self,
        pages: Pages,
        shape: tuple[int, int, int, int, int],
        dtype: torch.dtype,
        memory_limit: int,
        *,
        reclaim_after_s: float,
        reclaim_threshold: float,
        eager_tokens: int,
        synchronize: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """Use `init`."""
        num_layers, max_batch, max_context_len, num_kv_heads, head_dim = shape
        self.max_batch, self.max_context_len = max_batch, max_context_len
        self.page_bytes = pages.block_bytes
        self.token_bytes = num_kv_heads * head_dim * dtype.itemsize
        num_places = self._num_places(max_context_len)
        self.request_bytes = num_places * self.page_bytes
        # A mapper leaves one slot in front of those that it maps.
        self._stack = StackedPages(pages, 2 * num_layers, (1 + max_batch) * num_places)
        close_at_end(self, self._stack.close)
        self.memory_limit = memory_limit
        self._piece_bytes = 2 * num_layers * self.page_bytes
        self._slots = RequestSlots(
            max_batch,
            num_places,
            min(memory_limit // self._piece_bytes, max_batch * num_places),
            max_idle_share=reclaim_threshold,
            idle_timeout_s=reclaim_after_s,
            num_eager=self._num_places(eager_tokens),
        )
        self._mapper = Mapper(self._stack, self._stack.addresses, num_places, max_batch)
        close_at_end(self, self._mapper.close)
        per_request = self.request_bytes // dtype.itemsize
        per_token = num_kv_heads * head_dim
        tensors = [
            pages.tensor(addresses)
            .view(dtype)
            .view(1 + max_batch, per_request)[1:, : max_context_len * per_token]
            .view(max_batch, max_context_len, num_kv_heads, head_dim)
            for addresses in self._stack.ranges
        ]
        self.keys, self.values = tensors[:num_layers], tensors[num_layers:]
        self._synchronize, self._clock = synchronize, clock
        self._is_closed = False

    @classmethod
    def init(
        cls,
        num_layers: int,
        max_batch: int,
        max_context_len: int,
        num_kv_heads: int,
        head_dim: int,
        page_size_kb: int = 64,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "auto",
        memory_limit: int | None = None,
        reclaim_after_s: float = 10.0,
        reclaim_threshold: float = 0.85,
        eager_tokens: int = _EAGER_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> VirtualKVCache:
        """Reserve addresses for ``max_batch`` requests of ``max_context_len`` tokens; memory is
        taken as they grow.

        ``page_size_kb`` is what is mapped at once in each tensor, in KiB: a whole number of the
        driver's pages, which are 2,048 KiB on a GPU and 4 on most hosts. ``device`` ``auto`` takes
        a GPU where there is one. ``memory_limit`` in bytes bounds all tensors together; None: 90 %
        of what is free on a GPU, half of it on a host. Memory of ended requests stays mapped for
        whoever comes next, until others need it, ``reclaim_after_s`` seconds have passed, or more
        than ``reclaim_threshold`` of the limit is mapped. ``eager_tokens`` are mapped ahead for the
        next request.

        Raises:
            ValueError: a number is out of range.
            PageError: the driver has no such pages, or refuses the addresses; the message says what
                to pass.
        """
        sizes = {
            "num_layers": num_layers,
            "max_batch": max_batch,
            "max_context_len": max_context_len,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "page_size_kb": page_size_kb,
        }
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not 0 < reclaim_threshold <= 1:
            raise ValueError(
                f"reclaim_threshold must be above 0 and at most 1: {reclaim_threshold}"
            )
        if not reclaim_after_s >= 0 or eager_tokens < 0:
            raise ValueError("reclaim_after_s and eager_tokens must not be negative")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        where = _host_or_gpu(device)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype must be a torch.dtype such as torch.bfloat16, got {dtype!r}")
        if memory_limit is not None and (
            isinstance(memory_limit, bool) or not isinstance(memory_limit, int)
        ):
            raise ValueError(f"memory_limit must be a number of bytes, got {memory_limit!r}")
        is_gpu = where.type == "cuda"
        if is_gpu and where.index is None:
            where = torch.device("cuda", _current_gpu())
        index = where.index or 0
        granularity = cuda_page_bytes(index) if is_gpu else host_page_bytes()
        page_bytes = page_size_kb * 1024
        if page_bytes % granularity:
            needed = math.ceil(page_bytes / granularity) * granularity // 1024
            raise PageError(
                f"page_size_kb={page_size_kb}: the driver of {where} maps pages of "
                f"{granularity // 1024:,} KiB ({granularity:,} bytes) and multiples of that; pass "
                f"page_size_kb={needed}"
            )
        if is_gpu:
            torch.cuda.init()
        pages: Pages = CudaPages(page_bytes, device=index) if is_gpu else MemfdPages(page_bytes)
        if memory_limit is None:
            memory_limit = _default_limit(where)
        least = 2 * num_layers * page_bytes
        if memory_limit < least:
            pages.close()
            raise ValueError(
                f"memory_limit {memory_limit:,} holds no page for each of {2 * num_layers} "
                f"tensors, which take {least:,} bytes; give more, or smaller pages"
            )
        try:
            return cls(
                pages,
                (num_layers, max_batch, max_context_len, num_kv_heads, head_dim),
                dtype,
                memory_limit,
                reclaim_after_s=reclaim_after_s,
                reclaim_threshold=reclaim_threshold,
                eager_tokens=eager_tokens,
                synchronize=(lambda: torch.cuda.synchronize(where)) if is_gpu else _nothing,
                clock=clock,
            )
        except PageError:
            pages.close()
            raise

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All 2N: keys of every layer, then values."""
        return [*self.keys, *self.values]

    @property
    def mapped_bytes(self) -> int:
        """Memory that is mapped, or about to be, for requests that run and for stale ones."""
        return self._slots.num_mapped * self._piece_bytes

    @property
    def num_free_reqids(self) -> int:
        return self._slots.num_idle_slots

    def num_mapped_tokens(self, req_id: int) -> int:
        """Tokens of a request that may be touched now: what `step` was told, and what is mapped to
        the end of its page or ahead."""
        self._check_open()
        self._check_id(req_id)
        # Of what is mapped now some may be about to go.
        num_places = min(self._mapper.num_shown(req_id), len(self._slots.slots[req_id]))
        return min(num_places * self.page_bytes // self.token_bytes, self.max_context_len)

    def alloc_reqid(self) -> int:
        """An id for a new request: its row in every tensor, what is mapped there included.

        Raises:
            RuntimeError: ``max_batch`` requests are under way, or the cache is closed.
        """
        self._check_open()
        req_id = self._slots.alloc()
        if req_id is None:
            raise RuntimeError(
                f"all {self.max_batch} request ids are taken (max_batch); free one first"
            )
        return req_id

    def step(self, cache_seq_lens: Sequence[int]) -> None:
        """Let tokens below ``cache_seq_lens[req_id]`` be read and written, in every tensor.

        One length for each id, those of this iteration included; 0: the request does not run now
        and keeps what it has. Returns when everything is mapped; the pages that the next step is
        likely to need are mapped in the background from then on.

        Raises:
            ValueError: not ``max_batch`` lengths, one is out of range, or of a request that is not.
            OutOfMemoryError: together they need more than ``memory_limit``.
            PageError: the system refused memory or a mapping, now or in the background. After any
                of these what requests have is as before the call.
            RuntimeError: the cache is closed.
        """
        self._check_open()
        lengths = self._checked(cache_seq_lens)
        wanted = [self._num_places(length) for length in lengths]
        try:
            growth = self._slots.grow(wanted)
        except OutOfPiecesError as error:
            raise OutOfMemoryError(
                f"{error}, of {self._piece_bytes:,} bytes each; free a request, raise memory_limit "
                f"({self.memory_limit:,} bytes) or run fewer at once"
            ) from error
        if growth.taken:
            # A kernel that was launched before may still read what is unmapped.
            self._synchronize()
            self._mapper.order(growth.taken, is_urgent=False)
        if growth.mapped:
            self._mapper.order(growth.mapped, is_urgent=True)
        running = [slot for slot, count in enumerate(wanted) if count]
        try:
            self._mapper.require(int_array(running), int_array([wanted[slot] for slot in running]))
        except PageError:
            undone = self._slots.undo(growth)
            if undone:
                self._mapper.order(undone, is_urgent=True)
            raise
        self._tidy()
        following = [
            self._num_places(min(length + 1, self.max_context_len)) if length else 0
            for length in lengths
        ]
        if ahead := self._slots.look_ahead(following):
            self._mapper.order(ahead, is_urgent=False)

    def free_reqid(self, req_id: int) -> None:
        """The request has ended. Its pages stay mapped for the next one (deferred reclamation).

        Raises:
            ValueError: there is no such request.
            RuntimeError: the cache is closed.
        """
        self._check_open()
        self._check_id(req_id)
        self._slots.free(req_id, self._clock())

    def close(self) -> None:
        """Give memory and addresses back; the tensors must not be used again. Safe to repeat."""
        if self._is_closed:
            return
        self._is_closed = True
        self._synchronize()
        self._mapper.close()
        self.keys, self.values = [], []
        self._stack.close()

    def __enter__(self) -> VirtualKVCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tidy(self) -> None:
        """Deferred reclamation: what has been idle for too long, or is too much."""
        orders, released = self._slots.reclaim(self._clock())
        if orders:
            self._synchronize()
            self._stack.release_unmapped(released)
            self._mapper.order(orders, is_urgent=False)

    def _num_places(self, num_tokens: int) -> int:
        return -(-num_tokens * self.token_bytes // self.page_bytes)

    def _checked(self, lengths: Sequence[int]) -> list[int]:
        if len(lengths) != self.max_batch:
            raise ValueError(
                f"cache_seq_lens has {len(lengths)} lengths, but there is one for each of "
                f"{self.max_batch} request ids (0: it does not run)"
            )
        given = np.asarray(lengths)
        if given.dtype.kind not in "iu":
            # Rounding a length down would let a kernel touch what is not mapped.
            raise ValueError(f"cache_seq_lens must be whole numbers, got {lengths!r}")
        found: list[int] = given.tolist()
        for req_id, length in enumerate(found):
            if not 0 <= length <= self.max_context_len:
                raise ValueError(
                    f"request {req_id} has {length} tokens; it must be from 0 to "
                    f"{self.max_context_len} (max_context_len)"
                )
            if length:
                self._check_id(req_id)
        return found

    def _check_id(self, req_id: int) -> None:
        if not (isinstance(req_id, int) and self._slots.is_used(req_id)):
            raise ValueError(f"there is no request {req_id!r}; alloc_reqid gives ids")

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this cache is closed; make a new one with VirtualKVCache.init")


def _current_gpu() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def _host_or_gpu(device: str | torch.device) -> torch.device:
    """Raises ValueError for anything but a host and an NVIDIA GPU."""
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError):
        where = None
    if where is None or where.type not in ("cpu", "cuda") or (where.type == "cpu" and where.index):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    return where


def _nothing() -> None:
    """A CPU has done everything when a call returns."""


def _default_limit(device: torch.device) -> int:
    if device.type == "cuda":
        return int(_SHARE_OF_GPU * torch.cuda.mem_get_info(device)[0])
    return int(_SHARE_OF_HOST * host.available_bytes())
