"""Products with 4- and 8-bit weights for CPUs with AVX512-VNNI, compiled by numba.

Weights are quantized in groups of 32 inputs, ``w = d * q + m`` with ``q`` in 0..15 (the form of
GGUF's Q4_0 and Q4_1, which are repacked without loss) or ``w = d * (q - 128)`` with ``q`` in
0..255. Inputs are quantized on the fly, symmetrically, in the same groups. A group's sum of
products is an exact integer; groups are added in fp32 in a fixed order, so a row's result does not
depend on how many other rows there are.

Packed weights, for 16 outputs (the lanes of a 512-bit register) and a group of 32 inputs::

    4 bits   4 vectors of 64 bytes: byte [lane, i] holds inputs 8v + i (low) and 8v + 4 + i (high)
    8 bits   8 vectors of 64 bytes: byte [lane, i] holds input 4v + i
    scales   float16 d[16], float16 m[16]

Everything the kernels share stays in this file (see `cpu_attention`).
"""

# No `from __future__ import annotations` and no annotations: numba reads these functions' types
# from their arguments.

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from octavo.execution.kernels.compile import compiled

GROUP = 32
LANES = 16
_FLAGS = {"nogil": True, "error_model": "numpy"}

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_F32 = ir.FloatType()
_INTS, _FLOATS = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)


@intrinsic
def _float_of_bits(_context, bits):
    def generate(_ctx, builder, _signature, args):
        return builder.bitcast(args[0], _F32)

    return types.float32(types.uint32), generate


def _block_kernel(bits, rows):
    """An intrinsic that computes ``rows`` x 16 outputs over all groups."""

    @intrinsic
    def kernel(_context, weights, scales, inputs, input_scales, input_sums, out, row, block):
        def generate(ctx, builder, signature, args):
            _Block(ctx, builder, signature, args, bits, rows).emit()
            return ctx.get_dummy_value()

        signature = types.void(weights, scales, inputs, input_scales, input_sums, out, row, block)
        return signature, generate

    return kernel


