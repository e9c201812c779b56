"""Vector IR for quantized rows: integer products with quantized vectors, and scaled sums.

A chunk of 16 groups has one group in each 32-bit lane (`numba_kernels.formats`), so four bytes of
every group are multiplied and added at once, and scales are applied once for 32 weights. Integer
sums are exact; float sums run chunk by chunk, so a product does not depend on how many others are
computed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from numba_kernels.formats import CHUNK, CHUNK_GROUPS, QUANT_GROUP, SCALE_BYTES
from numba_kernels.ir.llvm_vectors import (
    BYTES,
    F32,
    FLOATS,
    HALF,
    I8,
    I16,
    I32,
    I64,
    LANES,
    LINE_BYTES,
    ZEROS,
    counted_loop,
    fma,
    has_feature,
    item_pointer,
    new_cell,
    prefetch_line,
    splat,
    sum_cells,
)

INTS = ir.VectorType(I32, LANES)
_BYTE_LANES = 4 * LANES
_MOST_CHAINS = 4  # products whose integer sums are kept in two registers each
_CHUNK_BYTES = {8: CHUNK, 4: CHUNK // 2}


def bits_of(dtype: Any) -> int:
    """8 or 4 for an array dtype of quantized rows, 0 for any other."""
    if not isinstance(dtype, types.Record):
        return 0
    return 8 if "q8" in dtype.fields else 4


@dataclass(frozen=True)
class Row:
    """A quantized row: i8* of its values and of its scales."""

    values: Any
    scales: Any


@dataclass(frozen=True)
class Vector:
    """A quantized vector: i8* of its values, scales (float32) and sums of values (int32)."""

    values: Any
    scales: Any
    sums: Any


class Chunk:
    """Up to 16 groups, one in each lane; loads and stores leave the lanes beyond them alone."""

    def __init__(self, builder: Any, index: Any, num_lanes: Any, mask: Any) -> None:
        """Chunk number `index` (i64); `mask` is None where all lanes hold a group."""
        self.builder = builder
        self.index = index
        self.num_lanes = num_lanes
        self.mask = mask

    def at(self, pointer: Any, bytes_a_chunk: int) -> Any:
        """i8* of this chunk's part."""
        return item_pointer(self.builder, pointer, self.index, bytes_a_chunk)

    def step(self, pointer: Any, number: int) -> Any:
        """i8* of row `number` of 32-bit lanes from `pointer` on."""
        return item_pointer(self.builder, pointer, self.num_lanes, 4 * number)

    def load(self, pointer: Any, element: Any) -> Any:
        """A vector of one `element` a lane."""
        kind = ir.VectorType(element, LANES)
        typed = self.builder.bitcast(pointer, kind.as_pointer())
        if self.mask is None:
            return self.builder.load(typed, align=1, typ=kind)
        name = {F32: "f32", HALF: "f16", I32: "i32"}[element]
        signature = ir.FunctionType(kind, [kind.as_pointer(), I32, self.mask.type, kind])
        load = cgutils.get_or_insert_function(
            self.builder.module, signature, f"llvm.masked.load.v{LANES}{name}.p0"
        )
        nothing = ir.Constant(kind, None)
        return self.builder.call(load, [typed, I32(1), self.mask, nothing])

    def store(self, value: Any, pointer: Any) -> None:
        """Write a float32 a lane."""
        typed = self.builder.bitcast(pointer, FLOATS.as_pointer())
        if self.mask is None:
            self.builder.store(value, typed, align=4)
            return
        signature = ir.FunctionType(
            ir.VoidType(), [FLOATS, FLOATS.as_pointer(), I32, self.mask.type]
        )
        store = cgutils.get_or_insert_function(
            self.builder.module, signature, f"llvm.masked.store.v{LANES}f32.p0"
        )
        self.builder.call(store, [value, typed, I32(4), self.mask])

    def row_scales(self, row: Row) -> Any:
        """The scales of a row's groups, as float32."""
        halves = self.load(self.at(row.scales, CHUNK_GROUPS * SCALE_BYTES), HALF)
        return self.builder.fpext(halves, FLOATS)


def each_chunk(builder: Any, num_groups: Any, body: Callable[[Chunk], None]) -> None:
    """Emit `body` for all whole chunks, and for what is left."""
    whole = builder.udiv(num_groups, I64(CHUNK_GROUPS))
    counted_loop(
        builder, I64(0), whole, 1, lambda index: body(Chunk(builder, index, I64(LANES), None))
    )
    rest = builder.sub(num_groups, builder.mul(whole, I64(CHUNK_GROUPS)))
    with builder.if_then(builder.icmp_unsigned("!=", rest, I64(0)), likely=False):
        body(_last_chunk(builder, whole, rest))


