"""Rows of matrices whose weights are packed numbers times scales: what blocks are made of.

A weight is scale * (number - zero), in float32. Which bits are whose is said by
`model/files/packed_methods.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hotcold.numba_kernels.formats import (
    E2M1_VALUES,
    INT4,
    INT5,
    INT8,
    NVFP4_SCALED,
    QUANT_GROUP,
    VALUES,
)
from hotcold.numba_kernels.load.stored_rows import RowSource

# Numbers (N, last - first) of the rows `ids`: integers, or float32.
Numbers = Callable[[np.ndarray, int, int], np.ndarray]
# A factor (N, len(columns)) of each of these rows' columns: float32, or integers.
Grid = Callable[[np.ndarray, np.ndarray], np.ndarray]

_RANGES = ((INT4, -8, 7), (INT5, -16, 15), (INT8, -128, 127))
_BLOCK = np.dtype([("scale", np.float16), ("numbers", np.int8, QUANT_GROUP)])
_E2M1_BLOCK = np.dtype([("scales", np.uint8, 4), ("pairs", np.uint64, 4), ("of_all", "<f4")])
_E4M3_NAN = 0x7F
E2M1_TABLE = np.array(E2M1_VALUES, np.float32) / 2


def _e4m3() -> np.ndarray:
    """What a byte of one sign, four exponent and three mantissa bits stands for; no infinity."""
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, (codes & 7) / 8
    values = np.where(exponent > 0, (1 + mantissa) * 2.0 ** (exponent - 7), mantissa * 2.0**-6)
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


def _e5m2() -> np.ndarray:
    """A byte of five exponent and two mantissa bits: the upper half of a float16."""
    return (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)


def _e8m0() -> np.ndarray:
    """A power of two by its exponent, whose bias is 127."""
    return np.append(np.exp2(np.arange(255.0) - 127), np.nan).astype(np.float32)


BYTE_TABLES = {"F8_E4M3": _e4m3(), "F8_E5M2": _e5m2(), "F8_E8M0": _e8m0(), "U8": _e8m0()}


def holder(lowest: int, highest: int, group: int) -> np.dtype:
    """Return the blocks that hold numbers of a range, with a scale for each `group` weights."""
    for dtype, least, most in _RANGES:
        if least <= lowest and highest <= most and not group % QUANT_GROUP:
            return dtype
    return VALUES


@dataclass(frozen=True)
class PackedRows:
    """A `RowSource` of `dtype`, one of UNPACKED_FORMATS: its numbers, scales and zeros by columns.

    Weights of `unit` columns from a multiple on have one scale and one zero.
    """

    dtype: np.dtype
    shape: tuple[int, int]
    unit: int
    numbers: Numbers
    scales: Grid
    zeros: Grid | None = None
    held: RowSource | None = None

    def blocks(self, row_ids: np.ndarray, first: int, last: int) -> np.ndarray:
        """As `RowSource.blocks`; a scale beyond float16 is infinite there."""
        numbers = self.numbers(row_ids, first, last)
        columns = np.arange(first, last, self.unit)
        scales = self.scales(row_ids, columns)
        parts = row_ids.size, columns.size, self.unit
        numbers = numbers.reshape(parts)
        if self.zeros is not None:
            wide = np.int8 if self.dtype != VALUES else np.int16
            zeros: np.ndarray = self.zeros(row_ids, columns).astype(wide)
            numbers = np.subtract(numbers.astype(wide), zeros[:, :, None])
        if self.dtype == VALUES:
            values = numbers.astype(np.float32)
            with np.errstate(over="ignore", invalid="ignore"):
                values *= scales[:, :, None]
            return values.reshape(row_ids.size, -1).view(self.dtype)
        out = np.empty((row_ids.size, columns.size), _BLOCK)
        with np.errstate(over="ignore", invalid="ignore"):
            out["scale"] = scales
        out["numbers"] = numbers
        return out.view(self.dtype).reshape(row_ids.size, -1)


@dataclass(frozen=True)
class E2M1Rows:
    """A `RowSource` of NVFP4 blocks: numbers of E2M1, E4M3 scales for 16, and one for all.

    Scales are bytes without a sign; of blocks whose scale is NaN that of all is.
    """

    shape: tuple[int, int]
    numbers: Numbers
    scales: Numbers  # of each 16 weights
    of_all: Callable[[], np.float32]
    dtype = NVFP4_SCALED
    held = None

    def blocks(self, row_ids: np.ndarray, first: int, last: int) -> np.ndarray:
        """As `RowSource.blocks`."""
        eights = self.numbers(row_ids, first, last).view(np.uint64)
        halves = eights.reshape(row_ids.size, -1, 4, 2)
        out = np.empty(halves.shape[:2], _E2M1_BLOCK)
        out["scales"] = scales = self.scales(row_ids, first, last).reshape(row_ids.size, -1, 4)
        out["pairs"] = halves[..., 0] | halves[..., 1] << np.uint64(4)
        out["of_all"] = np.where((scales == _E4M3_NAN).any(axis=2), np.nan, self.of_all())
        return out.view(self.dtype).reshape(row_ids.size, -1)


def unit_of(group: int, width: int) -> int:
    """Columns that share a scale, as many as divide a block, of groups that divide rows or not."""
    return math.gcd(QUANT_GROUP, group, width)


def grid(load: Callable[[], np.ndarray], rows: int, columns: int) -> Grid:
    """Factors of which each is of so many rows and columns; they are read once.

    Shapes:  what `load` returns (R / rows, C / columns), rounded up
    """
    kept = functools.cache(load)
    return lambda ids, firsts: kept()[ids[:, None] // rows, firsts[None] // columns]


def run_of(ids: np.ndarray) -> slice | np.ndarray:
    """The ids as a slice where they follow each other."""
    is_run = ids.size > 0 and ids[-1] - ids[0] == ids.size - 1 and bool((np.diff(ids) == 1).all())
    return slice(int(ids[0]), int(ids[-1]) + 1) if is_run else ids


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """The numbers of each word, from its lowest bits on: as many as are whole in 32 bits.

    Shapes:  words (N, W), result (N, W * (32 // bits))
    Dtypes:  words int32, result uint8
    """
    words = np.ascontiguousarray(words)
    if bits == 8:
        return words.view(np.uint8)
    if bits == 4:
        return nibbles(words.view(np.uint8))
    shifts = np.arange(0, 32 - bits + 1, bits, dtype=np.int32)
    numbers = (words[:, :, None] >> shifts) & np.int32((1 << bits) - 1)
    return numbers.astype(np.uint8).reshape(len(words), -1)


def nibbles(packed: np.ndarray, high_first: bool = False) -> np.ndarray:
    """The two numbers of each byte, the low one first.

    Shapes:  packed (N, B), result (N, 2 B)
    Dtypes:  uint8
    """
    out = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=out[..., int(high_first)])
    np.right_shift(packed, 4, out=out[..., 1 - int(high_first)])
    return out.reshape(len(packed), -1)


def numbers_along_rows(
    words: np.ndarray,
    first: np.ndarray | slice,
    rows: np.ndarray,
    bits: int,
    order: tuple[int, ...],
) -> np.ndarray:
    """Numbers [rows, first] of a matrix whose rows are packed beside each other.

    Word [c, j] has the rows from j * len(order) on; the i-th has place order[i] in it.
    Shapes:  words (C, R / len(order)) int32, first (M,) or a slice, rows (N,); result (N, M)
    """
    per_word = len(order)
    places = (np.array(order, np.int32) * np.int32(bits))[rows % per_word]
    taken = words[first][:, rows // per_word].T
    return (taken >> places[:, None]) & np.int32((1 << bits) - 1)
