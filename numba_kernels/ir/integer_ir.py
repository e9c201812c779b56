"""Vector IR for dot products of quantized rows and vectors: exact within a group.

Four bytes of every group are multiplied and added at once, and scales are applied once for 32
weights. Integer sums are exact; float sums run chunk by chunk, so a product does not depend on how
many others are computed beside it.

A single row is read in the order of its bytes, values first and their scales after them: two or
three streams a row reach half of what memory gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from hotcold.numba_kernels.formats import CHUNK, CHUNK_GROUPS, RowFormat
from hotcold.numba_kernels.ir.byte_dot import ByteDot
from hotcold.numba_kernels.ir.codes import codes_of
from hotcold.numba_kernels.ir.factors import factors_of
from hotcold.numba_kernels.ir.half_ir import Halves, takes_halves
from hotcold.numba_kernels.ir.quantized_ir import (
    INTS,
    Chunk,
    Rest,
    Row,
    Vector,
    row_bytes,
    with_chunks,
)
from hotcold.numba_kernels.ir.target import LANES, LINE_BYTES
from hotcold.numba_kernels.ir.vec import F32, I32, Ptr, Var, Vec, for_range, stack_space

_MAX_CHAINS = 4  # products whose integer sums are kept in two registers each
_FEW_CHUNKS = 4  # of a row whose integer sums stay in registers
_WAITING_SUMS = 128  # integer sums of a longer row that wait in memory (8 KiB) for their scales
_PART_BYTES = (
    CHUNK // 2
)  # of a vector: values that meet low nibbles, then those that meet high ones


def emit_products(
    row_format: RowFormat,
    rows: list[Row],
    vectors: list[Vector],
    groups: Vec,
    ahead: Sequence[Row],
    bytes_ahead: int = 0,
) -> list[Vec]:
    """Products of every row with every vector, row by row, as float32.

    sum over groups g of row_scale[g] * vector_scale[g] * (sum of integer products of the group)
                         + row_min[g] * vector_scale[g] * (sum of the vector's values)
    Rows in `ahead` are prefetched in step, from `bytes_ahead` on.
    """
    return _Products(row_format, rows, vectors, groups, bytes_ahead).emit(ahead)


class _Products:
    def __init__(
        self,
        row_format: RowFormat,
        rows: list[Row],
        vectors: list[Vector],
        groups: Vec,
        bytes_ahead: int,
    ) -> None:
        self.format = row_format
        self.codes = codes_of(row_format)
        self.rows = rows
        self.vectors = vectors
        self.groups = groups
        self.bytes_ahead = bytes_ahead
        self.builder = groups.builder
        self.pairs = [(row, vector) for row in range(len(rows)) for vector in range(len(vectors))]
        self.num_halves = 2 if row_format.has_halves else 1
        self.num_counts = len(self.pairs) * self.num_halves  # of a chunk
        # Two chains of additions where registers allow: whole numbers add up the same either way.
        self.num_chains = 2 if self.num_counts <= _MAX_CHAINS else 1
        self.multiply = ByteDot(row_format, self.num_chains)
        zeros = Vec.full(self.builder, 0, F32, LANES)
        self.totals = [Var(zeros) for _ in self.pairs]

    def emit(self, ahead: Sequence[Row]) -> list[Vec]:
        """The products; rows in `ahead` are prefetched in step."""
        if len(self.rows) > 1:
            with_chunks(self.groups, self.codes.steps, self._by_chunks, self._add_rest)
        else:
            self._in_order(ahead)
        return [total.get().sum() for total in self.totals]

    def _in_order(self, ahead: Sequence[Row]) -> None:
        """One row: its values, then its scales; of a long row stretch by stretch."""
        number = self.groups // CHUNK_GROUPS
        rest = Rest(number, self.groups - number * CHUNK_GROUPS, self.codes.steps)
        few, many = _FewChunks(self, number), _Stretches(self, number)
        is_short, has_rest = number.below(_FEW_CHUNKS + 1), rest.chunk.num_lanes.differs(0)
        last = self._last_chunk(number, rest)
        self.either(is_short, lambda: few.count(ahead), lambda: many.count(ahead))
        with self.builder.if_then(has_rest.value):
            last.count()
        self.either(is_short, few.add, many.add)
        with self.builder.if_then(has_rest.value):
            last.add()
        if ahead:
            self._prefetch_rest(ahead, number)

    def _last_chunk(self, index: Vec, rest: Rest) -> _LastChunk:
        if not takes_halves(self.format):
            return _LastChunk(self, rest)
        halves = Halves(self.format, self.rows[0], self.vectors, self.groups, index)
        return _LastChunk(self, rest, halves)

    def either(self, bit: Vec, yes: Callable[[], None], no: Callable[[], None]) -> None:
        with self.builder.if_else(bit.value) as (first, second):
            with first:
                yes()
            with second:
                no()

    def _prefetch_rest(self, rows: Sequence[Row], number: Vec) -> None:
        """Ask for what follows the values of the whole chunks."""

        def line(at: Vec) -> None:
            for row in rows:
                (row.values + at + self.bytes_ahead).prefetch(2)

        begin = number * self.format.chunk_bytes
        for_range(begin, row_bytes(self.format, self.groups), LINE_BYTES, line)

    def zero_counts(self) -> list[Var]:
        """Integer sums of a chunk, zero so far."""
        zeros = Vec.full(self.builder, 0, I32, LANES)
        return [Var(zeros) for _ in range(self.num_counts)]

    def chunk(self, index: Vec) -> Chunk:
        return Chunk(index, index.like(LANES), None)

    def prefetch(self, rows: Sequence[Row], index: Vec) -> None:
        """Ask for the values of a chunk of each row."""
        num_bytes = self.format.chunk_bytes
        for row in rows:
            for line in range(self.bytes_ahead, self.bytes_ahead + num_bytes, LINE_BYTES):
                (row.values + index * num_bytes + line).prefetch(2)

    def _by_chunks(self, number: Vec) -> None:
        """All whole chunks, each with its scales at once."""

        def chunk(index: Vec) -> None:
            self.add_scaled(self.chunk(index), self.counts(self.chunk(index)))

        for_range(0, number, 1, chunk)

    def counts(self, chunk: Chunk) -> list[Vec]:
        """The integer sums of a whole chunk, of each pair and there of each half of a group."""
        empty = self.multiply.empty(self.builder)
        chains = [[empty] * self.num_chains for _ in range(self.num_counts)]
        added = [empty] * (len(self.vectors) * self.num_halves)
        for number in range(self.codes.steps):
            weights = [
                self.codes.packed_step(chunk, row, number, self.multiply.high_in_place)
                for row in self.rows
            ]
            for part in range(len(weights[0])):
                inputs = [
                    self._values(chunk, vector, part, 4 * LANES * number).load(I32, LANES, align=1)
                    for vector in self.vectors
                ]
                half, turn = part % self.num_halves, self._turn(number, part)
                for pair, (row, vector) in enumerate(self.pairs):
                    sums = chains[pair * self.num_halves + half]
                    sums[turn] = self.multiply.add(sums[turn], weights[row][part], inputs[vector])
                for vector, values in enumerate(inputs):
                    place = vector * self.num_halves + half
                    added[place] = self.multiply.add_offset(added[place], values)
        return self._without(added, [self.multiply.end(sums) for sums in chains])

    def _turn(self, number: int, part: int) -> int:
        """The chain of additions that takes a part of a step."""
        return (part if self.multiply.high_in_place else number + part) % self.num_chains

    def _without(self, added: list[Vec], counts: list[Vec]) -> list[Vec]:
        """The counts minus the offset that each vector's half adds to them."""
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

    def add_scaled(self, chunk: Chunk, counts: list[Vec]) -> None:
        """Add a chunk's integer sums to the totals, with its scales and minima."""
        factors = [factors_of(chunk, row) for row in self.rows]
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
            scale = factors[row].scales[half] * scales[vector]
            self.totals[pair].set(count.astype(F32).fma(scale, self.totals[pair].get()))
        if not self.format.has_min:
            return
        scaled = [count.astype(F32) * scale for count, scale in zip(sums, scales, strict=True)]
        for total, (row, vector) in zip(self.totals, self.pairs, strict=True):
            minima = factors[row].minima
            assert minima is not None
            total.set(minima.fma(scaled[vector], total.get()))

    def _add_rest(self, rest: Rest) -> None:
        self.add_scaled(rest.chunk, self.rest_counts(rest))

    def rest_counts(self, rest: Rest) -> list[Vec]:
        """The integer sums of the last chunk, several of whose steps are taken at a time."""
        empty, chunk = self.multiply.empty(self.builder), rest.chunk
        chains = [[Var(empty) for _ in range(self.num_chains)] for _ in range(self.num_counts)]
        added = [Var(empty) for _ in range(len(self.vectors) * self.num_halves)]
        starts = [chunk.at(row.values, self.format.chunk_bytes) for row in self.rows]

        def add(index: Vec, weights: list[list[Vec]]) -> None:
            for part in range(len(weights[0])):
                inputs = [
                    rest.load(self._values(chunk, vector, part, 0), index)
                    for vector in self.vectors
                ]
                half, turn = part % self.num_halves, self._turn(0, part)
                for pair, (row, vector) in enumerate(self.pairs):
                    total = chains[pair * self.num_halves + half][turn]
                    total.set(self.multiply.add(total.get(), weights[row][part], inputs[vector]))
                for vector, values in enumerate(inputs):
                    total = added[vector * self.num_halves + half]
                    total.set(self.multiply.add_offset(total.get(), values))

        in_place, in_line = self.multiply.high_in_place, self.num_chains > 1
        self.codes.each_rest(rest, starts, in_place, in_line, add)
        ends = [self.multiply.end([var.get() for var in sums]) for sums in chains]
        counts = [Var(count) for count in self._without([var.get() for var in added], ends)]
        rest.fold(counts)
        return [count.get() for count in counts]


class _LastChunk:
    """The last, partial chunk of a row: by `halves` after a whole chunk, else by `rest`."""

    def __init__(self, products: _Products, rest: Rest, halves: Halves | None = None) -> None:
        self.products, self.rest, self.halves = products, rest, halves
        self.sums = products.zero_counts()

    def count(self) -> None:
        """Read the values."""
        self._way(lambda halves: halves.count(), self._count)

    def add(self) -> None:
        """Add what has been counted, with its scales."""
        totals = self.products.totals
        self._way(lambda halves: halves.add_scaled(totals), self._add)

    def _count(self) -> None:
        _set_all(self.sums, self.products.rest_counts(self.rest))

    def _add(self) -> None:
        self.products.add_scaled(self.rest.chunk, [count.get() for count in self.sums])

    def _way(self, by_halves: Callable[[Halves], None], by_rest: Callable[[], None]) -> None:
        halves = self.halves
        if halves is None:
            by_rest()
            return
        has_whole = self.rest.chunk.index.differs(0)
        self.products.either(has_whole, lambda: by_halves(halves), by_rest)


class _FewChunks:
    """The whole chunks of a short row, without a loop; their integer sums stay in registers."""

    def __init__(self, products: _Products, number: Vec) -> None:
        self.products = products
        self.number = number
        self.sums = [products.zero_counts() for _ in range(_FEW_CHUNKS)]

    def count(self, ahead: Sequence[Row]) -> None:
        """Read the values."""

        def chunk(index: Vec, sums: list[Var]) -> None:
            self.products.prefetch(ahead, index)
            _set_all(sums, self.products.counts(self.products.chunk(index)))

        self._each(chunk)

    def add(self) -> None:
        """Add what has been counted, with its scales."""

        def chunk(index: Vec, sums: list[Var]) -> None:
            self.products.add_scaled(self.products.chunk(index), [var.get() for var in sums])

        self._each(chunk)

    def _each(self, body: Callable[[Vec, list[Var]], None]) -> None:
        for index, sums in enumerate(self.sums):
            place = self.number.like(index)
            with self.number.builder.if_then(place.below(self.number).value):
                body(place, sums)


class _Stretches:
    """The whole chunks of a long row: the values of several, then their scales.

    Integer sums wait in memory meanwhile, those of the last stretch until they are added. Each turn
    from values to scales and back ends a stream, so nearly every row is one stretch.
    """

    def __init__(self, products: _Products, number: Vec) -> None:
        self.products = products
        self.number = number
        # Chunks of a stretch: a power of two.
        self.length = 1 << (_WAITING_SUMS // products.num_counts).bit_length() - 1
        self.last = (number + -1) // self.length * self.length  # the last stretch's first chunk
        kind = ir.ArrayType(INTS, self.length * products.num_counts)
        self.waiting = stack_space(products.builder, kind)

    def count(self, ahead: Sequence[Row]) -> None:
        """Read all values, and add all but the last stretch."""

        def chunk(index: Vec) -> None:
            self.products.prefetch(ahead, index)
            counts = self.products.counts(self.products.chunk(index))
            for at, count in zip(self._places(index), counts, strict=True):
                at.store(count)

        def stretch(first: Vec) -> None:
            self._add(first - first.minimum(self.length), first)
            for_range(first, (first + self.length).minimum(self.number), 1, chunk)

        for_range(0, self.number, self.length, stretch)

    def add(self) -> None:
        """Add the last stretch."""
        self._add(self.last, self.number)

    def _add(self, first: Vec, end: Vec) -> None:
        def chunk(index: Vec) -> None:
            counts = [at.load(I32, LANES) for at in self._places(index)]
            self.products.add_scaled(self.products.chunk(index), counts)

        for_range(first, end, 1, chunk)

    def _places(self, index: Vec) -> list[Ptr]:
        """Where a chunk's sums wait."""
        size = 4 * LANES * self.products.num_counts
        at = self.waiting + (index & self.length - 1) * size
        return [at + 4 * LANES * i for i in range(self.products.num_counts)]


def _set_all(cells: list[Var], values: list[Vec]) -> None:
    """Set each cell to its value."""
    for cell, value in zip(cells, values, strict=True):
        cell.set(value)
