"""The device's work of a step, captured once per size and replayed.

A decode step of n rows is one graph: fetch each row's token, run the model, sample, advance the
rows. Any other step is two: the forward pass over a number of tokens, rounded up, and the head over
a number of sampled rows. What a graph reads lies at fixed addresses; padding goes to the null row.
So inputs are put first, then sent with all else that the step needs, and then the graphs are run.
Graphs are captured at their second use: the first runs as it is, which also compiles its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.plan import Batch, IntArray
from octavo.execution.attention.dense import MIN_TOKENS, DenseChunk, dense_count
from octavo.execution.attention.paged import PagedAttention, PagedStep, RowSpans
from octavo.execution.captured_sizes import (
    MAX_CAPTURED_TOKENS,
    aligned,
    batch_bucket,
    captured_sizes,
    token_bucket,
)
from octavo.execution.decode_batch import DecodeBatch
from octavo.execution.device import Device
from octavo.execution.device_rows import DeviceRows
from octavo.execution.forward_inputs import ForwardInputs, num_ints, put_tokens
from octavo.execution.kernels.ahead import is_compiling_ahead
from octavo.execution.kernels.prefill_attention import tile_tokens
from octavo.execution.kernels.row_state import fill_tokens, gather_rows
from octavo.execution.kernels.sampling import (
    SampledRows,
    SamplingWorkspace,
    argmax_tokens,
    sample_tokens,
)
from octavo.execution.staging import Staging

if TYPE_CHECKING:
    from octavo.execution.gpu_runner import GPUModel


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """A forward pass whose inputs were put. ``run`` gives, once they are sent, ``[tokens or more,
    hidden]``, of which the rest is padding; or, without ``is_all``, the states of the tokens that
    were wanted alone."""

    run: Callable[[], torch.Tensor]
    is_all: bool


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
        staging: Staging,
        capture: bool,
    ) -> None:
        self._model = model
        self._attention = attention
        self._rows = rows
        self._device = device
        self._captures = capture
        self._pool = device.capture_pool()
        self._graphs: dict[Hashable, Callable[[], Any] | None] = {}
        self._uncaptured: set[Hashable] = set()
        self.captured_bytes = 0
        self._cutter = attention.cutter
        size = rows.num_rows
        place = device.torch_device
        self.out = torch.zeros(aligned(size), dtype=torch.int32, device=place)
        self._workspace = SamplingWorkspace(aligned(size), place)
        self._order = torch.arange(aligned(size), dtype=torch.int32, device=place)
        per_tile = tile_tokens(attention.num_heads, num_kv_heads, attention.dtype)
        self._staging = staging
        self._decode_batch = DecodeBatch(staging, size, per_tile)
        self._decode_inputs = torch.zeros(3, aligned(size), dtype=torch.int32, device=place)
        # In front of the tokens, and as much in all steps, so that both stay where they are.
        self._num_head_ints = 3 * aligned(size)
        self._head_inputs: tuple[IntArray, torch.Tensor] | None = None
        staging.reserve(self._num_head_ints)
        most = token_bucket(max_num_batched_tokens)
        # A step that is not captured may have a tile for each token.
        most_tiles = aligned(most + 64 + self._cutter.max_parts)
        staging.reserve(num_ints(most, most_tiles, size))
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

    def _num_padded(self, num_rows: int) -> int:
        return min(batch_bucket(num_rows), aligned(self._rows.num_rows))

    def put_decode(self, batch: Batch) -> None:
        """Have the rows of a decode step sent, unless the device has them."""
        if batch is self._batch:
            return
        self._batch = None
        self._max_tiles = self._decode_batch.put(batch, self._num_padded(len(batch.rows)))
        self._batch = batch

    def decode(
        self, batch: Batch, lengths: IntArray, is_random: bool, has_logits: bool
    ) -> torch.Tensor | None:
        """One token of every row of the batch that was put last, tokens in ``out``; with
        ``has_logits`` their logits, ``[rows, vocab]``, until the next step. ``lengths`` are the
        rows', that token included."""
        count, size = len(batch.rows), self._num_padded(len(batch.rows))
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

    def put_forward(
        self,
        rows: IntArray,
        counts: IntArray,
        starts: IntArray,
        token_ids: IntArray,
        positions: IntArray,
        wanted: NDArray[np.int64] | None,
        is_mapped: bool = True,
    ) -> Forward:
        """Have ``counts[i]`` tokens of each row sent, from ``starts[i]`` on; a negative token id
        stands for what the row sampled last. Without a captured step for them, the states of the
        ``wanted`` tokens suffice (None: all). Comes before `put_head`."""
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
            wanted = None if is_captured else wanted
        if not is_captured:
            size, max_tiles, max_decode = num_tokens, num_tiles, num_decode
        self._head_inputs = self._staging.take(self._num_head_ints)
        inputs = put_tokens(
            self._staging, token_ids, np.repeat(rows, counts), positions, num_decode, tiles, wanted,
            size=size, max_tiles=max_tiles, null=null,
        )  # fmt: skip
        longest = int((starts + counts).max())
        if is_captured:
            longest = self._attention.length_class(longest, max_decode)
        spans = None
        if has_spans:
            spans = _spans(rows, counts, starts, done, self._device.torch_device)
        chunks = tuple(chunk for _, chunk in dense)

        def work() -> torch.Tensor:
            return self._forward(inputs, max_decode, longest, chunks, in_slots, spans)

        if not is_captured:
            return Forward(work, wanted is None)

        def captured() -> torch.Tensor:
            """States in memory that all captured steps share."""
            hidden = work()
            if self._captured_states is None:
                shape = (MAX_CAPTURED_TOKENS, hidden.shape[1])
                self._captured_states = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
            return self._captured_states[:size].copy_(hidden)

        key = ("forward", size, max_tiles, max_decode, longest, in_slots)
        return Forward(lambda: self._run(key, captured), True)

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

    def put_head(
        self, index: NDArray[np.int64], rows: IntArray, next_positions: IntArray
    ) -> tuple[int, torch.Tensor]:
        """Have sent who samples: ``rows``, from the states at ``index``, whose next tokens stand at
        ``next_positions``. Returns their number and, once the step has sent, `head`'s inputs."""
        assert self._head_inputs is not None, "behind put_forward"
        (host, sent), self._head_inputs = self._head_inputs, None
        count = len(rows)
        size = self._num_padded(count)
        width = aligned(size)
        for part, (values, fill) in enumerate(
            ((index, 0), (rows, self._rows.num_rows), (next_positions - 1, 0))
        ):
            host[part * width : part * width + count] = values
            host[part * width + count : (part + 1) * width] = fill
        return count, sent[: 3 * width].view(3, width)[:, :size]

    def head(
        self,
        hidden: torch.Tensor,
        sampled: tuple[int, torch.Tensor],
        is_random: bool,
        has_logits: bool,
    ) -> torch.Tensor | None:
        """Sample for the rows that were put from the states ``hidden``; results as `decode`."""
        count, (index, rows, positions) = sampled
        size = len(index)
        if self._hidden is None:
            shape = (len(self._order), hidden.shape[1])
            self._hidden = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
        states = self._hidden[:size]
        torch.index_select(hidden, 0, index, out=states)
        chosen = SampledRows(self._order[:size], rows, positions, self._rows.num_rows)
        key = ("head", size, is_random, has_logits)
        logits = self._run(key, lambda: self._sample(states, chosen, is_random, has_logits))
        return logits[:count] if has_logits else None

    def _run(self, key: Hashable, work: Callable[[], Any]) -> Any:
        if not self._captures or key in self._uncaptured or is_compiling_ahead():
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
        try:
            replay = self._device.capture(work, self._pool) or work
        except BaseException:
            # Nobody else's step fails for it: those like this one run plainly from now on, and
            # others are captured into another pool.
            self._uncaptured.add(key)
            self._pool = self._device.capture_pool()
            raise
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
        inputs: ForwardInputs,
        max_decode: int,
        longest: int,
        dense: tuple[DenseChunk, ...],
        in_slots: bool,
        spans: RowSpans | None,
    ) -> torch.Tensor:
        token_ids, token_rows, positions = inputs.tokens()
        fill_tokens(token_ids, token_rows, self._rows.last_token)
        if is_compiling_ahead():
            token_ids.clamp_(min=0)  # Not filled in, and about to be looked up.
        step = PagedStep(
            token_rows,
            positions,
            self._rows.tables,
            num_decode=inputs.num_decode(),
            max_decode=max_decode,
            tiles=inputs.tiles(),
            dense=dense,
            in_slots=in_slots,
            max_length=longest,
            spans=spans,
        )
        hidden: torch.Tensor = self._model.forward(
            token_ids, positions, self._attention.plan(step), inputs.wanted()
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
