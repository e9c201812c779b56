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
from numba.core import types

from numba_kernels.formats import CHUNK, CHUNK_GROUPS, QUANT_GROUP, SCALE_BYTES
from numba_kernels.ir.target import LANES, LINE_BYTES, has_feature
from numba_kernels.ir.vec import F32, HALF, I8, I16, I32, Ptr, Var, Vec, for_range, shaped

_BYTE_LANES = 4 * LANES
_INTS = ir.VectorType(I32, LANES)
_MOST_CHAINS = 4  # products whose integer sums are kept in two registers each
_CHUNK_BYTES = {8: CHUNK, 4: CHUNK // 2}


def bits_of(dtype: Any) -> int:
    """8 or 4 for an array dtype of quantized rows, 0 for any other."""
    if not isinstance(dtype, types.Record):
        return 0
    return 8 if "q8" in dtype.fields else 4


@dataclass(frozen=True)
class Row:
    """A quantized row: where its values and its scales are."""

    values: Ptr
    scales: Ptr


@dataclass(frozen=True)
class Vector:
    """A quantized vector: where its values, scales (float32) and sums of values (int32) are."""

    values: Ptr
    scales: Ptr
    sums: Ptr


@dataclass(frozen=True)
class Chunk:
    """Up to 16 groups, one in each lane; loads and stores leave the lanes beyond them alone.

    index: the chunk's number; mask: a bit for each lane that holds a group, None where all do
    """

    index: Vec
    num_lanes: Vec
    mask: Vec | None

    def at(self, start: Ptr, bytes_a_chunk: int) -> Ptr:
        """Where this chunk's part is."""
        return start + self.index * bytes_a_chunk

    def step(self, start: Ptr, number: int) -> Ptr:
        """Where row `number` of 32-bit lanes from `start` on is."""
        return start + self.num_lanes * (4 * number)

    def load(self, at: Ptr, dtype: Any) -> Vec:
        """A vector of one item of `dtype` a lane."""
        if self.mask is None:
            return at.load(dtype, LANES, align=1)
        return at.load_masked(dtype, self.mask)

    def store(self, value: Vec, at: Ptr) -> None:
        """Write a float32 a lane."""
        if self.mask is None:
            at.store(value)
        else:
            at.store_masked(value, self.mask)

    def row_scales(self, row: Row) -> Vec:
        """The scales of a row's groups, as float32."""
        return self.load(self.at(row.scales, CHUNK_GROUPS * SCALE_BYTES), HALF).astype(F32)


def each_chunk(num_groups: Vec, body: Callable[[Chunk], None]) -> None:
    """Emit `body` for all whole chunks, and for what is left."""
    builder = num_groups.builder
    lanes, whole = num_groups.like(LANES), num_groups // CHUNK_GROUPS
    for_range(0, whole, 1, lambda index: body(Chunk(index, lanes, None)))
    rest = num_groups - whole * CHUNK_GROUPS
    with builder.if_then(rest.differs(0).value, likely=False):
        body(_last_chunk(whole, rest))


def one_chunk(num_groups: Vec, index: Vec, body: Callable[[Chunk], None]) -> None:
    """Emit `body` for chunk number `index`, which may be the last one and not whole."""
    left = num_groups - index * CHUNK_GROUPS
    is_whole = left >= CHUNK_GROUPS
    with num_groups.builder.if_else(is_whole.value, likely=True) as (whole, rest):
        with whole:
            body(Chunk(index, num_groups.like(LANES), None))
        with rest:
            body(_last_chunk(index, left))


def _last_chunk(index: Vec, num_lanes: Vec) -> Chunk:
    """A chunk of fewer groups than lanes."""
    lanes = Vec.of(index.builder, range(LANES), I32)
    return Chunk(index, num_lanes, lanes.below(num_lanes.astype(I32)))


def packed_steps(chunk: Chunk, bits: int, row: Row, number: int) -> list[Vec]:
    """Load step `number` of a row: 4 bytes a lane, int8 values (Q8) or nibbles in bytes (Q4).

    One vector for Q8, two for Q4: the quantized vector's steps 2 * number and 2 * number + 1.
    """
    loaded = chunk.load(chunk.step(chunk.at(row.values, _CHUNK_BYTES[bits]), number), I32)
    if bits == 8:
        return [loaded]
    return [loaded & 0x0F0F0F0F, loaded >> 4 & 0x0F0F0F0F]


def emit_products(
    bits: int, rows: list[Row], vectors: list[Vector], groups: Vec, ahead: Sequence[Row]
) -> list[Vec]:
    """Products of every row with every vector, row by row, as float32.

    sum over groups g of row_scale[g] * vector_scale[g] * (sum of integer products of the group)
    Rows in `ahead` are prefetched in step.
    """
    pairs = [(row, vector) for row in range(len(rows)) for vector in range(len(vectors))]
    zeros, zero_ints = (Vec.full(groups.builder, 0, dtype, LANES) for dtype in (F32, I32))
    totals = [Var(zeros) for _ in pairs]
    multiply = _Multiply(bits)

    def body(chunk: Chunk) -> None:
        for following in ahead:
            _prefetch_chunk(chunk, bits, following)
        starts = [multiply.start(chunk, vector) for vector in vectors]
        # Two chains of additions where registers allow: whole numbers add up the same either way.
        chains = 2 if len(pairs) <= _MOST_CHAINS else 1
        sums = [[starts[vector], zero_ints][:chains] for _, vector in pairs]
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
            scale = row_scales[row] * vector_scales[vector]
            count = sums[i][0] if chains == 1 else sums[i][0] + sums[i][1]
            totals[i].set(count.astype(F32).fma(scale, totals[i].get()))

    each_chunk(groups, body)
    return [total.get().sum() for total in totals]


def _vector_step(chunk: Chunk, vector: Vector, number: int) -> Vec:
    return chunk.load(chunk.step(chunk.at(vector.values, CHUNK), number), I32)


def _prefetch_chunk(chunk: Chunk, bits: int, row: Row) -> None:
    values = chunk.at(row.values, _CHUNK_BYTES[bits])
    for line in range(0, _CHUNK_BYTES[bits], LINE_BYTES):
        (values + line).prefetch()
    chunk.at(row.scales, CHUNK_GROUPS * SCALE_BYTES).prefetch()


class _Multiply:
    """sum[lane] += product of four bytes of weights with four of a vector, exactly.

    VNNI multiplies unsigned with signed bytes, so Q8's values get 128 added, and all sums start
    with what that, or Q4's offset of 8, adds too much.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.vnni = has_feature("avx512vnni") and has_feature("avx512f")
        self.avx2 = has_feature("avx2")
        self.offset = 8 if bits == 4 else 128 if self.vnni else 0

    def start(self, chunk: Chunk, vector: Vector) -> Vec:
        """The sums to begin with."""
        if not self.offset:
            return Vec.full(chunk.index.builder, 0, I32, LANES)
        return chunk.load(chunk.at(vector.sums, 4 * CHUNK_GROUPS), I32) * -self.offset

    def add(self, total: Vec, weights: Vec, values: Vec) -> Vec:
        """The sums with one step's products added."""
        if self.vnni:
            return self._vnni(total, weights, values)
        return (
            self._avx2(total, weights, values) if self.avx2 else self._plain(total, weights, values)
        )

    def _vnni(self, total: Vec, weights: Vec, values: Vec) -> Vec:
        if self.bits == 8:
            weights = weights ^ 0x80808080 - (1 << 32)
        name = "llvm.x86.avx512.vpdpbusd.512"
        return total.call(name, _INTS, total, weights.view(I8), values.view(I8))

    def _avx2(self, total: Vec, weights: Vec, values: Vec) -> Vec:
        """Bytes to pairs to fours; |weight| <= 127 and |value| <= 127, so no pair overflows."""
        unsigned, signed = weights.view(I8), values.view(I8)
        if self.bits == 8:
            negative = unsigned < 0
            signed = negative.where(-signed, signed)
            unsigned = negative.where(-unsigned, unsigned)
        low, high = (_avx2_half(unsigned, signed, half) for half in range(2))
        return total + low.take(range(LANES), high)

    def _plain(self, total: Vec, weights: Vec, values: Vec) -> Vec:
        for byte in range(4):
            total = total + signed_byte(weights, byte) * signed_byte(values, byte)
        return total


def _avx2_half(unsigned: Vec, signed: Vec, half: int) -> Vec:
    """Products of one half of the bytes, four added up in each lane."""
    width = _BYTE_LANES // 2
    lanes = range(half * width, (half + 1) * width)
    first, second = unsigned.take(lanes), signed.take(lanes)
    pairs = first.call("llvm.x86.avx2.pmadd.ub.sw", shaped(I16, width // 2), first, second)
    ones = Vec.full(first.builder, 1, I16, width // 2)
    return pairs.call("llvm.x86.avx2.pmadd.wd", shaped(I32, width // 4), pairs, ones)


def signed_byte(packed: Vec, byte: int) -> Vec:
    """Byte `byte` of every lane as a signed number."""
    return (packed << 24 - 8 * byte if byte < 3 else packed).shifted_right(24)


class ScaledSum:
    """out += sum of factor * row, row after row; `out` (float32) is in lane order.

    In lane order item i of group g of a chunk of n groups stands at n * i + g of the chunk.
    """

    def __init__(self, bits: int, rows: list[Row], factors: list[Vec], out: Ptr) -> None:
        self.bits = bits
        self.rows = rows
        self.out = out
        unit = 2.0**-24 if bits == 8 else 1.0  # of what `_byte_weights` gives
        self.factors = [(factor * unit).spread(LANES) for factor in factors]

    def emit(self, groups: Vec, ahead: list[Row]) -> None:
        """All columns; rows in `ahead` are prefetched in step."""

        def body(chunk: Chunk) -> None:
            for row in ahead:
                _prefetch_chunk(chunk, self.bits, row)
            self._add(chunk)

        each_chunk(groups, body)

    def emit_chunk(self, groups: Vec, index: Vec) -> None:
        """The columns of one chunk."""
        one_chunk(groups, index, self._add)

    def _add(self, chunk: Chunk) -> None:
        bits = self.bits
        scales = [
            chunk.row_scales(row) * factor
            for row, factor in zip(self.rows, self.factors, strict=True)
        ]
        target = chunk.at(self.out, 4 * CHUNK)
        for number in range(QUANT_GROUP * bits // 8 // 4):
            at = [chunk.step(chunk.at(row.values, _CHUNK_BYTES[bits]), number) for row in self.rows]
            steps = [chunk.load(place, I32) for place in at]
            for place, weights in _step_weights(bits, number):
                cell = chunk.step(target, place)
                total = chunk.load(cell, F32)
                for step, scale in zip(steps, scales, strict=True):
                    total = weights(step).fma(scale, total)
                chunk.store(total, cell)


def _step_weights(bits: int, number: int) -> list[tuple[int, Callable[[Vec], Vec]]]:
    """The places in a group of what step `number` holds, each with what takes it out of a lane."""
    if bits == 8:
        return [(4 * number + byte, partial(_byte_weights, byte)) for byte in range(4)]
    return [
        (8 * number + 4 * half + byte, partial(_nibble_weights, 2 * byte + half))
        for byte in range(4)
        for half in range(2)
    ]


def _byte_weights(byte: int, step: Vec) -> Vec:
    """Byte `byte` of every lane, times 2^24: moved to the lane's top by one shuffle."""
    zero = _BYTE_LANES  # a place in the second operand, all zeros
    places = [place for lane in range(LANES) for place in (zero, zero, zero, 4 * lane + byte)]
    zeros = Vec.full(step.builder, 0, I8, _BYTE_LANES)
    return step.view(I8).take(places, zeros).view(I32).astype(F32)


def _nibble_weights(number: int, step: Vec) -> Vec:
    """Nibble `number` of every lane, less 8; AVX-512 looks it up in a register."""
    shifted = step >> 4 * number if number else step
    if has_feature("avx512f"):
        table = Vec.of(step.builder, [value - 8 for value in range(16)], F32)
        name = "llvm.x86.avx512.permvar.sf.512"  # which reads four bits of a lane
        return table.call(name, table.value.type, table, shifted)
    return ((shifted & 0xF) - 8).astype(F32)
