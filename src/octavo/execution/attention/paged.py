"""Attention by Octavo's own Triton kernels, over block tables or, where an arena has them, slots.

Rows that run one token are split along their keys; rows that run more are cut into tiles of
queries. Which rows those are is read from device memory, so a captured step fits any mix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.core.plan import IntArray, RowForks, RowInit, TableDeltas
from octavo.execution.attention.dense import DenseChunk, dense_attention, is_supported
from octavo.execution.attention.flash3 import Flash3
from octavo.execution.captured_sizes import batch_bucket
from octavo.execution.device_arena import DeviceArena
from octavo.execution.kernels.decode_attention import DecodeWorkspace, decode_attention
from octavo.execution.kernels.decode_parts import (
    FEW_ROWS,
    LONG_ROW,
    DecodeParts,
    decode_parts,
    decode_tiling,
)
from octavo.execution.kernels.gpu import Product
from octavo.execution.kernels.prefill_attention import (
    PrefillTiles,
    PrefillWorkspace,
    prefill_attention,
    tile_tokens,
)
from octavo.execution.kernels.prefix_attention import PrefixTiles, prefix_attention
from octavo.execution.kernels.rope import rope_and_write
from octavo.execution.models.norms import QueryKeyNorm
from octavo.execution.models.rope import RopeTable
from octavo.execution.prefill_tiles import TileCutter

# Programs that fill a GPU of 132 multiprocessors twice.
_PROGRAMS = 264
SHARES = 396
"""Rows longer than such a share of all keys are cut, where there are not enough of them to fill
the GPU uncut. With half as many again as fit at once no round of programs is left nearly empty:
264, 528 and 792 were slower at 8 rows of 64K or 16 of 1K.
"""
_MAX_PREFIX_SPLITS = 8


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """A step's tokens on the device, int32.

    ``token_rows`` and ``positions`` are ``[tokens]``, ``tables [rows, blocks]``. The first
    ``num_decode`` (``[1]``, at most ``max_decode``) tokens are their rows' only ones; the others
    are covered by ``tiles``, None where there are none. ``dense`` chunks are covered by nothing
    else.
    ``prefix`` covers the first keys of decoding tokens. ``in_slots``: the rows' slots show what
    their tables say, and are read instead. ``max_length`` bounds the rows' lengths.
    """

    token_rows: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor
    num_decode: torch.Tensor
    max_decode: int
    tiles: PrefillTiles | None = None
    dense: tuple[DenseChunk, ...] = ()
    prefix: PrefixTiles | None = None
    in_slots: bool = False
    max_length: int = 0
    spans: RowSpans | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RowSpans:
    """The same step row by row, for kernels that know no tiles: int32 ``[rows + 1]`` each.

    ``rows``; ``ends``, how many tokens the row has; ``first``, where its own begin among the
    step's, at the end their number. ``max_count`` is the most of a row. ``tokens``, where given,
    picks those of the step that are meant, since others are covered otherwise. ``on_host`` is the
    first three, ``[3, rows + 1]``.
    """

    rows: torch.Tensor
    ends: torch.Tensor
    first: torch.Tensor
    max_count: int
    on_host: IntArray
    tokens: torch.Tensor | None = None


class PagedAttention:
    """``sliding_window`` 0 means none. ``max_decode`` is the most rows that run one token."""

    def __init__(
        self,
        arena: DeviceArena,
        num_heads: int,
        rope: RopeTable,
        dtype: torch.dtype,
        *,
        max_decode: int,
        max_length: int,
        sliding_window: int = 0,
        is_invariant: bool = False,
        only_dense_in_slots: bool = False,
        kv_scales: torch.Tensor | None = None,
        flash3: Flash3 | None = None,
    ) -> None:
        """``max_length`` bounds the tokens of any row. ``only_dense_in_slots``: both translations
        at once, slots where keys would have to be brought together, tables elsewhere.
        ``is_invariant``: every token attends in the order of the tiles' keys, whatever its batch
        and its chunk, so that its result has the same bits in any. ``kv_scales`` are float32
        ``[layer, K|V, kv_head]``, what an arena of float8_e4m3fn stands in. ``flash3`` attends for
        long chunks instead of cuDNN."""
        self.flash3 = flash3
        self.is_invariant = is_invariant
        self.layers = [arena.kv[:, :, layer] for layer in range(arena.layout.num_layers)]
        self.kv_scales = [None] * len(self.layers) if kv_scales is None else [*kv_scales]
        slots = arena.slots
        self.has_slots = slots is not None
        self.only_dense_in_slots = only_dense_in_slots
        self.slot_layers = (
            []
            if slots is None
            else [slots.guarded[:, :, layer] for layer in range(len(self.layers))]
        )
        self.num_heads = num_heads
        self.num_kv_heads = arena.layout.num_kv_heads
        self.rope = rope
        self.dtype = dtype
        self.sliding_window = sliding_window
        self.max_length = max_length
        self.max_decode = max_decode
        self.has_dense = (
            not sliding_window
            and not is_invariant
            and is_supported(dtype, arena.layout.head_dim, arena.kv.device)
        )
        # A step's list of parts is as long as its size, padding included, may need.
        most = batch_bucket(max_decode)
        self._workspace = DecodeWorkspace(
            DecodeParts.bound(most, 1, SHARES),
            most,
            self.num_kv_heads,
            arena.layout.head_dim,
            num_heads // self.num_kv_heads,
            arena.kv.device,
        )
        # An invariant token attends in one order; a window leaves few keys.
        self.cutter = TileCutter(
            tile_tokens(num_heads, self.num_kv_heads, dtype),
            self.num_kv_heads,
            cuts=not is_invariant and not sliding_window,
        )
        self.prefill_workspace = PrefillWorkspace(
            self.cutter.max_parts, self.num_kv_heads, arena.layout.head_dim, arena.kv.device
        )

    def rotate_and_write(
        self,
        step: PagedStep,
        layer: int,
        qkv: Product,
        norm: QueryKeyNorm | None,
    ) -> torch.Tensor:
        """Queries ``[tokens, num_heads, head_dim]``, rotated; keys and values go into the pool."""
        return rope_and_write(
            qkv,
            self.layers[layer],
            step.token_rows,
            step.positions,
            step.tables,
            self.rope.cos,
            self.rope.sin,
            self.num_heads,
            head_norms=None if norm is None else norm.weight,
            kv_scales=self.kv_scales[layer],
            eps=0.0 if norm is None else norm.eps,
            dtype=self.dtype,
            is_invariant=self.is_invariant,
        )

    def attend_densely(
        self, step: PagedStep, layer: int, queries: torch.Tensor, out: torch.Tensor
    ) -> None:
        """The step's ``dense`` chunks, into their parts of ``out``."""
        scales = self.kv_scales[layer]
        for chunk in step.dense:
            if step.in_slots and scales is None:
                slots = self.slot_layers[layer][1:]
                dense_attention(queries, slots, None, chunk, out, flash3=self.flash3)
            else:
                # Stored keys that have to be multiplied first are brought together for it.
                dense_attention(
                    queries, self.layers[layer], step.tables, chunk, out, scales, self.flash3
                )

    def follow(self, inits: tuple[RowInit, ...], forks: RowForks, deltas: TableDeltas) -> None:
        """What a plan changes of the rows' tables, in this order, before its step is run. Called on
        the host, for those who have to know there where a row's blocks are."""

    def wants_spans(self, in_slots: bool) -> bool:
        """Whether steps of more than a token a row come with `RowSpans`, and are not captured."""
        return False

    def prepare_decode(self, lengths: IntArray) -> None:
        """A step of a token a row is about to run or to be replayed, of rows of these lengths, that
        token and padding included. Called on the host, never while a step is captured."""

    def length_class(self, longest: int, num_decode: int) -> int:
        """What a captured step of up to ``num_decode`` rows that decode has to know of its longest
        row: a bound, of few."""
        is_told = 0 < num_decode <= FEW_ROWS and longest <= LONG_ROW
        return min(LONG_ROW, self.max_length) if is_told else self.max_length

    def plan(self, step: PagedStep) -> Callable[..., torch.Tensor]:
        """Starts the step's first kernel, where rows decode: what each program will read. A kernel
        that does not overlap with it, as the embedding's, comes before the first layer: there
        attention takes it for written."""
        return PagedStepAttention(self, step, self._workspace)


