"""Vector IR for float rows times several vectors whose columns are taken in parts.

A panel of rows is first read through, in one stream, which is what the hardware prefetches best;
prefetch instructions from between the products reach half of that, for a core keeps few of them
waiting. Then the panel is multiplied from the second-level cache part by part, so that the vectors'
part stays in the first-level cache. Sums wait in memory between parts.

Additions have the order of `numba_kernels.ir.operands`: even blocks to one sum, odd ones to
another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from numba_kernels.ir.llvm_vectors import (
    F32,
    FLOATS,
    I8,
    I64,
    LANES,
    LINE_BYTES,
    ZEROS,
    add_products,
    counted_loop,
    item_pointer,
    new_cell,
    sum_cells,
    whole_steps,
)

_LINES_A_STEP = 8


def read_through(builder: Any, first: Any, num_bytes: Any) -> None:
    """Bring whole steps of `num_bytes` from `first` (i8*) on into the cache, in one stream."""
    step = _LINES_A_STEP * LINE_BYTES

    def lines(index: Any) -> None:
        at = item_pointer(builder, first, index, 1)
        for line in range(_LINES_A_STEP):
            byte = item_pointer(builder, at, I64(line), LINE_BYTES)
            builder.load_atomic(byte, "monotonic", 1, typ=I8)  # atomic: else it is left out

    counted_loop(builder, I64(0), whole_steps(builder, num_bytes, step), step, lines)


class FloatPanel:
    """`num_tiles` tiles of rows, one after the other, times the vectors of one tile."""

    def __init__(
        self,
        builder: Any,
        dtype: Any,
        row: Callable[[Any], Any],
        xs: list[Any],
        num_rows: int,
        num_tiles: int,
        block: int,
        blocks_a_part: int,
    ) -> None:
        """`row` gives the i8* of the panel's row of an index (i64); a tile has `num_rows`.

        A part is `blocks_a_part` blocks of `block` weights, all even or all odd ones.
        """
        self._builder = builder
        self._dtype = dtype
        self._row = row
        self._xs = xs
        self._num_rows = num_rows
        self._num_tiles = num_tiles
        self._block = block
        self._blocks_a_part = blocks_a_part
        self._num_sums = num_rows * len(xs)
        kind = ir.ArrayType(FLOATS, 2 * num_tiles * self._num_sums)
        self._waiting = cgutils.alloca_once(builder, kind)

    def emit(self, length: Any, store: Callable[[Any, int, Any], None]) -> None:
        """Multiply; store(index of a row (i64), number of a vector, product) takes each product."""
        builder = self._builder
        num_even = builder.udiv(length, I64(2 * self._block))  # as many as odd ones
        for parity in range(2):
            with cgutils.for_range_slice(
                builder, I64(0), num_even, I64(self._blocks_a_part), inc=True
            ) as (first, _):
                end = builder.add(first, I64(self._blocks_a_part))
                end = builder.select(builder.icmp_signed("<", end, num_even), end, num_even)
                self._emit_part(parity, first, end)

        def end_tile(tile: Any) -> None:
            self._emit_end(tile, num_even, length, store)

        counted_loop(builder, I64(0), I64(self._num_tiles), 1, end_tile)

    def _emit_part(self, parity: int, first: Any, end: Any) -> None:
        """Blocks first..end-1 of one parity, for all tiles."""
        builder = self._builder
        fresh = builder.icmp_signed("==", first, I64(0))

        def tile(index: Any) -> None:
            cells, rows = self._load(parity, index, fresh), self._rows(index)

            def one_block(number: Any) -> None:
                column = builder.mul(number, I64(2 * self._block))
                for offset in range(parity * self._block, (parity + 1) * self._block, LANES):
                    self._add(rows, builder.add(column, I64(offset)), LANES, cells)

            counted_loop(builder, first, end, 1, one_block)
            self._keep(parity, index, cells)

        counted_loop(builder, I64(0), I64(self._num_tiles), 1, tile)

    def _emit_end(
        self, tile: Any, num_even: Any, length: Any, store: Callable[[Any, int, Any], None]
    ) -> None:
        """What is left of the rows, and the sums of all."""
        builder = self._builder
        rows = self._rows(tile)
        nothing = builder.icmp_signed("==", num_even, I64(0))
        even, odd = (self._load(parity, tile, nothing) for parity in range(2))
        tails = [new_cell(builder, F32(0)) for _ in range(self._num_sums)]
        paired = builder.mul(num_even, I64(2 * self._block))
        whole = whole_steps(builder, length, LANES)
        counted_loop(builder, paired, whole, LANES, lambda at: self._add(rows, at, LANES, even))
        counted_loop(builder, whole, length, 1, lambda at: self._add(rows, at, 1, tails))
        first = builder.mul(tile, I64(self._num_rows))
        for r in range(self._num_rows):
            for x in range(len(self._xs)):
                i = r * len(self._xs) + x
                total = builder.fadd(
                    sum_cells(builder, [even[i], odd[i]]), builder.load(tails[i], typ=F32)
                )
                store(builder.add(first, I64(r)), x, total)

    def _rows(self, tile: Any) -> list[Any]:
        first = self._builder.mul(tile, I64(self._num_rows))
        return [self._row(self._builder.add(first, I64(r))) for r in range(self._num_rows)]

    def _place(self, parity: int, tile: Any, number: int) -> Any:
        builder = self._builder
        first = builder.mul(tile, I64(2 * self._num_sums))
        index = builder.add(first, I64(parity * self._num_sums + number))
        base = builder.bitcast(self._waiting, FLOATS.as_pointer())
        return builder.gep(base, [index], source_etype=FLOATS)

    def _load(self, parity: int, tile: Any, fresh: Any) -> list[Any]:
        """Cells with the sums that wait, or with zeros where `fresh`."""
        builder, cells = self._builder, []
        for number in range(self._num_sums):
            cell = new_cell(builder, ZEROS)
            waiting = builder.load(self._place(parity, tile, number), typ=FLOATS)
            builder.store(builder.select(fresh, ZEROS, waiting), cell)
            cells.append(cell)
        return cells

    def _keep(self, parity: int, tile: Any, cells: list[Any]) -> None:
        builder = self._builder
        for number, cell in enumerate(cells):
            builder.store(builder.load(cell, typ=FLOATS), self._place(parity, tile, number))

    def _add(self, rows: list[Any], index: Any, lanes: int, cells: list[Any]) -> None:
        """cells[r, x] += row r times vector x at `index`."""
        add_products(self._builder, self._dtype, rows, self._xs, index, lanes, cells)
