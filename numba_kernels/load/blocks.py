"""Rows of ggml's blocks, as GGUF files have them, into rows that kernels compute with.

`BLOCK_FORMATS` says which rows take a block's values and scales to the bit, and which with scales
and minima, products of two numbers, rounded to float16. All other blocks become floats, which are
quantized again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hotcold.numba_kernels.checks import read_only
from hotcold.numba_kernels.formats import (
    BLOCK_FORMATS,
    EXPONENTS,
    HALVES,
    MINIMA,
    QUANT_GROUP,
    QUANTIZED,
    ROW_FORMATS,
    SCALES,
    SIX_BITS,
    BlockFormat,
    Factors,
    block_dtype,
    row_items,
    row_width,
)
from hotcold.numba_kernels.load.block_kernels import (
    DOES_NOT_FIT,
    dequantize_kernel,
    paired_blocks_kernel,
    repack_k_kernel,
    repack_kernel,
    repack_mxfp4_kernel,
    repack_q6_kernel,
    repack_with_min_kernel,
)
from hotcold.numba_kernels.load.loading import flat_rows
from hotcold.numba_kernels.load.quantize import DONE, NOT_FINITE, quantize_into

# What packs blocks whose numbers rows take as they are, by the rows' factors.
_Repack = Callable[[BlockFormat, np.int64, tuple[Any, ...]], int]
_REPACK: dict[Factors, _Repack] = {
    SCALES: lambda block, bits, places: repack_kernel(
        block.ggml_type, block.num_bytes, *places, bits
    ),
    MINIMA: lambda block, bits, places: repack_with_min_kernel(
        block.ggml_type, block.num_bytes, *places
    ),
    SIX_BITS: lambda block, bits, places: repack_k_kernel(bits, block.num_bytes, *places),
    HALVES: lambda block, bits, places: repack_q6_kernel(block.num_bytes, *places),
    EXPONENTS: lambda block, bits, places: repack_mxfp4_kernel(block.num_bytes, *places),
}
COLUMNS_AT_ONCE = 256  # whole blocks of any format
_FLOAT_BYTES = 2 << 20  # of floats on their way into quantized rows


class PairedBlocks:
    """Rows of MXFP4 as safetensors files have them, values beside scales: an array of its blocks.

    It has what functions of this module, and who hands rows to them, take of an array of bytes of
    blocks; `gathered` makes one of some rows.
    Shapes:  values (..., R, G, 16): byte j of a group has weights 2 j (low) and 2 j + 1; scales
             (..., R, G); as an array (..., R, 17 G)
    Dtypes:  uint8
    Errors:  ValueError for other shapes or dtypes
    Source:  OpenAI's gpt_oss/torch/weights.py
    """

    dtype = block_dtype("MXFP4")
    itemsize = 1

    def __init__(self, values: np.ndarray, scales: np.ndarray) -> None:
        are_bytes = values.dtype == scales.dtype == np.uint8
        if not are_bytes or values.shape != (*scales.shape, QUANT_GROUP // 2) or scales.ndim < 2:
            raise ValueError(f"{values.dtype} {values.shape} beside {scales.dtype} {scales.shape}")
        self._values, self._scales = read_only(values), read_only(scales)

    @property
    def shape(self) -> tuple[int, ...]:
        """In bytes of blocks."""
        return *self._scales.shape[:-1], row_items(self.dtype, QUANT_GROUP * self._scales.shape[-1])

    def reshape(self, *shape: int) -> PairedBlocks:
        """Matrices joined or taken apart; rows stay."""
        groups = self._scales.shape[-1]
        values = self._values.reshape(*shape[:-1], groups, QUANT_GROUP // 2)
        return PairedBlocks(values, self._scales.reshape(*shape[:-1], groups))

    def __getitem__(self, index: int | tuple[slice, slice]) -> PairedBlocks:
        """One of several matrices, or [:, bytes of whole blocks]."""
        if isinstance(index, tuple):
            first, last, _ = index[1].indices(self.shape[-1])
            groups = slice(*(row_width(self.dtype, at) // QUANT_GROUP for at in (first, last)))
            return PairedBlocks(self._values[index[0], groups], self._scales[index[0], groups])
        return PairedBlocks(self._values[index], self._scales[index])

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        """All rows as an array of blocks."""
        rows = self.reshape(-1, self.shape[-1])
        return rows.gathered(np.arange(rows.shape[0])).reshape(self.shape)

    def gathered(
        self, row_ids: np.ndarray, first_block: int = 0, num_blocks: int | None = None
    ) -> np.ndarray:
        """The rows `row_ids` of a matrix, or some blocks of each, as an array of blocks."""
        count = self._scales.shape[1] - first_block if num_blocks is None else num_blocks
        out = np.empty((row_ids.size, row_items(self.dtype, QUANT_GROUP * count)), np.uint8)
        ids = np.ascontiguousarray(row_ids, np.int64)
        paired_blocks_kernel(self._values, self._scales, ids, np.int64(first_block), out)
        return out.view(self.dtype)


def dequantize_rows(
    rows: np.ndarray | PairedBlocks,
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
    if isinstance(rows, PairedBlocks):
        own = rows.gathered(row_ids, first_block, num_blocks)
        return dequantize_rows(own, np.arange(len(own)))
    block = BLOCK_FORMATS[rows.dtype]
    if num_blocks is None:
        num_blocks = rows.shape[1] // block.num_bytes - first_block
    out = np.empty((row_ids.size, num_blocks * block.weights), np.float32)
    source, step = flat_rows(read_only(rows.view(np.uint8)))
    sizes = block.ggml_type, block.weights, block.num_bytes
    dequantize_kernel(*sizes, source, step, row_ids, np.int64(first_block), out)
    return out


def blocks_into(rows: np.ndarray | PairedBlocks, row_ids: np.ndarray, out: np.ndarray) -> int:
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
    if isinstance(rows, PairedBlocks):
        for first in range(0, ids.size, step):
            own = rows.gathered(ids[first : first + step])
            worst = max(worst, blocks_into(own, np.arange(len(own)), out[first : first + step]))
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
    block, row_format = BLOCK_FORMATS[rows.dtype], ROW_FORMATS[out.dtype]
    source = flat_rows(read_only(rows.view(np.uint8)))
    target = flat_rows(out.view(np.uint8))
    places = (*source, ids, *target, width)
    return int(_REPACK[row_format.factors](block, np.int64(row_format.bits), places))


def block_columns_into(
    rows: np.ndarray | PairedBlocks, column_ids: np.ndarray, out: np.ndarray
) -> int:
    """Fill `out` with the columns `column_ids` of a matrix of blocks, quantized again.

    Blocks are read by ranges, each of which some columns are in, so columns should lie close.
    Shapes:  rows (R, row bytes), column_ids (N,), out (N, row_items of R weights)
    Dtypes:  as of `blocks_into`
    Units:   takes 4 R bytes for each column, and for each of COLUMNS_AT_ONCE
    Errors:  ValueError on any mismatch
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
    return quantize_into(transposed, np.arange(column_ids.size), out)


def blocks_status(rows: np.ndarray) -> int:
    """DONE where all values of rows (R, row bytes) are finite, else NOT_FINITE."""
    step = max(1, _FLOAT_BYTES // (4 * max(1, row_width(rows.dtype, rows.shape[1]))))
    for first in range(0, rows.shape[0], step):
        ids = np.arange(first, min(first + step, rows.shape[0]))
        if not np.isfinite(dequantize_rows(rows, ids)).all():
            return NOT_FINITE
    return DONE
