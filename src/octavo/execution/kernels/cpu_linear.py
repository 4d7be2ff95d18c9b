"""Products with 4- and 8-bit weights for CPUs with AVX512-VNNI, compiled by numba.

Weights are quantized in groups of 32 inputs, ``w = d * q + m`` with ``q`` in 0..15 (the form of
GGUF's Q4_0 and Q4_1, which are repacked; only ``m`` is rounded, to bfloat16, and where the CPU
multiplies that) or ``w = d * (q - 128)`` with ``q`` in 0..255. Inputs are quantized on the fly,
symmetrically, in the same groups. A group's sum of products is an exact integer; groups are added
in fp32 in a fixed order, so a row's result does not depend on how many other rows there are.

Packed weights, for 16 outputs (the lanes of a 512-bit register) and a group of 32 inputs::

    4 bits   4 vectors of 64 bytes: byte [lane, i] holds inputs 8v + i (low) and 8v + 4 + i (high)
    8 bits   8 vectors of 64 bytes: byte [lane, i] holds input 4v + i
    scales   8 bits: float16 d[16] a group; 4 bits, for two groups: float16 d[2, 16], then their
             minima: bfloat16 m[16, 2] with AVX512-BF16, which adds those of both groups at once,
             else float16 m[2, 16]

Packed inputs, for a panel of 4 rows and a group, 44 words of 32 bits::

    0..31    word [row, quad]: 4 inputs, one byte each
    32..35   of each row: fp32 scale
    36..39   scale times the sum of the 32 numbers, which a weight's minimum is multiplied by:
             fp32, or in every second group bfloat16 pairs for it and the group behind
    40..43   int32 -128 times that sum, where products with 8-bit weights begin

So the kernel walks one pointer a panel: with a pointer a row and array there were too few registers
(docs/decisions/0004-cpu-prefill.md).

Everything the kernels share stays in this file (see `cpu_attention`).
"""

# No `from __future__ import annotations` and no annotations: numba reads these functions' types
# from their arguments.

import math

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from octavo.execution.kernels.compile import BFloatType, compiled

GROUP = 32
LANES = 16
# Rows of a panel, and words of a panel's group.
PANEL = 4
WORDS = 44
_SCALE, _SHIFT, _OFFSET = 32, 36, 40
# Rows that pass over all weights where more would compete for the same sets of the caches.
_ROW_BLOCK = 16
# Whether minima are bfloat16 pairs.
HAS_PAIRS = bool(binding.get_host_cpu_features().get("avx512bf16", False))
_FLAGS = {"nogil": True, "error_model": "numpy"}
# 2 ** x for x in -0.5..0.5 as a polynomial, highest power first.
_EXP2 = (0.00133908634, 0.00967603192, 0.0555035711, 0.240221075, 0.693147188, 1.00000008)

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_F32 = ir.FloatType()
_INTS, _FLOATS = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)


_BFLOATS = ir.VectorType(BFloatType(), 2 * LANES)


class _Emitter:
    """Emits vector code on the memory of an intrinsic's arguments; arrays are contiguous along
    their last axis."""

    def __init__(self, ctx, builder, signature, args):
        self.b = builder
        self.args = args
        self.data, self.strides, self.shapes = {}, {}, {}
        for i, (kind, arg) in enumerate(zip(signature.args, args, strict=True)):
            if isinstance(kind, types.Array):
                array = ctx.make_array(kind)(ctx, builder, arg)
                self.data[i] = builder.bitcast(array.data, _I8.as_pointer())
                self.strides[i] = cgutils.unpack_tuple(builder, array.strides)
                self.shapes[i] = cgutils.unpack_tuple(builder, array.shape)

    def function(self, name, result, *kinds):
        return cgutils.get_or_insert_function(
            self.b.module, ir.FunctionType(result, list(kinds)), name
        )

    def at(self, pointer, count, size=1):
        """``size`` times ``count`` bytes further."""
        if isinstance(count, int):
            return self.b.gep(pointer, [ir.Constant(_I64, count * size)])
        return self.b.gep(pointer, [self.b.mul(count, ir.Constant(_I64, size))])

    def line(self, which, row):
        """Where a row of an argument begins."""
        return self.b.gep(self.data[which], [self.b.mul(row, self.strides[which][0])])

    def load(self, pointer, kind):
        return self.b.load(self.b.bitcast(pointer, kind.as_pointer()), align=2)

    def store(self, value, pointer):
        self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer()), align=4)

    def splat(self, value):
        kind = ir.VectorType(value.type, LANES)
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.b.insert_element(undefined, value, ir.Constant(_I32, 0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))

    def constant(self, value, kind=_FLOATS):
        return ir.Constant(kind, [value] * LANES)

    def fold(self, operation, vector):
        """All lanes into one number by a function of two vectors."""
        for width in (8, 4, 2, 1):
            order = ir.Constant(_INTS, [(i + width) % LANES for i in range(LANES)])
            vector = operation(vector, self.b.shuffle_vector(vector, vector, order))
        return self.b.extract_element(vector, ir.Constant(_I32, 0))

    def panel(self, which, row):
        """Where the packed inputs of a row's panel begin, in argument ``which``."""
        panel = self.b.udiv(row, ir.Constant(_I64, PANEL))
        return self.b.gep(self.data[which], [self.b.mul(panel, self.strides[which][0])])


