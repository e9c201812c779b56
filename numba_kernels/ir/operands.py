"""Operands of dot products and sums, whatever the format: rows of weights, and vectors.

A row is a `Row` of quantized weights or, of float weights, an address; a vector a `Vector` or an
address, as `numba_kernels.decode.vectors.quantize_activations` gave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hotcold.numba_kernels.formats import CHUNK, QUANT_GROUP
from hotcold.numba_kernels.ir.float_ir import FloatDots, add_scaled, item_bytes
from hotcold.numba_kernels.ir.integer_ir import emit_products
from hotcold.numba_kernels.ir.quantize_ir import ScaledSum
from hotcold.numba_kernels.ir.quantized_ir import Row, Vector, format_of
from hotcold.numba_kernels.ir.target import FLOATS_AHEAD, QUANTIZED_AHEAD
from hotcold.numba_kernels.ir.vec import Array, Ptr, Vec

PART_COLUMNS = CHUNK  # of `add_part`: a chunk of quantized rows


class Weights:
    """A 2-D array of weight rows inside an intrinsic."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.dtype = array.kind.dtype
        self.format = format_of(self.dtype)  # None of floats
        num_items = array.shape[1]
        if self.format:
            blocks = num_items // self.format.block_bytes
            self.groups = blocks * self.format.block_groups
            self.width = self.groups * QUANT_GROUP
        else:
            self.width = num_items
        self.row_bytes = num_items * max(1, item_bytes(self.dtype))

    def row(self, index: Vec) -> Any:
        """A row's operand."""
        start = self.array.at(index)
        if not self.format:
            return start
        return Row.at(self.format, start, self.groups)

    def products(self, rows: list[Any], vectors: list[Any], ahead: Sequence[Any] = ()) -> list[Vec]:
        """Every row times every vector, row by row; rows in `ahead` are prefetched in step.

        Each product is added up in one order, so it does not depend on the others.
        """
        return self._products(rows, vectors, ahead, 0)

    def products_in_sequence(self, row: Any, vectors: list[Any]) -> list[Vec]:
        """A row times every vector; the rows behind it come next, and are prefetched in step."""
        bytes_ahead = QUANTIZED_AHEAD if self.format else FLOATS_AHEAD
        return self._products([row], vectors, [row] if bytes_ahead else [], bytes_ahead)

    def _products(
        self, rows: list[Any], vectors: list[Any], ahead: Sequence[Any], bytes_ahead: int
    ) -> list[Vec]:
        if self.format:
            return emit_products(self.format, rows, vectors, self.groups, ahead, bytes_ahead)
        return FloatDots(self.dtype, rows, vectors).emit(self.width, ahead, bytes_ahead)

    def add_scaled(
        self, out: Ptr, rows: list[Any], factors: list[Vec], ahead: Sequence[Any] = ()
    ) -> None:
        """out += sum of factor * row, row after row; in lane order for quantized rows.

        Rows in `ahead` are prefetched in step.
        """
        if self.format:
            ScaledSum(self.format, rows, factors, out).emit(self.groups, list(ahead))
        else:
            add_scaled(self.dtype, rows, factors, out, self.width, ahead)

    def add_part(self, out: Ptr, rows: list[Any], factors: list[Vec], part: Vec) -> None:
        """`add_scaled` for one part of the columns; `out` holds those alone.

        A part is PART_COLUMNS columns, the last one maybe less.
        """
        first = part * PART_COLUMNS
        if self.format:
            whole_out = out + first * -4
            ScaledSum(self.format, rows, factors, whole_out).emit_chunk(self.groups, part)
            return
        length = (self.width - first).minimum(PART_COLUMNS)
        starts = [row + first * item_bytes(self.dtype) for row in rows]
        add_scaled(self.dtype, starts, factors, out, length, [])


class Vectors:
    """The vectors that weights are multiplied with, inside an intrinsic: (T, d)."""

    def __init__(self, arrays: list[Array]) -> None:
        """One array of floats, or the three of a QuantizedVectors."""
        self.arrays = arrays

    def vector(self, token: Vec) -> Any:
        """The operand of one token."""
        parts = [array.at(token) for array in self.arrays]
        return Vector(*parts) if len(parts) > 1 else parts[0]