class PagedStepAttention:
    """Implements `StepAttention` for one step, or for every replay of a captured one."""

    def __init__(
        self,
        backend: PagedAttention,
        step: PagedStep,
        workspace: DecodeWorkspace,
    ) -> None:
        self._backend = backend
        self._step = step
        self._workspace = workspace
        self._parts: DecodeParts | None = None
        self._tiling = decode_tiling(
            step.max_decode,
            backend.num_heads,
            backend.num_kv_heads,
            backend.layers[0].shape[-1],
            step.max_length,
            backend.dtype,
            backend.layers[0].dtype,
        )
        if step.max_decode:
            self._parts = decode_parts(
                step.token_rows,
                step.positions,
                step.num_decode,
                max_tokens=step.max_decode,
                num_kv_heads=backend.num_kv_heads,
                programs=SHARES,
                tiling=self._tiling,
                window=backend.sliding_window,
                prefix_lengths=None if step.prefix is None else step.prefix.token_lengths,
            )

    def __call__(
        self,
        layer: int,
        qkv: Product,
        norm: QueryKeyNorm | None = None,
    ) -> torch.Tensor:
        """As `StepAttention`; ``qkv`` may be parts of a sum, and ``norm`` is applied to queries and
        keys before they are rotated."""
        backend, step = self._backend, self._step
        kv_layer, kv_scales = backend.layers[layer], backend.kv_scales[layer]
        queries = backend.rotate_and_write(step, layer, qkv, norm)
        out = torch.empty_like(queries)
        keys, tables = kv_layer, step.tables
        if step.in_slots and not backend.only_dense_in_slots:
            # The same bytes at addresses in order: no table is looked up.
            keys, tables = backend.slot_layers[layer], None
        if self._parts is not None:
            prefix = None
            if step.prefix is not None:
                programs = backend.num_kv_heads * len(step.prefix.rows)
                prefix = prefix_attention(
                    queries,
                    kv_layer,
                    step.prefix,
                    step.tables,
                    splits=min(max(_PROGRAMS // programs, 1), _MAX_PREFIX_SPLITS),
                    kv_scales=kv_scales,
                )
            decode_attention(
                queries,
                keys,
                self._parts,
                tables,
                out,
                self._workspace,
                self._tiling,
                prefix=prefix,
                kv_scales=kv_scales,
                is_planned=True,
            )
        if step.tiles is not None:
            prefill_attention(
                queries,
                keys,
                step.tiles,
                tables,
                out,
                backend.prefill_workspace,
                window=backend.sliding_window,
                kv_scales=kv_scales,
            )
        backend.attend_densely(step, layer, queries, out)
        return out.view(len(out), -1)
