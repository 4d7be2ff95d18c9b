"""Attention of rows that run one token, over the block table, split along the keys.

A program serves all query heads of one KV head, so keys and values are read once for the group, and
one part of a row's keys (flash-decoding; which one, `decode_parts` says). The program that finishes
last adds the parts of its row in their order: no second kernel, and the same bits at every run.

Where rows are many it serves as many KV heads as have the query heads of a tensor core's tile,
which one group would leave empty by half or more: a product of the tile has the scores of every
head with every other's keys, and keeps those of its own. That is no more work than a program for
each, and one start and one end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.execution.kernels.ahead import Kernel
from octavo.execution.kernels.decode_parts import WIDTH, DecodeParts, DecodeTiling
from octavo.execution.kernels.gpu import OVERLAP, PDL, begin
from octavo.execution.kernels.rope import kv_offset


@triton.jit
def _add_prefix(
    acc,
    total,
    largest,
    prefix_out,
    prefix_lse,
    first_key,
    token,
    head,
    head_mask,
    num_heads,
    PREFIX_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Add the parts of the prefix that the row shares to its own keys' sum; none where it is
    empty."""
    d = tl.arange(0, DIM)
    for part in tl.static_range(PREFIX_SPLITS):
        place = (token.to(tl.int64) * PREFIX_SPLITS + part) * num_heads + head
        mask = head_mask & (first_key + 0 * head > 0)
        lse = tl.load(prefix_lse + place, mask=mask, other=float("-inf"))
        o = tl.load(
            prefix_out + place[:, None] * HEAD_DIM + d[None, :],
            mask=mask[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, lse)
        shrink = tl.exp2(largest - new_largest)
        weight = tl.exp2(lse - new_largest)
        acc = acc * shrink[:, None] + o * weight[:, None]
        total = total * shrink + weight
        largest = new_largest
    return acc, total, largest


@triton.jit
def _add_parts(
    part_out,
    part_lse,
    first_item,
    num_parts,
    out,
    prefix_lengths,
    prefix_out,
    prefix_lse,
    token,
    first_head,
    num_own,
    num_heads,
    PREFIX_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Store the sum of a row's parts for ``num_own`` heads, ``PARTS`` at a time, for each is a wait
    for memory. What pads a tensor core's tile stays out: ``GROUP`` has the query heads alone."""
    d = tl.arange(0, DIM)
    g = tl.arange(0, GROUP)
    g_mask = g < num_own
    head = first_head + g
    p = tl.arange(0, PARTS)
    largest = tl.full([GROUP], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP], dtype=tl.float32)
    acc = tl.zeros([GROUP, DIM], dtype=tl.float32)
    for first in range(0, num_parts, PARTS):
        item = (first_item + first + p).to(tl.int64)
        place = item[None, :] * num_heads + head[:, None]
        mask = (first + p < num_parts)[None, :] & g_mask[:, None]
        lse = tl.load(part_lse + place, mask=mask, other=float("-inf"), cache_modifier=".cg")
        lse = tl.where(g_mask[:, None], lse, 0.0)
        o = tl.load(
            part_out + place[:, :, None] * DIM + d[None, None, :],
            mask=mask[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_largest = tl.maximum(largest, tl.max(lse, axis=1))
        shrink = tl.exp2(largest - new_largest)
        weight = tl.exp2(lse - new_largest[:, None])
        # A thread has all parts of its place in a head: the sum needs nobody else.
        acc = acc * shrink[:, None] + tl.sum(o * weight[:, :, None], axis=1)
        total = total * shrink + tl.sum(weight, axis=1)
        largest = new_largest
    if PREFIX_SPLITS > 0:
        # What a group of rows has in common was attended to for all of them at once.
        first_key = tl.load(prefix_lengths + token)
        acc, total, largest = _add_prefix(
            acc, total, largest, prefix_out, prefix_lse, first_key, token, head, g_mask,
            num_heads, PREFIX_SPLITS, HEAD_DIM, DIM,
        )  # fmt: skip
    acc = acc / total[:, None]
    place = (token.to(tl.int64) * num_heads + head[:, None]) * HEAD_DIM + d[None, :]
    mask = g_mask[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)


@Kernel
@triton.jit
def _decode(
    queries,
    keys,
    parts,
    num_used,
    tables,
    out,
    part_out,
    part_lse,
    counters,
    prefix_lengths,
    prefix_out,
    prefix_lse,
    kv_scales,
    scale_log2,
    group,
    num_kv_heads,
    stride_table,
    stride_block,
    stride_token,
    value_offset,
    PREFIX_SPLITS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    MERGED_GROUP: tl.constexpr,
    MERGED_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KV_HEADS: tl.constexpr,
    AHEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_PLANNED: tl.constexpr,
    PDL: tl.constexpr,
):
    if IS_PLANNED and PDL:
        tl.extra.cuda.gdc_launch_dependents()
    else:
        begin(PDL)
    item = tl.program_id(0)
    first_kv_head = tl.program_id(1) * KV_HEADS
    # All before the branch: one wait for memory, not two.
    used = tl.load(num_used)
    own = parts + item * WIDTH
    token = tl.load(own)
    row = tl.load(own + 1)
    start = tl.load(own + 2)
    end = tl.load(own + 3)
    split = tl.load(own + 4)
    num_parts = tl.load(own + 5)
    # A tile has the keys of all its KV heads, token by token, as the pool has them.
    n = tl.arange(0, BLOCK_N * KV_HEADS)
    n_token = n // KV_HEADS
    n_head = n % KV_HEADS
    is_used = item < used
    if AHEAD:
        # Tables are what they were when the step began.
        following = kv_offset(
            tables, tl.where(is_used, row, 0),
            tl.where(is_used, tl.minimum(start + n_token, end - 1), 0 * n_token), stride_table,
            stride_block, stride_token, BLOCK_SIZE,
        )  # fmt: skip
    if IS_PLANNED and PDL:
        tl.extra.cuda.gdc_wait()
    if not is_used:
        return
    g = tl.arange(0, GROUP)
    d = tl.arange(0, DIM)
    g_head = tl.minimum(g // group, KV_HEADS - 1)
    num_heads = num_kv_heads * group
    head = first_kv_head * group + g
    g_mask = g < KV_HEADS * group
    q_mask = g_mask[:, None] & (d < HEAD_DIM)[None, :]
    q_place = (token.to(tl.int64) * num_heads + head[:, None]) * HEAD_DIM + d[None, :]
    q = tl.load(queries + q_place, mask=q_mask, other=0.0)
    if HAS_SCALES and q.dtype == tl.bfloat16:
        # A GPU has an instruction from e4m3 to float16, and none to bfloat16. What is beyond
        # float16 becomes its largest, since infinity times a key of 0 is NaN.
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        q = q.to(tl.float16)
    largest = tl.full([GROUP], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP], dtype=tl.float32)
    acc = tl.zeros([GROUP, DIM], dtype=tl.float32)
    pool = keys + (first_kv_head + n_head) * HEAD_DIM
    key_scales = scale_log2
    if HAS_SCALES:
        key_scales = scale_log2 * tl.load(kv_scales + first_kv_head + n_head)[None, :]
    for first in range(start, end, BLOCK_N):
        key = first + n_token
        seen = key < end
        kv_mask = seen[:, None] & (d < HEAD_DIM)[None, :]
        if AHEAD:
            # What waits for a table in its own turn is not loaded early.
            offset = following
            following = kv_offset(
                tables, row, tl.minimum(key + BLOCK_N, end - 1), stride_table, stride_block,
                stride_token, BLOCK_SIZE,
            )  # fmt: skip
        else:
            offset = kv_offset(
                tables, row, tl.minimum(key, end - 1), stride_table, stride_block, stride_token,
                BLOCK_SIZE,
            )  # fmt: skip
        place = (pool + offset)[:, None] + d[None, :]
        k = tl.load(place, mask=kv_mask, other=0.0)
        v = tl.load(place + value_offset, mask=kv_mask, other=0.0)
        k = k.to(q.dtype)
        v = v.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * key_scales
        own_key = seen[None, :]
        if KV_HEADS > 1:
            own_key = own_key & (g_head[:, None] == n_head[None, :])
        scores = tl.where(own_key, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        weight = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
        largest = new_largest
    if HAS_SCALES:
        acc *= tl.load(kv_scales + num_kv_heads + first_kv_head + g_head)[:, None]
    if num_parts == 1:
        if PREFIX_SPLITS > 0:
            # What a group of rows has in common was attended to for all of them at once.
            first_key = tl.load(prefix_lengths + token)
            acc, total, largest = _add_prefix(
                acc, total, largest, prefix_out, prefix_lse, first_key, token, head, g_mask,
                num_heads, PREFIX_SPLITS, HEAD_DIM, DIM,
            )  # fmt: skip
        acc = acc / total[:, None]
        tl.store(out + q_place, acc.to(out.dtype.element_ty), mask=q_mask)
        return
    acc = acc / total[:, None]
    owner = token.to(tl.int64) * num_kv_heads + first_kv_head
    part = item.to(tl.int64) * num_heads + head
    tl.store(part_out + part[:, None] * DIM + d[None, :], acc, mask=g_mask[:, None])
    tl.store(part_lse + part, largest + tl.log2(total), mask=g_mask)
    # Every thread's part is written before the one that counts says so.
    tl.debug_barrier()
    done = tl.atomic_add(counters + owner, 1, sem="acq_rel", scope="gpu")
    if done == num_parts - 1:
        tl.debug_barrier()
        _add_parts(
            part_out, part_lse, item - split, num_parts, out, prefix_lengths, prefix_out,
            prefix_lse, token, first_kv_head * group, KV_HEADS * group, num_heads, PREFIX_SPLITS,
            HEAD_DIM, DIM, MERGED_GROUP, MERGED_PARTS,
        )  # fmt: skip
        tl.store(counters + owner, 0)


class DecodeWorkspace:
    """What the programs of a row hand to the last of them. Counters are zero between launches."""

    def __init__(
        self,
        max_parts: int,
        max_tokens: int,
        num_kv_heads: int,
        head_dim: int,
        group: int,
        device: torch.device,
    ) -> None:
        """``max_parts`` bounds the parts (`DecodeParts.bound`) and ``max_tokens`` the tokens of any
        launch."""
        parts = max_parts * num_kv_heads * group
        dim = triton.next_power_of_2(head_dim)
        self.out = torch.empty(parts * dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(parts, dtype=torch.float32, device=device)
        self.counters = torch.zeros(max_tokens * num_kv_heads, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixParts:
    """What `prefix_attention` found: ``lengths`` int32 ``[tokens]``, how many of a token's first
    keys it covers (0: none); ``out`` float32 ``[tokens, splits, num_heads, head_dim]`` and ``lse``
    (of base 2) ``[tokens, splits, num_heads]``."""

    lengths: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def padded_group(group: int) -> int:
    """Query heads of a program: a tensor core's tile has 16 rows at least."""
    return max(16, triton.next_power_of_2(group))


def decode_attention(
    queries: torch.Tensor,
    kv_layer: torch.Tensor,
    parts: DecodeParts,
    tables: torch.Tensor | None,
    out: torch.Tensor,
    workspace: DecodeWorkspace,
    tiling: DecodeTiling,
    *,
    prefix: SharedPrefixParts | None = None,
    kv_scales: torch.Tensor | None = None,
    is_planned: bool = False,
) -> None:
    """Attend for the tokens of ``parts``, whose keys are written already.

    ``queries`` and ``out`` are ``[tokens, num_heads, head_dim]``. Without ``tables`` ``kv_layer``
    is a layer of slots, ``[1 + slot, token, K|V, kv_head, head_dim]``, the first nobody's: nothing
    behind a row's tokens is touched. ``prefix`` covers the first keys of some tokens, which
    ``parts`` leave out. ``kv_scales`` as in `rope_and_write`: keys and values are multiplied by
    their head's. ``is_planned``: ``parts`` were written before the last kernel that overlaps with
    none, so they are read while the kernel before this one still runs.
    """
    _, num_heads, head_dim = queries.shape
    _, block_size, _, num_kv_heads, _ = kv_layer.shape
    group = num_heads // num_kv_heads
    kv_heads = tiling.kv_heads
    assert num_kv_heads % kv_heads == 0
    assert len(parts.table) * num_heads <= len(workspace.lse)
    dim, merged_group = triton.next_power_of_2(head_dim), triton.next_power_of_2(kv_heads * group)
    _decode[(len(parts.table), num_kv_heads // kv_heads)](
        queries,
        kv_layer,
        parts.table,
        parts.count,
        parts.table if tables is None else tables,
        out,
        workspace.out,
        workspace.lse,
        workspace.counters,
        parts.table if prefix is None else prefix.lengths,
        out if prefix is None else prefix.out,
        out if prefix is None else prefix.lse,
        out if kv_scales is None else kv_scales,
        head_dim**-0.5 * 1.4426950408889634,
        group,
        num_kv_heads,
        0 if tables is None else tables.stride(0),
        kv_layer.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        PREFIX_SPLITS=0 if prefix is None else prefix.out.shape[1],
        HAS_SCALES=kv_scales is not None,
        BLOCK_SIZE=0 if tables is None else block_size,
        HEAD_DIM=head_dim,
        DIM=dim,
        GROUP=padded_group(kv_heads * group),
        MERGED_GROUP=merged_group,
        # As many as need no more registers than attending does.
        MERGED_PARTS=max(1, min(8, 16384 // (merged_group**2 * dim))),
        BLOCK_N=tiling.block_n,
        KV_HEADS=kv_heads,
        AHEAD=tiling.is_ahead,
        WIDTH=WIDTH,
        IS_PLANNED=is_planned,
        PDL=PDL,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **OVERLAP,
    )
