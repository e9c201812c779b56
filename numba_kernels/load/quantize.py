"""Weights into rows of Q8, Q4, Q4_1 and MXFP4; `formats` says how such rows are laid out.

The rules are those of llama.cpp's formats, so that bytes and errors compare:

    Q8:   scale = max |x| / 127,  value = x / scale, rounded, halves away from zero
    Q4:   scale = m / -8 with m the value of the largest magnitude, the first of equals,
          nibble = min(15, trunc(x / scale + 8.5))
    Q4_1: minimum = min x, scale = (max x - min x) / 15,
          nibble = min(15, trunc((x - minimum) / scale + 0.5))
    MXFP4: 2 ^ (exponent - 125) the largest power of two that is not above max |x|,
          nibble of the nearest value, the smaller one of two

A division by the scale is a product with its float32 reciprocal; scales and minima are then stored
rounded to float16. A group of zeros, or one too small for a reciprocal, has zeros.
Source:  ggml-quants.c, quantize_row_q8_0_ref, quantize_row_q4_0_ref, quantize_row_q4_1_ref and
         quantize_row_mxfp4_ref, which finds powers of two by logarithms rounded to float32
"""

from __future__ import annotations

import numpy as np

from hotcold.numba_kernels.checks import read_only
from hotcold.numba_kernels.formats import (
    E4M3S,
    EXPONENTS,
    FLOATS,
    MAX_EXPONENT,
    MXFP4,
    Q4,
    Q4_1,
    Q8,
    QUANTIZED,
    ROW_FORMATS,
    row_items,
    row_width,
)
from hotcold.numba_kernels.load.loading import checked_ids, flat_rows, gather_bytes
from hotcold.numba_kernels.load.quantize_kernels import (
    AS_MXFP4,
    AS_Q4,
    AS_Q4_1,
    AS_Q8,
    DONE,
    NOT_FINITE,
    TOO_LARGE,
    quantize_kernel,
)

_WAYS = {Q8: AS_Q8, Q4: AS_Q4, Q4_1: AS_Q4_1, MXFP4: AS_MXFP4}

__all__ = [
    "DONE",
    "NOT_FINITE",
    "TOO_LARGE",
    "copy_quantized",
    "quantize_into",
    "quantize_rows",
]


def quantize_rows(weights: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return `weights` as rows of Q8, Q4, Q4_1 or MXFP4.

    Shapes:  weights (R, W), W a multiple of 32; result (R, row_items(dtype, W))
    Dtypes:  weights float32, uint16 (float16 bits) or int16 (bfloat16 bits)
    Errors:  ValueError for another dtype or width, for weights that are not finite, and for weights
             so large (8.3e6 for Q8, 5.2e5 for Q4) that their scale or minimum is beyond float16
    """
    if weights.ndim != 2:
        raise ValueError(f"weights of shape {weights.shape} are no matrix")
    rows = np.empty((weights.shape[0], row_items(dtype, weights.shape[1])), dtype)
    status = quantize_into(weights, np.arange(weights.shape[0]), rows)
    if status != DONE:
        raise ValueError(
            "weights are not finite"
            if status == NOT_FINITE
            else "weights are too large for a float16 scale"
        )
    return rows


def quantize_into(weights: np.ndarray, row_ids: np.ndarray, rows: np.ndarray) -> int:
    """Quantize the rows `row_ids` of `weights` into `rows`; the GIL is free meanwhile.

    Returns DONE; NOT_FINITE or TOO_LARGE (see `quantize_rows`) leave `rows` unspecified.
    Shapes:  weights (R, W), row_ids (N,), rows (N, row_items); contiguous rows at any distance
    Dtypes:  weights float32, uint16 or int16; row_ids int, rows as of `quantize_rows`
    Errors:  ValueError on any mismatch or an id outside [0, R)
    """
    if weights.dtype not in FLOATS or rows.dtype not in _WAYS:
        raise ValueError(f"quantizing {weights.dtype} to {rows.dtype}")
    if rows.shape != (row_ids.size, row_items(rows.dtype, weights.shape[1])):
        raise ValueError(f"quantizing {row_ids.size} rows of {weights.shape} to {rows.shape}")
    ids = checked_ids(row_ids, weights.shape[0])
    source, target = flat_rows(read_only(weights)), flat_rows(rows.view(np.uint8))
    width = np.int64(weights.shape[1])
    return int(quantize_kernel(_WAYS[rows.dtype], *source, ids, *target, width))


def copy_quantized(src: np.ndarray, row_ids: np.ndarray, dst: np.ndarray) -> bool:
    """Copy the rows `row_ids` of `src` into `dst`; return whether they are what rows can be.

    They are unless a scale or minimum is not finite, or an exponent above 252.
    Shapes:  src (R, B), row_ids (N,), dst (N, B); contiguous rows at any distance
    Dtypes:  src, dst of ROW_FORMATS, alike; row_ids int
    Errors:  ValueError on any mismatch or an id outside [0, R)
    """
    if src.dtype != dst.dtype or src.dtype not in QUANTIZED:
        raise ValueError(f"copy of {src.dtype} rows to {dst.dtype}")
    if dst.shape != (row_ids.size, src.shape[1]):
        raise ValueError(f"copy of {row_ids.size} rows from {src.shape} to {dst.shape}")
    stored, row_format = dst.view(np.uint8), ROW_FORMATS[src.dtype]
    gather_bytes(src.view(np.uint8), checked_ids(row_ids, src.shape[0]), stored)
    num_blocks = row_width(src.dtype, src.shape[1]) // row_format.block_weights
    if row_format.factors == EXPONENTS:
        exponents = stored[:, stored.shape[1] - num_blocks * row_format.group_factor_bytes :]
        return bool((exponents <= MAX_EXPONENT).all())
    factors = stored[:, stored.shape[1] - num_blocks * row_format.factor_bytes :]
    kind = np.float32 if row_format.factors == E4M3S else np.float16
    return bool(np.isfinite(np.ascontiguousarray(factors).view(kind)).all())
