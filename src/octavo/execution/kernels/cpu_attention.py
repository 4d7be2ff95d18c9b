"""Attention kernels for CPUs, compiled by numba: rotate + write, paged decode, gather.

They see the pool as one flat array of elements and compute offsets from the one layout (see
`octavo.core.layout`). All arithmetic is fp32; elements are ``float32``, or ``uint16`` holding
bfloat16 bits, or ``int16`` holding float16 bits, since numba knows neither of those types. Their
PyTorch reference is `octavo.execution.attention.reference`.

Everything they share stays in this file: numba's on-disk cache only looks at the file of the
kernel itself.
"""

# No `from __future__ import annotations` and no annotations: numba reads these functions' types
# from their arguments.

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from octavo.execution.kernels.compile import compiled

_FLAGS = {"nogil": True, "error_model": "numpy", "fastmath": True}


@intrinsic
def _float_of_bits(_context, bits):
    def generate(_ctx, builder, _signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def _bits_of_float(_context, value):
    def generate(_ctx, builder, _signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def _float_of_half_bits(_context, bits):
    def generate(_ctx, builder, _signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), generate


@intrinsic
def _half_bits_of_float(_context, value):
    def generate(_ctx, builder, _signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), generate


@intrinsic
def _prefetch(_context, array, index):
    """Ask for the cache line of ``array[index]``: pool reads jump from page to page, which the
    hardware does not foresee (measured: 1.9 times faster out of cache)."""

    def generate(ctx, builder, signature, args):
        array_type = signature.args[0]
        data = ctx.make_array(array_type)(ctx, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        int32 = ir.IntType(32)
        function_type = ir.FunctionType(
            ir.VoidType(), [ir.IntType(8).as_pointer(), int32, int32, int32]
        )
        function = cgutils.get_or_insert_function(
            builder.module, function_type, "llvm.prefetch.p0i8"
        )
        read, keep, data_cache = (ir.Constant(int32, value) for value in (0, 3, 1))
        builder.call(function, [pointer, read, keep, data_cache])
        return ctx.get_dummy_value()

    return types.void(array, index), generate


def _load(element):
    """The fp32 value of an element."""
    raise AssertionError("only called from compiled code")


@overload(_load, inline="always")
def _load_overload(element):
    if element == types.uint16:
        return lambda element: _float_of_bits(np.uint32(element) << np.uint32(16))
    if element == types.int16:
        return lambda element: _float_of_half_bits(element)
    return lambda element: element


def _store(array, index, value):
    """Round an fp32 value to the array's element type, to nearest even, and store it."""
    raise AssertionError("only called from compiled code")


@overload(_store, inline="always")
def _store_overload(array, index, value):
    if array.dtype == types.uint16:

        def store_bfloat16(array, index, value):
            bits = _bits_of_float(np.float32(value))
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            array[index] = np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

        return store_bfloat16
    if array.dtype == types.int16:

        def store_float16(array, index, value):
            array[index] = _half_bits_of_float(np.float32(value))

        return store_float16

    def store_float32(array, index, value):
        array[index] = value

    return store_float32


@njit(inline="always", fastmath=True)
def _exp(x):
    """exp(x) for x <= 0, relative error below 3e-7, in a form that vectorizes: 2^floor by
    exponent bits, 2^fraction by a minimax polynomial of degree 6."""
    scaled = max(x * np.float32(1.44269504088896341), np.float32(-126.0))
    whole = math.floor(scaled)
    f = np.float32(scaled - whole)
    p = np.float32(2.15406697e-4)
    p = p * f + np.float32(1.24828400e-3)
    p = p * f + np.float32(9.67454989e-3)
    p = p * f + np.float32(5.54853207e-2)
    p = p * f + np.float32(2.40229401e-1)
    p = p * f + np.float32(6.93147028e-1)
    p = p * f + np.float32(1.0)
    return p * _float_of_bits(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23))


@compiled(**_FLAGS)
def rotate_and_write(
    qkv, positions, kv_offsets, cos, sin, pool, layer, num_layers, num_heads, num_kv_heads, head_dim
):
    """Rotate q and k in place and write k and v of each token into the pool.

    ``qkv [n, (num_heads + 2 num_kv_heads) head_dim]``; ``positions [n]`` index ``cos`` and ``sin``
    ``[max_positions, rotary_dim / 2]`` (fp32; zero columns: no rotation); ``kv_offsets [n]`` are
    ``block_id * block_size + offset``; ``pool`` is flat.
    """
    half = cos.shape[1]
    token_elements = num_layers * 2 * num_kv_heads * head_dim
    kv_elements = num_kv_heads * head_dim
    for i in range(qkv.shape[0]):
        row = qkv[i]
        c = cos[positions[i]]
        s = sin[positions[i]]
        for head in range(num_heads + num_kv_heads):
            low = row[head * head_dim : head * head_dim + half]
            high = row[head * head_dim + half : head * head_dim + 2 * half]
            for d in range(half):
                x = _load(low[d])
                y = _load(high[d])
                _store(low, d, x * c[d] - y * s[d])
                _store(high, d, y * c[d] + x * s[d])
        start = kv_offsets[i] * token_elements + layer * 2 * kv_elements
        target = pool[start : start + 2 * kv_elements]
        source = row[num_heads * head_dim :]
        for d in range(2 * kv_elements):
            _store(target, d, _load(source[d]))


@compiled(**_FLAGS)
def decode_attention(
    qkv,
    tokens,
    tables,
    rows,
    lengths,
    window,
    scale,
    pool,
    layer,
    num_layers,
    num_heads,
    num_kv_heads,
    head_dim,
    block_size,
    out,
):
    """One query token a row over its blocks, by running softmax block after block.

    Query ``i`` is token ``tokens[i]`` of ``qkv``; it sees the first ``lengths[i]`` tokens of
    ``tables[rows[i]]``, of those the last ``window`` (0: all). Writes ``out[tokens[i]]``,
    ``[num_heads * head_dim]``.
    """
    group = num_heads // num_kv_heads
    kv_elements = num_kv_heads * head_dim
    token_elements = num_layers * 2 * kv_elements
    lines = (2 * kv_elements * pool.itemsize + 63) // 64
    line_elements = 64 // pool.itemsize
    layer_start = layer * 2 * kv_elements
    scores = np.empty((num_heads, block_size), np.float32)
    acc = np.empty((num_heads, head_dim), np.float32)
    query = np.empty((num_heads, head_dim), np.float32)
    top = np.empty(num_heads, np.float32)
    total = np.empty(num_heads, np.float32)
    for i in range(tokens.shape[0]):
        length = lengths[i]
        table = tables[rows[i]]
        begin = max(length - window, 0) if window > 0 else 0
        source = qkv[tokens[i]]
        for head in range(num_heads):
            top[head] = -np.float32(1e30)
            total[head] = 0.0
            for d in range(head_dim):
                query[head, d] = _load(source[head * head_dim + d]) * scale
                acc[head, d] = 0.0
        num_blocks = (length + block_size - 1) // block_size
        for index in range(begin // block_size, num_blocks):
            block = np.int64(table[index]) * block_size
            following = block
            if index + 1 < num_blocks:
                following = np.int64(table[index + 1]) * block_size
            first = max(begin - index * block_size, 0)
            count = min(block_size, length - index * block_size)
            for t in range(first, count):
                ahead = (following + t) * token_elements + layer_start
                for line in range(lines):
                    _prefetch(pool, ahead + line * line_elements)
                start = (block + t) * token_elements + layer_start
                for kv_head in range(num_kv_heads):
                    key = pool[start + kv_head * head_dim : start + (kv_head + 1) * head_dim]
                    for head in range(kv_head * group, (kv_head + 1) * group):
                        q = query[head]
                        dot = np.float32(0.0)
                        for d in range(head_dim):
                            dot += q[d] * _load(key[d])
                        scores[head, t] = dot
            for head in range(num_heads):
                highest = top[head]
                for t in range(first, count):
                    highest = max(highest, scores[head, t])
                if highest > top[head]:
                    shrink = _exp(top[head] - highest)
                    total[head] *= shrink
                    for d in range(head_dim):
                        acc[head, d] *= shrink
                    top[head] = highest
                added = np.float32(0.0)
                for t in range(first, count):
                    weight = _exp(scores[head, t] - highest)
                    scores[head, t] = weight
                    added += weight
                total[head] += added
            for t in range(first, count):
                start = (block + t) * token_elements + layer_start + kv_elements
                for kv_head in range(num_kv_heads):
                    value = pool[start + kv_head * head_dim : start + (kv_head + 1) * head_dim]
                    for head in range(kv_head * group, (kv_head + 1) * group):
                        weight = scores[head, t]
                        a = acc[head]
                        for d in range(head_dim):
                            a[d] += weight * _load(value[d])
        target = out[tokens[i]]
        for head in range(num_heads):
            inverse = np.float32(1.0) / total[head]
            for d in range(head_dim):
                _store(target, head * head_dim + d, acc[head, d] * inverse)


@compiled(**_FLAGS)
def gather_keys_values(
    table,
    begin,
    end,
    pool,
    layer,
    num_layers,
    num_kv_heads,
    head_dim,
    block_size,
    keys,
    values,
):
    """Copy positions ``begin .. end - 1`` of one sequence out of its blocks.

    ``keys`` and ``values`` are ``[num_kv_heads, end - begin, head_dim]``, of any element type.
    """
    kv_elements = num_kv_heads * head_dim
    token_elements = num_layers * 2 * kv_elements
    for position in range(begin, end):
        place = np.int64(table[position // block_size]) * block_size + position % block_size
        start = place * token_elements + layer * 2 * kv_elements
        for kv_head in range(num_kv_heads):
            target = keys[kv_head, position - begin]
            source = pool[start : start + head_dim]
            for d in range(head_dim):
                _store(target, d, _load(source[d]))
            start += head_dim
        for kv_head in range(num_kv_heads):
            target = values[kv_head, position - begin]
            source = pool[start : start + head_dim]
            for d in range(head_dim):
                _store(target, d, _load(source[d]))
            start += head_dim
