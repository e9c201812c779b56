"""Weights in another format, for the matrix products of prefill."""

import numpy as np
from numba import njit

from numba_kernels.checks import require, weight_rows
from numba_kernels.formats import row_width
from numba_kernels.ir.vector_ir import widen_row


@njit(nogil=True, cache=True)
def widen_kernel(weights, out, first, last):
    """out[n] = weights[n] for rows first..last-1; checks nothing.

    out (N, d) is int16 (the nearest bfloat16, ties to even) or float32; quantized weights too.
    """
    for row in range(first, last):
        widen_row(weights, row, out[row])


def _widened(weights: np.ndarray, dtype: type) -> np.ndarray:
    weights = weight_rows("weights", weights)
    require(weights.size > 0, "weights must not be empty")
    out: np.ndarray = np.empty(
        (weights.shape[0], row_width(weights.dtype, weights.shape[1])), dtype
    )
    widen_kernel(weights, out, 0, weights.shape[0])
    return out


def to_bfloat16(weights: np.ndarray) -> np.ndarray:
    """Weights rounded to the nearest bfloat16, ties to even.

    Shapes:  weights (N, d) or (N, row bytes), out (N, d)
    Dtypes:  weights float32, uint16 (float16 bits), int16, Q8 or Q4; out int16 (bfloat16 bits)
    Errors:  ValueError for another dtype or number of dimensions. NaN stays NaN.
    """
    return _widened(weights, np.int16)


def to_float32(weights: np.ndarray) -> np.ndarray:
    """Weights of any format as float32, which is exact.

    Shapes:  weights (N, d) or (N, row bytes), out (N, d)
    Errors:  as `to_bfloat16`
    """
    return _widened(weights, np.float32)
