"""Weights in another format, and single numbers too."""

import numpy as np

from hotcold.numba_kernels.checks import require, weight_rows
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.formats import is_blocks, is_quantized, row_width
from hotcold.numba_kernels.ir.vector_ir import widen_row
from hotcold.numba_kernels.load.blocks import dequantize_rows

_ROWS_AT_ONCE = 256


@njit(nogil=True, cache=True)
def widen_kernel(weights, out, first, last):
    """out[n] = weights[n] for rows first..last-1; checks nothing.

    out (N, d) is int16 (the nearest bfloat16, ties to even) or float32; quantized weights too.
    """
    for row in range(first, last):
        widen_row(weights, row, out[row])


def to_float32(weights: np.ndarray) -> np.ndarray:
    """The values of weights of any format, in a new aligned array; this is exact.

    Shapes:  weights (..., d) or (..., row bytes), result (..., d)
    Dtypes:  weights float32, uint16 (float16 bits), int16 (bfloat16 bits), of ROW_FORMATS, or
             ggml's blocks (BLOCK_FORMATS, rounded as ggml rounds them); result float32
    Errors:  ValueError for another dtype, or a row length that no width has
    """
    if weights.dtype == np.uint16:
        return weights.view(np.float16).astype(np.float32)
    if weights.dtype == np.int16:
        return (weights.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if weights.dtype == np.float32:
        return weights.astype(np.float32)
    if is_blocks(weights.dtype):
        rows = np.ascontiguousarray(weights).reshape(-1, weights.shape[-1])
        values = dequantize_rows(rows, np.arange(rows.shape[0]))
        return values.reshape(*weights.shape[:-1], -1)
    require(is_quantized(weights.dtype), f"dtype {weights.dtype} holds no weights")
    width = row_width(weights.dtype, weights.shape[-1])
    out = np.empty((*weights.shape[:-1], width), np.float32)
    if out.size:
        rows = np.ascontiguousarray(weights).reshape(-1, weights.shape[-1])
        widen_kernel(rows, out.reshape(-1, width), 0, rows.shape[0])
    return out


def row_lengths(weights: np.ndarray) -> np.ndarray:
    """The Euclidean length of each row.

    Shapes:  weights (N, d) or (N, row bytes), result (N,)
    Dtypes:  weights as of `to_float32`, result float32
    Errors:  those of `to_float32`
    """
    lengths = np.empty(weights.shape[0], np.float32)
    for first in range(0, lengths.size, _ROWS_AT_ONCE):
        rows = to_float32(weights[first : first + _ROWS_AT_ONCE])
        lengths[first : first + _ROWS_AT_ONCE] = np.sqrt(np.einsum("nd,nd->n", rows, rows))
    return lengths


def to_bfloat16(weights: np.ndarray) -> np.ndarray:
    """Weights rounded to the nearest bfloat16, ties to even.

    Shapes:  weights (N, d) or (N, row bytes), out (N, d)
    Dtypes:  weights float32, uint16 (float16 bits), int16 or of ROW_FORMATS; out int16 (bfloat16
             bits)
    Errors:  ValueError for another dtype or number of dimensions. NaN stays NaN.
    """
    weights = weight_rows("weights", weights)
    require(weights.size > 0, "weights must not be empty")
    out = np.empty((weights.shape[0], row_width(weights.dtype, weights.shape[1])), np.int16)
    widen_kernel(weights, out, 0, weights.shape[0])
    return out


def from_float32(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Float32 `values` of any shape as bits of `dtype`, rounded to the nearest, ties to even.

    Errors:  ValueError for a dtype other than float32, uint16 (float16) and int16 (bfloat16)
    """
    if dtype == np.uint16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    if dtype == np.int16:
        if not values.size:
            return values.astype(np.int16)
        return to_bfloat16(values.reshape(1, -1)).reshape(values.shape)
    require(dtype == np.float32, f"dtype {dtype} holds no weights")
    return values
