"""Rows whose logits are changed before they sample, on the device: who they are, and their state.

The state follows the tokens that the device samples, so the host waits for none of them. It exists
once a row needs it, for as many rows as ever did at once: one int32 word a token of the vocabulary
and row, 0.5 MB of a vocabulary of 128 thousand.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.plan import BoolArray, IntArray, RowInit, int_array
from octavo.execution.device import Device
from octavo.execution.device_rows import DeviceRows
from octavo.execution.kernels import logit_edits as edits
from octavo.execution.kernels.logit_edits import EditedRows, EditState, edit_logits, record_tokens
from octavo.execution.kernels.row_state import scatter
from octavo.execution.kernels.sampling import (
    SampledRows,
    SamplingWorkspace,
    argmax_tokens,
    sample_tokens,
)
from octavo.execution.staging import Staging

# Rows whose edited logits exist at a time: 33 MB of a vocabulary of 128 thousand.
_SLICE = 64
_FIRST_SLOTS = 8
_ALIGN = 16
_ALWAYS = np.iinfo(np.int64).max
_NO_SLOT = -1
# Nobody notices a smaller penalty; it keeps a divided logit finite.
_MIN_REPETITION = 1e-6


def most_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """Device memory that the state of ``max_num_seqs`` rows takes, phrases of bad words excepted,
    and the logits of a slice of them."""
    words = max_num_seqs * (vocab_size + edits.SETTINGS_WIDTH)
    return 4 * (words + min(max_num_seqs, _SLICE) * vocab_size)


@dataclass(frozen=True, slots=True, eq=False)
class EditedSample:
    """Rows of a step that change their logits. ``sent [5, count or more]`` are, once the step has
    sent: where their logits are, rows, their slots, the indices of their tokens and of those
    before."""

    count: int
    sent: torch.Tensor
    has_biases: bool
    has_phrases: bool
    is_random: bool


class DeviceEdits:
    """Implements, for the rows of a GPU, what `octavo.execution.sampling.sampler.Sampler` does
    between logits and choosing: the same changes in the same order."""

    def __init__(
        self, device: Device, max_num_seqs: int, vocab_size: int, staging: Staging
    ) -> None:
        self.vocab_size = vocab_size
        self._device = device
        self._max_num_seqs = max_num_seqs
        # A row changes its logits while its sequence is shorter than this.
        self._until = np.zeros(max_num_seqs, dtype=np.int64)
        self._has_biases = np.zeros(max_num_seqs, dtype=np.bool_)
        self._has_phrases = np.zeros(max_num_seqs, dtype=np.bool_)
        # Kept by a row until it starts a sequence that changes nothing.
        self._slot: IntArray = np.full(max_num_seqs, _NO_SLOT, dtype=np.int32)
        self._free: list[int] = []
        self._state: EditState | None = None
        self._fills: list[tuple[int, int]] = []
        self._writes: list[tuple[str, NDArray[np.int64], IntArray]] = []
        self._staging = staging
        padded = -(-max_num_seqs // _ALIGN) * _ALIGN
        staging.reserve(5 * padded)
        place = device.torch_device
        size = min(_SLICE, padded)
        self._order = torch.arange(size, dtype=torch.int32, device=place)
        self._workspace = SamplingWorkspace(size, place)
        self._tokens = torch.zeros(size, dtype=torch.int32, device=place)
        self._logits: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Device memory of the state now."""
        if self._state is None:
            return 0
        tensors = (self._state.words, self._state.settings, self._state.phrases, self._logits)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def set_row(self, init: RowInit) -> None:
        """A row starts, new or resumed; `put` makes it known to the device."""
        row, params = init.row, init.params
        num_prompt = len(init.token_ids) if init.num_prompt_tokens is None else (
            init.num_prompt_tokens
        )  # fmt: skip
        repeats = params.repetition_penalty != 1
        is_lasting = bool(
            repeats
            or params.frequency_penalty
            or params.presence_penalty
            or params.logit_bias
            or params.bad_words_token_ids
            or params.allowed_token_ids is not None
        )
        has_stops = params.min_tokens > 0 and len(init.stop_token_ids) > 0
        until = num_prompt + params.min_tokens if has_stops else 0
        self._until[row] = _ALWAYS if is_lasting else until
        phrases = [word for word in params.bad_words_token_ids if len(word) > 1]
        self._has_biases[row] = bool(params.logit_bias)
        self._has_phrases[row] = bool(phrases)
        if not is_lasting and len(init.token_ids) >= until:
            self._give_back(row)
            return
        slot = self._take(row)
        output = init.token_ids[num_prompt:]
        base = 0 if params.allowed_token_ids is None else edits.FORBIDDEN
        self._fills.append((slot, base))
        self._write_words(slot, init, output, base)
        setting = np.full(edits.BIAS_IDS, -1, dtype=np.int32)
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        setting[: edits.UNTIL] = np.array(
            [max(penalties[0], _MIN_REPETITION), *penalties[1:]], dtype=np.float32
        ).view(np.int32)
        setting[edits.UNTIL] = until
        setting[edits.NUM_BIASES] = len(params.logit_bias)
        setting[edits.NUM_PHRASES] = len(phrases)
        setting[edits.LONGEST] = max((len(phrase) for phrase in phrases), default=0)
        recent = np.arange(
            max(num_prompt, len(init.token_ids) - edits.RING_SIZE + 1), len(init.token_ids)
        )
        setting[edits.RING + recent % edits.RING_SIZE] = init.token_ids[recent]
        first = slot * edits.SETTINGS_WIDTH
        self._writes.append(("settings", first + np.arange(len(setting)), setting))
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            places = first + np.arange(len(ids))
            bits = np.array(values, dtype=np.float32).view(np.int32)
            self._writes.append(("settings", places + edits.BIAS_IDS, int_array(ids)))
            self._writes.append(("settings", places + edits.BIAS_VALUES, bits))
        if phrases:
            self._write_phrases(slot, phrases)

    def _write_words(self, slot: int, init: RowInit, output: IntArray, base: int) -> None:
        params = init.params
        generated, counts = np.unique(output, return_counts=True)
        is_repeated = params.repetition_penalty != 1
        prompt = init.token_ids[: len(init.token_ids) - len(output)] if is_repeated else output[:0]
        single = [word[0] for word in params.bad_words_token_ids if len(word) == 1]
        stops = init.stop_token_ids if params.min_tokens else ()
        allowed = params.allowed_token_ids or ()
        kinds = [np.unique(int_array(ids)) for ids in (allowed, single, stops, prompt)]
        ids = np.unique(np.concatenate([*kinds, generated]))
        words: IntArray = np.full(len(ids), base, dtype=np.int32)
        words[np.searchsorted(ids, kinds[0])] = 0
        for found, bit in zip(
            kinds[1:], (edits.FORBIDDEN, edits.STOP, edits.IN_PROMPT), strict=True
        ):
            words[np.searchsorted(ids, found)] |= bit
        words[np.searchsorted(ids, generated)] += counts.astype(np.int32)
        # A model's stop tokens may lie beyond its vocabulary; such a token is never sampled.
        known = (ids >= 0) & (ids < self.vocab_size)
        places = slot * self.vocab_size + ids[known].astype(np.int64)
        self._writes.append(("words", places, words[known]))

    def _write_phrases(self, slot: int, phrases: list[tuple[int, ...]]) -> None:
        first = slot * edits.MAX_PHRASES * edits.PHRASE_WIDTH
        starts = [first + index * edits.PHRASE_WIDTH for index in range(len(phrases))]
        places = [
            start + np.arange(len(phrase) + 1)
            for start, phrase in zip(starts, phrases, strict=True)
        ]
        values = [int_array([len(phrase), *phrase]) for phrase in phrases]
        self._writes.append(("phrases", np.concatenate(places), np.concatenate(values)))

    def put(self) -> None:
        """Have what rows started with sent, behind the steps that were started before."""
        if not self._fills:
            return
        fills, writes = self._fills, self._writes
        self._fills, self._writes = [], []
        state = self._fitted(has_phrases=any(name == "phrases" for name, _, _ in writes))
        for slot, base in fills:
            state.words[slot].fill_(base)
        for target in {name: None for name, _, _ in writes}:
            own = [(places, values) for name, places, values in writes if name == target]
            places, values = map(np.concatenate, zip(*own, strict=True))
            self._staging.then(partial(scatter, getattr(state, target).view(-1)), places, values)

    def needs(self, rows: IntArray, indices: NDArray[np.int64]) -> BoolArray:
        """Which of ``rows`` change their logits before the token at ``indices``."""
        edited: BoolArray = indices < self._until[rows]
        return edited

    def put_sampled(
        self,
        places: NDArray[np.int64],
        rows: IntArray,
        indices: NDArray[np.int64],
        *,
        is_random: bool,
    ) -> EditedSample:
        """Have sent what `sample` needs of ``rows``, whose logits are at ``places`` of the step's,
        to sample what stands at ``indices`` of their sequences."""
        count = len(rows)
        padded = -(-count // _ALIGN) * _ALIGN
        host, sent = self._staging.take(5 * padded)
        for part, values in enumerate((places, rows, self._slot[rows], indices, indices - 1)):
            host[part * padded : part * padded + count] = values
        return EditedSample(
            count,
            sent.view(5, padded),
            has_biases=bool(self._has_biases[rows].any()),
            has_phrases=bool(self._has_phrases[rows].any()),
            is_random=is_random,
        )

    def sample(
        self,
        logits: torch.Tensor,
        sample: EditedSample,
        device_rows: DeviceRows,
        out: torch.Tensor,
    ) -> None:
        """Sample from ``logits`` what was put, into ``out`` at its places, and into the rows."""
        assert self._state is not None
        if self._logits is None:
            shape = (len(self._order), self.vocab_size)
            self._logits = torch.empty(shape, dtype=torch.float32, device=logits.device)
        for first in range(0, sample.count, len(self._order)):
            size = min(len(self._order), sample.count - first)
            at, row, slot, index, before = sample.sent[:, first : first + size]
            edited = EditedRows(at, slot, index)
            own, tokens = self._logits[:size], self._tokens[:size]
            edit_logits(
                logits,
                edited,
                self._state,
                own,
                has_biases=sample.has_biases,
                has_phrases=sample.has_phrases,
            )
            sampled = SampledRows(self._order[:size], row, before, device_rows.num_rows)
            last, position = device_rows.last_token, device_rows.position
            argmax_tokens(own, sampled, self._workspace, tokens, last, position)
            if sample.is_random:
                sample_tokens(own, sampled, device_rows.sampling, self._workspace, tokens, last)
            record_tokens(tokens, edited, self._state, out)

    def _take(self, row: int) -> int:
        if self._slot[row] == _NO_SLOT:
            if not self._free:
                used = int((self._slot != _NO_SLOT).sum())
                self._free = list(range(min(max(2 * used, _FIRST_SLOTS), self._max_num_seqs)))[
                    used:
                ]
            self._slot[row] = self._free.pop()
        return int(self._slot[row])

    def _give_back(self, row: int) -> None:
        if self._slot[row] != _NO_SLOT:
            self._free.append(int(self._slot[row]))
            self._slot[row] = _NO_SLOT

    def _fitted(self, *, has_phrases: bool) -> EditState:
        """The state, with room for every slot that was given out."""
        old = self._state
        num_slots = len(self._free) + int((self._slot != _NO_SLOT).sum())
        place = self._device.torch_device
        if num_slots * max(self.vocab_size, edits.MAX_PHRASES * edits.PHRASE_WIDTH) >= 2**31:
            raise RuntimeError(
                f"{num_slots} sequences with penalties or masks at once are more than can be "
                "addressed; ask for fewer with max_num_seqs"
            )

        def fitted(tensor: torch.Tensor | None, width: int) -> torch.Tensor:
            if tensor is not None and len(tensor) >= num_slots:
                return tensor
            larger = torch.zeros(num_slots, width, dtype=torch.int32, device=place)
            if tensor is not None:
                larger[: len(tensor)] = tensor
            return larger

        phrases = None if old is None else old.phrases
        if has_phrases or phrases is not None:
            phrases = fitted(phrases, edits.MAX_PHRASES * edits.PHRASE_WIDTH)
        self._state = EditState(
            fitted(None if old is None else old.words, self.vocab_size),
            fitted(None if old is None else old.settings, edits.SETTINGS_WIDTH),
            phrases,
        )
        return self._state
