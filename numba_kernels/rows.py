"""Rows times vectors: the matrix products of decoding, limited by how fast weights are read."""

import numpy as np
from numba import njit

from numba_kernels.checks import float_array, optional_floats, weight_rows
from numba_kernels.vector_ir import dot1, dot1_ahead


@njit(nogil=True, cache=True)
def rows_kernel(weights, bias, x, out, first, last):
    """out[t, n] = weights[n] . x[t] + bias[n] for n in first..last-1; checks nothing.

    A row is read once for all tokens, and the one after it is prefetched meanwhile.
    """
    num_tokens = x.shape[0]
    for row in range(first, last):
        out[0, row] = dot1_ahead(weights, row, min(row + 1, last - 1), x[0])
        for t in range(1, num_tokens):
            out[t, row] = dot1(weights, row, x[t])
    if bias.shape[0]:
        for t in range(num_tokens):
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
