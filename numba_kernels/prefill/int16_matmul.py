"""Matmul of 16-bit weights and many tokens (prefill), as pairs of int16, by AVX512-VNNI.

An instruction multiplies twice as many numbers as in float32. Groups of columns are rounded to 13
bits and, of tokens, to 14, with a scale each: nearer than bfloat16's 8 bits where a group's numbers
are alike. Blocks are as in `float_matmul`; a panel of tokens is multiplied in parts that stay in
the first-level cache. A token's result does not depend on its batch-mates.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.ir.bit_ir import float32_of
from hotcold.numba_kernels.ir.int16_ir import (
    COLUMN_GROUP,
    GROUP_PAIRS,
    MAX_INPUT,
    MAX_WEIGHT,
    add_group_tile,
    round_group,
)
from hotcold.numba_kernels.ir.lane_tile import MAX_GROUPS, ROWS_AHEAD, TILE_ROWS
from hotcold.numba_kernels.ir.target import LANES
from hotcold.numba_kernels.prefill.float_matmul import store_sums

_ROWS, _GROUPS = 16 * TILE_ROWS, 16  # of a block: 96 x 1024
_PART = 4  # groups of columns: 64 tokens' 32 KiB
_PAD = 16  # pairs behind each row of the buffer: a power of two between rows would fill one set
_STRIDE = _GROUPS * GROUP_PAIRS + _PAD
BUFFER_PAIRS = _ROWS * _STRIDE
MAX_SUMS = _ROWS  # rows of sums that the kernel wants


def num_column_groups(width: int) -> int:
    """Groups of columns in a row, the last one filled up with zeros."""
    return -(-width // COLUMN_GROUP)


@njit(nogil=True, cache=True, _nrt=True)
def pack_groups(x, ids, tokens, scales, buffer, first, last):
    """Groups first..last-1 of `tokens`, `scales` = rounded pairs of x[ids], zeros at the end."""
    row = buffer[: _GROUPS * GROUP_PAIRS]
    bits, wide = row.view(np.int16).reshape(1, -1), np.empty((1, COLUMN_GROUP), np.float32)
    row_scales = np.empty((1, _GROUPS), np.float32)
    for group in range(first, last):
        tokens[group] = 0
        scales[group] = 0
        for t in range(group * LANES, min((group + 1) * LANES, ids.shape[0])):
            lane = t - group * LANES
            for begin in range(0, scales.shape[1], _GROUPS):
                end = min(begin + _GROUPS, scales.shape[1])
                _round_block(x, ids[t], 1, begin, end, MAX_INPUT, bits, row_scales, wide)
                for part in range(begin, end):
                    scales[group, part, lane] = row_scales[0, part - begin]
                pair = begin * GROUP_PAIRS
                for i in range((end - begin) * GROUP_PAIRS):
                    tokens[group, pair + i, lane] = row[i]


@njit(nogil=True, cache=True, _nrt=True)
def multiply_rows(weights, tokens, token_scales, buffer, sums, out, ids, adds, first, last):
    """out[ids[t], n] = weights[n] . x[t], or adds it, for rows first..last-1."""
    num_parts = token_scales.shape[1]
    block = buffer.reshape(_ROWS, _STRIDE)
    bits = block.view(np.int16)
    scales, wide = np.empty((_ROWS, _GROUPS), np.float32), np.empty((1, COLUMN_GROUP), np.float32)
    for row in range(first, last, _ROWS):
        num_rows = min(_ROWS, last - row)
        sums[:num_rows] = 0
        for begin in range(0, num_parts, _GROUPS):
            end = min(begin + _GROUPS, num_parts)
            _round_block(weights, row, num_rows, begin, end, MAX_WEIGHT, bits, scales, wide)
            next_row, column = row, COLUMN_GROUP * end
            if end == num_parts:
                next_row, column = row + _ROWS, 0
            for group in range(0, tokens.shape[0], MAX_GROUPS):
                ahead = next_row + min(group // MAX_GROUPS, 1) * ROWS_AHEAD
                for part in range(begin, end, _PART):
                    _add_panel(
                        tokens, token_scales, group, block, scales, num_rows, part, part - begin,
                        min(_PART, end - part), sums, weights, ahead,
                        column + (part - begin) * COLUMN_GROUP,
                    )  # fmt: skip
        store_sums(sums, num_rows, out, ids, adds, row)


# Numba counts an array's references wherever a name is given to it, which takes as long as rounding
# a group. Functions that only hand on what they were given count none.


@njit(nogil=True, cache=True)
def _round_block(matrix, row, num_rows, begin, end, most, bits, scales, wide):
    """bits, scales = groups begin..end-1 of rows, each at most `most`; the last may end in one."""
    limit, whole = np.float32(most), matrix.shape[1] // COLUMN_GROUP
    for r in range(num_rows):
        for part in range(begin, min(end, whole)):
            scales[r, part - begin] = round_group(
                matrix, row + r, part * COLUMN_GROUP, limit, bits, r, (part - begin) * COLUMN_GROUP
            )
    if end > whole:
        column, at = whole * COLUMN_GROUP, whole - begin
        for r in range(num_rows):
            for i in range(COLUMN_GROUP):
                wide[0, i] = 0
            for i in range(matrix.shape[1] - column):
                wide[0, i] = float32_of(matrix[row + r, column + i])
            scales[r, at] = round_group(wide, 0, 0, limit, bits, r, at * COLUMN_GROUP)


@njit(nogil=True, cache=True)
def _add_panel(
    tokens, token_scales, group, weights, scales, num_rows, first, at, count,
    out, ahead, ahead_row, column,
):  # fmt: skip
    """`add_group_tile` for all rows, and for as many groups of tokens as there are, at most 4."""
    left = tokens.shape[0] - group
    if left >= 4:
        for r in range(0, num_rows, TILE_ROWS):
            add_group_tile(
                tokens, token_scales, group, 4, weights, scales, r, first, at, count,
                out, ahead, ahead_row + r, column,
            )  # fmt: skip
    elif left == 3:
        for r in range(0, num_rows, TILE_ROWS):
            add_group_tile(
                tokens, token_scales, group, 3, weights, scales, r, first, at, count,
                out, ahead, ahead_row + r, column,
            )  # fmt: skip
    elif left == 2:
        for r in range(0, num_rows, TILE_ROWS):
            add_group_tile(
                tokens, token_scales, group, 2, weights, scales, r, first, at, count,
                out, ahead, ahead_row + r, column,
            )  # fmt: skip
    else:
        for r in range(0, num_rows, TILE_ROWS):
            add_group_tile(
                tokens, token_scales, group, 1, weights, scales, r, first, at, count,
                out, ahead, ahead_row + r, column,
            )  # fmt: skip
