"""The device's work of a step, captured once per size and replayed.

A decode step of n rows is one graph: fetch each row's token, run the model, sample, advance the
rows. Any other step is two: the forward pass over a number of tokens, rounded up, and the head over
a number of sampled rows. What a graph reads lies at fixed addresses; padding goes to the null row.
Graphs are captured at their second use: the first runs as it is, which also compiles its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.plan import Batch, IntArray
from octavo.execution.attention.dense import MIN_TOKENS, DenseChunk, dense_count
from octavo.execution.attention.paged import PagedAttention, PagedStep, RowSpans
from octavo.execution.captured_sizes import (
    ALIGN,
    MAX_CAPTURED_TOKENS,
    aligned,
    batch_bucket,
    captured_sizes,
    token_bucket,
)
from octavo.execution.decode_batch import DecodeBatch
from octavo.execution.device import Device
from octavo.execution.device_rows import DeviceRows
from octavo.execution.kernels.ahead import is_compiling_ahead
from octavo.execution.kernels.prefill_attention import PrefillTiles
from octavo.execution.kernels.prefix_attention import tile_rows
from octavo.execution.kernels.row_state import fill_tokens, gather_rows
from octavo.execution.kernels.sampling import (
    SampledRows,
    SamplingWorkspace,
    argmax_tokens,
    sample_tokens,
)
from octavo.execution.prefill_tiles import FIELDS
from octavo.execution.staging import Staging

if TYPE_CHECKING:
    from octavo.execution.gpu_runner import GPUModel


class StepGraphs:
    """``out`` holds the sampled tokens of the last step, int32, in the order of its rows.

    ``captured_bytes`` is the device's memory that captured steps have taken so far: their tensors,
    and what the driver keeps of them.
    """

    def __init__(
        self,
        model: GPUModel,
        attention: PagedAttention,
        rows: DeviceRows,
        device: Device,
        *,
        num_kv_heads: int,
        max_num_batched_tokens: int,
        depth: int,
        capture: bool,
    ) -> None:
        self._model = model
        self._attention = attention
        self._rows = rows
        self._device = device
        self._captures = capture
        self._pool = device.capture_pool()
        self._graphs: dict[Hashable, Callable[[], Any] | None] = {}
        self.captured_bytes = 0
        self._cutter = attention.cutter
        size = rows.num_rows
        place = device.torch_device
        self.out = torch.zeros(aligned(size), dtype=torch.int32, device=place)
        self._workspace = SamplingWorkspace(aligned(size), place)
        self._order = torch.arange(aligned(size), dtype=torch.int32, device=place)
        per_tile = tile_rows(attention.num_heads, num_kv_heads)
        self._decode_batch = DecodeBatch(device, size, per_tile, depth)
        self._decode_inputs = torch.zeros(3, aligned(size), dtype=torch.int32, device=place)
        self._head_inputs = Staging(device, 3 * aligned(size), depth)
        most = token_bucket(max_num_batched_tokens)
        # A step that is not captured may have a tile for each token.
        most_tiles = aligned(most + 64 + self._cutter.max_parts)
        num_ints = 3 * most + FIELDS * most_tiles + 32 + aligned(size)
        self._forward_inputs = Staging(device, num_ints, depth)
        self._hidden: torch.Tensor | None = None
        self._captured_states: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None
        self._batch: Batch | None = None
        self._max_tiles = 0

    @property
    def num_captured(self) -> int:
        """Captured steps."""
        return sum(replay is not None for replay in self._graphs.values())

    @property
    def padded_sizes(self) -> tuple[int, ...]:
        """What rows of captured steps are padded to, and tokens of more than 224, ascending; empty
        where nothing is captured."""
        return captured_sizes() if self._captures else ()

    def decode(
        self, batch: Batch, lengths: IntArray, is_random: bool, has_logits: bool
    ) -> torch.Tensor | None:
        """One token of every row, tokens in ``out``; with ``has_logits`` their logits, ``[rows,
        vocab]``, until the next step. ``lengths`` are the rows', that token included."""
        count = len(batch.rows)
        size = min(batch_bucket(count), aligned(self._rows.num_rows))
        if batch is not self._batch:
            self._max_tiles = self._decode_batch.send(batch, size)
            self._batch = batch
        padded: IntArray = np.ones(size, dtype=np.int32)
        padded[:count] = lengths
        self._attention.prepare_decode(padded)
        longest, max_tiles = self._attention.length_class(int(lengths.max()), size), self._max_tiles
        in_slots = batch.is_mapped and self._attention.has_slots
        key = ("decode", size, longest, is_random, max_tiles, has_logits, in_slots)
        logits = self._run(
            key, lambda: self._decode(size, longest, is_random, max_tiles, has_logits, in_slots)
        )
        return logits[:count] if has_logits else None

    def forward(
        self,
        rows: IntArray,
        counts: IntArray,
        starts: IntArray,
        token_ids: IntArray,
        positions: IntArray,
        wanted: NDArray[np.int64] | None,
        is_mapped: bool = True,
    ) -> tuple[torch.Tensor, bool]:
        """Run ``counts[i]`` tokens of each row, from ``starts[i]`` on; a negative token id stands
        for what the row sampled last.

        Returns ``[tokens or more, hidden]``, of which the rest is padding, and True; or, where the
        step is not captured, the states of the ``wanted`` tokens alone, and False.
        """
        num_tokens, null = len(token_ids), self._rows.num_rows
        single = counts == 1
        num_decode = len(rows) if single.all() else int(np.argmin(single))
        if self._attention.is_invariant:
            num_decode = 0
        dense = self._dense_chunks(rows, counts, starts) if self._attention.has_dense else ()
        done: IntArray = np.zeros(len(rows), dtype=np.int32)
        for index, chunk in dense:
            done[index] = chunk.count
        tiles = self._cutter.tiles(rows, counts, starts, done, num_decode)
        num_tiles = tiles.shape[1]
        in_slots = is_mapped and self._attention.has_slots
        has_spans = self._attention.wants_spans(in_slots)
        is_captured = (
            num_tokens <= MAX_CAPTURED_TOKENS and self._captures and not dense and not has_spans
        )
        if is_captured:
            size = token_bucket(num_tokens)
            most = self._most_prefill_tiles(size)
            is_captured = num_tiles <= most
            max_tiles = most if num_tiles else 0
            max_decode = min(batch_bucket(num_decode), size) if num_decode else 0
        if not is_captured:
            size, max_tiles, max_decode = num_tokens, num_tiles, num_decode
        width, tile_width = aligned(size), aligned(max_tiles)
        host = self._forward_inputs.host()
        for part, (values, fill) in enumerate(
            ((token_ids, 0), (np.repeat(rows, counts), null), (positions, 0))
        ):
            host[part * width : part * width + num_tokens] = values
            host[part * width + num_tokens : (part + 1) * width] = fill
        first = 3 * width
        host[first : first + 2] = (num_decode, num_tiles)
        first += ALIGN
        for part in range(FIELDS):
            place = first + part * tile_width
            host[place : place + num_tiles] = tiles[part]
        first += FIELDS * tile_width
        is_all = is_captured or wanted is None
        num_wanted = 0 if is_all or wanted is None else len(wanted)
        if num_wanted:
            host[first : first + num_wanted] = wanted
        sent = self._forward_inputs.send(first + num_wanted)
        kept = None if is_all else sent[first:]
        longest = int((starts + counts).max())
        if is_captured:
            longest = self._attention.length_class(longest, max_decode)
        spans = None
        if has_spans:
            spans = _spans(rows, counts, starts, done, self._device.torch_device)
        chunks = tuple(chunk for _, chunk in dense)

        def work() -> torch.Tensor:
            return self._forward(
                sent, size, width, max_tiles, tile_width, max_decode, longest, chunks, in_slots,
                spans, kept,
            )  # fmt: skip

        if not is_captured:
            return work(), is_all

        def captured() -> torch.Tensor:
            """States in memory that all captured steps share."""
            hidden = work()
            if self._captured_states is None:
                shape = (MAX_CAPTURED_TOKENS, hidden.shape[1])
                self._captured_states = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
            return self._captured_states[:size].copy_(hidden)

        key = ("forward", size, max_tiles, max_decode, longest, in_slots)
        return self._run(key, captured), True

    def _most_prefill_tiles(self, num_tokens: int) -> int:
        """Of a captured step: each row's last tile may be a small one, and some are cut."""
        return num_tokens // self._cutter.tile + 64 + self._cutter.max_parts

    @staticmethod
    def _dense_chunks(
        rows: IntArray, counts: IntArray, starts: IntArray
    ) -> tuple[tuple[int, DenseChunk], ...]:
        """Index among ``rows`` and chunk, of those that are long enough."""
        found = []
        offsets = np.cumsum(counts) - counts
        for index in np.flatnonzero(counts >= MIN_TOKENS).tolist():
            start = int(starts[index])
            count = dense_count(int(counts[index]), start)
            if count:
                chunk = DenseChunk(int(rows[index]), int(offsets[index]), count, start)
                found.append((index, chunk))
        return tuple(found)

    def head(
        self,
        hidden: torch.Tensor,
        index: NDArray[np.int64],
        rows: IntArray,
        next_positions: IntArray,
        is_random: bool,
        has_logits: bool,
    ) -> torch.Tensor | None:
        """Sample for ``rows`` from the states ``hidden[index]``, whose next tokens stand at
        ``next_positions``; results as `decode`."""
        count = len(rows)
        size = min(batch_bucket(count), aligned(self._rows.num_rows))
        width = aligned(size)
        host = self._head_inputs.host()
        for part, (values, fill) in enumerate(
            ((index, 0), (rows, self._rows.num_rows), (next_positions - 1, 0))
        ):
            host[part * width : part * width + count] = values
            host[part * width + count : (part + 1) * width] = fill
        sent = self._head_inputs.send(3 * width)
        if self._hidden is None:
            shape = (len(self._order), hidden.shape[1])
            self._hidden = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
        states = self._hidden[:size]
        torch.index_select(hidden, 0, sent[:size], out=states)
        sampled = SampledRows(
            self._order[:size], sent[width:][:size], sent[2 * width :][:size], self._rows.num_rows
        )
        key = ("head", size, is_random, has_logits)
        logits = self._run(key, lambda: self._sample(states, sampled, is_random, has_logits))
        return logits[:count] if has_logits else None

    def _run(self, key: Hashable, work: Callable[[], Any]) -> Any:
        if not self._captures or is_compiling_ahead():
            return work()
        if key not in self._graphs:
            result = work()
            # Only now is everything loaded that a capture may not load.
            self._graphs[key] = None
            return result
        replay = self._graphs[key]
        if replay is not None:
            return replay()
        free = self._device.free_bytes()
        # A capture that fails starts over with a plain run.
        del self._graphs[key]
        replay = self._device.capture(work, self._pool) or work
        self._graphs[key] = replay
        # The driver takes some at the first replay. Somebody else may give memory back meanwhile.
        result = replay()
        self.captured_bytes += max(free - self._device.free_bytes(), 0)
        return result

    def _decode(
        self,
        size: int,
        longest: int,
        is_random: bool,
        max_tiles: int,
        has_logits: bool,
        in_slots: bool,
    ) -> torch.Tensor | None:
        rows = self._rows
        token_ids, token_rows, positions = (part[:size] for part in self._decode_inputs)
        gather_rows(
            self._decode_batch.rows(size),
            rows.last_token,
            rows.position,
            token_ids,
            token_rows,
            positions,
        )
        step = PagedStep(
            token_rows,
            positions,
            rows.tables,
            num_decode=torch.full((1,), size, dtype=torch.int32, device=token_rows.device),
            max_decode=size,
            prefix=self._decode_batch.prefix_tiles(size, max_tiles),
            in_slots=in_slots,
            max_length=longest,
        )
        hidden = self._model.forward(token_ids, positions, self._attention.plan(step))
        sampled = SampledRows(self._order[:size], token_rows, positions, rows.num_rows)
        return self._sample(hidden, sampled, is_random, has_logits)

    def _forward(
        self,
        sent: torch.Tensor,
        size: int,
        width: int,
        max_tiles: int,
        tile_width: int,
        max_decode: int,
        longest: int,
        dense: tuple[DenseChunk, ...],
        in_slots: bool,
        spans: RowSpans | None,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        token_ids, token_rows, positions = (sent[part * width :][:size] for part in range(3))
        fill_tokens(token_ids, token_rows, self._rows.last_token)
        if is_compiling_ahead():
            token_ids.clamp_(min=0)  # Not filled in, and about to be looked up.
        counts = sent[3 * width :]
        first = 3 * width + ALIGN
        tiles = None
        if max_tiles:
            table = sent[first:][: FIELDS * tile_width].view(FIELDS, tile_width)[:, :max_tiles]
            tiles = PrefillTiles(table, counts[1:2])
        step = PagedStep(
            token_rows,
            positions,
            self._rows.tables,
            num_decode=counts[:1],
            max_decode=max_decode,
            tiles=tiles,
            dense=dense,
            in_slots=in_slots,
            max_length=longest,
            spans=spans,
        )
        hidden: torch.Tensor = self._model.forward(
            token_ids, positions, self._attention.plan(step), wanted
        )
        return hidden

    def _sample(
        self, hidden: torch.Tensor, sampled: SampledRows, is_random: bool, has_logits: bool
    ) -> torch.Tensor | None:
        rows = self._rows
        logits = self._model.logits(hidden)
        out = self.out[: len(logits)]
        argmax_tokens(logits, sampled, self._workspace, out, rows.last_token, rows.position)
        if is_random:
            sample_tokens(logits, sampled, rows.sampling, self._workspace, out, rows.last_token)
        if not has_logits:
            return None
        # A copy: kept alive by a captured step, they would be memory that no other step can use.
        if self._logits is None:
            shape = (len(self._order), logits.shape[1])
            self._logits = torch.empty(shape, dtype=logits.dtype, device=logits.device)
        return self._logits[: len(logits)].copy_(logits)


def _spans(
    rows: IntArray, counts: IntArray, starts: IntArray, done: IntArray, device: torch.device
) -> RowSpans | None:
    """The rows whose first ``done`` tokens are covered otherwise; None when that is all."""
    left = counts - done
    kept = np.flatnonzero(left)
    if not len(kept):
        return None
    first = np.concatenate([[0], np.cumsum(left[kept])])
    sent = np.zeros((3, len(first)), dtype=np.int32)
    sent[0, :-1], sent[1, :-1], sent[2] = rows[kept], (starts + counts)[kept], first
    on_device = torch.from_numpy(sent).to(device, non_blocking=True)
    tokens = None
    if done.any():
        offsets = np.cumsum(counts) - left
        index = np.repeat(offsets[kept] - first[:-1], left[kept]) + np.arange(first[-1])
        tokens = torch.from_numpy(index.astype(np.int64)).to(device, non_blocking=True)
    return RowSpans(*on_device, max_count=int(left.max()), on_host=sent, tokens=tokens)
