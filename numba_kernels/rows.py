"""Rows times vectors: the matrix products of decoding, limited by how fast weights are read."""

import numpy as np
from numba import njit

from numba_kernels.checks import float_array, optional_floats, weight_rows
from numba_kernels.vector_ir import dot1_ahead, dot4, dot_tile, prefetch_row


@njit(nogil=True, cache=True)
def row_kernel(weights, row, following, x, out, column):
    """out[t, column] = weights[row] . x[t]; row `following` is prefetched; checks nothing."""
    for t in range(x.shape[0]):
        out[t, column] = dot1_ahead(weights, row, following, x[t])


@njit(nogil=True, cache=True)
def four_rows_kernel(weights, n0, n1, n2, n3, x, out, column):
    """out[t, column + r] = weights[n_r] . x[t] for four rows and all tokens; checks nothing."""
    t = 0
    while t + 4 <= x.shape[0]:
        tile = dot_tile(weights, n0, n1, n2, n3, x, t)
        for r in range(4):
            for k in range(4):
                out[t + k, column + r] = tile[4 * r + k]
        t += 4
    while t < x.shape[0]:
        sums = dot4(weights, n0, n1, n2, n3, x[t])
        for r in range(4):
            out[t, column + r] = sums[r]
        t += 1


@njit(nogil=True, cache=True)
def rows_kernel(weights, bias, x, out, first, last):
    """out[t, n] = weights[n] . x[t] + bias[n] for n in first..last-1; checks nothing.

    For one token rows are read one after the other, as fast as memory gives; for more, when
    multiplying takes longer than reading, four side by side.
    """
    row = first
    while x.shape[0] > 1 and row + 4 <= last:
        for ahead in range(row + 4, min(row + 8, last)):
            prefetch_row(weights, ahead)
        four_rows_kernel(weights, row, row + 1, row + 2, row + 3, x, out, row)
        row += 4
    while row < last:
        row_kernel(weights, row, min(row + 1, last - 1), x, out, row)
        row += 1
    if bias.shape[0]:
        for t in range(x.shape[0]):
            for n in range(first, last):
                out[t, n] += bias[n]


@njit(nogil=True, cache=True)
def share(length, part, num_parts, unit):
    """First and last of part `part` when `length` is cut into parts of whole `unit`s; no checks."""
    units = (length + unit - 1) // unit
    first = units * part // num_parts * unit
    last = units * (part + 1) // num_parts * unit
    return min(first, length), min(last, length)


def rows_times_vectors(
    weights: np.ndarray, x: np.ndarray, bias: np.ndarray | None = None
) -> np.ndarray:
    """Products of weight rows with several vectors.

    out[t, n] = sum over k of weights[n, k] * x[t, k], plus bias[n]
    Shapes:  weights (N, d), x (T, d), bias (N,), out (T, N)
    Dtypes:  weights float32, uint16 (float16 bits) or int16 (bfloat16 bits); the rest float32
    Units:   reads N * d weights once
    Errors:  ValueError on any mismatch
    """
    weights = weight_rows("weights", weights)
    x = float_array("x", x, (x.shape[0] if x.ndim else 0, weights.shape[1]))
    biases = optional_floats("bias", bias, weights.shape[0])
    out = np.empty((x.shape[0], weights.shape[0]), np.float32)
    if x.shape[0]:  # kernels take at least one token
        rows_kernel(weights, biases, x, out, 0, weights.shape[0])
    return out
