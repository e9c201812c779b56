"""Matmul of 16-bit weights and many tokens (prefill), as pairs of bfloat16, by AVX512-BF16.

A block of weights is converted into a buffer and then multiplied with all tokens, a panel of them
at a time: the buffer, the panel's part and the next block, which is prefetched meanwhile, stay in
the second-level cache. Sums wait in memory between parts. A token's result does not depend on its
batch-mates.

Source: "Anatomy of High-Performance Matrix Multiplication", K. Goto and R. van de Geijn, 2008.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.ir.bfloat16_ir import add_tile, narrow_pair, narrow_row
from hotcold.numba_kernels.ir.pair_ir import MAX_GROUPS, ROWS_AHEAD, TILE_ROWS
from hotcold.numba_kernels.ir.target import LANES

# Rows and pairs of columns in a block of `linear`, columns and pairs of rows in one of `combine`.
_LINEAR_ROWS, _LINEAR_PAIRS = 16 * TILE_ROWS, 512
_COMBINE_COLUMNS, _COMBINE_PAIRS = 128 * TILE_ROWS, 128
_PAD = 16  # pairs behind each row of the buffer: a power of two between rows would fill one set
BUFFER_PAIRS = max(
    _LINEAR_ROWS * (_LINEAR_PAIRS + _PAD), _COMBINE_PAIRS * (_COMBINE_COLUMNS + _PAD)
)
MAX_SUMS = _COMBINE_COLUMNS  # rows of sums that a kernel wants


def num_groups(num_tokens: int) -> int:
    """Groups of LANES tokens."""
    return -(-num_tokens // LANES)


@njit(nogil=True, cache=True)
def pack_tokens_kernel(x, tokens, buffer, first, last):
    """Groups first..last-1 of `tokens` = pairs of x (T, d) float32; checks nothing.

    tokens (groups, pairs of d, LANES) int32, zeros where x ends; buffer (BUFFER_PAIRS,) int32
    """
    num_pairs = tokens.shape[1]
    row, bits = buffer[:_LINEAR_PAIRS], buffer.view(np.int16)
    for group in range(first, last):
        for lane in range(LANES):
            t = group * LANES + lane
            if t >= x.shape[0]:
                for pair in range(num_pairs):
                    tokens[group, pair, lane] = 0
                continue
            for begin in range(0, num_pairs, _LINEAR_PAIRS):
                end = min(begin + _LINEAR_PAIRS, num_pairs)
                _narrow_part(x, t, begin, end, bits)
                for pair in range(begin, end):
                    tokens[group, pair, lane] = row[pair - begin]


@njit(nogil=True, cache=True)
def linear_kernel(weights, tokens, buffer, sums, out, first, last):
    """out[t, n] = weights[n] . x[t] for rows first..last-1; checks nothing.

    weights (N, d) uint16 (float16) or int16 (bfloat16); tokens: see `pack_tokens_kernel`
    buffer (BUFFER_PAIRS,) int32, sums (MAX_SUMS, groups, LANES) float32; out (T, N) float32
    """
    num_pairs, stride = tokens.shape[1], _LINEAR_PAIRS + _PAD
    block = buffer[: _LINEAR_ROWS * stride].reshape(_LINEAR_ROWS, stride)
    bits = block.view(np.int16)
    for row in range(first, last, _LINEAR_ROWS):
        num_rows = min(_LINEAR_ROWS, last - row)
        sums[:num_rows] = 0
        for begin in range(0, num_pairs, _LINEAR_PAIRS):
            end = min(begin + _LINEAR_PAIRS, num_pairs)
            for r in range(num_rows):
                _narrow_part(weights, row + r, begin, end, bits[r])
            next_row, column = row, 2 * end
            if end == num_pairs:
                next_row, column = row + _LINEAR_ROWS, 0
            for group in range(0, tokens.shape[0], MAX_GROUPS):
                ahead = next_row + min(group // MAX_GROUPS, 1) * ROWS_AHEAD
                for r in range(0, num_rows, TILE_ROWS):
                    _add_tiles(
                        tokens, group, block, r, begin, end, sums, weights, ahead + r, column, 4
                    )
        _store(sums, num_rows, out, row)


@njit(nogil=True, cache=True)
def combine_kernel(rows, tokens, buffer, sums, out, first, last):
    """out[t] = sum over n of h[t, n] rows[n], in columns first..last-1; checks nothing.

    rows (N, d) uint16 or int16; tokens are h's; the rest as in `linear_kernel`, out (T, d)
    """
    num_rows, num_pairs = rows.shape[0], tokens.shape[1]
    stride = _COMBINE_COLUMNS + _PAD
    block = buffer[: _COMBINE_PAIRS * stride].reshape(_COMBINE_PAIRS, stride)
    columns, bits = block.T, np.empty(_COMBINE_COLUMNS, np.int16)
    ahead_bytes = 2 * _COMBINE_COLUMNS // _COMBINE_PAIRS
    for column in range(first, last, _COMBINE_COLUMNS):
        num_columns = min(_COMBINE_COLUMNS, last - column)
        sums[:num_columns] = 0
        for begin in range(0, num_pairs, _COMBINE_PAIRS):
            end = min(begin + _COMBINE_PAIRS, num_pairs)
            for pair in range(begin, end):
                if 2 * pair + 1 < num_rows:
                    narrow_pair(rows, 2 * pair, column, num_columns, block[pair - begin])
                else:  # a row without a second one
                    narrow_row(rows, 2 * pair, column, num_columns, bits)
                    for i in range(num_columns):
                        block[pair - begin, i] = np.int32(bits[i]) & 0xFFFF
            next_row, next_column = 2 * end, column
            if end == num_pairs:
                next_row, next_column = 0, column + _COMBINE_COLUMNS
            for group in range(0, tokens.shape[0], MAX_GROUPS):
                for c in range(0, num_columns, TILE_ROWS):
                    ahead = next_row + c * 2 * _COMBINE_PAIRS // num_columns
                    _add_tiles(
                        tokens, group, columns, c, begin, end, sums,
                        rows, ahead, next_column, ahead_bytes,
                    )  # fmt: skip
        _store(sums, num_columns, out, column)


@njit(nogil=True, cache=True)
def _narrow_part(matrix, row, first, last, out):
    """out = pairs first..last-1 of matrix[row], as bfloat16; a last one's second half may be 0."""
    length = min(2 * last, matrix.shape[1]) - 2 * first
    narrow_row(matrix, row, 2 * first, length, out)
    if length % 2:
        out[length] = 0


@njit(nogil=True, cache=True, inline="always")
def _add_tiles(
    tokens, group, weights, row, first, last, sums, ahead, ahead_row, column, ahead_bytes
):
    """`add_tile` with as many groups as there are from `group` on, at most MAX_GROUPS."""
    left = tokens.shape[0] - group
    if left >= 4:
        add_tile(
            tokens, group, 4, weights, row, first, last, sums, ahead, ahead_row, column, ahead_bytes
        )
    elif left == 3:
        add_tile(
            tokens, group, 3, weights, row, first, last, sums, ahead, ahead_row, column, ahead_bytes
        )
    elif left == 2:
        add_tile(
            tokens, group, 2, weights, row, first, last, sums, ahead, ahead_row, column, ahead_bytes
        )
    else:
        add_tile(
            tokens, group, 1, weights, row, first, last, sums, ahead, ahead_row, column, ahead_bytes
        )


@njit(nogil=True, cache=True)
def _store(sums, count, out, first):
    """out[t, first + i] = sums[i] of token t, for i < count."""
    for t in range(out.shape[0]):
        group, lane = t // LANES, t % LANES
        for i in range(count):
            out[t, first + i] = sums[i, group, lane]
