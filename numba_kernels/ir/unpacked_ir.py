"""Vector IR for products of a few quantized rows with many vectors: rows unpacked once for all.

A chunk's codes become bytes, and its factors float32, on the stack, which is in the first-level
cache. Vectors meet them in tiles whose integer sums fill the registers; float sums wait on the
stack too. Each product is added up in the order of `numba_kernels.ir.integer_ir`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from hotcold.numba_kernels.formats import CHUNK, CHUNK_GROUPS, RowFormat
from hotcold.numba_kernels.ir.byte_dot import ByteDot
from hotcold.numba_kernels.ir.codes import codes_of
from hotcold.numba_kernels.ir.factors import factors_of
from hotcold.numba_kernels.ir.quantized_ir import Chunk, Rest, Row, Vector
from hotcold.numba_kernels.ir.target import LANES, REGISTER_LANES, has_feature
from hotcold.numba_kernels.ir.vec import (
    F32,
    I8,
    I32,
    I64,
    Ptr,
    Var,
    Vec,
    for_range,
    stack_space,
    whole_steps,
)

_TOKENS = 32  # whose sums wait on the stack
_VECTOR_BYTES = 4 * LANES  # of a float32, or of four codes, for each group of a chunk
_STEPS = 8  # of a chunk's codes as bytes


class UnpackedRows:
    """Rows of one format times many vectors."""

    def __init__(self, row_format: RowFormat, rows: list[Row], groups: Vec, at_once: int) -> None:
        """at_once: vectors of a tile."""
        self.format, self.codes = row_format, codes_of(row_format)
        self.rows, self.groups, self.at_once = rows, groups, at_once
        self.builder = groups.builder
        self.num_halves = 2 if row_format.has_halves else 1
        self.num_parts = _STEPS // self.codes.steps
        self.multiply = ByteDot(row_format, 1, of_parts=True)
        # Of each row: parts of steps, with what the last chunk's stores go beyond.
        self.part_bytes = (self.codes.steps + 1) * _VECTOR_BYTES
        self.codes_at = self._space(self.num_parts * self.part_bytes)
        self.scales_at = self._space(self.num_halves * _VECTOR_BYTES)
        self.minima_at = self._space(_VECTOR_BYTES)
        self.totals = stack_space(
            self.builder, ir.ArrayType(I8, _TOKENS * len(rows) * _VECTOR_BYTES)
        )

    def _space(self, num_bytes: int) -> list[Ptr]:
        kind = ir.ArrayType(I8, num_bytes)
        return [stack_space(self.builder, kind) for _ in self.rows]

    def emit(
        self,
        vector_of: Callable[[Vec], Vector],
        num_tokens: Vec,
        store: Callable[[Vec, int, Vec], None],
    ) -> None:
        """store(token, row, product) for all of them."""

        def block(first: Vec) -> None:
            count = (num_tokens - first).minimum(_TOKENS)
            num_totals = count * len(self.rows)
            zeros = Vec.full(self.builder, 0, F32, LANES)
            for_range(0, num_totals, 1, lambda i: (self.totals + i * _VECTOR_BYTES).store(zeros))

            def each_chunk(index: Vec) -> None:
                left = self.groups - index * CHUNK_GROUPS
                with self.builder.if_else((left >= CHUNK_GROUPS).value) as (whole, rest):
                    with whole:
                        self._unpack(Chunk(index, index.like(LANES), None))
                    with rest:
                        self._unpack_rest(Rest(index, left, self.codes.steps))
                tile = _Tile(self, index, left.minimum(CHUNK_GROUPS))
                self._tiles(tile, vector_of, first, count)

            for_range(0, (self.groups + (CHUNK_GROUPS - 1)) // CHUNK_GROUPS, 1, each_chunk)

            def sums(token: Vec) -> None:
                for row in range(len(self.rows)):
                    total = self.total_at(token, row).load(F32, LANES)
                    store(first + token, row, total.sum())

            for_range(0, count, 1, sums)

        for_range(0, num_tokens, _TOKENS, block)

    def total_at(self, token: Vec, row: int) -> Ptr:
        """The float sums of a row and a token of the block."""
        return self.totals + token * (len(self.rows) * _VECTOR_BYTES) + row * _VECTOR_BYTES

    def _tiles(
        self, tile: _Tile, vector_of: Callable[[Vec], Vector], first: Vec, count: Vec
    ) -> None:
        """All tokens of a block, `at_once` of them side by side as long as there are so many."""

        def some(token: Vec, number: int) -> None:
            vectors = [vector_of(first + token + i) for i in range(number)]
            totals = [self.total_at(token + i, 0) for i in range(number)]
            tile.emit(vectors, totals)

        whole = whole_steps(count, self.at_once)
        for_range(0, whole, self.at_once, lambda token: some(token, self.at_once))
        for_range(whole, count, 1, lambda token: some(token, 1))

    def _unpack(self, chunk: Chunk) -> None:
        for place, row in enumerate(self.rows):
            for number in range(self.codes.steps):
                parts = self.codes.packed_step(chunk, row, number)
                self._store(place, parts, number * _VECTOR_BYTES)
        self._unpack_factors(chunk)

    def _unpack_rest(self, rest: Rest) -> None:
        starts = [rest.chunk.at(row.values, self.format.chunk_bytes) for row in self.rows]

        def turn(index: Vec, weights: list[list[Vec]]) -> None:
            for place, parts in enumerate(weights):
                self._store(place, parts, index * rest.num_lanes * 4)

        self.codes.each_rest(rest, starts, False, False, turn)
        self._unpack_factors(rest.chunk)

    def _store(self, row: int, parts: list[Vec], at: Vec | int) -> None:
        for part, weights in enumerate(parts):
            taken = self.multiply.taken(weights)
            (self.codes_at[row] + part * self.part_bytes + at).store(taken, align=1)

    def _unpack_factors(self, chunk: Chunk) -> None:
        for place, row in enumerate(self.rows):
            factors = factors_of(chunk, row)
            for half, scales in enumerate(factors.scales):
                (self.scales_at[place] + half * _VECTOR_BYTES).store(scales)
            if factors.minima is not None:
                self.minima_at[place].store(factors.minima)


class _Tile:
    """Unpacked rows times some vectors in a chunk of g groups, a register of them after the other.

    `side` steps share a register where so many times g lanes fit it. Loops stay loops: LLVM gets
    along with the registers that there are.
    """

    def __init__(self, rows: UnpackedRows, index: Vec, num_groups: Vec) -> None:
        self.rows, self.index, self.num_groups = rows, index, num_groups
        self.multiply, self.builder = rows.multiply, rows.builder
        self.steps = rows.codes.steps
        self.halvings = num_groups.like(0)  # side is 2 to so many
        for doublings in range(1, self.steps.bit_length()):
            fits = num_groups.below((REGISTER_LANES >> doublings) + 1)
            self.halvings = self.halvings + fits.astype(I64, signed=False)
        self.num_turns = num_groups.like(self.steps) >> self.halvings
        self.num_lanes = num_groups << self.halvings

    def emit(self, vectors: list[Vector], totals: list[Ptr]) -> None:
        """Add the products to `totals`, each a vector's first row's."""
        for_range(
            0,
            whole_steps(self.num_groups + (REGISTER_LANES - 1), REGISTER_LANES),
            REGISTER_LANES,
            lambda lane: self._register(vectors, totals, lane),
        )

    def _register(self, vectors: list[Vector], totals: list[Ptr], lane: Vec) -> None:
        rows, first = self.rows, lane * 4
        counts_of_halves = self._counts(vectors, first)
        at = self.index * (4 * CHUNK_GROUPS) + first
        scales = [
            self._scales((vector.scales + at).load(F32, REGISTER_LANES, align=1), lane)
            for vector in vectors
        ]
        sums = []
        if self.multiply.offset or rows.format.has_min:
            sums = [(vector.sums + at).load(I32, REGISTER_LANES, align=1) for vector in vectors]
        cells = [
            [total + row * _VECTOR_BYTES + first for total in totals]
            for row in range(len(rows.rows))
        ]
        sofar = [[cell.load(F32, REGISTER_LANES) for cell in of_row] for of_row in cells]
        for half, counts in enumerate(counts_of_halves):
            for row in range(len(rows.rows)):
                of_row = (rows.scales_at[row] + half * _VECTOR_BYTES + first).load(
                    F32, REGISTER_LANES
                )
                for i, scale in enumerate(scales):
                    count = counts[row * len(vectors) + i]
                    if self.multiply.offset:
                        count = count - (sums[i] << self.multiply.offset.bit_length() - 1)
                    sofar[row][i] = count.astype(F32).fma(of_row * scale, sofar[row][i])
        scaled = (
            [
                count.astype(F32) * scale
                for count, scale in zip(sums, scales, strict=True)
                if rows.format.has_min
            ]
            if sums
            else []
        )
        for row, of_cells in enumerate(cells):
            for i, cell in enumerate(of_cells):
                total = sofar[row][i]
                if rows.format.has_min:
                    minima = (rows.minima_at[row] + first).load(F32, REGISTER_LANES)
                    total = minima.fma(scaled[i], total)
                cell.store(total)

    def _counts(self, vectors: list[Vector], first: Vec) -> list[list[Vec]]:
        """Integer sums of each row and vector, by halves of groups."""
        every = range(self.rows.num_parts)
        if self.rows.num_halves == 2:
            return [self._folded(self._sums(vectors, first, [part])) for part in every]
        if not self.multiply.has_part_sums:
            return [self._folded(self._sums(vectors, first, every))]
        found = [self._sums(vectors, first, [part]) for part in every]
        return [self._folded([low + high for low, high in zip(*found, strict=True)])]

    def _sums(self, vectors: list[Vector], first: Vec, parts: Sequence[int]) -> list[Vec]:
        """Of some parts of the steps, those side by side still apart."""
        rows, part_bytes = self.rows, self.num_groups * (4 * self.steps)
        empty = self.multiply.empty(self.builder, REGISTER_LANES)
        sums = [Var(empty) for _ in range(len(rows.rows) * len(vectors))]
        added = [Var(Vec.full(self.builder, 0, I32, REGISTER_LANES)) for _ in vectors]
        starts = [vector.values + self.index * CHUNK + first for vector in vectors]

        def turn(index: Vec) -> None:
            at = index * self.num_lanes * 4
            for part in parts:
                inputs = [
                    (start + part_bytes * part + at).load(I32, REGISTER_LANES, align=1)
                    for start in starts
                ]
                for values, more in zip(inputs, added, strict=True):
                    more.set(self.multiply.add_offset(more.get(), values))
                for row, codes in enumerate(rows.codes_at):
                    place = codes + part * rows.part_bytes + at + first
                    weights = place.load(I32, REGISTER_LANES, align=1)
                    for i, values in enumerate(inputs):
                        total = sums[row * len(vectors) + i]
                        total.set(self.multiply.add_taken(total.get(), weights, values))

        for_range(0, self.num_turns, 1, turn)
        ends = [self.multiply.end([total.get()]) for total in sums]
        if not self.multiply.half_offset:
            return ends
        return [end - added[i % len(vectors)].get() for i, end in enumerate(ends)]

    def _folded(self, counts: list[Vec]) -> list[Vec]:
        """The sums of all steps, in the lanes of the first."""
        sums = [Var(count) for count in counts]
        for number in range(self.steps.bit_length() - 1):
            distance = (self.num_lanes >> number + 1).astype(I32)
            with self.builder.if_then(self.halvings.like(number).below(self.halvings).value):
                for total in sums:
                    total.set(total.get() + moved_down(total.get(), distance))
        return [total.get() for total in sums]

    def _scales(self, numbers: Vec, lane: Vec) -> Vec:
        """A vector's scales, 0 where there is no group."""
        lanes = Vec.of(self.builder, range(REGISTER_LANES), I32)
        left = (self.num_groups - lane).astype(I32)
        return (lanes < left.spread(REGISTER_LANES)).where(numbers, 0)


def moved_down(ints: Vec, distance: Vec) -> Vec:
    """Lane i + distance of a register in lane i; any numbers in lanes for which there is none."""
    builder, kind = ints.builder, ints.value.type
    places = Vec.of(builder, range(ints.lanes), I32) + distance
    if ints.lanes == LANES and has_feature("avx512f"):
        return ints.call("llvm.x86.avx512.permvar.si.512", kind, ints, places)
    if ints.lanes == LANES // 2 and has_feature("avx2"):
        return ints.call("llvm.x86.avx2.permd", kind, ints, places)
    space = stack_space(builder, ir.ArrayType(I8, 2 * 4 * ints.lanes))
    for half in range(2):
        (space + half * 4 * ints.lanes).store(ints)
    return (space + distance.astype(I64) * 4).load(I32, ints.lanes)