class _Block:
    """Emits one register block. Arguments: ``weights`` and ``scales`` flat, ``inputs [n, K]``
    int8, ``input_scales [n, G]`` fp32, ``input_sums [n, G]`` int32, ``out [n, N]`` fp32, the first
    row, the block of 16 outputs."""

    def __init__(self, ctx, builder, signature, args, bits, rows):
        self.b = builder
        self.bits, self.rows = bits, rows
        arrays = [
            ctx.make_array(kind)(ctx, builder, arg)
            for kind, arg in zip(signature.args[:6], args[:6], strict=True)
        ]
        self.data = [builder.bitcast(array.data, _I8.as_pointer()) for array in arrays]
        self.strides = [cgutils.unpack_tuple(builder, array.strides)[0] for array in arrays]
        self.num_groups = cgutils.unpack_tuple(builder, arrays[3].shape)[1]
        self.row, self.block = args[6], args[7]
        module = builder.module
        self.dot = cgutils.get_or_insert_function(
            module, ir.FunctionType(_INTS, [_INTS] * 3), "llvm.x86.avx512.vpdpbusd.512"
        )
        self.fma = cgutils.get_or_insert_function(
            module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), "llvm.fma.v16f32"
        )

    def emit(self):
        b = self.b
        rows = range(self.rows)
        group_bytes = GROUP * LANES * self.bits // 8
        totals = [cgutils.alloca_once(b, _FLOATS) for _ in rows]
        for total in totals:
            b.store(ir.Constant(_FLOATS, [0.0] * LANES), total)
        first = b.mul(self.block, self.num_groups)
        weights = self._at(self.data[0], first, group_bytes)
        scales = self._at(self.data[1], first, 4 * LANES)
        inputs, factors, sums = ([self._line(which, r) for r in rows] for which in (2, 3, 4))
        with cgutils.for_range(b, self.num_groups) as loop:
            g = loop.index
            group = self._at(weights, g, group_bytes)
            quads = [b.bitcast(self._at(x, g, GROUP), _I32.as_pointer()) for x in inputs]
            sum_here = [self._scalar(line, g, _I32) for line in sums]
            if self.bits == 8:
                # Stored weights are 128 too large: subtract that from all products at once.
                offsets = [b.mul(s, ir.Constant(_I32, -128)) for s in sum_here]
                counts = [self._splat(offset, _INTS) for offset in offsets]
            else:
                counts = [ir.Constant(_INTS, [0] * LANES)] * self.rows
            for quad in range(GROUP // 4):
                w = self._quad(group, quad)
                for r in rows:
                    at = b.gep(quads[r], [ir.Constant(_I64, quad)])
                    x = self._splat(b.load(at, align=4), _INTS)
                    counts[r] = b.call(self.dot, [counts[r], w, x])
            at = b.bitcast(self._at(scales, g, 4 * LANES), _HALVES.as_pointer())
            d = b.fpext(b.load(at, align=2), _FLOATS)
            m = b.fpext(b.load(b.gep(at, [ir.Constant(_I64, 1)]), align=2), _FLOATS)
            for r in rows:
                factor = self._scalar(factors[r], g, _F32)
                part = b.fmul(b.sitofp(counts[r], _FLOATS), self._splat(factor, _FLOATS))
                total = b.call(self.fma, [part, d, b.load(totals[r])])
                if self.bits == 4:
                    shift = b.fmul(factor, b.sitofp(sum_here[r], _F32))
                    total = b.call(self.fma, [self._splat(shift, _FLOATS), m, total])
                b.store(total, totals[r])
        for r in rows:
            at = self._at(self._line(5, r), self.block, 4 * LANES)
            b.store(b.load(totals[r]), b.bitcast(at, _FLOATS.as_pointer()), align=4)

    def _line(self, which, r):
        """Where row ``r`` of an argument begins."""
        row = self.b.add(self.row, ir.Constant(_I64, r))
        return self.b.gep(self.data[which], [self.b.mul(row, self.strides[which])])

    def _at(self, pointer, count, size):
        return self.b.gep(pointer, [self.b.mul(count, ir.Constant(_I64, size))])

    def _scalar(self, line, g, kind):
        return self.b.load(self.b.gep(self.b.bitcast(line, kind.as_pointer()), [g]), align=4)

    def _splat(self, value, kind):
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.b.insert_element(undefined, value, ir.Constant(_I32, 0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))

    def _quad(self, group, quad):
        """Four inputs' weights for 16 outputs, one byte each."""
        b = self.b
        vector = quad // 2 if self.bits == 4 else quad
        at = b.gep(group, [ir.Constant(_I64, 4 * LANES * vector)])
        packed = b.load(b.bitcast(at, _INTS.as_pointer()), align=1)
        if self.bits == 8:
            return packed
        if quad % 2:
            packed = b.lshr(packed, ir.Constant(_INTS, [4] * LANES))
        return b.and_(packed, ir.Constant(_INTS, [0x0F0F0F0F] * LANES))


_int4_1, _int4_2, _int4_4 = (_block_kernel(4, rows) for rows in (1, 2, 4))
_int8_1, _int8_2, _int8_4 = (_block_kernel(8, rows) for rows in (1, 2, 4))


@compiled(**_FLAGS)
def int4_linear(weights, scales, inputs, input_scales, input_sums, out):
    """``out [n, N]`` = dequantized ``inputs [n, K]`` times the weights' transpose.

    N is a multiple of 16, K of 32. The weights of 16 outputs stay in the first cache while all
    rows, four at a time, pass over them.
    """
    rows = np.int64(inputs.shape[0])
    for b in range(out.shape[1] // LANES):
        block, row = np.int64(b), np.int64(0)
        while row + 4 <= rows:
            _int4_4(weights, scales, inputs, input_scales, input_sums, out, row, block)
            row += 4
        if row + 2 <= rows:
            _int4_2(weights, scales, inputs, input_scales, input_sums, out, row, block)
            row += 2
        if row < rows:
            _int4_1(weights, scales, inputs, input_scales, input_sums, out, row, block)


@compiled(**_FLAGS)
def int8_linear(weights, scales, inputs, input_scales, input_sums, out):
    """Like `int4_linear`, for 8-bit weights."""
    rows = np.int64(inputs.shape[0])
    for b in range(out.shape[1] // LANES):
        block, row = np.int64(b), np.int64(0)
        while row + 4 <= rows:
            _int8_4(weights, scales, inputs, input_scales, input_sums, out, row, block)
            row += 4
        if row + 2 <= rows:
            _int8_2(weights, scales, inputs, input_scales, input_sums, out, row, block)
            row += 2
        if row < rows:
            _int8_1(weights, scales, inputs, input_scales, input_sums, out, row, block)


@njit(inline="always", fastmath=True)
def _quantize_group(values, start, target, scales, sums, g):
    """Symmetric 8-bit quantization of ``values[start : start + 32]``."""
    peak = np.float32(0.0)
    for i in range(GROUP):
        peak = max(peak, abs(values[start + i]))
    inverse = np.float32(127.0) / peak if peak > 0 else np.float32(0.0)
    total = np.int32(0)
    for i in range(GROUP):
        q = np.int32(np.rint(values[start + i] * inverse))
        target[start + i] = np.int8(q)
        total += q
    scales[g] = peak / np.float32(127.0)
    sums[g] = total


@compiled(**_FLAGS)
def quantize(x, target, scales, sums):
    """``x [n, K]`` fp32 to int8 ``target``, a scale and a sum a group."""
    for row in range(x.shape[0]):
        for g in range(scales.shape[1]):
            _quantize_group(x[row], g * GROUP, target[row], scales[row], sums[row], g)


@compiled(fastmath=True, **_FLAGS)
def rms_norm_quantize(x, weight, eps, target, scales, sums):
    """RMSNorm in fp32, then `quantize`."""
    size = x.shape[1]
    normed = np.empty(size, np.float32)
    for row in range(x.shape[0]):
        line = x[row]
        squares = np.float32(0.0)
        for i in range(size):
            squares += line[i] * line[i]
        factor = np.float32(1.0) / np.float32(math.sqrt(squares / np.float32(size) + eps))
        for i in range(size):
            normed[i] = line[i] * factor * weight[i]
        for g in range(scales.shape[1]):
            _quantize_group(normed, g * GROUP, target[row], scales[row], sums[row], g)


@njit(inline="always", fastmath=True)
def _exp(x):
    """exp(x) in a form that vectorizes; see `cpu_attention`."""
    scaled = min(max(x * np.float32(1.44269504088896341), np.float32(-126.0)), np.float32(126.0))
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


@compiled(fastmath=True, **_FLAGS)
def silu_mul_quantize(gate_up, target, scales, sums):
    """``silu(gate) * up`` of ``gate_up [n, 2 K]`` fp32, then `quantize`."""
    size = target.shape[1]
    product = np.empty(size, np.float32)
    one = np.float32(1.0)
    for row in range(gate_up.shape[0]):
        gate, up = gate_up[row, :size], gate_up[row, size:]
        for i in range(size):
            product[i] = gate[i] / (one + _exp(-gate[i])) * up[i]
        for g in range(scales.shape[1]):
            _quantize_group(product, g * GROUP, target[row], scales[row], sums[row], g)
