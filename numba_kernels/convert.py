"""Weights in another format, for the matrix products of prefill."""

import numpy as np
from numba import njit

from numba_kernels.checks import require, weight_rows
from numba_kernels.vector_ir import row_to_bfloat16


@njit(nogil=True, cache=True)
def bfloat16_kernel(weights, out, first, last):
    """out[n] = weights[n] as bfloat16 bits for rows first..last-1; checks nothing."""
    for row in range(first, last):
        row_to_bfloat16(weights, row, out[row])


def to_bfloat16(weights: np.ndarray) -> np.ndarray:
    """Weights rounded to the nearest bfloat16, ties to even.

    Shapes:  weights, out (N, d)
    Dtypes:  weights float32, uint16 (float16 bits) or int16; out int16 (bfloat16 bits)
    Errors:  ValueError for another dtype or number of dimensions. A NaN's result is unspecified.
    """
    weights = weight_rows("weights", weights)
    require(weights.size > 0, "weights must not be empty")
    out = np.empty(weights.shape, np.int16)
    bfloat16_kernel(weights, out, 0, weights.shape[0])
    return out
