"""Rows of ggml's blocks, as GGUF files have them, into rows that kernels compute with.

`BLOCK_FORMATS` says which rows take a block's values and scales to the bit, and which with scales
and minima, products of two numbers, rounded to float16. All other blocks become floats, which are
quantized again.
"""

from __future__ import annotations

import numpy as np

from hotcold.numba_kernels.checks import read_only
from hotcold.numba_kernels.formats import (
    BLOCK_FORMATS,
    QUANT_GROUP,
    QUANTIZED,
    ROW_FORMATS,
    VALUES,
    block_dtype,
    row_items,
    row_width,
)
from hotcold.numba_kernels.load.block_kernels import (
    DOES_NOT_FIT,
    FACTORS,
    dequantize_kernel,
    paired_blocks_kernel,
    repack_kernel,
)
from hotcold.numba_kernels.load.loading import flat_rows
from hotcold.numba_kernels.load.quantize import DONE, NOT_FINITE, quantize_into
from hotcold.numba_kernels.load.stored_rows import StoredRows

COLUMNS_AT_ONCE = 256  # whole blocks of any format
_FLOAT_BYTES = 2 << 20  # of floats on their way into quantized rows


class PairedBlocks:
    """Rows of MXFP4 as safetensors files have them, values beside scales: makes ggml's blocks.

    Shapes:  values (R, G, 16): byte j of a group has weights 2 j (low) and 2 j + 1; scales (R, G)
    Dtypes:  uint8
    Errors:  ValueError for other shapes or dtypes
    Source:  OpenAI's gpt_oss/torch/weights.py
    """

    dtype = block_dtype("MXFP4")
    held = None

    def __init__(self, values: np.ndarray, scales: np.ndarray) -> None:
        are_bytes = values.dtype == scales.dtype == np.uint8
        if not are_bytes or values.shape != (*scales.shape, QUANT_GROUP // 2) or scales.ndim != 2:
            raise ValueError(f"{values.dtype} {values.shape} beside {scales.dtype} {scales.shape}")
        self._values, self._scales = read_only(values), read_only(scales)
        self.shape = scales.shape[0], QUANT_GROUP * scales.shape[1]

    def blocks(self, row_ids: np.ndarray, first: int, last: int) -> np.ndarray:
        """As `RowSource.blocks`."""
        first, last = first // QUANT_GROUP, last // QUANT_GROUP
        out = np.empty(
            (row_ids.size, row_items(self.dtype, QUANT_GROUP * (last - first))), np.uint8
        )
        ids = np.ascontiguousarray(row_ids, np.int64)
        paired_blocks_kernel(self._values, self._scales, ids, np.int64(first), out)
        return out.view(self.dtype)


def dequantize_rows(
    rows: np.ndarray | StoredRows,
    row_ids: np.ndarray,
    first_block: int = 0,
    num_blocks: int | None = None,
) -> np.ndarray:
    """The values of the rows `row_ids`, or of some blocks of each; the GIL is free meanwhile.

    Shapes:  rows (R, row bytes), row_ids (N,), result (N, weights)
    Dtypes:  rows of BLOCK_FORMATS, row_ids int64, result float32, rounded as ggml rounds
    Errors:  ValueError for another dtype, or rows that are not contiguous
    """
    if rows.dtype not in BLOCK_FORMATS:
        raise ValueError(f"dtype {rows.dtype} holds no blocks")
    if isinstance(rows, StoredRows):
        own = rows.gathered(row_ids, first_block, num_blocks)
        return dequantize_rows(own, np.arange(len(own)))
    block = BLOCK_FORMATS[rows.dtype]
    if num_blocks is None:
        num_blocks = rows.shape[1] // block.num_bytes - first_block
    if rows.dtype == VALUES:
        part = slice(first_block * block.num_bytes, (first_block + num_blocks) * block.num_bytes)
        return np.ascontiguousarray(rows.view(np.uint8)[row_ids, part]).view(np.float32)
    out = np.empty((row_ids.size, num_blocks * block.weights), np.float32)
    source, step = flat_rows(read_only(rows.view(np.uint8)))
    sizes = block.ggml_type, block.weights, block.num_bytes
    dequantize_kernel(*sizes, source, step, row_ids, np.int64(first_block), out)
    return out


def blocks_into(rows: np.ndarray | StoredRows, row_ids: np.ndarray, out: np.ndarray) -> int:
    """Fill `out` with the rows `row_ids`; returns DONE, or what is wrong, as `quantize_into` does.

    Shapes:  rows (R, row bytes), row_ids (N,), out (N, row_items)
    Dtypes:  rows of BLOCK_FORMATS, row_ids int, out of ROW_FORMATS
    Errors:  ValueError on any mismatch
    """
    width = row_width(rows.dtype, rows.shape[1])
    if out.dtype not in QUANTIZED or out.shape != (row_ids.size, row_items(out.dtype, width)):
        raise ValueError(f"{row_ids.size} rows of {rows.dtype} {rows.shape} to {out.shape}")
    ids = np.ascontiguousarray(row_ids, np.int64)
    block = BLOCK_FORMATS[rows.dtype]
    step, worst = max(1, _FLOAT_BYTES // (4 * max(1, width))), DONE
    if isinstance(rows, StoredRows):
        found = rows.blocks_for(out.dtype)
        for first in range(0, ids.size, step):
            own = found.gathered(ids[first : first + step])
            status = blocks_into(own, np.arange(len(own)), out[first : first + step])
            worst = max(worst, status)
        return worst
    if out.dtype in (*block.exact, *block.rounded):
        status = _repacked(rows, ids, out, np.int64(width))
        if status != DOES_NOT_FIT:
            return status
    for first in range(0, ids.size, step):
        values = dequantize_rows(rows, ids[first : first + step])
        worst = max(worst, quantize_into(values, np.arange(len(values)), out[first : first + step]))
    return worst


def _repacked(rows: np.ndarray, ids: np.ndarray, out: np.ndarray, width: np.int64) -> int:
    block, row = BLOCK_FORMATS[rows.dtype], ROW_FORMATS[out.dtype]
    sizes = block.ggml_type, np.int64(block.weights), block.num_bytes
    places = (*flat_rows(read_only(rows.view(np.uint8))), ids, *flat_rows(out.view(np.uint8)))
    small_bytes = int(width) // row.block_weights * row.group_factor_bytes
    layout = FACTORS.index(row.factors)
    row_code = row.bits, row.offset, row.has_halves, layout, small_bytes
    return int(repack_kernel(*sizes, *places, width, row_code))


def block_columns(rows: np.ndarray | StoredRows, column_ids: np.ndarray) -> np.ndarray:
    """The columns `column_ids` of a matrix of blocks, as rows of float32.

    Blocks are read by ranges, each of which some columns are in, so columns should lie close.
    Shapes:  rows (R, row bytes), column_ids (N,), result (N, R)
    Units:   takes 4 R bytes for each column, and for each of COLUMNS_AT_ONCE
    """
    weights = BLOCK_FORMATS[rows.dtype].weights
    transposed = np.empty((column_ids.size, rows.shape[0]), np.float32)
    all_rows = np.arange(rows.shape[0])
    ranges = column_ids // COLUMNS_AT_ONCE
    for number in np.unique(ranges):
        is_here = ranges == number
        first = int(number) * COLUMNS_AT_ONCE
        num_columns = min(COLUMNS_AT_ONCE, row_width(rows.dtype, rows.shape[1]) - first)
        values = dequantize_rows(rows, all_rows, first // weights, num_columns // weights)
        transposed[is_here] = values[:, column_ids[is_here] - first].T
    return transposed


def blocks_status(rows: np.ndarray) -> int:
    """DONE where all values of rows (R, row bytes) are finite, else NOT_FINITE."""
    step = max(1, _FLOAT_BYTES // (4 * max(1, row_width(rows.dtype, rows.shape[1]))))
    for first in range(0, rows.shape[0], step):
        ids = np.arange(first, min(first + step, rows.shape[0]))
        if not np.isfinite(dequantize_rows(rows, ids)).all():
            return NOT_FINITE
    return DONE
