"""Attention of a chunk of one sequence on CPUs with AVX512, as blocked matrix products.

A block of queries of all heads that share a KV head meets a block of keys while both are in the
first caches: scores, a running softmax, and the weighted sum of values, as in FlashAttention. Its
PyTorch reference is `octavo.execution.attention.gather`.

Both products are one microkernel on 32-bit words. A word is an fp32 number, or two bfloat16
numbers that follow each other along the summed dimension, which AVX512-BF16 multiplies and adds to
an fp32 sum in one instruction. Operands are packed so that a word of 32 columns is 128 bytes::

    keys     [tile of 32 keys, word of the head dimension, key]
    values   [tile of 32 dimensions, word of keys, dimension]

Everything the kernels share stays in this file (see `cpu_attention`).
"""

# No `from __future__ import annotations` and no annotations: numba reads these functions' types
# from their arguments.

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from octavo.execution.kernels.compile import BFloatType, compiled

# Columns of a packed tile: two 512-bit registers.
TILE = 32
# Rows of the microkernel: 16 sums hide the latency of an instruction.
_ROWS = 8
# Query tokens and keys of a block: scores of a few heads stay in the first two caches.
_QUERY_BLOCK = 32
_KEY_BLOCK = 256
_LANES = 16
_FLAGS = {"nogil": True, "error_model": "numpy", "fastmath": True}

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_F32 = ir.FloatType()
_INTS, _FLOATS = ir.VectorType(_I32, _LANES), ir.VectorType(_F32, _LANES)


_BF16 = ir.VectorType(BFloatType(), 2 * _LANES)
_BF16_HALF = ir.VectorType(BFloatType(), _LANES)

# 2 ** x for x in -0.5..0.5 as a polynomial, highest power first.
_EXP2 = (0.00133908634, 0.00967603192, 0.0555035711, 0.240221075, 0.693147188, 1.00000008)


@intrinsic
def _bits_of_float(_context, value):
    def generate(_ctx, builder, _signature, args):
        return builder.bitcast(args[0], _I32)

    return types.uint32(types.float32), generate


def _element(value, like):
    """``value`` (fp32) as an element of the array ``like``: fp32, or bfloat16 bits, rounded to
    nearest even."""
    raise AssertionError("only called from compiled code")


@overload(_element, inline="always")
def _element_overload(value, like):
    if like.dtype == types.uint16:

        def bfloat16(value, like):
            bits = _bits_of_float(value)
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

        return bfloat16
    return lambda value, like: value


