"""Kernels that copy weights from a mapped file into the layout that the compute kernels read.

A weight is its bits: float32 as itself, float16 as uint16, bfloat16 as int16. Sources may be
read-only, strided by row and unaligned, as tensors in a safetensors file are. To kernels all are
read-only: Numba would compile them once more for others. Each copy also tells whether every value
is finite, which costs nothing beside the memory traffic.
"""

from __future__ import annotations

import numpy as np
from numba import uint32, uint64

from hotcold.numba_kernels.checks import read_only
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.formats import FLOAT_FORMATS

# All exponent bits of a format: a value with all of them set is infinite or not a number.
_EXPONENT: dict[np.dtype, np.unsignedinteger] = {
    dtype: np.dtype(f"u{dtype.itemsize}").type(kind.exponent)
    for dtype, kind in FLOAT_FORMATS.items()
}
_TILE_ROWS = 256
_TILE_COLUMNS = 64
_TILE_STEP = _TILE_ROWS + 32


def gather_rows(src: np.ndarray, row_ids: np.ndarray, dst: np.ndarray) -> bool:
    """Copy the rows `row_ids` of `src` into `dst`; return whether all their values are finite.

    dst[i] = src[row_ids[i]]
    Shapes:  src (R, C), row_ids (N,), dst (N, C); rows contiguous, any distance between rows
    Dtypes:  src, dst both float32, uint16 (float16 bits) or int16 (bfloat16 bits); row_ids int
    Errors:  ValueError on any mismatch or an id outside [0, R)
    """
    if dst.shape != (row_ids.size, src.shape[1]):
        raise ValueError(f"gather_rows of {row_ids.size} rows from {src.shape} to {dst.shape}")
    mask = _check(src, dst)
    ids = checked_ids(row_ids, src.shape[0])
    return bool(_gather_rows(*_source(src), ids, *_flat(dst), np.int64(src.shape[1]), mask))


def gather_bytes(src: np.ndarray, row_ids: np.ndarray, dst: np.ndarray) -> None:
    """`gather_rows` of bytes (uint8), by `checked_ids`."""
    width = np.int64(src.shape[1])
    _gather_rows(*_source(src), row_ids, *_flat(dst), width, np.uint8(0))


def gather_columns(src: np.ndarray, column_ids: np.ndarray, dst: np.ndarray) -> bool:
    """Copy the columns `column_ids` of `src` into rows of `dst`; return whether all are finite.

    dst[i, r] = src[r, column_ids[i]]: a down projection (D, F) becomes neuron-major (N, D)
    Shapes:  src (R, C), column_ids (N,), dst (N, R); rows contiguous, any distance between rows
    Dtypes:  src, dst as in gather_rows; column_ids int
    Errors:  ValueError on any mismatch or an id outside [0, C)
    """
    if dst.shape != (column_ids.size, src.shape[0]):
        raise ValueError(f"gather_columns of {column_ids.size} from {src.shape} to {dst.shape}")
    mask = _check(src, dst)
    ids = checked_ids(column_ids, src.shape[1])
    return bool(_gather_columns(*_source(src), ids, *_flat(dst), np.int64(src.shape[0]), mask))


def all_finite(bits: np.ndarray) -> bool:
    """Return whether all weights of a matrix (R, C) are finite. Errors: as gather_rows."""
    exponent = _check(bits, bits)
    return bool(
        _all_finite(*_source(bits), np.int64(bits.shape[0]), np.int64(bits.shape[1]), exponent)
    )


def _check(src: np.ndarray, dst: np.ndarray) -> np.unsignedinteger:
    if src.dtype != dst.dtype or src.dtype not in _EXPONENT:
        raise ValueError(f"copy of {src.dtype} weights to {dst.dtype}")
    return _EXPONENT[src.dtype]


