"""Vector IR for products of quantized rows with many vectors: a block of rows unpacked for all.

A chunk's codes become bytes, and its factors float32, on the stack, and stay in the first-level
cache. Vectors meet them in tiles whose integer sums fill the registers; float sums wait on the
stack too, and go by. Each product is added up in the order of `numba_kernels.ir.integer_ir`. A tile
of a whole chunk is one run of instructions without a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from hotcold.numba_kernels.formats import CHUNK, CHUNK_GROUPS, RowFormat
from hotcold.numba_kernels.ir.byte_dot import ByteDot
from hotcold.numba_kernels.ir.codes import codes_of
from hotcold.numba_kernels.ir.factors import factors_of
from hotcold.numba_kernels.ir.quantized_ir import Chunk, Rest, Row, SideBySide, Vector
from hotcold.numba_kernels.ir.target import LANES, REGISTER_LANES
from hotcold.numba_kernels.ir.vec import (
    F32,
    I8,
    I32,
    Ptr,
    Var,
    Vec,
    for_range,
    held,
    stack_space,
    whole_steps,
)

TOKENS = 32  # whose sums wait on the stack
_VECTOR_BYTES = 4 * LANES  # of a float32, or of four codes, for each group of a chunk
_STEPS = 8  # of a chunk's codes as bytes


class UnpackedRows:
    """A block of rows of one format times some vectors, up to TOKENS of them."""

    def __init__(
        self,
        row_format: RowFormat,
        row_of: Callable[[Vec], Row],
        num_rows: int,
        groups: Vec,
        tile: tuple[int, int],
    ) -> None:
        """row_of: a row by its place among `num_rows`; tile: rows and vectors side by side."""
        self.format, self.codes = row_format, codes_of(row_format)
        self.row_of, self.num_rows, self.groups = row_of, num_rows, groups
        self.tile_rows, self.at_once = tile
        self.builder = groups.builder
        self.num_halves = 2 if row_format.has_halves else 1
        self.num_parts = _STEPS // self.codes.steps
        self.multiply = ByteDot(row_format, 1, of_parts=True)
        # Of each row: parts of steps, with what the last chunk's stores go beyond.
        self.part_bytes = (self.codes.steps + 1) * _VECTOR_BYTES
        self.code_bytes = self.num_parts * self.part_bytes
        self.factor_bytes = (self.num_halves + row_format.has_min) * _VECTOR_BYTES
        self.codes_at = self._space(self.num_rows * self.code_bytes)
        self.factors_at = self._space(self.num_rows * self.factor_bytes)
        self.begins_at = self._space(self.at_once * self.num_halves * _VECTOR_BYTES)
        self.totals = self._space(TOKENS * self.num_rows * _VECTOR_BYTES)

    def _space(self, num_bytes: int) -> Ptr:
        return stack_space(self.builder, ir.ArrayType(I8, num_bytes))

    def emit(
        self,
        vector_of: Callable[[Vec], Vector],
        count: Vec,
        store: Callable[[Vec, Vec, Vec], None],
    ) -> None:
        """store(token, row, product) for all of them."""
        zeros = Vec.full(self.builder, 0, F32, LANES)
        num_totals = count * self.num_rows
        for_range(0, num_totals, 1, lambda i: (self.totals + i * _VECTOR_BYTES).store(zeros))
        whole, lanes = self.groups // CHUNK_GROUPS, self.groups.like(CHUNK_GROUPS)

        def each_chunk(index: Vec) -> None:
            chunk = Chunk(index, lanes, None)
            for_range(0, lanes.like(self.num_rows), 1, lambda row: self._unpack(chunk, row))
            self._tiles(_Chunk(self, index), vector_of, count)

        for_range(0, whole, 1, each_chunk)
        left = self.groups - whole * CHUNK_GROUPS
        with self.builder.if_then(left.differs(0).value):
            rest = Rest(whole, left, self.codes.steps)
            for_range(0, lanes.like(self.num_rows), 1, lambda row: self._unpack_rest(rest, row))
            self._tiles(_LastChunk(self, whole, left), vector_of, count)

        def sums(token: Vec) -> None:
            def sum_row(row: Vec) -> None:
                store(token, row, self.total_at(token, row).load(F32, LANES).sum())

            for_range(0, token.like(self.num_rows), 1, sum_row)

        for_range(0, count, 1, sums)

    def total_at(self, token: Vec, row: Vec | int) -> Ptr:
        """The float sums of a row and a token of the block."""
        start = self.totals + token * (self.num_rows * _VECTOR_BYTES)
        return start + row * _VECTOR_BYTES

    def _tiles(self, chunk: _Chunk, vector_of: Callable[[Vec], Vector], count: Vec) -> None:
        """All tokens of a block, `at_once` of them side by side as long as there are so many."""

        def some(token: Vec, number: int) -> None:
            vectors = [vector_of(token + i) for i in range(number)]
            chunk.begin(vectors)

            def tile(row: Vec) -> None:
                totals = [self.total_at(token + i, row) for i in range(number)]
                codes = self.codes_at + row * self.code_bytes
                chunk.tile(vectors, totals, codes, self.factors_at + row * self.factor_bytes)

            for_range(0, token.like(self.num_rows), self.tile_rows, tile)

        whole = whole_steps(count, self.at_once)
        for_range(0, whole, self.at_once, lambda token: some(token, self.at_once))
        for_range(whole, count, 1, lambda token: some(token, 1))

    def _unpack(self, chunk: Chunk, place: Vec) -> None:
        row = self.row_of(place)
        for number in range(self.codes.steps):
            parts = self.codes.packed_step(chunk, row, number)
            self._store(place, parts, number * _VECTOR_BYTES)
        self._unpack_factors(chunk, place, row)

    def _unpack_rest(self, rest: Rest, place: Vec) -> None:
        row = self.row_of(place)
        start = rest.chunk.at(row.values, self.format.chunk_bytes)

        def turn(index: Vec, weights: list[list[Vec]]) -> None:
            self._store(place, weights[0], index * rest.num_lanes * 4)

        self.codes.each_rest(rest, [start], False, False, turn)
        self._unpack_factors(rest.chunk, place, row)

    def _store(self, place: Vec, parts: list[Vec], at: Vec | int) -> None:
        start = self.codes_at + place * self.code_bytes + at
        for part, weights in enumerate(parts):
            (start + part * self.part_bytes).store(self.multiply.taken(weights), align=1)

    def _unpack_factors(self, chunk: Chunk, place: Vec, row: Row) -> None:
        found = factors_of(chunk, row)
        start = self.factors_at + place * self.factor_bytes
        for i, factors in enumerate([*found.scales, found.minima]):
            if factors is not None:
                (start + i * _VECTOR_BYTES).store(factors)


class _Chunk:
    """A whole chunk of unpacked rows times some vectors, a register of groups after the other."""

    def __init__(self, rows: UnpackedRows, index: Vec) -> None:
        self.rows, self.index = rows, index
        self.multiply, self.builder = rows.multiply, rows.builder
        self.steps = rows.codes.steps
        every = range(rows.num_parts)
        # Parts whose products are added up: a half of each group, or all.
        self.part_sums = [[part] for part in every] if rows.num_halves == 2 else [list(every)]

    def each_register(self, body: Callable[[Vec], None]) -> None:
        """body(first lane) for all of them."""
        for lane in range(0, CHUNK_GROUPS, REGISTER_LANES):
            body(self.index.like(lane))

    def each_turn(self, body: Callable[[Vec | int, Vec | int], None]) -> None:
        """body(where a turn's codes are, where a part begins beyond part 0's)."""
        for number in range(self.steps):
            body(number * _VECTOR_BYTES, CHUNK // self.rows.num_parts)

    def folded(self, counts: list[Vec]) -> list[Vec]:
        """Sums of all steps, in the lanes of the first."""
        return counts

    def scales(self, vector: Vector, at: Vec, lane: Vec) -> Vec:
        """A vector's scales, 0 where there is no group."""
        return (vector.scales + at).load(F32, REGISTER_LANES, align=1)

    def begin(self, vectors: list[Vector]) -> None:
        """What sums of products with each vector begin with."""
        if not self.multiply.begin_offset:
            return

        def register(lane: Vec) -> None:
            sums = [
                [Var(self.multiply.empty(self.builder, REGISTER_LANES)) for _ in self.part_sums]
                for _ in vectors
            ]
            starts = [self._values(vector, lane) for vector in vectors]

            def turn(at: Vec | int, part_bytes: Vec | int) -> None:
                for start, of_vector in zip(starts, sums, strict=True):
                    for parts, total in zip(self.part_sums, of_vector, strict=True):
                        for part in parts:
                            values = self._load(start, part_bytes, part, at)
                            total.set(self.multiply.add_begin(total.get(), values))

            self.each_turn(turn)
            for i, of_vector in enumerate(sums):
                for half, total in enumerate(of_vector):
                    self._begin_at(i, half, lane).store(total.get())

        self.each_register(register)

    def _begin_at(self, vector: int, half: int, lane: Vec) -> Ptr:
        place = (vector * self.rows.num_halves + half) * _VECTOR_BYTES
        return self.rows.begins_at + place + lane * 4

    def tile(self, vectors: list[Vector], totals: list[Ptr], codes: Ptr, factors: Ptr) -> None:
        """Add the products to `totals`; these, `codes` and `factors` are the first row's."""
        self.each_register(lambda lane: self._register(vectors, totals, codes, factors, lane))

    def _register(
        self, vectors: list[Vector], totals: list[Ptr], codes: Ptr, factors: Ptr, lane: Vec
    ) -> None:
        """Each half of a group, or whole ones: the sums of few products fit the registers."""
        rows, first = self.rows, lane * 4
        at = self.index * (4 * CHUNK_GROUPS) + first
        scales = [self.scales(vector, at, lane) for vector in vectors]
        sums: list[Vec] = []
        if self.multiply.offset or rows.format.has_min:
            sums = [(vector.sums + at).load(I32, REGISTER_LANES, align=1) for vector in vectors]
        for half in range(rows.num_halves):
            counts = iter(self._counts(vectors, codes, lane, half))
            for row in range(rows.tile_rows):
                own = factors + row * rows.factor_bytes + first
                of_row = (own + half * _VECTOR_BYTES).load(F32, REGISTER_LANES)
                for i, (total, scale) in enumerate(zip(totals, scales, strict=True)):
                    cell, count = total + row * _VECTOR_BYTES + first, next(counts)
                    if self.multiply.offset:
                        count = count - (sums[i] << self.multiply.offset.bit_length() - 1)
                    sofar = cell.load(F32, REGISTER_LANES)
                    sofar = count.astype(F32).fma(of_row * scale, sofar)
                    if rows.format.has_min:  # such formats have no halves
                        minima = (own + rows.num_halves * _VECTOR_BYTES).load(F32, REGISTER_LANES)
                        sofar = minima.fma(sums[i].astype(F32) * scale, sofar)
                    cell.store(sofar)

    def _counts(self, vectors: list[Vector], codes: Ptr, lane: Vec, half: int) -> list[Vec]:
        """Integer sums of each row and vector, of whole groups or of one half of each."""
        if not self.multiply.has_part_sums:
            return self.folded(self._sums(vectors, codes, lane, half, self.part_sums[half]))
        found = [
            self._sums(vectors, codes, lane, half, [part]) for part in range(self.rows.num_parts)
        ]
        return self.folded([low + high for low, high in zip(*found, strict=True)])

    def _values(self, vector: Vector, lane: Vec) -> Ptr:
        return vector.values + self.index * CHUNK + lane * 4

    def _load(self, start: Ptr, part_bytes: Vec | int, part: int, at: Vec | int) -> Vec:
        return (start + part_bytes * part + at).load(I32, REGISTER_LANES, align=1)

    def _sums(
        self, vectors: list[Vector], codes: Ptr, lane: Vec, half: int, parts: Sequence[int]
    ) -> list[Vec]:
        """Of some parts of the steps, those side by side still apart."""
        rows = self.rows
        begins = [self.multiply.empty(self.builder, REGISTER_LANES)] * len(vectors)
        if self.multiply.begin_offset:
            begins = [
                self._begin_at(i, half, lane).load(begin.dtype, begin.lanes)
                for i, begin in enumerate(begins)
            ]
        sums = [Var(begin) for _ in range(rows.tile_rows) for begin in begins]
        added = [Var(Vec.full(self.builder, 0, I32, REGISTER_LANES)) for _ in vectors]
        starts = [self._values(vector, lane) for vector in vectors]

        def turn(at: Vec | int, part_bytes: Vec | int) -> None:
            for part in parts:
                inputs = [self._load(start, part_bytes, part, at) for start in starts]
                for values, more in zip(inputs, added, strict=True):
                    more.set(self.multiply.add_offset(more.get(), values))
                for row in range(rows.tile_rows):
                    place = codes + row * rows.code_bytes + part * rows.part_bytes + lane * 4
                    weights = (place + at).load(I32, REGISTER_LANES, align=1)
                    for i, values in enumerate(inputs):
                        total = sums[row * len(vectors) + i]
                        total.set(self.multiply.add_taken(total.get(), weights, values))
                for total, value in zip(sums, held([total.get() for total in sums]), strict=True):
                    total.set(value)

        self.each_turn(turn)
        ends = [self.multiply.end([total.get()]) for total in sums]
        if not self.multiply.half_offset:
            return ends
        return [end - added[i % len(vectors)].get() for i, end in enumerate(ends)]


