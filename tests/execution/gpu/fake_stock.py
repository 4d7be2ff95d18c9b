"""FlashAttention-2's and cuDNN's operators as far as Octavo calls them, in PyTorch and float32: the
same arguments, and checks of what the kernels take for granted. For CPUs, where neither runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch


@dataclass(slots=True)
class Calls:
    """How often each was called."""

    flash: int = 0
    cudnn: int = 0


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q [count, num_heads, head_dim]`` over ``k`` and ``v [length, num_kv_heads, head_dim]``,
    where ``seen [count, length]``; also the log-sum-exp, ``[num_heads, count]``."""
    k, v = (part.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
    return out, scores.logsumexp(-1)


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor,
) -> tuple[torch.Tensor, None]:
    assert (dropout_p, is_causal, return_debug_mask) == (0.0, True, False)
    assert query.shape[1:] == (query.shape[1], key.shape[2])
    assert key.shape == value.shape
    assert key.stride() == value.stride()
    assert query.stride(-1) == key.stride(-1) == 1
    for part in (cum_seq_q, cum_seq_k, seqused_k):
        assert part.dtype == torch.int32
        assert part.is_contiguous()
    assert len(cum_seq_q) == len(cum_seq_k) == len(seqused_k) + 1
    first, starts, used = (part.tolist() for part in (cum_seq_q, cum_seq_k, seqused_k))
    assert (first[0], first[-1]) == (0, len(query))
    assert window_size_right == (None if window_size_left is None else 0)
    out = torch.empty_like(query)
    for row, (start, length) in enumerate(zip(starts, used, strict=False)):
        own = slice(first[row], first[row + 1])
        count = own.stop - own.start
        assert 1 <= count <= max_q
        assert count <= length <= max_k
        assert start + length <= len(key)
        place = torch.arange(length)
        seen = place <= place[length - count :, None]
        if window_size_left is not None:
            seen &= place >= place[length - count :, None] - window_size_left
        keys, values = key[start : start + length], value[start : start + length]
        out[own], _ = attend(query[own], keys, values, seen)
    return out, None


def cudnn_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: None,
    compute_log_sumexp: bool,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert (attn_bias, compute_log_sumexp, dropout_p, return_debug_mask) == (None, True, 0.0, False)
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    if is_causal:
        assert len(q) == len(k)
        seen = seen.tril()
    out, lse = attend(q, k, v, seen)
    return out.transpose(0, 1)[None], lse[None, :, :, None]


@contextmanager
def standing_in() -> Iterator[Calls]:
    """Octavo's calls go to these, and are counted."""
    calls = Calls()

    def flash(*args: object, **options: object) -> object:
        calls.flash += 1
        return flash_attention(*args, **options)  # type: ignore[arg-type]

    def cudnn(*args: object) -> object:
        calls.cudnn += 1
        return cudnn_attention(*args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
        patch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", cudnn)
        yield calls