def _block_kernel(bits, rows):
    """An intrinsic that computes ``rows`` x 16 outputs over all groups."""

    @intrinsic
    def kernel(_context, weights, scales, inputs, out, row, block):
        def generate(ctx, builder, signature, args):
            _Block(ctx, builder, signature, args, bits, rows).emit()
            return ctx.get_dummy_value()

        return types.void(weights, scales, inputs, out, row, block), generate

    return kernel


class _Block(_Emitter):
    """Emits one register block. Arguments: ``weights`` and ``scales`` flat, packed ``inputs
    [panels, G, WORDS]``, ``out [n, N]`` fp32, the first row, the block of 16 outputs."""

    def __init__(self, ctx, builder, signature, args, bits, rows):
        super().__init__(ctx, builder, signature, args)
        self.bits, self.rows = bits, rows
        self.dot = self.function("llvm.x86.avx512.vpdpbusd.512", *[_INTS] * 4)
        self.fma = self.function("llvm.fma.v16f32", *[_FLOATS] * 4)

    def emit(self):
        b = self.b
        rows = range(self.rows)
        row, block = self.args[4], self.args[5]
        self.num_groups = self.shapes[2][1]
        self.totals = [cgutils.alloca_once(b, _FLOATS) for _ in rows]
        for total in self.totals:
            b.store(self.constant(0.0), total)
        self.group_bytes = GROUP * LANES * self.bits // 8
        self.weights = self.at(self.data[0], b.mul(block, self.num_groups), self.group_bytes)
        self.panels = [
            self.panel(2, b.add(row, ir.Constant(_I64, r))) for r in range(0, self.rows, PANEL)
        ]
        if self.bits == 8:
            self.scales = self.at(self.data[1], b.mul(block, self.num_groups), 2 * LANES)
            with cgutils.for_range(b, self.num_groups) as loop:
                self.add_group(loop.index, self.at(self.scales, loop.index, 2 * LANES))
        else:
            one = ir.Constant(_I64, 1)
            pairs = b.lshr(b.add(self.num_groups, one), one)
            self.scales = self.at(self.data[1], b.mul(block, pairs), 8 * LANES)
            whole = b.lshr(self.num_groups, one)
            with cgutils.for_range(b, whole) as loop:
                self.add_pair(loop.index, 2)
            with b.if_then(b.icmp_unsigned("<", whole, pairs)):
                self.add_pair(whole, 1)
        for r in rows:
            line = self.line(3, b.add(row, ir.Constant(_I64, r)))
            self.store(b.load(self.totals[r]), self.at(line, block, 4 * LANES))

    def add_pair(self, pair, count):
        """Two groups of 4-bit weights, or one that is left, and their minima."""
        b = self.b
        first = b.mul(pair, ir.Constant(_I64, 2))
        scales = self.at(self.scales, pair, 8 * LANES)
        groups = [first, b.add(first, ir.Constant(_I64, 1))][:count]
        for i, group in enumerate(groups):
            self.add_group(group, self.at(scales, i, 2 * LANES))
        minima = self.at(scales, 4 * LANES)
        if HAS_PAIRS:
            m = self.load(minima, _BFLOATS)
            dot = self.function(
                "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, _FLOATS, *[_BFLOATS] * 2
            )
            for r, total in enumerate(self.totals):
                shift = b.bitcast(self.input(r, first, _SHIFT, _I32), _BFLOATS)
                b.store(b.call(dot, [b.load(total), m, shift]), total)
            return
        for i, group in enumerate(groups):
            m = b.fpext(self.load(self.at(minima, i, 2 * LANES), _HALVES), _FLOATS)
            for r, total in enumerate(self.totals):
                shift = self.input(r, group, _SHIFT, _F32)
                b.store(b.call(self.fma, [shift, m, b.load(total)]), total)

    def add_group(self, g, scales):
        """Products of a group, times its scales."""
        b = self.b
        group = self.at(self.weights, g, self.group_bytes)
        # Stored 8-bit weights are 128 too large: subtract that from all products at once.
        counts = [
            self.input(r, g, _OFFSET, _I32) if self.bits == 8 else self.constant(0, _INTS)
            for r in range(self.rows)
        ]
        for quad in range(GROUP // 4):
            w = self.quad(group, quad)
            for r in range(self.rows):
                x = self.input(r, g, quad, _I32)
                counts[r] = b.call(self.dot, [counts[r], w, x])
        d = b.fpext(self.load(scales, _HALVES), _FLOATS)
        for r, total in enumerate(self.totals):
            part = b.fmul(b.sitofp(counts[r], _FLOATS), self.input(r, g, _SCALE, _F32))
            b.store(b.call(self.fma, [part, d, b.load(total)]), total)

    def input(self, r, group, word, kind):
        """A word of a row's packed inputs in all lanes."""
        at = self.at(self.panels[r // PANEL], group, 4 * WORDS)
        # A row's 8 quads stand together, of the rest each kind of all rows.
        each = GROUP // 4 if word < _SCALE else 1
        at = self.at(at, word + r % PANEL * each, 4)
        return self.splat(self.b.load(self.b.bitcast(at, kind.as_pointer()), align=4))

    def quad(self, group, quad):
        """Four inputs' weights for 16 outputs, one byte each."""
        b = self.b
        vector = quad // 2 if self.bits == 4 else quad
        packed = self.load(self.at(group, vector, 4 * LANES), _INTS)
        if self.bits == 8:
            return packed
        if quad % 2:
            packed = b.lshr(packed, self.constant(4, _INTS))
        return b.and_(packed, self.constant(0x0F0F0F0F, _INTS))


_int4_1, _int4_2, _int4_3, _int4_4 = (_block_kernel(4, rows) for rows in (1, 2, 3, 4))
_int4_5, _int4_6, _int4_7, _int4_8 = (_block_kernel(4, rows) for rows in (5, 6, 7, 8))
_int8_1, _int8_2, _int8_3, _int8_4 = (_block_kernel(8, rows) for rows in (1, 2, 3, 4))
_int8_5, _int8_6, _int8_7, _int8_8 = (_block_kernel(8, rows) for rows in (5, 6, 7, 8))


@njit(**_FLAGS)
def _int4_rows(weights, scales, inputs, out, row, block, count):
    if count == 1:
        _int4_1(weights, scales, inputs, out, row, block)
    elif count == 2:
        _int4_2(weights, scales, inputs, out, row, block)
    elif count == 3:
        _int4_3(weights, scales, inputs, out, row, block)
    elif count == 4:
        _int4_4(weights, scales, inputs, out, row, block)
    elif count == 5:
        _int4_5(weights, scales, inputs, out, row, block)
    elif count == 6:
        _int4_6(weights, scales, inputs, out, row, block)
    elif count == 7:
        _int4_7(weights, scales, inputs, out, row, block)
    elif count == 8:
        _int4_8(weights, scales, inputs, out, row, block)


@njit(**_FLAGS)
def _int8_rows(weights, scales, inputs, out, row, block, count):
    if count == 1:
        _int8_1(weights, scales, inputs, out, row, block)
    elif count == 2:
        _int8_2(weights, scales, inputs, out, row, block)
    elif count == 3:
        _int8_3(weights, scales, inputs, out, row, block)
    elif count == 4:
        _int8_4(weights, scales, inputs, out, row, block)
    elif count == 5:
        _int8_5(weights, scales, inputs, out, row, block)
    elif count == 6:
        _int8_6(weights, scales, inputs, out, row, block)
    elif count == 7:
        _int8_7(weights, scales, inputs, out, row, block)
    elif count == 8:
        _int8_8(weights, scales, inputs, out, row, block)


@njit(inline="always")
def _row_block(out):
    """How many rows pass over all weights before the next do: all, unless their outputs lie a
    multiple of 2 KB apart, so that many of them compete for a few sets of the caches."""
    if out.shape[0] >= 8 * _ROW_BLOCK and out.strides[0] % 2048 == 0:
        return np.int64(_ROW_BLOCK)
    return np.int64(max(out.shape[0], 1))


@njit(inline="always")
def _part(left):
    """How many of the last rows to take at once: a panel first of 9 to 12."""
    if left > 12:
        return np.int64(8)
    return np.int64(PANEL) if left > 8 else left


@compiled(**_FLAGS)
def int4_linear(weights, scales, inputs, out):
    """``out [n, N]`` = the packed inputs' numbers ``[n, K]`` times the weights' transpose.

    N is a multiple of 16, K of 32. The weights of 16 outputs stay in the first cache while all
    rows, eight at a time, pass over them. The last 9 to 12 are parted as 4 and the rest: unpacking
    the weights takes as long as the products of 3 rows.
    """
    rows = np.int64(out.shape[0])
    size = _row_block(out)
    for first in range(0, rows, size):
        last = min(first + size, rows)
        for b in range(out.shape[1] // LANES):
            block, row = np.int64(b), np.int64(first)
            while row < last:
                count = _part(last - row)
                _int4_rows(weights, scales, inputs, out, row, block, count)
                row += count


@compiled(**_FLAGS)
def int8_linear(weights, scales, inputs, out):
    """Like `int4_linear`, for 8-bit weights."""
    rows = np.int64(out.shape[0])
    size = _row_block(out)
    for first in range(0, rows, size):
        last = min(first + size, rows)
        for b in range(out.shape[1] // LANES):
            block, row = np.int64(b), np.int64(first)
            while row < last:
                count = _part(last - row)
                _int8_rows(weights, scales, inputs, out, row, block, count)
                row += count


class _Quantize(_Emitter):
    """Emits the symmetric 8-bit quantization of a group of 32 numbers. The first argument is ``x``,
    the last three are the packed inputs, the row and the group."""

    def emit(self, values):
        """``values``: two vectors of 16 fp32 numbers."""
        b = self.b
        size = self.function("llvm.fabs.v16f32", *[_FLOATS] * 2)
        round_even = self.function("llvm.rint.v16f32", *[_FLOATS] * 2)
        low, high = (b.call(size, [value]) for value in values)
        peak = self.fold(self.largest, self.largest(low, high))
        zero, steps = ir.Constant(_F32, 0.0), ir.Constant(_F32, 127.0)
        inverse = b.fdiv(steps, peak)
        inverse = self.splat(b.select(b.fcmp_ordered(">", peak, zero), inverse, zero))
        whole = [b.fptosi(b.call(round_even, [b.fmul(value, inverse)]), _INTS) for value in values]
        total = self.fold(b.add, b.add(*whole))
        scale = b.fdiv(peak, steps)
        shift = b.fmul(scale, b.sitofp(total, _F32))
        offset = b.mul(total, ir.Constant(_I32, -128))
        row, group = self.args[-2:]
        within = b.urem(row, ir.Constant(_I64, PANEL))
        panel = self.panel(len(self.args) - 3, row)
        start = self.at(panel, group, 4 * WORDS)
        target = self.at(start, within, GROUP)
        for half, numbers in enumerate(whole):
            narrow = b.trunc(numbers, ir.VectorType(_I8, LANES))
            self.store(narrow, self.at(target, half, LANES))
        target = self.at(start, within, 4)
        for value, word in ((scale, _SCALE), (offset, _OFFSET)):
            self.store(value, self.at(target, word, 4))
        if not HAS_PAIRS:
            self.store(shift, self.at(target, _SHIFT, 4))
            return
        bits = b.bitcast(shift, _I32)
        odd = b.and_(b.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        bits = b.add(bits, b.add(odd, ir.Constant(_I32, 0x7FFF)))
        bits = b.trunc(b.lshr(bits, ir.Constant(_I32, 16)), ir.IntType(16))
        side = b.and_(group, ir.Constant(_I64, 1))
        even = self.at(self.at(panel, b.sub(group, side), 4 * WORDS), within, 4)
        place = self.at(self.at(even, _SHIFT, 4), side, 2)
        b.store(bits, b.bitcast(place, bits.type.as_pointer()), align=2)

    def largest(self, x, y):
        """One instruction, unlike ``llvm.maxnum``, which minds NaN."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def halves(self, pointer):
        """The group's 32 numbers of the row that begins at ``pointer``."""
        pointer = self.at(pointer, self.args[-1], 4 * GROUP)
        return [self.load(self.at(pointer, half, 4 * LANES), _FLOATS) for half in range(2)]

    def silu(self, x):
        """``x / (1 + exp(-x))``: 2 to the nearest whole part by exponent bits, to the rest by a
        polynomial of relative error below 3e-7."""
        b = self.b
        round_even = self.function("llvm.rint.v16f32", *[_FLOATS] * 2)
        fma = self.function("llvm.fma.v16f32", *[_FLOATS] * 4)
        scaled = self.largest(b.fmul(x, self.constant(-1.44269504088896341)), self.constant(-126.0))
        # The smaller of the two, by which exp stays finite.
        limit = self.constant(126.0)
        scaled = b.select(b.fcmp_ordered("<", scaled, limit), scaled, limit)
        whole = b.call(round_even, [scaled])
        fraction = b.fsub(scaled, whole)
        power = self.constant(_EXP2[0])
        for coefficient in _EXP2[1:]:
            power = b.call(fma, [power, fraction, self.constant(coefficient)])
        exponent = b.shl(b.fptosi(whole, _INTS), self.constant(23, _INTS))
        power = b.bitcast(b.add(b.bitcast(power, _INTS), exponent), _FLOATS)
        return b.fdiv(x, b.fadd(power, self.constant(1.0)))


@intrinsic
def _quantize_group(_context, x, inputs, row, group):
    """32 numbers of a row of ``x``."""

    def generate(ctx, builder, signature, args):
        e = _Quantize(ctx, builder, signature, args)
        e.emit(e.halves(e.line(0, args[2])))
        return ctx.get_dummy_value()

    return types.void(x, inputs, row, group), generate


@intrinsic
def _quantize_scaled_group(_context, x, weight, factor, inputs, row, group):
    """32 numbers of ``x * factor * weight``."""

    def generate(ctx, builder, signature, args):
        e = _Quantize(ctx, builder, signature, args)
        scale = e.splat(args[2])
        pairs = zip(e.halves(e.line(0, args[4])), e.halves(e.data[1]), strict=True)
        e.emit([builder.fmul(builder.fmul(value, scale), w) for value, w in pairs])
        return ctx.get_dummy_value()

    return types.void(x, weight, factor, inputs, row, group), generate


@intrinsic
def _quantize_silu_group(_context, x, size, inputs, row, group):
    """32 numbers of ``silu(gate) * up``, where ``up`` stands ``size`` after ``gate`` in a row."""

    def generate(ctx, builder, signature, args):
        e = _Quantize(ctx, builder, signature, args)
        gate = e.line(0, args[3])
        pairs = zip(e.halves(gate), e.halves(e.at(gate, args[1], 4)), strict=True)
        e.emit([builder.fmul(e.silu(g), up) for g, up in pairs])
        return ctx.get_dummy_value()

    return types.void(x, size, inputs, row, group), generate


@compiled(**_FLAGS)
def quantize(x, inputs):
    """``x [n, K]`` fp32 to packed ``inputs``."""
    for row in range(x.shape[0]):
        for g in range(inputs.shape[1]):
            _quantize_group(x, inputs, np.int64(row), np.int64(g))


@compiled(fastmath=True, **_FLAGS)
def rms_norm_quantize(x, weight, eps, inputs):
    """RMSNorm in fp32, then `quantize`."""
    size = x.shape[1]
    for row in range(x.shape[0]):
        line = x[row]
        squares = np.float32(0.0)
        for i in range(size):
            squares += line[i] * line[i]
        factor = np.float32(1.0) / np.float32(math.sqrt(squares / np.float32(size) + eps))
        for g in range(inputs.shape[1]):
            _quantize_scaled_group(x, weight, factor, inputs, np.int64(row), np.int64(g))


@compiled(**_FLAGS)
def silu_mul_quantize(gate_up, inputs):
    """``silu(gate) * up`` of ``gate_up [n, 2 K]`` fp32, then `quantize`."""
    size = np.int64(gate_up.shape[1] // 2)
    for row in range(gate_up.shape[0]):
        for g in range(inputs.shape[1]):
            _quantize_silu_group(gate_up, size, inputs, np.int64(row), np.int64(g))
