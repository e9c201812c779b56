"""Products of quantized rows and many vectors by the int8 tiles of AMX.

To the bit those of `numba_kernels.ir.integer_ir`: whole numbers are exact within a group, and
floats are added up chunk by chunk in the lane of a group, then lane by lane. A tile has 16 rows
and 16 vectors; of each group it adds 32 products. Codes of rows are unpacked once for all vectors,
and vectors are packed once for all rows, group by group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hotcold.numba_kernels.amx import tile_shapes
from hotcold.numba_kernels.formats import CHUNK, CHUNK_GROUPS
from hotcold.numba_kernels.ir.amx_ir import (
    AMX_ROWS,
    call_tiles,
    load_shapes,
    load_tile,
    store_tile,
)
from hotcold.numba_kernels.ir.codes import codes_of
from hotcold.numba_kernels.ir.factors import factors_of
from hotcold.numba_kernels.ir.operands import Vectors, Weights
from hotcold.numba_kernels.ir.quantized_ir import Chunk, each_chunk, format_of
from hotcold.numba_kernels.ir.target import LANES, has_feature
from hotcold.numba_kernels.ir.vec import (
    F32,
    I8,
    I32,
    Arguments,
    Array,
    Ptr,
    Var,
    Vec,
    call_by_name,
    codegen_of,
    for_range,
    transposed,
)

_STEPS = 8  # words of four codes in a group
_LINE = 4 * LANES
_GROUP_BYTES = AMX_ROWS * 4 * _STEPS  # of 16 rows' or vectors' codes
_TILE_BYTES = AMX_ROWS * _LINE
_SUMS, _ROWS, _VECTORS = (0, 1, 2, 3), (4, 5), (6, 7)  # tiles
_SHAPES = tile_shapes(*[(AMX_ROWS, 64)] * 4, *[(AMX_ROWS, 4 * _STEPS)] * 2, *[(_STEPS, 64)] * 2)
_INDEX = types.int64


def takes_bytes(dtype) -> bool:  # type: ignore[no-untyped-def]
    """Whether rows of this dtype are multiplied so here: those with one scale a group."""
    row_format = format_of(dtype)
    return row_format is not None and not row_format.has_halves and has_feature("amx-int8")


@dataclass(frozen=True)
class _Packed:
    """16 rows, or vectors: of each group codes, scales and, where rows have minima, those.

    Of vectors, in place of minima, scale times sum of values.
    """

    codes: Ptr
    scales: Ptr
    minima: Ptr

    def at(self, group: Vec) -> _Packed:
        """What begins with group number `group`."""
        return _Packed(
            self.codes + group * _GROUP_BYTES,
            self.scales + group * _LINE,
            self.minima + group * _LINE,
        )

    def put(self, chunk: Chunk, chunks: Vec, scales: list[Vec], minima: list[Vec]) -> None:
        """The factors of a chunk, given row by row."""
        for lane, of_lane in enumerate(transposed(scales)):
            self.at(chunk.index + chunks * lane).scales.store(of_lane)
        for lane, of_lane in enumerate(transposed(minima) if minima else []):
            self.at(chunk.index + chunks * lane).minima.store(of_lane)


class _Products:
    """All products of rows `first`.. with all vectors; at least 16 of each."""

    def __init__(self, weights: Array, vectors: list[Array], out: Array) -> None:
        self.matrix, self.vectors, self.out = Weights(weights), Vectors(vectors), out
        assert self.matrix.format
        self.format, self.builder = self.matrix.format, weights.builder
        self.groups = self.matrix.groups
        self.chunks = (self.groups + (CHUNK_GROUPS - 1)) // CHUNK_GROUPS
        self.padded_groups = self.chunks * CHUNK_GROUPS
        self.num_blocks = (out.shape[0] + (AMX_ROWS - 1)) // AMX_ROWS  # of vectors

    def emit(self, first: Vec, last: Vec, column: Vec) -> Vec:
        """out[t, column + n - first] for rows n before `last`; whether there was memory for it."""
        bytes_a_group = _GROUP_BYTES + 2 * _LINE
        num_bytes = (self.num_blocks + 1) * self.padded_groups * bytes_a_group
        totals_bytes = self.num_blocks * (CHUNK_GROUPS * _TILE_BYTES)
        counts_bytes = self.chunks * _TILE_BYTES
        num_bytes = num_bytes + totals_bytes + counts_bytes
        space, free = _allocated(self.builder, num_bytes + _LINE)
        is_there = space.address().differs(0)
        with self.builder.if_then(is_there.value, likely=True):
            aligned = ((space.address() + (_LINE - 1)) & -_LINE).value
            start = Ptr(self.builder, self.builder.inttoptr(aligned, I8.as_pointer()))
            self._multiply(start, totals_bytes, counts_bytes, first, last, column)
            free()
        return is_there

    def _multiply(
        self, start: Ptr, totals_bytes: Vec, counts_bytes: Vec, first: Vec, last: Vec, column: Vec
    ) -> None:
        """As `emit`, in the space that begins at `start`."""
        load_shapes(self.builder, _SHAPES)
        self.totals, start = start, start + totals_bytes
        self.counts, start = start, start + counts_bytes
        codes_end = start + (self.num_blocks + 1) * self.padded_groups * _GROUP_BYTES
        scales_end = codes_end + (self.num_blocks + 1) * self.padded_groups * _LINE
        every = _Packed(start, codes_end, scales_end)  # 16 rows, then all vectors
        vectors = every.at(self.padded_groups)
        for_range(
            0,
            self.num_blocks,
            1,
            lambda block: self._pack_vectors(
                self._place(block, self.out.shape[0]), vectors.at(block * self.padded_groups)
            ),
        )

        def rows(row: Vec) -> None:
            begin = row.minimum(last - AMX_ROWS)
            self._pack_rows(begin, every)

            def lane(number: Vec) -> None:
                def tile(block: Vec) -> None:
                    totals = self._totals(block) + number * _TILE_BYTES
                    self._lane(number, every, vectors.at(block * self.padded_groups), totals)

                for_range(0, self.num_blocks, 1, tile)

            def put(block: Vec) -> None:
                token = self._place(block, self.out.shape[0])
                self._put(self._totals(block), token, column + begin - first)

            for_range(0, row.like(CHUNK_GROUPS), 1, lane)
            for_range(0, self.num_blocks, 1, put)

        for_range(
            0, (last - first + (AMX_ROWS - 1)) // AMX_ROWS, 1, lambda i: rows(first + i * AMX_ROWS)
        )
        call_tiles(self.builder, "tilerelease")

    def _place(self, block: Vec, count: Vec) -> Vec:
        """The first vector of a block; the last one has some of those before, too."""
        return (block * AMX_ROWS).minimum(count - AMX_ROWS)

    def _pack_vectors(self, first: Vec, packed: _Packed) -> None:
        own = [self.vectors.vector(first + i) for i in range(AMX_ROWS)]

        def pack(chunk: Chunk) -> None:
            def step(number: Vec) -> None:
                at = chunk.num_lanes * number * 4
                words = [chunk.load(chunk.at(each.values, CHUNK) + at, I32) for each in own]
                for lane, of_lane in enumerate(transposed(words)):
                    place = packed.at(chunk.index + self.chunks * lane).codes
                    (place + number * _LINE).store(of_lane)

            for_range(0, chunk.num_lanes.like(_STEPS), 1, step)
            scales = [chunk.load(chunk.at(each.scales, _LINE), F32) for each in own]
            sums: list[Vec] = []
            if self.format.has_min:
                found = [chunk.load(chunk.at(each.sums, _LINE), I32) for each in own]
                sums = [s.astype(F32) * scale for s, scale in zip(found, scales, strict=True)]
            packed.put(chunk, self.chunks, scales, sums)

        each_chunk(self.groups, pack)

    def _pack_rows(self, first: Vec, packed: _Packed) -> None:
        codes = codes_of(self.format)

        def words(chunk: Chunk, row: Vec) -> list[Vec]:
            steps = [
                codes.packed_step(chunk, self.matrix.row(row), number)
                for number in range(codes.steps)
            ]
            return [
                (part.view(I8) - codes.offset).view(I32) if codes.offset else part
                for of_part in zip(*steps, strict=True)
                for part in of_part
            ]

        def pack(chunk: Chunk) -> None:
            def two(row: Vec) -> None:
                both = words(chunk, first + row) + words(chunk, first + row + 1)
                for lane, of_lane in enumerate(transposed(both)):
                    place = packed.at(chunk.index + self.chunks * lane).codes
                    (place + row * (4 * _STEPS)).store(of_lane)

            for_range(0, first.like(AMX_ROWS), 2, two)
            found = [factors_of(chunk, self.matrix.row(first + i)) for i in range(AMX_ROWS)]
            minima = [each.minima for each in found if each.minima is not None]
            packed.put(chunk, self.chunks, [each.scales[0] for each in found], minima)

        each_chunk(self.groups, pack)

    def _lane(self, number: Vec, rows: _Packed, vectors: _Packed, totals: Ptr) -> None:
        """The totals of a lane: for each of 16 rows those of 16 vectors."""
        zeros = Vec.full(self.builder, 0, F32, LANES)
        left, right = rows.at(number * self.chunks), vectors.at(number * self.chunks)
        sums = [Var(zeros) for _ in range(AMX_ROWS)]

        def counts_of(chunk: Vec) -> Ptr:
            return self.counts + chunk * _TILE_BYTES

        def count(first: Vec) -> None:
            chunks = [(first + i).minimum(self.chunks - 1) for i in range(len(_SUMS))]
            for i, chunk in enumerate(chunks):
                call_tiles(self.builder, "tilezero", I8(_SUMS[i]))
                load_tile(_ROWS[i % 2], left.at(chunk).codes, number.like(4 * _STEPS))
                load_tile(_VECTORS[i % 2], right.at(chunk).codes, number.like(_LINE))
                tiles = [I8(tile) for tile in (_SUMS[i], _ROWS[i % 2], _VECTORS[i % 2])]
                call_tiles(self.builder, "tdpbssd", *tiles)
            for i, chunk in enumerate(chunks):
                store_tile(_SUMS[i], counts_of(chunk), number.like(_LINE))

        def scale(chunk: Vec) -> None:
            one, other = left.at(chunk), right.at(chunk)
            scales = other.scales.load(F32, LANES)
            for r, total in enumerate(sums):
                counted = (counts_of(chunk) + r * _LINE).load(I32, LANES).astype(F32)
                factor = (one.scales + 4 * r).load(F32).spread(LANES) * scales
                total.set(counted.fma(factor, total.get()))
                if self.format.has_min:
                    minimum = (one.minima + 4 * r).load(F32).spread(LANES)
                    total.set(minimum.fma(other.minima.load(F32, LANES), total.get()))

        # One tile's sums are not there for long: those of several are under way at a time.
        for_range(0, self.chunks, len(_SUMS), count)
        for_range(0, self.chunks, 1, scale)
        for r, total in enumerate(sums):
            (totals + r * _LINE).store(total.get())

    def _totals(self, block: Vec) -> Ptr:
        """Of a block of vectors those of all lanes, for each of 16 rows."""
        return self.totals + block * (CHUNK_GROUPS * _TILE_BYTES)

    def _put(self, totals: Ptr, token: Vec, column: Vec) -> None:
        """Write the sums of all lanes, by halving, as `Vec.sum`."""

        def row(number: Vec) -> None:
            at = totals + number * _LINE
            lanes = [(at + g * _TILE_BYTES).load(F32, LANES) for g in range(CHUNK_GROUPS)]
            while len(lanes) > 1:
                half = len(lanes) // 2
                lanes = [lanes[i] + lanes[half + i] for i in range(half)]
            at.store(lanes[0])

        for_range(0, token.like(AMX_ROWS), 1, row)
        sums = transposed([(totals + r * _LINE).load(F32, LANES) for r in range(AMX_ROWS)])
        for i, of_token in enumerate(sums):
            self.out.at(token + i, column).store(of_token)


def _allocated(builder, num_bytes: Vec) -> tuple[Ptr, Callable[[], None]]:  # type: ignore[no-untyped-def]
    """So much memory, or null, and what gives it back: more than a stack holds."""
    space = call_by_name(builder, "malloc", I8.as_pointer(), [num_bytes.value])

    def give_back() -> None:
        call_by_name(builder, "free", ir.VoidType(), [space])

    return Ptr(builder, space), give_back


@intrinsic
def byte_tile_products(typingctx, weights, x, out, first, last, column):
    """out[t, column + n - first] = weights[n] . x[t] for n in first..last-1 and all t.

    At least 16 rows and 16 vectors; weights of `takes_bytes`, x `QuantizedVectors`; numbers of a
    row of `out` lie side by side. False, and nothing is done, where there is no memory for that.
    Checks nothing.
    """

    def emit(given: Arguments) -> Vec:
        products = _Products(given.array(0), given.arrays(1), given.array(2))
        return products.emit(*given.numbers(3, 4, 5))

    return types.boolean(weights, x, out, *(_INDEX,) * 3), codegen_of(emit)
