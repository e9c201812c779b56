"""Vector IR for float rows: dot products with vectors, and scaled sums.

float16 widens by an instruction, bfloat16 by a shift of 16 bits; everything is added up in float32.
A dot product has one order of additions, so its bits do not depend on what is computed beside it:
blocks of eight vectors go to two sums in turn, further whole vectors to the first, the last numbers
one by one to a third.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types

from hotcold.numba_kernels.ir.target import LANES, LINE_BYTES, has_feature
from hotcold.numba_kernels.ir.vec import (
    F32,
    HALF,
    I8,
    I16,
    I32,
    I64,
    Ptr,
    Var,
    Vec,
    for_range,
    stack_space,
    whole_steps,
)

BLOCK = 8 * LANES  # weights that go to one of two sums
# Of a panel: lanes of a register, of a sum's LANES; blocks whose vectors stay in the first-level
# cache; how often a loop goes through a block. Eight lanes are half of each line that is read.
_REGISTER, _BLOCKS_A_PART, _STEPS_A_BLOCK = (
    (LANES, 8, 1) if has_feature("avx512f") else (LANES // 2, 4, 4)
)
_MAX_CHAINS = 4  # rows times vectors whose two sums are kept side by side
_LINES_A_STEP = 8  # of reading through
_FLOATS = ir.VectorType(F32, LANES)


def item_bytes(dtype: Any) -> int:
    """Bytes of one weight of a float dtype."""
    return int(dtype.bitwidth) // 8


def widen(dtype: Any, at: Ptr, lanes: int) -> Vec:
    """Load `lanes` weights of a Numba dtype, as float32."""
    if dtype == types.float32:
        return at.load(F32, lanes)
    if dtype == types.uint16:
        return at.load(HALF, lanes).astype(F32)
    if dtype == types.int16:
        return (at.load(I16, lanes).astype(I32, signed=False) << 16).view(F32)
    if dtype == types.int8:
        return at.load(I8, lanes).astype(F32)
    raise TypeError(
        f"weights must be float32, uint16 (float16), int16 (bfloat16) or int8, not {dtype}"
    )


def round_to_bfloat16(floats: Vec) -> Vec:
    """The nearest bfloat16, ties to even, as bits (i16). NaN stays NaN."""
    bits = floats.view(I32)
    odd = bits >> 16 & 1
    rounded = floats.is_nan().where(bits | 0x400000, bits + (odd + 0x7FFF))
    return (rounded >> 16).astype(I16)


def read_through(first: Ptr, num_bytes: Vec) -> None:
    """Bring whole steps of `num_bytes` from `first` on into the cache, in one stream."""
    step = _LINES_A_STEP * LINE_BYTES

    def lines(index: Vec) -> None:
        for line in range(0, step, LINE_BYTES):
            (first + index + line).touch()

    for_range(0, whole_steps(num_bytes, step), step, lines)


class FloatDots:
    """Dot products of float rows and vectors, in registers.

    Few products have two chains of additions each, twice as fast as one; more of them compute one
    sum after the other, as registers hold one each.
    """

    def __init__(self, dtype: Any, rows: list[Ptr], xs: list[Ptr]) -> None:
        """Rows of `dtype`, vectors of float32."""
        self.dtype = dtype
        self.rows = rows
        self.xs = xs
        self.builder = rows[0].builder
        self.num_pairs = len(rows) * len(xs)

    def emit(self, length: Vec, ahead: Sequence[Ptr], bytes_ahead: int = 0) -> list[Vec]:
        """The products, row by row; rows in `ahead` are prefetched in step, from there on."""
        ahead = [row + bytes_ahead for row in ahead]
        sums = [self.zeros(LANES) for _ in range(2)]
        tails = self.zeros(1)
        paired, whole = whole_steps(length, 2 * BLOCK), whole_steps(length, LANES)

        def block(index: Vec, number: int) -> None:
            start = index + number * BLOCK
            self.prefetch(ahead, start, BLOCK)
            for offset in range(0, BLOCK, LANES):
                self.add(start + offset, LANES, sums[number])

        def both(index: Vec) -> None:
            block(index, 0)
            block(index, 1)

        if self.num_pairs <= _MAX_CHAINS:
            for_range(0, paired, 2 * BLOCK, both)
        else:
            for_range(0, paired, 2 * BLOCK, lambda index: block(index, 0))
            for_range(0, paired, 2 * BLOCK, lambda index: block(index, 1))

        def rest(index: Vec) -> None:
            self.prefetch(ahead, index, LANES)
            self.add(index, LANES, sums[0])

        for_range(paired, whole, LANES, rest)
        for_range(whole, length, 1, lambda index: self.add(index, 1, tails))
        return self.totals(sums[0], sums[1], tails)

    def zeros(self, lanes: int) -> list[Var]:
        """A sum for every product."""
        zero = Vec.full(self.builder, 0, F32, lanes)
        return [Var(zero) for _ in range(self.num_pairs)]

    def add(self, index: Vec, lanes: int, sums: list[Var]) -> None:
        """sums[r * len(xs) + t] += rows[r] * xs[t] at `index`."""
        parts = [widen(types.float32, x + index * 4, lanes) for x in self.xs]
        step = index * item_bytes(self.dtype)
        weights = [widen(self.dtype, row + step, lanes) for row in self.rows]
        pairs = [(weight, part) for weight in weights for part in parts]
        for total, (weight, part) in zip(sums, pairs, strict=True):
            total.set(weight.fma(part, total.get()))

    @staticmethod
    def totals(even: list[Var], odd: list[Var], tails: list[Var]) -> list[Vec]:
        """The products, from their sums."""
        return [
            (first.get() + second.get()).sum() + tail.get()
            for first, second, tail in zip(even, odd, tails, strict=True)
        ]

    def prefetch(self, ahead: Sequence[Ptr], index: Vec, count: int) -> None:
        """Ask for `count` columns of rows, from `index` on."""
        size = item_bytes(self.dtype)
        for row in ahead:
            for line in range(0, count * size, LINE_BYTES):
                (row + index * size + line).prefetch(2)


def add_scaled(
    dtype: Any, rows: list[Ptr], factors: list[Vec], out: Ptr, length: Vec, ahead: Sequence[Ptr]
) -> None:
    """out += sum of factor * row, row after row; rows in `ahead` are prefetched in step."""
    size = item_bytes(dtype)
    step = LANES if not ahead else max(LANES, LINE_BYTES // size)  # a line, or more of them
    lines, whole = whole_steps(length, step), whole_steps(length, LANES)
    wide = [factor.spread(LANES) for factor in factors]

    def add(index: Vec, lanes: int) -> None:
        total = widen(types.float32, out + index * 4, lanes)
        for row, factor in zip(rows, wide if lanes > 1 else factors, strict=True):
            total = widen(dtype, row + index * size, lanes).fma(factor, total)
        (out + index * 4).store(total)

    def one_line(index: Vec) -> None:
        for row in ahead:
            (row + index * size).prefetch(2)
        for first in range(0, step, LANES):
            add(index + first, LANES)

    for_range(0, lines, step, one_line)
    if step > LANES:
        for_range(lines, whole, LANES, lambda index: add(index, LANES))
    for_range(whole, length, 1, lambda index: add(index, 1))


class FloatPanel:
    """Tiles of float rows, one after the other, times several vectors, by parts of their columns.

    A panel of rows is first read through, in one stream, which the hardware prefetches best;
    prefetch instructions between the multiplications reach half of that, as a core has few in
    flight. Then the panel is multiplied from the second-level cache part by part, so that the
    vectors' part stays in the first-level cache. Sums wait in memory between parts. Of registers
    of fewer lanes than a sum's a tile takes one of each sum at a time: more rows and tokens fit.
    """

    def __init__(
        self,
        dtype: Any,
        row: Callable[[Vec], Ptr],
        xs: list[Ptr],
        num_rows: int,
        num_tiles: int,
        turns: Sequence[Vec] = (),
    ) -> None:
        """`row` gives the address of the panel's row of a number; a tile has `num_rows`.

        turns: if any, (turn, number of turns) of calls that share asking for the next panel
        """
        self._turns = turns
        self._dtype = dtype
        self._row = row
        self._xs = xs
        self._num_rows = num_rows
        self._num_sums = num_rows * len(xs)
        self._builder = xs[0].builder
        self._num_tiles = Vec.full(self._builder, num_tiles, I64)
        kind = ir.ArrayType(_FLOATS, 2 * num_tiles * self._num_sums)
        self._waiting = stack_space(self._builder, kind)

    def emit(self, length: Vec, store: Callable[[Vec, int, Vec], None]) -> None:
        """Multiply; store(number of a row, number of a vector, product) takes each product."""
        num_even = length // (2 * BLOCK)  # as many as odd ones

        def part_of(parity: int) -> Callable[[Vec], None]:
            def part(first: Vec) -> None:
                self._emit_part(parity, first, (first + _BLOCKS_A_PART).minimum(num_even))

            return part

        for parity in range(2):
            for_range(0, num_even, _BLOCKS_A_PART, part_of(parity))
        for_range(0, self._num_tiles, 1, lambda tile: self._end(tile, num_even, length, store))

    def _emit_part(self, parity: int, first: Vec, end: Vec) -> None:
        """Blocks first..end-1 of one parity, for all tiles."""

        size = BLOCK // _STEPS_A_BLOCK

        def some_lanes(index: Vec, lane: int) -> None:
            sums = self._load(parity, index, first.equals(0), lane, _REGISTER)
            products = self._products(index)

            def step(number: Vec) -> None:
                block = number // _STEPS_A_BLOCK
                column = block * (2 * BLOCK) + (number - block * _STEPS_A_BLOCK) * size + lane
                for offset in range(0, size, LANES):
                    products.add(column + (parity * BLOCK + offset), _REGISTER, sums)

            for_range(first * _STEPS_A_BLOCK, end * _STEPS_A_BLOCK, 1, step)
            for number, total in enumerate(sums):
                self._place(parity, index, number, lane).store(total.get(), align=4 * _REGISTER)

        def tile(index: Vec) -> None:
            if self._turns:
                self._ask_ahead(index, parity, first, end)
            for lane in range(0, LANES, _REGISTER):
                some_lanes(index, lane)

        for_range(0, self._num_tiles, 1, tile)

    def _ask_ahead(self, tile: Vec, parity: int, first: Vec, end: Vec) -> None:
        """Prefetch a tile's part of the next panel: each turn its lines, one of every `turns`."""
        turn, num_turns = self._turns
        item = item_bytes(self._dtype)
        lines = BLOCK * item // LINE_BYTES
        number = (tile + self._num_tiles) * self._num_rows
        rows = [self._row(number + r) + parity * BLOCK * item for r in range(self._num_rows)]

        def line(number: Vec) -> None:
            index = number * num_turns + turn
            block = index // lines
            place = (first + block) * (2 * BLOCK * item) + (index - block * lines) * LINE_BYTES
            for row in rows:
                (row + place).prefetch(2)

        for_range(0, ((end - first) * lines + num_turns - turn + -1) // num_turns, 1, line)

    def _end(
        self, tile: Vec, num_even: Vec, length: Vec, store: Callable[[Vec, int, Vec], None]
    ) -> None:
        """What is left of the rows, and the sums of all."""
        products = self._products(tile)
        even, odd = (self._load(parity, tile, num_even.equals(0)) for parity in range(2))
        tails = products.zeros(1)
        whole = whole_steps(length, LANES)
        for_range(num_even * (2 * BLOCK), whole, LANES, lambda at: products.add(at, LANES, even))
        for_range(whole, length, 1, lambda at: products.add(at, 1, tails))
        for i, total in enumerate(products.totals(even, odd, tails)):
            row, x = divmod(i, len(self._xs))
            store(tile * self._num_rows + row, x, total)

    def _products(self, tile: Vec) -> FloatDots:
        rows = [self._row(tile * self._num_rows + r) for r in range(self._num_rows)]
        return FloatDots(self._dtype, rows, self._xs)

    def _place(self, parity: int, tile: Vec, number: int, lane: int = 0) -> Ptr:
        index = tile * (2 * self._num_sums) + (parity * self._num_sums + number)
        return self._waiting + index * (4 * LANES) + 4 * lane

    def _load(
        self, parity: int, tile: Vec, fresh: Vec, lane: int = 0, lanes: int = LANES
    ) -> list[Var]:
        """Lanes of the sums that wait, or zeros where `fresh`."""
        zeros = Vec.full(self._builder, 0, F32, lanes)
        places = [self._place(parity, tile, number, lane) for number in range(self._num_sums)]
        return [Var(fresh.where(zeros, at.load(F32, lanes, align=4 * lanes))) for at in places]


class FloatStream(FloatPanel):
    """A panel whose tiles take rows straight from memory, by parts of their columns.

    A tile of few rows has both sums of its products, so it reads a part's lines in their order.
    Meanwhile as many lines of what comes next are prefetched into the second-level cache: the same
    rows' next part, or the first part of the next panel.
    """

    def __init__(
        self,
        pairs_a_part: int,
        dtype: Any,
        row: Callable[[Vec], Ptr],
        xs: list[Ptr],
        num_rows: int,
        num_tiles: int,
    ) -> None:
        """A part has up to `pairs_a_part` pairs of blocks; the rest as `FloatPanel`."""
        super().__init__(dtype, row, xs, num_rows, num_tiles)
        self._most = pairs_a_part

    def emit(self, length: Vec, store: Callable[[Vec, int, Vec], None]) -> None:
        """As `FloatPanel.emit`, straight from memory."""
        num_pairs = length // (2 * BLOCK)
        some = (num_pairs + (self._most - 1)) // self._most
        num_parts = some.equals(0).where(some.like(1), some)
        size = (num_pairs + num_parts + -1) // num_parts

        def part(number: Vec) -> None:
            self._emit_pairs(number * size, size, num_pairs, length)

        for_range(0, num_parts, 1, part)
        for_range(0, self._num_tiles, 1, lambda tile: self._end(tile, num_pairs, length, store))

    def _emit_pairs(self, first: Vec, size: Vec, num_pairs: Vec, length: Vec) -> None:
        """A part of up to `size` pairs of blocks from `first` on, for all tiles."""
        item, following = item_bytes(self._dtype), first + size
        step = max(LANES, LINE_BYTES // item)  # a line, or more of them
        is_last = num_pairs.below(following + 1)
        end = following.minimum(num_pairs)
        distance = is_last.where(-first, size) * (2 * BLOCK * item)

        def tile(index: Vec) -> None:
            sums = [self._load(parity, index, first.equals(0)) for parity in range(2)]
            products = self._products(index)
            next_tile = is_last.where(index + self._num_tiles, index)
            following_rows = self._products(next_tile).rows
            ahead = [row + distance for row in following_rows]

            def pair(number: Vec) -> None:
                for parity in range(2):
                    start = number * (2 * BLOCK) + parity * BLOCK
                    for offset in range(0, BLOCK, LANES):
                        if offset % step == 0:
                            products.prefetch(ahead, start + offset, step)
                        products.add(start + offset, LANES, sums[parity])

            def missing(number: Vec) -> None:
                products.prefetch(ahead, number * (2 * BLOCK), 2 * BLOCK)

            for_range(first, end, 1, pair)
            for_range(end, following, 1, missing)  # of the last part, which may be shorter
            rest = lambda at: products.prefetch(following_rows, at, step)  # noqa: E731
            for_range(num_pairs * (2 * BLOCK), is_last.where(length, 0), step, rest)
            for parity in range(2):
                for number, total in enumerate(sums[parity]):
                    self._place(parity, index, number).store(total.get(), align=4 * LANES)

        for_range(0, self._num_tiles, 1, tile)