class _LastChunk(_Chunk):
    """The last chunk, of g groups.

    Loops stay loops: LLVM gets along with the registers that there are.
    """

    def __init__(self, rows: UnpackedRows, index: Vec, num_groups: Vec) -> None:
        super().__init__(rows, index)
        self.num_groups = num_groups
        self.side = SideBySide(num_groups, self.steps, REGISTER_LANES)

    def each_register(self, body: Callable[[Vec], None]) -> None:
        """body(first lane) for all of them."""
        end = whole_steps(self.num_groups + (REGISTER_LANES - 1), REGISTER_LANES)
        for_range(0, end, REGISTER_LANES, body)

    def each_turn(self, body: Callable[[Vec | int, Vec | int], None]) -> None:
        """body(where a turn's codes are, where a part begins beyond part 0's)."""
        part_bytes, side = self.num_groups * (4 * self.steps), self.side
        for_range(0, side.num_turns, 1, lambda i: body(i * side.num_lanes * 4, part_bytes))

    def folded(self, counts: list[Vec]) -> list[Vec]:
        """The sums of all steps, in the lanes of the first."""
        sums = [Var(count) for count in counts]
        self.side.fold(sums)
        return [total.get() for total in sums]

    def scales(self, vector: Vector, at: Vec, lane: Vec) -> Vec:
        """A vector's scales, 0 where there is no group."""
        lanes = Vec.of(self.builder, range(REGISTER_LANES), I32)
        left = (self.num_groups - lane).astype(I32)
        numbers = super().scales(vector, at, lane)
        return (lanes < left.spread(REGISTER_LANES)).where(numbers, 0)
