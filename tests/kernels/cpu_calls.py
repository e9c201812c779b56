"""The CPU's kernels as functions of NumPy arrays, with the names and arguments of `reference`."""

from __future__ import annotations

import numpy as np

from hotcold.numba_kernels.checks import float_array, weight_rows
from hotcold.numba_kernels.decode.vectors import activation_space
from hotcold.numba_kernels.formats import row_width
from hotcold.numba_kernels.measure import dense_part


def gemv(weights: np.ndarray, x: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    weights = weight_rows("weights", weights)
    x = float_array("x", x, (len(x), row_width(weights.dtype, weights.shape[1])))
    out = np.empty((len(x), len(weights)), np.float32)
    dense_part(weights, x, activation_space(1, *x.shape), 0, out, 0, len(weights))
    return out if bias is None else out + bias
