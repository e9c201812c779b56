"""Items of 32 bits that weights and tokens are multiplied as: how many there are, and made of what.

What they are is the dtype of the arrays: see `float_matmul`.
"""

import numpy as np
from numba import types

from hotcold.numba_kernels.compiler import by_types
from hotcold.numba_kernels.formats import CHUNK
from hotcold.numba_kernels.ir.amx_ir import AMX_ITEMS, AMX_ROWS
from hotcold.numba_kernels.ir.lane_tile import TILE_ROWS
from hotcold.numba_kernels.ir.panel_ir import (
    fill_groups,
    fill_pairs,
    fill_row,
    prefetch_columns,
    unpack_chunk,
    unpack_groups,
    unpack_pairs,
)
from hotcold.numba_kernels.ir.quantized_ir import format_of

_ROWS_AHEAD = 8  # of a block of `combine` while it is filled


def num_items(width: int, dtype: type) -> int:
    """Items of `dtype` that hold `width` numbers."""
    if dtype == np.float32:
        return width
    at_once = 1 if dtype == np.int32 else AMX_ITEMS
    return -(-width // (2 * at_once)) * at_once


@by_types
def numbers_an_item(items):  # type: ignore[no-untyped-def]
    """2 of pairs, else 1; for compiled code, as the functions below."""
    number = 1 if items.dtype == types.float32 else 2
    return lambda items: number


@by_types
def items_in(width, items):  # type: ignore[no-untyped-def]
    """`num_items` for compiled code."""
    if items.dtype == types.float32:
        return lambda width, items: width
    numbers = 2 * (AMX_ITEMS if items.dtype == types.uint32 else 1)
    return lambda width, items: (width + numbers - 1) // numbers * (numbers // 2)


@by_types
def unit_of(items):  # type: ignore[no-untyped-def]
    """Rows of `combine`'s tokens are whole ones of so many, with anything behind the last one."""
    unit = AMX_ROWS if items.dtype == types.uint32 else TILE_ROWS
    return lambda items: unit


@by_types
def fill_items(matrix, row, first, last, out):  # type: ignore[no-untyped-def]
    """out = items first..last-1 of matrix[row], zeros beyond its end."""

    def floats(matrix, row, first, last, out):  # type: ignore[no-untyped-def]
        fill_row(matrix, row, first, last - first, out)

    def pairs(matrix, row, first, last, out):  # type: ignore[no-untyped-def]
        length = min(2 * last, matrix.shape[1]) - 2 * first
        bits = out.view(np.int16)
        fill_row(matrix, row, 2 * first, length, bits)
        for i in range(length, 2 * (last - first)):
            bits[i] = 0

    return floats if out.dtype == types.float32 else pairs


@by_types
def end_of_block(rows, column, last, most):  # type: ignore[no-untyped-def]
    """Where a block of `combine` ends that begins at `column`; a quantized one has one chunk."""
    if format_of(rows.dtype):
        return lambda rows, column, last, most: min((column // CHUNK + 1) * CHUNK, last)
    return lambda rows, column, last, most: min(column + most, last)


@by_types
def part_of_row(rows, column, count):  # type: ignore[no-untyped-def]
    """Of `count` columns from `column` on: the index of their first item in a row, and bytes."""
    row_format = format_of(rows.dtype)
    if not row_format:
        return lambda rows, column, count: (column, count * rows.itemsize)
    chunk_bytes = row_format.chunk_bytes
    return lambda rows, column, count: (column // CHUNK * chunk_bytes, chunk_bytes)


@by_types
def is_in_lanes(rows, column, count):  # type: ignore[no-untyped-def]
    """Whether these columns are a whole chunk of quantized rows, unpacked with a group a lane."""
    if format_of(rows.dtype):
        return lambda rows, column, count: count == CHUNK
    return lambda rows, column, count: False


@by_types
def fill_block(rows, first, last, column, count, out, space):  # type: ignore[no-untyped-def]
    """out[k // LANES, i - first, k % LANES] = column k of item i, for k < count, first <= i < last.

    Items are of `rows` from `column` on. Quantized columns are of one chunk; a whole one's are in
    the order of `is_in_lanes`. space (2, CHUNK) float32
    """
    is_quantized, has_pairs = format_of(rows.dtype) is not None, out.dtype != types.float32

    def floats(rows, first, last, column, count, out, space):  # type: ignore[no-untyped-def]
        for i in range(first, last):
            prefetch_columns(rows, i + _ROWS_AHEAD, column, count)
            fill_groups(rows, i, column, count, out, i - first)

    def pairs(rows, first, last, column, count, out, space):  # type: ignore[no-untyped-def]
        for i in range(first, last):
            if 2 * i >= rows.shape[0]:
                out[:, i - first] = 0
                continue
            prefetch_columns(rows, 2 * i + _ROWS_AHEAD, column, count)
            prefetch_columns(rows, 2 * i + 1 + _ROWS_AHEAD, column, count)
            if 2 * i + 1 < rows.shape[0]:
                fill_pairs(rows, 2 * i, column, count, out, i - first)
            else:  # a row without a second one
                fill_groups(rows, 2 * i, column, count, out, i - first)

    def unpacked_floats(rows, first, last, column, count, out, space):  # type: ignore[no-untyped-def]
        chunk, begin = column // CHUNK, column % CHUNK
        for i in range(first, last):
            prefetch_columns(rows, i + _ROWS_AHEAD, column, count)
            if count == CHUNK:
                unpack_groups(rows, i, chunk, out, i - first)
            else:
                unpack_chunk(rows, i, chunk, space[0])
                fill_groups(space, 0, begin, count, out, i - first)

    def unpacked_pairs(rows, first, last, column, count, out, space):  # type: ignore[no-untyped-def]
        chunk, begin = column // CHUNK, column % CHUNK
        bits = space.view(np.int16)
        for i in range(first, last):
            if 2 * i >= rows.shape[0]:
                out[:, i - first] = 0
                continue
            has_second = 2 * i + 1 < rows.shape[0]
            prefetch_columns(rows, 2 * i + _ROWS_AHEAD, column, count)
            prefetch_columns(rows, 2 * i + 1 + _ROWS_AHEAD, column, count)
            if count == CHUNK:
                if has_second:
                    unpack_pairs(rows, 2 * i, chunk, out, i - first)
                else:
                    unpack_groups(rows, 2 * i, chunk, out, i - first)
                continue
            unpack_chunk(rows, 2 * i, chunk, bits[0])
            if has_second:
                unpack_chunk(rows, 2 * i + 1, chunk, bits[1])
                fill_pairs(bits, 0, begin, count, out, i - first)
            else:
                fill_groups(bits, 0, begin, count, out, i - first)

    if is_quantized:
        return unpacked_pairs if has_pairs else unpacked_floats
    return pairs if has_pairs else floats
