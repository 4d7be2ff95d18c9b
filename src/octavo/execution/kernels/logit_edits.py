"""What rows change in their logits before they sample: masks, biases, penalties.

A row that changes anything has a slot. What it says of every token is one int32 word::

    bit 30  stop token, forbidden while the sequence is shorter than ``until``
    bit 29  forbidden
    bit 28  in the prompt, for the repetition penalty
    0 - 27  times that it was generated

and what is short is one row of ``settings``, in the order of the constants below. Edited logits are
float32 copies, so rounding to a narrower type takes no small penalty away, and neighbours that
change nothing are not touched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.core.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIASES
from octavo.execution.kernels.ahead import Kernel

STOP, FORBIDDEN, IN_PROMPT = 1 << 30, 1 << 29, 1 << 28

REPETITION, FREQUENCY, PRESENCE, UNTIL, NUM_BIASES, NUM_PHRASES, LONGEST = range(7)
"""Fields of a row of settings: three floats by their bits, and four ints."""
RING = 32
"""First of `RING_SIZE` ints: the last generated tokens, each at its index modulo that; -1: none."""
RING_SIZE = MAX_BAD_WORD_TOKENS
BIAS_IDS = RING + RING_SIZE
BIAS_VALUES = BIAS_IDS + MAX_LOGIT_BIASES
SETTINGS_WIDTH = BIAS_VALUES + MAX_LOGIT_BIASES

MAX_PHRASES = 2 * MAX_BAD_WORDS
PHRASE_WIDTH = MAX_BAD_WORD_TOKENS + 1
"""A phrase is its length and its tokens."""

_BLOCK = 4096
_BIAS_BLOCK = 256
_PHRASE_BLOCK = 64


@dataclass(frozen=True, slots=True, eq=False)
class EditState:
    """By slot, int32: ``words [slots, vocab]``, ``settings [slots, SETTINGS_WIDTH]``, and ``phrases
    [slots, MAX_PHRASES * PHRASE_WIDTH]`` (None: no row has any)."""

    words: torch.Tensor
    settings: torch.Tensor
    phrases: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class EditedRows:
    """Rows of a step that edit, int32 ``[m]`` each: their places among its logits, their slots, and
    the index in its sequence of the token that each is about to sample."""

    places: torch.Tensor
    slots: torch.Tensor
    indices: torch.Tensor


@triton.jit
def _float(pointer):
    return tl.load(pointer).to(tl.float32, bitcast=True)


@triton.jit
def _changed(x, word, setting, index):
    """Float32 logits ``x`` of tokens with these words, after masks and penalties."""
    repetition, frequency, presence = _float(setting), _float(setting + 1), _float(setting + 2)
    count = word & 0x0FFFFFFF
    is_seen = (word & 0x1FFFFFFF) != 0
    y = tl.where(x > 0.0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
    y -= frequency * count.to(tl.float32)
    y -= presence * (count > 0).to(tl.float32)
    y = tl.where(is_seen, y, x)
    is_early = index < tl.load(setting + 3)
    is_forbidden = ((word & 0x20000000) != 0) | (((word & 0x40000000) != 0) & is_early)
    return tl.where(is_forbidden, float("-inf"), y)


@Kernel
@triton.jit
def _edit(
    logits, places, slots, indices, words, settings, out, vocab, stride, width, BLOCK: tl.constexpr
):
    i = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < vocab
    slot = tl.load(slots + i).to(tl.int64)
    place = tl.load(places + i).to(tl.int64)
    x = tl.load(logits + place * stride + n, mask=mask, other=0.0).to(tl.float32)
    word = tl.load(words + slot * vocab + n, mask=mask, other=0)
    y = _changed(x, word, settings + slot * width, tl.load(indices + i))
    tl.store(out + i.to(tl.int64) * vocab + n, y, mask=mask)


@Kernel
@triton.jit
def _edit_biased(
    logits,
    places,
    slots,
    indices,
    words,
    settings,
    out,
    vocab,
    stride,
    width,
    IDS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + i).to(tl.int64)
    setting = settings + slot * width
    num_biases = tl.load(setting + 4)
    if tl.program_id(1) * BLOCK >= num_biases:
        return
    mask = n < num_biases
    token = tl.load(setting + IDS + n, mask=mask, other=0)
    bias = tl.load(setting + VALUES + n, mask=mask, other=0).to(tl.float32, bitcast=True)
    place = tl.load(places + i).to(tl.int64)
    x = tl.load(logits + place * stride + token, mask=mask, other=0.0).to(tl.float32) + bias
    word = tl.load(words + slot * vocab + token, mask=mask, other=0)
    y = _changed(x, word, setting, tl.load(indices + i))
    tl.store(out + i.to(tl.int64) * vocab + token, y, mask=mask)


@Kernel
@triton.jit
def _forbid_phrases(
    slots,
    indices,
    settings,
    phrases,
    out,
    vocab,
    width,
    phrases_width,
    RING: tl.constexpr,
    RING_SIZE: tl.constexpr,
    PHRASE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + i).to(tl.int64)
    setting = settings + slot * width
    num_phrases = tl.load(setting + 5)
    if tl.program_id(1) * BLOCK >= num_phrases:
        return
    mask = n < num_phrases
    index = tl.load(indices + i)
    phrase = phrases + slot * phrases_width + n * PHRASE_WIDTH
    length = tl.load(phrase, mask=mask, other=1)
    matches = mask
    for j in range(tl.load(setting + 6) - 1):
        is_before = mask & (j < length - 1)
        # A power of two: the remainder of a negative index is right, too.
        recent = (index - length + 1 + j) & (RING_SIZE - 1)
        token = tl.load(phrase + 1 + j, mask=is_before, other=0)
        generated = tl.load(setting + RING + recent, mask=is_before, other=0)
        matches = matches & (token == generated)
    last = tl.load(phrase + length, mask=mask, other=0)
    gone = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    tl.store(out + i.to(tl.int64) * vocab + last, gone, mask=matches)


def edit_logits(
    logits: torch.Tensor,
    rows: EditedRows,
    state: EditState,
    out: torch.Tensor,
    *,
    has_biases: bool,
    has_phrases: bool,
) -> None:
    """Write what each of ``rows`` makes of its ``logits [n, vocab]`` to float32 ``out [m, vocab]``,
    in the order of `octavo.core.sampling_params.SamplingParams`: masks, biases, penalties."""
    count, vocab = out.shape
    width = state.settings.shape[1]
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    given = (logits, rows.places, rows.slots, rows.indices, state.words, state.settings, out)
    sizes = (vocab, logits.stride(0), width)
    _edit[(count, triton.cdiv(vocab, block))](*given, *sizes, BLOCK=block)
    if has_biases:
        _edit_biased[(count, triton.cdiv(MAX_LOGIT_BIASES, _BIAS_BLOCK))](
            *given, *sizes, IDS=BIAS_IDS, VALUES=BIAS_VALUES, BLOCK=_BIAS_BLOCK
        )
    if has_phrases:
        assert state.phrases is not None
        _forbid_phrases[(count, triton.cdiv(MAX_PHRASES, _PHRASE_BLOCK))](
            rows.slots,
            rows.indices,
            state.settings,
            state.phrases,
            out,
            vocab,
            width,
            state.phrases.shape[1],
            RING=RING,
            RING_SIZE=RING_SIZE,
            PHRASE_WIDTH=PHRASE_WIDTH,
            BLOCK=_PHRASE_BLOCK,
        )


@Kernel
@triton.jit
def _record(
    tokens,
    places,
    slots,
    indices,
    words,
    settings,
    out,
    count,
    vocab,
    width,
    RING: tl.constexpr,
    RING_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    token = tl.load(tokens + i, mask=mask, other=-1)
    tl.store(out + tl.load(places + i, mask=mask, other=0), token, mask=mask)
    is_token = mask & (token >= 0)
    slot = tl.load(slots + i, mask=mask, other=0).to(tl.int64)
    # No two rows of a step have one slot.
    word = words + slot * vocab + tl.maximum(token, 0)
    tl.store(word, tl.load(word, mask=is_token, other=0) + 1, mask=is_token)
    recent = tl.load(indices + i, mask=mask, other=0) & (RING_SIZE - 1)
    tl.store(settings + slot * width + RING + recent, token, mask=is_token)


def record_tokens(
    tokens: torch.Tensor, rows: EditedRows, state: EditState, out: torch.Tensor
) -> None:
    """``rows`` sampled ``tokens [m]``: put them into ``out`` at their places, and count them in the
    rows' state. A token below 0 stands for logits that are not finite and counts for nothing."""
    count = len(tokens)
    _record[(triton.cdiv(count, 64),)](
        tokens,
        rows.places,
        rows.slots,
        rows.indices,
        state.words,
        state.settings,
        out,
        count,
        state.words.shape[1],
        state.settings.shape[1],
        RING=RING,
        RING_SIZE=RING_SIZE,
        BLOCK=64,
    )