class _Emitter:
    """What the intrinsics share: arrays as bytes, and vectors of 16 numbers."""

    def __init__(self, ctx, builder, signature, args):
        self.ctx, self.b = ctx, builder
        self.signature, self.args = signature, args

    def base(self, index):
        kind = self.signature.args[index]
        data = self.ctx.make_array(kind)(self.ctx, self.b, self.args[index]).data
        return self.b.bitcast(data, _I8.as_pointer())

    def at(self, pointer, count, size):
        return self.b.gep(pointer, [self.b.mul(count, ir.Constant(_I64, size))])

    def intrinsic(self, name, *kinds):
        return cgutils.get_or_insert_function(
            self.b.module, ir.FunctionType(kinds[0], list(kinds[1:])), name
        )

    def load(self, pointer, kind=_FLOATS):
        return self.b.load(self.b.bitcast(pointer, kind.as_pointer()), align=1)

    def store(self, value, pointer):
        self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer()), align=1)

    def splat(self, value):
        kind = ir.VectorType(value.type, _LANES)
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.b.insert_element(undefined, value, ir.Constant(_I32, 0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * _LANES))

    def constant(self, value):
        return ir.Constant(_FLOATS, [value] * _LANES)

    def largest(self, x, y):
        """One instruction, unlike ``llvm.maxnum``, which minds NaN."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def exp2(self, x):
        """``2 ** x`` for ``x >= -126``: the nearest whole part by exponent bits, the rest by a
        polynomial of relative error below 3e-7."""
        b = self.b
        fma = self.intrinsic("llvm.fma.v16f32", *[_FLOATS] * 4)
        whole = b.call(self.intrinsic("llvm.rint.v16f32", _FLOATS, _FLOATS), [x])
        fraction = b.fsub(x, whole)
        power = self.constant(_EXP2[0])
        for coefficient in _EXP2[1:]:
            power = b.call(fma, [power, fraction, self.constant(coefficient)])
        exponent = b.shl(b.fptosi(whole, _INTS), ir.Constant(_INTS, [23] * _LANES))
        return b.bitcast(b.add(b.bitcast(power, _INTS), exponent), _FLOATS)

    def by_chunks(self, chunks, low, high, emit):
        """``emit(chunk, seen)`` for ``chunks`` of 16 columns; ``seen`` is None for those that lie
        in ``low .. high - 1`` as a whole."""
        b = self.b
        lanes, zero = ir.Constant(_I64, _LANES), ir.Constant(_I64, 0)
        whole = b.select(b.icmp_signed(">", high, zero), b.sdiv(high, lanes), zero)
        whole = b.select(b.icmp_signed("<", whole, chunks), whole, chunks)
        whole = b.select(b.icmp_signed(">", low, zero), zero, whole)
        with cgutils.for_range(b, whole) as loop:
            emit(loop.index, None)
        with cgutils.for_range(b, b.sub(chunks, whole)) as loop:
            chunk = b.add(whole, loop.index)
            emit(chunk, self.is_seen(chunk, low, high))

    def is_seen(self, chunk, low, high):
        """Which of 16 columns from ``16 * chunk`` on lie in ``low .. high - 1``."""
        first = self.b.trunc(self.b.mul(chunk, ir.Constant(_I64, _LANES)), _I32)
        columns = self.b.add(self.splat(first), ir.Constant(_INTS, list(range(_LANES))))
        low, high = (self.splat(self.b.trunc(x, _I32)) for x in (low, high))
        return self.b.and_(
            self.b.icmp_signed(">=", columns, low), self.b.icmp_signed("<", columns, high)
        )


@intrinsic
def _multiply(_context, a, a_start, a_stride, b, b_start, steps, c, c_start, c_stride, adds):
    """``_ROWS`` x 32 block of ``c`` = (``adds``: plus) ``a`` times the packed tile ``b``.

    Places and strides of ``a`` and ``c`` count words, ``steps`` the words of the summed dimension.
    """

    def generate(ctx, builder, signature, args):
        e, b = _Emitter(ctx, builder, signature, args), builder
        is_bfloat16 = signature.args[0].dtype == types.uint16
        if is_bfloat16:
            fused = e.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, _FLOATS, _BF16, _BF16)
        else:
            fused = e.intrinsic("llvm.fma.v16f32", _FLOATS, _FLOATS, _FLOATS, _FLOATS)
        a_rows = [
            e.at(e.base(0), b.add(args[1], b.mul(args[2], ir.Constant(_I64, r))), 4)
            for r in range(_ROWS)
        ]
        c_rows = [
            e.at(e.base(6), b.add(args[7], b.mul(args[8], ir.Constant(_I64, r))), 4)
            for r in range(_ROWS)
        ]
        tile = e.at(e.base(3), args[4], 4)
        sums = [[cgutils.alloca_once(b, _FLOATS) for _ in range(2)] for _ in range(_ROWS)]
        with b.if_else(args[9]) as (then, otherwise):
            with then:
                for row, pointer in zip(sums, c_rows, strict=True):
                    for half, total in enumerate(row):
                        b.store(e.load(b.gep(pointer, [ir.Constant(_I64, 64 * half)])), total)
            with otherwise:
                for row in sums:
                    for total in row:
                        b.store(e.constant(0.0), total)
        with cgutils.for_range(b, args[5]) as loop:
            here = e.at(tile, loop.index, 4 * TILE)
            columns = [e.load(b.gep(here, [ir.Constant(_I64, 64 * h)])) for h in range(2)]
            for row, pointer in zip(sums, a_rows, strict=True):
                word = e.splat(e.load(e.at(pointer, loop.index, 4), _F32))
                for column, total in zip(columns, row, strict=True):
                    if is_bfloat16:
                        x, y = b.bitcast(word, _BF16), b.bitcast(column, _BF16)
                        b.store(b.call(fused, [b.load(total), x, y]), total)
                    else:
                        b.store(b.call(fused, [word, column, b.load(total)]), total)
        for row, pointer in zip(sums, c_rows, strict=True):
            for half, total in enumerate(row):
                e.store(b.load(total), b.gep(pointer, [ir.Constant(_I64, 64 * half)]))
        return ctx.get_dummy_value()

    signature = types.void(a, a_start, a_stride, b, b_start, steps, c, c_start, c_stride, adds)
    return signature, generate


@intrinsic
def _highest(_context, scores, start, chunks, low, high):
    """The greatest of ``scores[start + low : start + high]``, by ``chunks`` of 16."""

    def generate(ctx, builder, signature, args):
        e, b = _Emitter(ctx, builder, signature, args), builder
        line = e.at(e.base(0), args[1], 4)
        best = cgutils.alloca_once(b, _FLOATS)
        b.store(e.constant(-1e30), best)

        def compare(chunk, seen):
            values = e.load(e.at(line, chunk, 64))
            if seen is not None:
                values = b.select(seen, values, e.constant(-1e30))
            b.store(e.largest(values, b.load(best)), best)

        e.by_chunks(args[2], args[3], args[4], compare)
        reduce = e.intrinsic("llvm.vector.reduce.fmax.v16f32", _F32, _FLOATS)
        return b.call(reduce, [b.load(best)])

    return types.float32(scores, start, chunks, low, high), generate


@intrinsic
def _exponentials(_context, scores, start, chunks, low, high, scale, top, weights, target):
    """``weights[target + i] = 2 ** (scale * scores[start + i] - top)`` for ``i`` in ``low ..
    high - 1``, 0 for the other columns of ``chunks`` of 16; returns their sum."""

    def generate(ctx, builder, signature, args):
        e, b = _Emitter(ctx, builder, signature, args), builder
        is_bfloat16 = signature.args[7].dtype == types.uint16
        line = e.at(e.base(0), args[1], 4)
        goal = e.at(e.base(7), args[8], 2 if is_bfloat16 else 4)
        scale, shift = e.splat(args[5]), e.splat(b.fneg(args[6]))
        total = cgutils.alloca_once(b, _FLOATS)
        b.store(e.constant(0.0), total)
        fma = e.intrinsic("llvm.fma.v16f32", *[_FLOATS] * 4)
        narrow = e.intrinsic("llvm.x86.avx512bf16.cvtneps2bf16.512", _BF16_HALF, _FLOATS)

        def raise_to(chunk, seen):
            x = b.call(fma, [e.load(e.at(line, chunk, 64)), scale, shift])
            value = e.exp2(e.largest(x, e.constant(-126.0)))
            if seen is not None:
                value = b.select(seen, value, e.constant(0.0))
            b.store(b.fadd(b.load(total), value), total)
            if is_bfloat16:
                e.store(b.call(narrow, [value]), e.at(goal, chunk, 32))
            else:
                e.store(value, e.at(goal, chunk, 64))

        e.by_chunks(args[2], args[3], args[4], raise_to)
        added = b.load(total)
        for width in (8, 4, 2, 1):
            order = [(i + width) % _LANES for i in range(_LANES)]
            added = b.fadd(added, b.shuffle_vector(added, added, ir.Constant(_INTS, order)))
        return b.extract_element(added, ir.Constant(_I32, 0))

    signature = types.float32(scores, start, chunks, low, high, scale, top, weights, target)
    return signature, generate


@njit(inline="always", **_FLAGS)
def _pack_keys(keys, packed):
    """Words of ``keys [n, words]`` to ``packed [tiles, words, 32]``, zeros beyond."""
    for key in range(packed.shape[0] * TILE):
        target = packed[key // TILE, :, key % TILE]
        if key < keys.shape[0]:
            for word in range(keys.shape[1]):
                target[word] = keys[key, word]
        else:
            target[:] = 0


def _pack_values(values, packed):
    """``values [n, dim]`` to ``packed [tiles of dimensions, words of keys, 32]``, zeros beyond."""
    raise AssertionError("only called from compiled code")


@overload(_pack_values)
def _pack_values_overload(values, packed):
    if values.dtype == types.uint16:

        def pack_pairs(values, packed):
            length, dim = values.shape
            packed[:] = 0
            for tile in range(packed.shape[0]):
                first = tile * TILE
                width = min(TILE, dim - first)
                for word in range(length // 2):
                    low = values[2 * word, first : first + width]
                    high = values[2 * word + 1, first : first + width]
                    target = packed[tile, word]
                    for d in range(width):
                        target[d] = np.uint32(low[d]) | (np.uint32(high[d]) << np.uint32(16))
                if length % 2:
                    target = packed[tile, length // 2]
                    for d in range(width):
                        target[d] = np.uint32(values[length - 1, first + d])

        return pack_pairs

    def pack_floats(values, packed):
        words = values.view(np.uint32)
        packed[:] = 0
        for tile in range(packed.shape[0]):
            first = tile * TILE
            width = min(TILE, values.shape[1] - first)
            for key in range(values.shape[0]):
                packed[tile, key, :width] = words[key, first : first + width]

    return pack_floats


@compiled(**_FLAGS)
def chunk_attention(queries, keys, values, start, window, scale, num_heads, out):
    """Attention of consecutive tokens of one sequence, ``keys`` and ``values`` theirs and those of
    the tokens before.

    ``queries [count, at least num_heads * head_dim]`` fp32, rotated; ``keys`` and ``values
    [num_kv_heads, n, head_dim]``, fp32, or bfloat16 bits (``uint16``) of an even ``head_dim``:
    then products are of bfloat16 numbers. Query ``i`` sees the first ``start + i + 1`` keys, of
    those the last ``window`` (0: all). Writes ``out [count, num_heads * head_dim]`` fp32.
    """
    num_kv_heads, length, dim = keys.shape
    count = queries.shape[0]
    group = num_heads // num_kv_heads
    each = 4 // keys.itemsize
    words = dim // each
    dim_tiles = (dim + TILE - 1) // TILE
    key_blocks = (length + _KEY_BLOCK - 1) // _KEY_BLOCK
    num_keys = key_blocks * _KEY_BLOCK
    # exp(scale * s) = 2 ** (factor * s)
    factor = np.float32(scale * 1.4426950408889634)
    most = (min(_QUERY_BLOCK, count) * group + _ROWS - 1) // _ROWS * _ROWS
    packed_keys = np.empty((num_keys // TILE, words, TILE), np.uint32)
    packed_values = np.empty((dim_tiles, num_keys // each, TILE), np.uint32)
    query = np.zeros((most, dim), keys.dtype)
    scores = np.empty((most, _KEY_BLOCK), np.float32)
    weights = np.empty((most, _KEY_BLOCK), keys.dtype)
    sums = np.empty((most, dim_tiles * TILE), np.float32)
    top = np.empty(most, np.float32)
    total = np.empty(most, np.float32)
    weights[:] = 0
    for kv_head in range(num_kv_heads):
        _pack_keys(keys[kv_head].view(np.uint32), packed_keys)
        _pack_values(values[kv_head], packed_values)
        for first in range(0, count, _QUERY_BLOCK):
            last = min(first + _QUERY_BLOCK, count)
            rows = (last - first) * group
            panels = (rows + _ROWS - 1) // _ROWS
            for r in range(rows):
                head = kv_head * group + r % group
                source = queries[first + r // group, head * dim : (head + 1) * dim]
                line = query[r]
                for d in range(dim):
                    line[d] = _element(source[d], query)
                top[r] = -np.float32(1e30)
                total[r] = 0.0
            lowest = max(start + first + 1 - window, 0) if window > 0 else 0
            begin = lowest // _KEY_BLOCK
            for index in range(begin, (start + last + _KEY_BLOCK - 1) // _KEY_BLOCK):
                block = index * _KEY_BLOCK
                tiles = (min(start + last - block, _KEY_BLOCK) + TILE - 1) // TILE
                for tile in range(tiles):
                    b_start = (block // TILE + tile) * words * TILE
                    for panel in range(panels):
                        _multiply(
                            query,
                            panel * _ROWS * words,
                            words,
                            packed_keys,
                            b_start,
                            words,
                            scores,
                            panel * _ROWS * _KEY_BLOCK + tile * TILE,
                            _KEY_BLOCK,
                            False,
                        )
                chunks = tiles * (TILE // _LANES)
                for r in range(rows):
                    high = start + first + r // group + 1 - block
                    low = high - window if window > 0 else 0
                    highest = _highest(scores, r * _KEY_BLOCK, chunks, low, high) * factor
                    highest = max(highest, top[r])
                    if index > begin and highest > top[r]:
                        shrink = np.float32(2.0) ** (top[r] - highest)
                        total[r] *= shrink
                        for d in range(dim_tiles * TILE):
                            sums[r, d] *= shrink
                    top[r] = highest
                    total[r] += _exponentials(
                        scores,
                        r * _KEY_BLOCK,
                        chunks,
                        low,
                        high,
                        factor,
                        highest,
                        weights,
                        r * _KEY_BLOCK,
                    )
                steps = tiles * TILE // each
                for tile in range(dim_tiles):
                    b_start = (tile * num_keys + block) // each * TILE
                    for panel in range(panels):
                        _multiply(
                            weights,
                            panel * _ROWS * (_KEY_BLOCK // each),
                            _KEY_BLOCK // each,
                            packed_values,
                            b_start,
                            steps,
                            sums,
                            panel * _ROWS * dim_tiles * TILE + tile * TILE,
                            dim_tiles * TILE,
                            index > begin,
                        )
            for r in range(rows):
                head = kv_head * group + r % group
                inverse = np.float32(1.0) / total[r]
                target = out[first + r // group, head * dim : (head + 1) * dim]
                for d in range(dim):
                    target[d] = sums[r, d] * inverse
