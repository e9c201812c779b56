"""Rows times vectors: the matrix products of decoding, limited by how fast weights are read."""

import numpy as np
from numba import njit
from numba.extending import overload

from numba_kernels.checks import float_array, optional_floats, weight_rows
from numba_kernels.decode.vectors import empty_vectors, prepared
from numba_kernels.formats import CHUNK, CHUNK_GROUPS, QUANT_GROUP, is_quantized, row_width
from numba_kernels.ir.quantized_ir import format_of
from numba_kernels.ir.vector_ir import (
    dot_ahead,
    dot_tokens2,
    dot_tokens4,
    read_rows,
    tile_narrow,
    tile_panel,
    tile_shape,
    tile_wide,
)

_BYTES_AHEAD = 16384  # of one stream: what a core reads while memory answers


@njit(nogil=True, cache=True)
def rows_ahead(weights):
    """How many rows lie between one that is read and one that is prefetched meanwhile."""
    return max(1, _BYTES_AHEAD // max(1, weights.shape[1] * weights.itemsize))


@njit(nogil=True, cache=True, inline="always")  # a call costs as much as half a short row
def one_row_kernel(weights, row, following, x, out, column):
    """out[t, column] = weights[row] . x[t]; row `following` is prefetched; checks nothing."""
    t, num_tokens = 0, out.shape[0]
    while t + 4 <= num_tokens:
        four = dot_tokens4(weights, row, following, x, t, t + 1, t + 2, t + 3)
        for k in range(4):
            out[t + k, column] = four[k]
        t += 4
    if t + 2 <= num_tokens:
        two = dot_tokens2(weights, row, following, x, t, t + 1)
        out[t, column], out[t + 1, column] = two[0], two[1]
        t += 2
    if t < num_tokens:
        out[t, column] = dot_ahead(weights, row, following, x, t)


def tile_kernel(weights, row, x, out, column):  # type: ignore[no-untyped-def]
    """out[t, column + r] = weights[row + r] . x[t] for `tile_rows` rows, all tokens; no checks.

    The rows are read through first, then multiplied from the cache. There are more tokens than few
    of `tile_shape`. For compiled code alone; see the overload below.
    """
    raise NotImplementedError("tile_kernel() is for compiled code")


@overload(tile_kernel)
def _tile_kernel(weights, row, x, out, column):  # type: ignore[no-untyped-def]
    if format_of(weights.dtype):
        return _quantized_tiles
    return _float_panel


def _quantized_tiles(weights, row, x, out, column):  # type: ignore[no-untyped-def]
    num_tokens = out.shape[0]
    rows, tokens, _, tiles = tile_shape(weights)
    read_rows(weights, row, rows * tiles)
    for tile in range(tiles):
        first, t = tile * rows, 0
        while t + tokens <= num_tokens:
            tile_wide(weights, row + first, x, t, out, column + first)
            t += tokens
        while t < num_tokens:
            tile_narrow(weights, row + first, x, t, out, column + first)
            t += 1


def _float_panel(weights, row, x, out, column):  # type: ignore[no-untyped-def]
    num_tokens = out.shape[0]
    rows, tokens, _, tiles = tile_shape(weights)
    read_rows(weights, row, rows * tiles)
    for t in range(0, num_tokens, tokens):  # the last tokens with some of those before them
        tile_panel(weights, row, x, min(t, num_tokens - tokens), out, column)


@njit(nogil=True, cache=True)
def tile_rows(weights, num_tokens):
    """Rows that are multiplied side by side with so many tokens: one, or those of `tile_kernel`.

    For few tokens rows are read one after the other, as fast as memory gives; for more, when
    multiplying takes longer than reading, side by side.
    """
    rows, _, few_tokens, tiles = tile_shape(weights)
    return 1 if num_tokens <= few_tokens else rows * tiles


@njit(nogil=True, cache=True)
def block_products(weights, x, out, first, last, column, end):
    """out[t, column + n - first] = weights[n] . x[t] for n in first..last-1; checks nothing.

    Rows before `end` may be prefetched. `x` is what `prepared` gave for the T tokens of `out`.
    """
    row, num_tokens, distance = first, out.shape[0], rows_ahead(weights)
    side_by_side, column = tile_rows(weights, num_tokens), column - first
    while side_by_side > 1 and row + side_by_side <= last:
        tile_kernel(weights, row, x, out, column + row)
        row += side_by_side
    while num_tokens > 1 and row < last:
        one_row_kernel(weights, row, min(row + distance, end - 1), x, out, column + row)
        row += 1
    while row < last:  # without a call: that takes as long as half a short row
        out[0, column + row] = dot_ahead(weights, row, min(row + distance, end - 1), x, 0)
        row += 1


@njit(nogil=True, cache=True)
def rows_kernel(weights, bias, x, out, first, last):
    """out[t, n] = weights[n] . x[t] + bias[n] for n in first..last-1; checks nothing.

    `x` is what `prepared` gave for as many tokens as `out` (T, N) has.
    """
    block_products(weights, x, out, first, last, first, last)
    if bias.shape[0]:
        for t in range(out.shape[0]):
            for n in range(first, last):
                out[t, n] += bias[n]


@njit(nogil=True, cache=True)
def split_range(length, part, num_parts, unit):
    """First and last of part `part` when `length` is cut into parts of whole `unit`s; no checks."""
    units = (length + unit - 1) // unit
    first = units * part // num_parts * unit
    last = units * (part + 1) // num_parts * unit
    return min(first, length), min(last, length)


def add_in_order(weights, source, target, first, last):  # type: ignore[no-untyped-def]
    """target[first:last] += what `add_scaled4` summed of `weights` into `source`, in its order.

    Float formats keep the weights' order; quantized ones sum in lane order (item i of group g of a
    chunk at 16 * i + g of it, and chunks are whole there), and `first` and `last` are then
    multiples of 512 or the end. For compiled code alone; see the overload below.
    """
    raise NotImplementedError("add_in_order() is for compiled code")


@overload(add_in_order)
def _add_in_order(weights, source, target, first, last):  # type: ignore[no-untyped-def]
    if not format_of(weights.dtype):

        def plain(weights, source, target, first, last):  # type: ignore[no-untyped-def]
            values, sums = source[first:last], target[first:last]
            for i in range(sums.shape[0]):
                sums[i] += values[i]

        return plain

    def from_lanes(weights, source, target, first, last):  # type: ignore[no-untyped-def]
        for begin in range(first, last, CHUNK):
            groups = min(CHUNK_GROUPS, (last - begin) // QUANT_GROUP)
            for g in range(groups):
                for i in range(QUANT_GROUP):
                    target[begin + g * QUANT_GROUP + i] += source[begin + i * CHUNK_GROUPS + g]

    return from_lanes


@njit(nogil=True, cache=True)
def _rows_times_vectors(weights, bias, x, scratch, out):
    rows_kernel(weights, bias, prepared(weights, x, scratch, 0), out, 0, out.shape[1])


def rows_times_vectors(
    weights: np.ndarray, x: np.ndarray, bias: np.ndarray | None = None
) -> np.ndarray:
    """Products of weight rows with several vectors.

    out[t, n] = sum over k of weights[n, k] * x[t, k], plus bias[n]
    For quantized weights x is quantized too, in groups of 32: x = scale * value, value int8.
    Shapes:  weights (N, d) or (N, row bytes), x (T, d), bias (N,), out (T, N)
    Dtypes:  weights float32, uint16 (float16 bits), int16 (bfloat16 bits) or of ROW_FORMATS
             (`numba_kernels.formats`); the rest float32
    Units:   reads the weights once for every few tokens
    Errors:  ValueError on any mismatch
    """
    weights = weight_rows("weights", weights)
    width = row_width(weights.dtype, weights.shape[1])
    x = float_array("x", x, (x.shape[0] if x.ndim else 0, width))
    biases = optional_floats("bias", bias, weights.shape[0])
    out = np.empty((x.shape[0], weights.shape[0]), np.float32)
    if x.shape[0]:  # kernels take at least one token
        room = empty_vectors(1, *(x.shape if is_quantized(weights.dtype) else (0, 0)))
        _rows_times_vectors(weights, biases, x, room, out)
    return out