def checked_ids(ids: np.ndarray, size: int) -> np.ndarray:
    """Whole numbers in a row as int64. Errors: ValueError for one outside [0, size)."""
    if ids.ndim != 1 or ids.dtype.kind != "i":
        raise ValueError(f"ids are {ids.dtype} of shape {ids.shape}, not a row of integers")
    if ids.size and (ids.min() < 0 or ids.max() >= size):
        raise ValueError(f"ids from {ids.min()} to {ids.max()} do not lie in [0, {size})")
    return np.ascontiguousarray(ids, np.int64)


def flat_rows(matrix: np.ndarray) -> tuple[np.ndarray, np.int64]:
    """Return a matrix as one contiguous row over the same memory, and the items from row to row.

    One contiguous row is what Numba vectorises, whatever the distance between rows.
    Errors:  ValueError for rows that are not contiguous, or not whole items apart
    """
    rows, columns = matrix.shape
    item = matrix.dtype.itemsize
    if not matrix.size:  # whose strides mean nothing
        return matrix.reshape(-1), np.int64(columns)
    row_bytes = matrix.strides[0] if rows > 1 else columns * item
    if (
        (columns > 1 and matrix.strides[1] != item)
        or row_bytes % item
        or row_bytes < columns * item
    ):
        raise ValueError(f"rows of strides {matrix.strides} are not contiguous")
    num_items = (rows - 1) * (row_bytes // item) + columns
    flat = np.lib.stride_tricks.as_strided(matrix, (num_items,), (item,))
    return flat, np.int64(row_bytes // item)


def _flat(matrix: np.ndarray) -> tuple[np.ndarray, np.int64]:
    """`flat_rows`, as unsigned integers of the weights' bits."""
    flat, step = flat_rows(matrix)
    return flat.view(f"u{matrix.dtype.itemsize}"), step


def _source(matrix: np.ndarray) -> tuple[np.ndarray, np.int64]:
    return _flat(read_only(matrix))


@njit(nogil=True, cache=True)
def _all_finite(src, src_step, num_rows, num_columns, exponent):
    worst = exponent ^ exponent
    for row in range(num_rows):
        source = src[row * src_step : row * src_step + num_columns]
        for k in range(source.shape[0]):
            worst = max(worst, source[k] & exponent)
    return worst != exponent


@njit(nogil=True, cache=True)
def _gather_rows(src, src_step, row_ids, dst, dst_step, num_columns, exponent):
    worst = exponent ^ exponent
    for row in range(row_ids.shape[0]):
        start = row_ids[row] * src_step
        source = src[start : start + num_columns]
        target = dst[row * dst_step : row * dst_step + num_columns]
        for k in range(target.shape[0]):
            bits = source[k]
            target[k] = bits
            worst = max(worst, bits & exponent)
    return worst != exponent


@njit(nogil=True, cache=True, _nrt=True)
def _gather_columns(src, src_step, column_ids, dst, dst_step, num_rows, exponent):
    worst = exponent ^ exponent
    # Transposed in a tile that stays in the nearest cache: rows of `dst` often lie a power of two
    # apart, and written one item at a time they would evict each other.
    # Its indices are unsigned: signed ones cost a test for negative values at each item.
    tile = np.empty(_TILE_COLUMNS * _TILE_STEP, src.dtype)
    for first_row in range(0, num_rows, _TILE_ROWS):
        rows = min(_TILE_ROWS, num_rows - first_row)
        for first_id in range(0, column_ids.shape[0], _TILE_COLUMNS):
            ids = column_ids[first_id : first_id + _TILE_COLUMNS]
            for row in range(rows):
                source = src[(first_row + row) * src_step :]
                for i in range(ids.shape[0]):
                    tile[uint64(i * _TILE_STEP + row)] = source[uint32(ids[i])]
            for i in range(ids.shape[0]):
                start = (first_id + i) * dst_step + first_row
                target = dst[start : start + rows]
                line = tile[i * _TILE_STEP : i * _TILE_STEP + rows]
                for k in range(target.shape[0]):
                    bits = line[k]
                    target[k] = bits
                    worst = max(worst, bits & exponent)
    return worst != exponent
