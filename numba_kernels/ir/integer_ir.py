"""Vector IR for products of quantized rows with quantized vectors: exact within a group.

Four bytes of every group are multiplied and added at once, and scales are applied once for 32
weights. Integer sums are exact; float sums run chunk by chunk, so a product does not depend on how
many others are computed beside it.

A single long row is read in the order of its bytes, values first and their scales after them: two
or three streams a row reach half of what memory gives.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba.core import cgutils

from numba_kernels.formats import CHUNK, CHUNK_GROUPS, RowFormat
from numba_kernels.ir.quantized_ir import (
    BYTE_LANES,
    CHUNK_BYTES,
    INTS,
    PACKED_STEPS,
    Chunk,
    Rest,
    Row,
    Vector,
    joined,
    packed_steps,
    row_bytes,
    signed_byte,
    unpacked,
    value_offset,
    with_chunks,
)
from numba_kernels.ir.target import LANES, LINE_BYTES, has_feature
from numba_kernels.ir.vec import F32, I8, I16, I32, Ptr, Var, Vec, for_range, shaped

_MOST_CHAINS = 4  # products whose integer sums are kept in two registers each
_FEW_CHUNKS = 4  # of a row that is hardly longer than what is read at once
_STRETCH = 16  # chunks of a longer row whose values are read before their scales
_NEAR_BYTES = 1024  # of a row, between what is read and what the second-level cache is asked for
_PART_BYTES = (
    CHUNK // 2
)  # of a vector: values that meet low nibbles, then those that meet high ones


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
    return _Products(row_format, rows, vectors, groups).emit(ahead)


class _Products:
    def __init__(
        self, row_format: RowFormat, rows: list[Row], vectors: list[Vector], groups: Vec
    ) -> None:
        self.format = row_format
        self.bits = row_format.bits
        self.rows = rows
        self.vectors = vectors
        self.groups = groups
        self.builder = groups.builder
        self.pairs = [(row, vector) for row in range(len(rows)) for vector in range(len(vectors))]
        self.multiply = ByteProducts(row_format)
        self.num_halves = 2 if row_format.has_halves else 1
        self.num_counts = len(self.pairs) * self.num_halves  # of a chunk
        zeros = Vec.full(self.builder, 0, F32, LANES)
        self.totals = [Var(zeros) for _ in self.pairs]

    def emit(self, ahead: Sequence[Row]) -> list[Vec]:
        """The products; rows in `ahead` are prefetched in step."""

        def rest_line(at: Vec) -> None:
            for row in ahead:
                (row.values + at).prefetch(2)

        def whole(number: Vec) -> None:
            if len(self.rows) > 1:
                self._by_chunks(number, ahead)
            else:
                is_short = number.below(_FEW_CHUNKS)
                with self.builder.if_else(is_short.value) as (few, many):
                    with few:
                        self._by_chunks(number, ahead)
                    with many:
                        self._by_stretches(number, ahead)
            if ahead:
                begin = number * CHUNK_BYTES[self.bits]
                for_range(begin, row_bytes(self.format, self.groups), LINE_BYTES, rest_line)

        with_chunks(self.groups, self.bits, whole, self._add_rest)
        return [total.get().sum() for total in self.totals]

    def _chunk(self, index: Vec) -> Chunk:
        return Chunk(index, index.like(LANES), None)

    def _prefetch(self, rows: Sequence[Row], index: Vec, offset: int) -> None:
        """Ask for the values of a chunk of each row, `offset` bytes on."""
        num_bytes = CHUNK_BYTES[self.bits]
        for row in rows:
            for line in range(offset, offset + num_bytes, LINE_BYTES):
                (row.values + index * num_bytes + line).prefetch(2)

    def _by_chunks(self, number: Vec, ahead: Sequence[Row]) -> None:
        """All whole chunks, each with its scales at once."""

        def chunk(index: Vec) -> None:
            self._prefetch(ahead, index, 0)
            self._add_scaled(self._chunk(index), self._counts(self._chunk(index)))

        for_range(0, number, 1, chunk)

    def _by_stretches(self, number: Vec, ahead: Sequence[Row]) -> None:
        """All whole chunks, the values of several, then their scales."""
        size = 4 * LANES * self.num_counts
        kind = ir.ArrayType(INTS, _STRETCH * self.num_counts)
        waiting = Ptr(self.builder, cgutils.alloca_once(self.builder, kind, zfill=False))

        def stretch(first: Vec) -> None:
            end = (first + _STRETCH).minimum(number)

            def places(index: Vec) -> list[Ptr]:
                at = waiting + (index - first) * size
                return [at + 4 * LANES * i for i in range(self.num_counts)]

            def values(index: Vec) -> None:
                self._prefetch(ahead or self.rows, index, 0 if ahead else _NEAR_BYTES)
                counts = self._counts(self._chunk(index))
                for at, count in zip(places(index), counts, strict=True):
                    at.store(count)

            def scales(index: Vec) -> None:
                counts = [at.load(I32, LANES) for at in places(index)]
                self._add_scaled(self._chunk(index), counts)

            for_range(first, end, 1, values)
            for_range(first, end, 1, scales)

        for_range(0, number, _STRETCH, stretch)

    def _counts(self, chunk: Chunk) -> list[Vec]:
        """The integer sums of a whole chunk, of each pair and there of each half of a group."""
        # Two chains of additions where registers allow: whole numbers add up the same either way.
        num_chains = 2 if self.num_counts <= _MOST_CHAINS else 1
        empty = self.multiply.empty(self.builder)
        chains = [[empty] * num_chains for _ in range(self.num_counts)]
        added = [empty] * (len(self.vectors) * self.num_halves)
        for number in range(PACKED_STEPS[self.bits]):
            weights = [packed_steps(chunk, self.bits, row, number) for row in self.rows]
            for part in range(len(weights[0])):
                inputs = [
                    self._values(chunk, vector, part, 4 * LANES * number).load(I32, LANES, align=1)
                    for vector in self.vectors
                ]
                half, turn = part % self.num_halves, (number + part) % num_chains
                for pair, (row, vector) in enumerate(self.pairs):
                    sums = chains[pair * self.num_halves + half]
                    sums[turn] = self.multiply.add(sums[turn], weights[row][part], inputs[vector])
                for vector, values in enumerate(inputs):
                    place = vector * self.num_halves + half
                    added[place] = self.multiply.add_offset(added[place], values)
        return self._without(added, [self.multiply.end(sums) for sums in chains])

    def _without(self, added: list[Vec], counts: list[Vec]) -> list[Vec]:
        """The counts less what each vector's half has too much in them."""
        if not self.multiply.half_offset:
            return counts
        return [
            count - added[self.pairs[place // self.num_halves][1] * self.num_halves + half]
            for place, count in enumerate(counts)
            for half in [place % self.num_halves]
        ]

    def _values(self, chunk: Chunk, vector: Vector, part: int, offset: int) -> Ptr:
        """Where values of a vector are: those that meet low nibbles, or all (part 0), or high."""
        first = chunk.at(vector.values, CHUNK)
        return first + chunk.num_lanes * (part * _PART_BYTES // LANES) + offset

    def _add_scaled(self, chunk: Chunk, counts: list[Vec]) -> None:
        """Add a chunk's integer sums to the totals, with its scales and minima."""
        row_scales = [chunk.scales(row) for row in self.rows]
        scales = [
            chunk.load(chunk.at(vector.scales, 4 * CHUNK_GROUPS), F32) for vector in self.vectors
        ]
        sums: list[Vec] = []
        if self.multiply.offset or self.format.has_min:
            sums = [
                chunk.load(chunk.at(vector.sums, 4 * CHUNK_GROUPS), I32) for vector in self.vectors
            ]
        for place, count in enumerate(counts):
            pair, half = divmod(place, self.num_halves)
            row, vector = self.pairs[pair]
            if self.multiply.offset:
                count = count - (sums[vector] << self.multiply.offset.bit_length() - 1)
            scale = row_scales[row][half] * scales[vector]
            self.totals[pair].set(count.astype(F32).fma(scale, self.totals[pair].get()))
        if not self.format.has_min:
            return
        minima = [chunk.factors(row.minima) for row in self.rows if row.minima is not None]
        scaled = [count.astype(F32) * scale for count, scale in zip(sums, scales, strict=True)]
        for total, (row, vector) in zip(self.totals, self.pairs, strict=True):
            total.set(minima[row].fma(scaled[vector], total.get()))

    def _add_rest(self, rest: Rest) -> None:
        """The last chunk, several of its steps at a time."""
        empty = self.multiply.empty(self.builder)
        sums, chunk = [Var(empty) for _ in range(self.num_counts)], rest.chunk
        added = [Var(empty) for _ in range(len(self.vectors) * self.num_halves)]
        starts = [chunk.at(row.values, CHUNK_BYTES[self.bits]) for row in self.rows]

        def add(index: Vec, weights: list[list[Vec]]) -> None:
            for part in range(len(weights[0])):
                inputs = [
                    rest.load(self._values(chunk, vector, part, 0), index)
                    for vector in self.vectors
                ]
                half = part % self.num_halves
                for pair, (row, vector) in enumerate(self.pairs):
                    total = sums[pair * self.num_halves + half]
                    total.set(self.multiply.add(total.get(), weights[row][part], inputs[vector]))
                for vector, values in enumerate(inputs):
                    total = added[vector * self.num_halves + half]
                    total.set(self.multiply.add_offset(total.get(), values))

        def turn(index: Vec) -> None:
            add(index, [unpacked(self.bits, rest.load(start, index)) for start in starts])

        if self.bits == 6:  # half a chunk: two steps in each of three vectors
            last = self.groups.like(2)
            for number in range(2):
                index = self.groups.like(number)
                add(
                    index,
                    [
                        joined(rest.load(start, index), rest.load(start, last), number)
                        for start in starts
                    ],
                )
        else:
            rest.each_turn(turn)
        ends = [self.multiply.end([total.get()]) for total in sums]
        counts = [Var(count) for count in self._without([var.get() for var in added], ends)]
        rest.fold(counts)
        self._add_scaled(chunk, [count.get() for count in counts])


class ByteProducts:
    """sum[lane] += product of four bytes of weights with four of a vector, exactly.

    VNNI multiplies unsigned with signed bytes, so Q8's values get 128 added, and `offset` times a
    group's sum of values is what that, or Q4's offset of 8, adds too much. Nibbles beside a minimum
    have no offset. AVX2 multiplies bytes to pairs of 16 bits. Eight pairs of nibbles' products fit
    in them, all that a lane has of a chunk: they are added up before they become 32 bits.
    """

    def __init__(self, row_format: RowFormat) -> None:
        self.bits = row_format.bits
        self.vnni = has_feature("avx512vnni") and has_feature("avx512f")
        self.avx2 = has_feature("avx2") and not self.vnni
        self.in_pairs = self.avx2 and self.bits < 8
        stored = value_offset(row_format)
        self.offset = {8: 128 if self.vnni else 0, 6: 0, 4: stored}[self.bits]
        self.half_offset = stored if self.bits == 6 and self.vnni else 0
        self.subtracted = stored if self.bits == 6 and not self.vnni else 0

    def empty(self, builder: ir.IRBuilder) -> Vec:
        """Sums of nothing."""
        if self.in_pairs:
            return Vec.full(builder, 0, I16, 2 * LANES)
        return Vec.full(builder, 0, I32, LANES)

    def add(self, total: Vec, weights: Vec, values: Vec) -> Vec:
        """The sums with one step's products added."""
        if self.subtracted:
            weights = (weights.view(I8) - self.subtracted).view(I32)
        if self.vnni:
            return self._vnni(total, weights, values)
        if self.avx2:
            pairs = _avx2_pairs(self.bits, weights.view(I8), values.view(I8))
            return total + (pairs if self.in_pairs else _avx2_fours(pairs))
        for byte in range(4):
            total = total + signed_byte(weights, byte) * signed_byte(values, byte)
        return total

    def add_offset(self, total: Vec, values: Vec) -> Vec:
        """The sums of values times `half_offset`, with one step's added."""
        if not self.half_offset:
            return total
        return self._dot(total, values.view(I8).like(self.half_offset), values.view(I8))

    def end(self, chains: list[Vec]) -> Vec:
        """All chains of sums together, int32, `offset` still in them."""
        total = chains[0]
        for more in chains[1:]:
            total = total + more
        return _avx2_fours(total) if self.in_pairs else total

    def _vnni(self, total: Vec, weights: Vec, values: Vec) -> Vec:
        if self.bits == 8:
            weights = weights ^ 0x80808080 - (1 << 32)
        return self._dot(total, weights.view(I8), values.view(I8))

    def _dot(self, total: Vec, unsigned: Vec, signed: Vec) -> Vec:
        return total.call("llvm.x86.avx512.vpdpbusd.512", INTS, total, unsigned, signed)


def _avx2_pairs(bits: int, unsigned: Vec, signed: Vec) -> Vec:
    """Products of bytes, two added up in 16 bits.

    |weight| <= 127 and |value| <= 127, so no pair overflows.
    """
    width, found = BYTE_LANES // 2, []
    for first in (0, width):
        lanes = range(first, first + width)
        weights, values = unsigned.take(lanes), signed.take(lanes)
        kind = weights.value.type
        if bits > 4:
            values = values.call("llvm.x86.avx2.psign.b", kind, values, weights)
            weights = (weights < 0).where(-weights, weights)
        name = "llvm.x86.avx2.pmadd.ub.sw"
        found.append(weights.call(name, shaped(I16, width // 2), weights, values))
    return found[0].take(range(width), found[1])


def _avx2_fours(pairs: Vec) -> Vec:
    """Neighbours of 16 bits added up to 32 bits."""
    found = []
    for first in (0, LANES):
        part = pairs.take(range(first, first + LANES))
        kind = shaped(I32, LANES // 2)
        found.append(part.call("llvm.x86.avx2.pmadd.wd", kind, part, part.like(1)))
    return found[0].take(range(LANES), found[1])
