"""What products are made of, whatever the format: rows of weights and vectors, as pointers.

A row is a `Row` of quantized weights or a plain pointer; a vector a `Vector` or a plain pointer,
as `numba_kernels.decode.vectors.prepared` gave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import types

from numba_kernels.formats import CHUNK, QUANT_GROUP, SCALE_BYTES
from numba_kernels.ir.llvm_vectors import (
    F32,
    I64,
    LANES,
    LINE_BYTES,
    ZEROS,
    add_products,
    counted_loop,
    fma,
    item_pointer,
    new_cell,
    prefetch_line,
    row_pointer,
    splat,
    sum_cells,
    whole_steps,
    widen,
)
from numba_kernels.ir.panel_ir import FloatPanel
from numba_kernels.ir.quantized_ir import Row, ScaledSum, Vector, bits_of, emit_products
from numba_kernels.ir.vec import Ptr, Vec

PART_COLUMNS = CHUNK  # of `add_part`: a chunk of quantized rows
_BLOCK = 8 * LANES  # weights that go to one of two sums
_BLOCKS_A_PART = 8  # of a panel: four vectors' parts take 16 KiB
_MOST_CHAINS = 4  # rows times vectors whose two sums are kept side by side


class Weights:
    """A 2-D array of weight rows inside an intrinsic."""

    def __init__(self, context: Any, builder: Any, array_type: Any, array: Any) -> None:
        self.context = context
        self.builder = builder
        self.type = array_type
        self.array = array
        self.bits = bits_of(array_type.dtype)
        struct = context.make_array(array_type)(context, builder, value=array)
        num_items = builder.extract_value(struct.shape, 1)
        if self.bits:
            self.groups = builder.udiv(num_items, I64(QUANT_GROUP * self.bits // 8 + SCALE_BYTES))
            self.width = builder.mul(self.groups, I64(QUANT_GROUP))
        else:
            self.width = num_items
        self.row_bytes = builder.mul(num_items, I64(max(1, array_type.dtype.bitwidth // 8)))

    def pointer(self, index: Any) -> Any:
        """i8* of a row."""
        return row_pointer(self.context, self.builder, self.type, self.array, index)

    def row(self, index: Any) -> Any:
        """A row's operand."""
        if not self.bits:
            return self.pointer(index)
        values = self.pointer(index)
        num_bytes = self.builder.mul(self.groups, I64(QUANT_GROUP * self.bits // 8))
        start = Ptr(self.builder, values)
        return Row(start, start + Vec(self.builder, num_bytes))

    def products(self, rows: list[Any], vectors: list[Any], ahead: Sequence[Any] = ()) -> list[Any]:
        """Every row times every vector, row by row; rows in `ahead` are prefetched in step.

        Each product is added up in one order, so it does not depend on the others.
        """
        if self.bits:
            groups = Vec(self.builder, self.groups)
            products = emit_products(self.bits, rows, vectors, groups, ahead)
            return [product.value for product in products]
        floats = _FloatProducts(self.builder, self.type.dtype, rows, vectors)
        return floats.emit(self.width, ahead)

    def panel(
        self, first_row: Any, vectors: list[Any], num_rows: int, num_tiles: int
    ) -> FloatPanel:
        """Float rows from `first_row` on, as `num_tiles` tiles of `num_rows`, times `vectors`."""
        builder = self.builder

        def row(index: Any) -> Any:
            return self.pointer(builder.add(first_row, index))

        return FloatPanel(
            builder, self.type.dtype, row, vectors, num_rows, num_tiles, _BLOCK, _BLOCKS_A_PART
        )

    def add_scaled(self, out: Any, rows: list[Any], factors: list[Any], ahead: list[Any]) -> None:
        """out (i8*) += sum of factor * row, row after row; in lane order for quantized rows.

        Rows in `ahead` are prefetched in step.
        """
        if self.bits:
            self._scaled(rows, factors, out).emit(Vec(self.builder, self.groups), ahead)
        else:
            _float_scaled_sum(self.builder, self.type.dtype, rows, factors, out, self.width, ahead)

    def _scaled(self, rows: list[Any], factors: list[Any], out: Any) -> ScaledSum:
        numbers = [Vec(self.builder, factor) for factor in factors]
        return ScaledSum(self.bits, rows, numbers, Ptr(self.builder, out))

    def add_part(self, out: Any, rows: list[Any], factors: list[Any], part: Any) -> None:
        """`add_scaled` for one part of the columns; `out` (i8*) holds those alone.

        A part is PART_COLUMNS columns, the last one maybe less.
        """
        builder = self.builder
        if self.bits:
            before = builder.mul(part, I64(-4 * PART_COLUMNS))
            whole_out = item_pointer(builder, out, before, 1)
            scaled = self._scaled(rows, factors, whole_out)
            scaled.emit_chunk(Vec(builder, self.groups), Vec(builder, part))
            return
        first = builder.mul(part, I64(PART_COLUMNS))
        left = builder.sub(self.width, first)
        whole = builder.icmp_signed("<", I64(PART_COLUMNS), left)
        length = builder.select(whole, I64(PART_COLUMNS), left)
        item_bytes = self.type.dtype.bitwidth // 8
        parts = [item_pointer(builder, row, first, item_bytes) for row in rows]
        _float_scaled_sum(builder, self.type.dtype, parts, factors, out, length, [])


class Vectors:
    """The vectors that weights are multiplied with, inside an intrinsic: (T, d) or (d,)."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        self.context = context
        self.builder = builder
        self.kind = kind
        self.value = value

    def vector(self, token: Any) -> Any:
        """The operand of one token."""
        if not isinstance(self.kind, types.BaseNamedTuple):
            return self._row(self.kind, self.value, token)
        parts = [
            self._row(kind, self.builder.extract_value(self.value, i), token)
            for i, kind in enumerate(self.kind.types)
        ]
        return Vector(*(Ptr(self.builder, part) for part in parts))

    def _row(self, kind: Any, array: Any, token: Any) -> Any:
        return row_pointer(self.context, self.builder, kind, array, token)


class _FloatProducts:
    """Products of float rows with vectors: 16 lanes, added up in two sums.

    Blocks of eight vectors go to the two sums in turn, what is left of whole vectors to the first,
    the last numbers one by one to a third. One row and vector then have two chains of additions,
    twice as fast as one; more of them take one sum after the other, for registers hold one each.
    """

    def __init__(self, builder: Any, dtype: Any, rows: list[Any], xs: list[Any]) -> None:
        self.builder = builder
        self.dtype = dtype
        self.item_bytes = dtype.bitwidth // 8
        self.rows = rows
        self.xs = xs
        self.num_pairs = len(rows) * len(xs)

    def emit(self, length: Any, ahead: Sequence[Any]) -> list[Any]:
        """The products, row by row; rows in `ahead` are prefetched in step."""
        builder = self.builder
        sums = [self._cells(ZEROS) for _ in range(2)]
        tails = self._cells(F32(0))
        paired = whole_steps(builder, length, 2 * _BLOCK)
        whole = whole_steps(builder, length, LANES)

        def block(index: Any, number: int) -> None:
            start = builder.add(index, I64(number * _BLOCK))
            self._prefetch(ahead, start, _BLOCK)
            for offset in range(0, _BLOCK, LANES):
                self._add(builder.add(start, I64(offset)), LANES, sums[number])

        def both(index: Any) -> None:
            block(index, 0)
            block(index, 1)

        if self.num_pairs <= _MOST_CHAINS:
            counted_loop(builder, I64(0), paired, 2 * _BLOCK, both)
        else:
            counted_loop(builder, I64(0), paired, 2 * _BLOCK, lambda index: block(index, 0))
            counted_loop(builder, I64(0), paired, 2 * _BLOCK, lambda index: block(index, 1))

        def rest(index: Any) -> None:
            self._prefetch(ahead, index, LANES)
            self._add(index, LANES, sums[0])

        counted_loop(builder, paired, whole, LANES, rest)
        counted_loop(builder, whole, length, 1, lambda index: self._add(index, 1, tails))
        return [
            builder.fadd(sum_cells(builder, [first, second]), builder.load(tail, typ=F32))
            for first, second, tail in zip(*sums, tails, strict=True)
        ]

    def _cells(self, value: Any) -> list[Any]:
        return [new_cell(self.builder, value) for _ in range(self.num_pairs)]

    def _prefetch(self, ahead: Sequence[Any], index: Any, count: int) -> None:
        for row in ahead:
            for line in range(0, count * self.item_bytes, LINE_BYTES):
                at = item_pointer(self.builder, row, index, self.item_bytes)
                prefetch_line(self.builder, at, line)

    def _add(self, index: Any, lanes: int, cells: list[Any]) -> None:
        add_products(self.builder, self.dtype, self.rows, self.xs, index, lanes, cells)


def _float_scaled_sum(
    builder: Any,
    dtype: Any,
    rows: list[Any],
    scales: list[Any],
    out: Any,
    length: Any,
    ahead: list[Any],
) -> None:
    item_bytes = dtype.bitwidth // 8
    step = LANES if not ahead else max(LANES, LINE_BYTES // item_bytes)  # a line, or more of them
    wide = [splat(builder, scale) for scale in scales]
    lines, whole = whole_steps(builder, length, step), whole_steps(builder, length, LANES)

    def add(index: Any, lanes: int, factors: list[Any]) -> None:
        cell = item_pointer(builder, out, index, 4)
        total = widen(builder, types.float32, cell, lanes)
        for row, factor in zip(rows, factors, strict=True):
            weights = widen(builder, dtype, item_pointer(builder, row, index, item_bytes), lanes)
            total = fma(builder, weights, factor, total)
        builder.store(total, builder.bitcast(cell, total.type.as_pointer()), align=4)

    def one_line(index: Any) -> None:
        for row in ahead:
            prefetch_line(builder, item_pointer(builder, row, index, item_bytes), 0)
        for first in range(0, step, LANES):
            add(builder.add(index, I64(first)), LANES, wide)

    counted_loop(builder, I64(0), lines, step, one_line)
    if step > LANES:
        counted_loop(builder, lines, whole, LANES, lambda index: add(index, LANES, wide))
    counted_loop(builder, whole, length, 1, lambda index: add(index, 1, scales))


def store_float(builder: Any, value: Any, pointer: Any, offset_bytes: Any) -> None:
    """Write a float32 at `pointer` (i8*) + `offset_bytes`."""
    cell = item_pointer(builder, pointer, offset_bytes, 1)
    builder.store(value, builder.bitcast(cell, ir.FloatType().as_pointer()), align=4)