def one_chunk(builder: Any, num_groups: Any, index: Any, body: Callable[[Chunk], None]) -> None:
    """Emit `body` for chunk number `index`, which may be the last one and not whole."""
    left = builder.sub(num_groups, builder.mul(index, I64(CHUNK_GROUPS)))
    is_whole = builder.icmp_signed(">=", left, I64(CHUNK_GROUPS))
    with builder.if_else(is_whole, likely=True) as (whole, rest):
        with whole:
            body(Chunk(builder, index, I64(LANES), None))
        with rest:
            body(_last_chunk(builder, index, left))


def _last_chunk(builder: Any, index: Any, num_lanes: Any) -> Chunk:
    """A chunk of fewer groups than lanes."""
    lanes = ir.Constant(INTS, [I32(lane) for lane in range(LANES)])
    limit = splat_int(builder, builder.trunc(num_lanes, I32))
    return Chunk(builder, index, num_lanes, builder.icmp_unsigned("<", lanes, limit))


def splat_int(builder: Any, value: Any) -> Any:
    """A vector with the i32 `value` in every lane."""
    undefined = ir.Constant(INTS, ir.Undefined)
    one = builder.insert_element(undefined, value, I32(0))
    return builder.shuffle_vector(one, undefined, ir.Constant(INTS, [I32(0)] * LANES))


def repeated(value: int) -> Any:
    """A constant vector of one i32."""
    return ir.Constant(INTS, [I32(value)] * LANES)


def packed_steps(chunk: Chunk, bits: int, row: Row, number: int) -> list[Any]:
    """Load step `number` of a row: 4 bytes a lane, int8 values (Q8) or nibbles in bytes (Q4).

    One vector for Q8, two for Q4: the quantized vector's steps 2 * number and 2 * number + 1.
    """
    builder = chunk.builder
    loaded = chunk.load(chunk.step(chunk.at(row.values, _CHUNK_BYTES[bits]), number), I32)
    if bits == 8:
        return [loaded]
    low = repeated(0x0F0F0F0F)
    return [builder.and_(loaded, low), builder.and_(builder.lshr(loaded, repeated(4)), low)]


