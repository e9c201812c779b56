"""How a matrix is copied from a checkpoint into memory: as it is, transposed, cast, quantized.

Each function returns a `Copy`, which threads run over ranges of destination rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hotcold.numba_kernels.formats import is_blocks, is_quantized
from hotcold.numba_kernels.load import blocks, loading, quantize
from hotcold.numba_kernels.load.convert import from_float32, to_float32

# Copies the destination's rows start..end-1; returns DONE or a key of FAULTS.
Copy = Callable[[int, int], int]
DAMAGED, BEYOND = -1, -2
FAULTS = {
    quantize.NOT_FINITE: "has NaN or infinite values; download it again or use another model",
    quantize.TOO_LARGE: "has weights too large to be quantized; leave --dtype out",
    BEYOND: "has weights too large for this --dtype; leave it out, or give --dtype bf16",
    DAMAGED: "has scales or values that quantized rows never have; quantize the model again",
}


def finite_status(is_finite: bool) -> int:
    """Return DONE or NOT_FINITE."""
    return quantize.DONE if is_finite else quantize.NOT_FINITE


def float_rows(src: np.ndarray, dst: np.ndarray, row_ids: np.ndarray | None) -> Copy:
    """Copy rows `row_ids` of `src`, or all, in dst's float format.

    Shapes:  src (R, C), row_ids (N,) int32, dst (N, C)
    """

    def copy(start: int, end: int) -> int:
        ids = np.arange(start, end) if row_ids is None else row_ids[start:end]
        if src.dtype == dst.dtype:
            return finite_status(loading.gather_rows(src, ids, dst[start:end]))
        return _cast(src[start:end] if row_ids is None else src[ids], dst[start:end])

    return copy


def float_columns(src: np.ndarray, dst: np.ndarray, column_ids: np.ndarray) -> Copy:
    """Copy columns `column_ids` of `src` as rows, in dst's float format.

    Shapes:  src (R, C), column_ids (N,) int32, dst (N, R)
    """

    def copy(start: int, end: int) -> int:
        if is_blocks(src.dtype):
            return _cast(blocks.block_columns(src, column_ids[start:end]), dst[start:end])
        if src.dtype != dst.dtype:
            transposed = np.empty((end - start, src.shape[0]), src.dtype)
            if not loading.gather_columns(src, column_ids[start:end], transposed):
                return quantize.NOT_FINITE
            return _cast(transposed, dst[start:end])
        return finite_status(loading.gather_columns(src, column_ids[start:end], dst[start:end]))

    return copy


def quantized_rows(src: np.ndarray, dst: np.ndarray, row_ids: np.ndarray) -> Copy:
    """Copy rows `row_ids` of `src`, quantizing them where they are not quantized yet.

    ggml's blocks that hold the same numbers keep them to the bit.

    Shapes:  src (R, C), row_ids (N,) int32, dst (N, row_items of C weights)
    """

    def copy(start: int, end: int) -> int:
        ids, part = row_ids[start:end], dst[start:end]
        if is_blocks(src.dtype):
            return blocks.blocks_into(src, ids, part)
        if not is_quantized(src.dtype):
            return quantize.quantize_into(src, ids, part)
        return quantize.DONE if quantize.copy_quantized(src, ids, part) else DAMAGED

    return copy


def quantized_columns(src: np.ndarray, dst: np.ndarray, column_ids: np.ndarray) -> Copy:
    """Copy columns `column_ids` of `src` as quantized rows, transposed block by block.

    Shapes:  src (R, C) floats or blocks of C weights, column_ids (N,) int32, dst (N, row_items of R
             weights)
    """

    def copy(start: int, end: int) -> int:
        ids = column_ids[start:end]
        if is_blocks(src.dtype):
            transposed = blocks.block_columns(src, ids)
        else:
            transposed = np.empty((end - start, src.shape[0]), src.dtype)
            if not loading.gather_columns(src, ids, transposed):
                return quantize.NOT_FINITE
        return quantize.quantize_into(transposed, np.arange(end - start), dst[start:end])

    return copy


def _cast(rows: np.ndarray, dst: np.ndarray) -> int:
    """Round floats, or ggml's blocks, to dst's float format."""
    values = to_float32(rows)
    if not np.isfinite(values).all():
        return quantize.NOT_FINITE
    dst[:] = from_float32(values, dst.dtype)
    return quantize.DONE if loading.all_finite(dst) else BEYOND
