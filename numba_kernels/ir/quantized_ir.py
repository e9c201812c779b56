"""Vector IR for quantized rows: their chunks, and integer products with quantized vectors.

A chunk of 16 groups has one group in each 32-bit lane (`numba_kernels.formats`), so four bytes of
every group are multiplied and added at once, and scales are applied once for 32 weights. Integer
sums are exact; float sums run chunk by chunk, so a product does not depend on how many others are
computed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import types

from numba_kernels.formats import (
    CHUNK,
    CHUNK_GROUPS,
    QUANT_GROUP,
    ROW_FORMATS,
    SCALE_BYTES,
    RowFormat,
)
from numba_kernels.ir.target import LANES, LINE_BYTES, has_feature
from numba_kernels.ir.vec import F32, HALF, I8, I16, I32, Ptr, Var, Vec, for_range, shaped

BYTE_LANES = 4 * LANES
_INTS = ir.VectorType(I32, LANES)
_MOST_CHAINS = 4  # products whose integer sums are kept in two registers each
CHUNK_BYTES = {8: CHUNK, 4: CHUNK // 2}
FACTOR_BYTES = CHUNK_GROUPS * SCALE_BYTES  # of a chunk's scales, or minima
_BY_NAME = {dtype.names: row_format for dtype, row_format in ROW_FORMATS.items()}


def format_of(dtype: Any) -> RowFormat | None:
    """The format of an array dtype of quantized rows in compiled code, None for any other."""
    return _BY_NAME[tuple(dtype.fields)] if isinstance(dtype, types.Record) else None


@dataclass(frozen=True)
class Row:
    """A quantized row: where its values, its scales and its minima, if it has any, are."""

    values: Ptr
    scales: Ptr
    minima: Ptr | None = None

    @property
    def factors(self) -> list[Ptr]:
        """Where the numbers are that a group has one of."""
        return [self.scales] if self.minima is None else [self.scales, self.minima]


@dataclass(frozen=True)
class Vector:
    """A quantized vector: where its values, scales (float32) and sums of values (int32) are."""

    values: Ptr
    scales: Ptr
    sums: Ptr


@dataclass(frozen=True)
class Chunk:
    """Up to 16 groups, one in each lane; loads leave the lanes beyond them alone.

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

    def factors(self, start: Ptr) -> Vec:
        """The scales, or minima, of a row's groups, as float32."""
        at = self.at(start, FACTOR_BYTES)
        if self.mask is None or has_feature("avx512bw"):
            return self.load(at, HALF).astype(F32)
        return self._few_halves(at).astype(F32)

    def _few_halves(self, at: Ptr) -> Vec:
        """A float16 a lane by words of two, where the CPU has masked loads of words alone."""
        places = Vec.of(at.builder, range(LANES // 2), I32)
        whole = (self.num_lanes >> 1).astype(I32)
        words = at.load_masked(I32, places.below(whole))
        last = (at + (self.num_lanes * 2 + -2)).load(I16, align=1).astype(I32, signed=False)
        is_odd = (self.num_lanes & 1).differs(0)
        return places.equals(is_odd.where(whole, -1)).where(last, words).view(HALF)


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
    """Load step `number` of a row: 4 bytes a lane, int8 values or nibbles in bytes.

    One vector of 8 bits, two of 4: the quantized vector's steps 2 * number and 2 * number + 1.
    """
    loaded = chunk.load(chunk.step(chunk.at(row.values, CHUNK_BYTES[bits]), number), I32)
    if bits == 8:
        return [loaded]
    return [loaded & 0x0F0F0F0F, loaded >> 4 & 0x0F0F0F0F]


def emit_products(
    row_format: RowFormat,
    rows: list[Row],
    vectors: list[Vector],
    groups: Vec,
    ahead: Sequence[Row],
) -> list[Vec]:
    """Products of every row with every vector, row by row, as float32.

    sum over groups g of row_scale[g] * vector_scale[g] * (sum of integer products of the group)
                         + row_min[g] * vector_scale[g] * (sum of the vector's values)
    Rows in `ahead` are prefetched in step.
    """
    bits = row_format.bits
    pairs = [(row, vector) for row in range(len(rows)) for vector in range(len(vectors))]
    zeros, zero_ints = (Vec.full(groups.builder, 0, dtype, LANES) for dtype in (F32, I32))
    totals = [Var(zeros) for _ in pairs]
    multiply = _Multiply(row_format)

    def body(chunk: Chunk) -> None:
        for following in ahead:
            prefetch_chunk(chunk, bits, following)
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
        row_scales = [chunk.factors(row.scales) for row in rows]
        vector_scales = [
            chunk.load(chunk.at(vector.scales, 4 * CHUNK_GROUPS), F32) for vector in vectors
        ]
        for i, (row, vector) in enumerate(pairs):
            scale = row_scales[row] * vector_scales[vector]
            count = sums[i][0] if chains == 1 else sums[i][0] + sums[i][1]
            totals[i].set(count.astype(F32).fma(scale, totals[i].get()))
        if not row_format.has_min:
            return
        minima = [chunk.factors(row.minima) for row in rows if row.minima is not None]
        vector_sums = [
            chunk.load(chunk.at(vector.sums, 4 * CHUNK_GROUPS), I32).astype(F32) * scale
            for vector, scale in zip(vectors, vector_scales, strict=True)
        ]
        for i, (row, vector) in enumerate(pairs):
            totals[i].set(minima[row].fma(vector_sums[vector], totals[i].get()))

    each_chunk(groups, body)
    return [total.get().sum() for total in totals]


def _vector_step(chunk: Chunk, vector: Vector, number: int) -> Vec:
    return chunk.load(chunk.step(chunk.at(vector.values, CHUNK), number), I32)


def prefetch_chunk(chunk: Chunk, bits: int, row: Row) -> None:
    """Ask for a row's part of a chunk."""
    values = chunk.at(row.values, CHUNK_BYTES[bits])
    for line in range(0, CHUNK_BYTES[bits], LINE_BYTES):
        (values + line).prefetch()
    for factors in row.factors:
        chunk.at(factors, FACTOR_BYTES).prefetch()


class _Multiply:
    """sum[lane] += product of four bytes of weights with four of a vector, exactly.

    VNNI multiplies unsigned with signed bytes, so Q8's values get 128 added, and all sums start
    with what that, or Q4's offset of 8, adds too much. Nibbles beside a minimum have no offset.
    """

    def __init__(self, row_format: RowFormat) -> None:
        self.bits = row_format.bits
        self.vnni = has_feature("avx512vnni") and has_feature("avx512f")
        self.avx2 = has_feature("avx2")
        self.offset = nibble_offset(row_format) if self.bits == 4 else 128 if self.vnni else 0

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
    width = BYTE_LANES // 2
    lanes = range(half * width, (half + 1) * width)
    first, second = unsigned.take(lanes), signed.take(lanes)
    pairs = first.call("llvm.x86.avx2.pmadd.ub.sw", shaped(I16, width // 2), first, second)
    ones = Vec.full(first.builder, 1, I16, width // 2)
    return pairs.call("llvm.x86.avx2.pmadd.wd", shaped(I32, width // 4), pairs, ones)


def nibble_offset(row_format: RowFormat) -> int:
    """What a nibble is more than its value."""
    return 0 if row_format.has_min else 8


def signed_byte(packed: Vec, byte: int) -> Vec:
    """Byte `byte` of every lane as a signed number."""
    return (packed << 24 - 8 * byte if byte < 3 else packed).shifted_right(24)