def emit_products(
    builder: Any,
    bits: int,
    rows: list[Row],
    vectors: list[Vector],
    groups: Any,
    ahead: Sequence[Row],
) -> list[Any]:
    """Products of every row with every vector, row by row, as float32.

    sum over groups g of row_scale[g] * vector_scale[g] * (sum of integer products of the group)
    Rows in `ahead` are prefetched in step.
    """
    pairs = [(row, vector) for row in range(len(rows)) for vector in range(len(vectors))]
    totals = [new_cell(builder, ZEROS) for _ in pairs]
    multiply = _Multiply(builder, bits)

    def body(chunk: Chunk) -> None:
        for following in ahead:
            _prefetch_chunk(chunk, bits, following)
        starts = [multiply.start(chunk, vector) for vector in vectors]
        # Two chains of additions where registers allow: whole numbers add up the same either way.
        chains = 2 if len(pairs) <= _MOST_CHAINS else 1
        sums = [[starts[vector], ir.Constant(INTS, None)][:chains] for _, vector in pairs]
        for number in range(QUANT_GROUP * bits // 8 // 4):
            weights = [packed_steps(chunk, bits, row, number) for row in rows]
            per_load = len(weights[0])
            for part in range(per_load):
                inputs = [
                    _vector_step(chunk, vector, number * per_load + part) for vector in vectors
                ]
                turn = (number * per_load + part) % chains
                for i, (row, vector) in enumerate(pairs):
                    sums[i][turn] = multiply.add(sums[i][turn], weights[row][part], inputs[vector])
        row_scales = [chunk.row_scales(row) for row in rows]
        vector_scales = [
            chunk.load(chunk.at(vector.scales, 4 * CHUNK_GROUPS), F32) for vector in vectors
        ]
        for i, (row, vector) in enumerate(pairs):
            scale = builder.fmul(row_scales[row], vector_scales[vector])
            count = sums[i][0] if chains == 1 else builder.add(*sums[i])
            total = builder.load(totals[i], typ=FLOATS)
            builder.store(fma(builder, builder.sitofp(count, FLOATS), scale, total), totals[i])

    each_chunk(builder, groups, body)
    return [sum_cells(builder, [total]) for total in totals]


def _vector_step(chunk: Chunk, vector: Vector, number: int) -> Any:
    return chunk.load(chunk.step(chunk.at(vector.values, CHUNK), number), I32)


def _prefetch_chunk(chunk: Chunk, bits: int, row: Row) -> None:
    builder = chunk.builder
    values = chunk.at(row.values, _CHUNK_BYTES[bits])
    for line in range(0, _CHUNK_BYTES[bits], LINE_BYTES):
        prefetch_line(builder, values, line)
    prefetch_line(builder, chunk.at(row.scales, CHUNK_GROUPS * SCALE_BYTES), 0)


class _Multiply:
    """sum[lane] += product of four bytes of weights with four of a vector, exactly.

    VNNI multiplies unsigned with signed bytes, so Q8's values get 128 added, and all sums start
    with what that, or Q4's offset of 8, adds too much.
    """

    def __init__(self, builder: Any, bits: int) -> None:
        self.builder = builder
        self.bits = bits
        self.vnni = has_feature("avx512vnni") and has_feature("avx512f")
        self.avx2 = has_feature("avx2")
        self.offset = 8 if bits == 4 else 128 if self.vnni else 0

    def start(self, chunk: Chunk, vector: Vector) -> Any:
        """The sums to begin with."""
        if not self.offset:
            return ir.Constant(INTS, None)
        sums = chunk.load(chunk.at(vector.sums, 4 * CHUNK_GROUPS), I32)
        return self.builder.mul(sums, repeated(-self.offset))

    def add(self, total: Any, weights: Any, values: Any) -> Any:
        """The sums with one step's products added."""
        if self.vnni:
            return self._vnni(total, weights, values)
        return (
            self._avx2(total, weights, values) if self.avx2 else self._plain(total, weights, values)
        )

    def _vnni(self, total: Any, weights: Any, values: Any) -> Any:
        builder = self.builder
        if self.bits == 8:
            weights = builder.xor(weights, repeated(0x80808080 - (1 << 32)))
        kind = ir.VectorType(I8, _BYTE_LANES)
        signature = ir.FunctionType(INTS, [INTS, kind, kind])
        function = cgutils.get_or_insert_function(
            builder.module, signature, "llvm.x86.avx512.vpdpbusd.512"
        )
        return builder.call(
            function, [total, builder.bitcast(weights, kind), builder.bitcast(values, kind)]
        )

    def _avx2(self, total: Any, weights: Any, values: Any) -> Any:
        """Bytes to pairs to fours; |weight| <= 127 and |value| <= 127, so no pair overflows."""
        builder = self.builder
        bytes_kind = ir.VectorType(I8, _BYTE_LANES)
        unsigned = builder.bitcast(weights, bytes_kind)
        signed = builder.bitcast(values, bytes_kind)
        if self.bits == 8:
            zeros = ir.Constant(bytes_kind, None)
            negative = builder.icmp_signed("<", unsigned, zeros)
            signed = builder.select(negative, builder.sub(zeros, signed), signed)
            unsigned = builder.select(negative, builder.sub(zeros, unsigned), unsigned)
        halves = [self._avx2_half(unsigned, signed, half) for half in range(2)]
        joined = builder.shuffle_vector(
            halves[0], halves[1], ir.Constant(INTS, [I32(lane) for lane in range(LANES)])
        )
        return builder.add(total, joined)

    def _avx2_half(self, unsigned: Any, signed: Any, half: int) -> Any:
        builder = self.builder
        width = _BYTE_LANES // 2
        lanes = ir.Constant(
            ir.VectorType(I32, width), [I32(half * width + lane) for lane in range(width)]
        )
        parts = [builder.shuffle_vector(bytes_, bytes_, lanes) for bytes_ in (unsigned, signed)]
        small, pairs = ir.VectorType(I8, width), ir.VectorType(I16, width // 2)
        ints = ir.VectorType(I32, width // 4)
        to_pairs = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(pairs, [small, small]), "llvm.x86.avx2.pmadd.ub.sw"
        )
        to_fours = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ints, [pairs, pairs]), "llvm.x86.avx2.pmadd.wd"
        )
        ones = ir.Constant(pairs, [I16(1)] * (width // 2))
        return builder.call(to_fours, [builder.call(to_pairs, parts), ones])

    def _plain(self, total: Any, weights: Any, values: Any) -> Any:
        builder = self.builder
        for byte in range(4):
            product = builder.mul(
                signed_byte(builder, weights, byte), signed_byte(builder, values, byte)
            )
            total = builder.add(total, product)
        return total


def signed_byte(builder: Any, packed: Any, byte: int) -> Any:
    """Byte `byte` of every lane as a signed number."""
    if byte < 3:
        packed = builder.shl(packed, repeated(24 - 8 * byte))
    return builder.ashr(packed, repeated(24))


class ScaledSum:
    """out += sum of factor * row, row after row; `out` (i8*, float32) is in lane order.

    In lane order item i of group g of a chunk of n groups stands at n * i + g of the chunk.
    """

    def __init__(
        self, builder: Any, bits: int, rows: list[Row], factors: list[Any], out: Any
    ) -> None:
        self.builder = builder
        self.bits = bits
        self.rows = rows
        self.out = out
        unit = F32(2.0**-24 if bits == 8 else 1.0)  # of what `_byte_weights` gives
        self.factors = [splat(builder, builder.fmul(factor, unit)) for factor in factors]

    def emit(self, groups: Any, ahead: list[Row]) -> None:
        """All columns; rows in `ahead` are prefetched in step."""

        def body(chunk: Chunk) -> None:
            for row in ahead:
                _prefetch_chunk(chunk, self.bits, row)
            self._add(chunk)

        each_chunk(self.builder, groups, body)

    def emit_chunk(self, groups: Any, index: Any) -> None:
        """The columns of one chunk."""
        one_chunk(self.builder, groups, index, self._add)

    def _add(self, chunk: Chunk) -> None:
        builder, bits = self.builder, self.bits
        scales = [
            builder.fmul(chunk.row_scales(row), factor)
            for row, factor in zip(self.rows, self.factors, strict=True)
        ]
        target = chunk.at(self.out, 4 * CHUNK)
        for number in range(QUANT_GROUP * bits // 8 // 4):
            at = [chunk.step(chunk.at(row.values, _CHUNK_BYTES[bits]), number) for row in self.rows]
            steps = [chunk.load(pointer, I32) for pointer in at]
            for place, weights in _step_weights(builder, bits, number):
                cell = chunk.step(target, place)
                total = chunk.load(cell, F32)
                for step, scale in zip(steps, scales, strict=True):
                    total = fma(builder, weights(step), scale, total)
                chunk.store(total, cell)


def _step_weights(builder: Any, bits: int, number: int) -> list[tuple[int, Callable[[Any], Any]]]:
    """The places in a group of what step `number` holds, each with what takes it out of a lane."""
    if bits == 8:
        return [(4 * number + byte, partial(_byte_weights, builder, byte)) for byte in range(4)]
    return [
        (8 * number + 4 * half + byte, partial(_nibble_weights, builder, 2 * byte + half))
        for byte in range(4)
        for half in range(2)
    ]


def _byte_weights(builder: Any, byte: int, step: Any) -> Any:
    """Byte `byte` of every lane, times 2^24: moved to the lane's top by one shuffle."""
    kind = ir.VectorType(I8, _BYTE_LANES)
    zero = _BYTE_LANES  # an index into the second operand, all zeros
    places = [place for lane in range(LANES) for place in (zero, zero, zero, 4 * lane + byte)]
    indices = ir.Constant(ir.VectorType(I32, _BYTE_LANES), [I32(place) for place in places])
    top = builder.shuffle_vector(builder.bitcast(step, kind), ir.Constant(kind, None), indices)
    return builder.sitofp(builder.bitcast(top, INTS), FLOATS)


def _nibble_weights(builder: Any, number: int, step: Any) -> Any:
    """Nibble `number` of every lane, less 8; AVX-512 looks it up in a register."""
    shifted = builder.lshr(step, repeated(4 * number)) if number else step
    if has_feature("avx512f"):
        table = ir.Constant(FLOATS, [F32(value - 8) for value in range(16)])
        signature = ir.FunctionType(FLOATS, [FLOATS, INTS])
        look_up = cgutils.get_or_insert_function(
            builder.module, signature, "llvm.x86.avx512.permvar.sf.512"
        )
        return builder.call(look_up, [table, shifted])  # which reads four bits of a lane
    nibble = builder.and_(shifted, repeated(0xF))
    return builder.sitofp(builder.sub(nibble, repeated(8)), FLOATS)


def row_of(builder: Any, bits: int, pointer: Any, groups: Any) -> Row:
    """The parts of a row that starts at `pointer` (i8*)."""
    scales = item_pointer(builder, pointer, groups, QUANT_GROUP * bits // 8)
    return Row(builder.bitcast(pointer, BYTES), scales)
