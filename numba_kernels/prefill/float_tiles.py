"""Tiles of `float_matmul`: how large they and their blocks are, and how sums are added to.

The dtype of items says what multiplies them: AMX (uint32) or vectors whose lanes are tokens.
"""

from numba import types

from hotcold.numba_kernels.compiler import by_types, inlined_by_types
from hotcold.numba_kernels.ir.amx_ir import (
    AMX_ROWS,
    add_tiles_11,
    add_tiles_12,
    add_tiles_21,
    add_tiles_22,
    begin_tiles,
    end_tiles,
)
from hotcold.numba_kernels.ir.lane_tile import MAX_GROUPS, ROWS_AHEAD, TILE_ROWS
from hotcold.numba_kernels.ir.panel_ir import add_tile
from hotcold.numba_kernels.ir.target import LANES

# Rows and groups of a tile, rows and items of columns in a block of `linear`, columns and items of
# rows in one of `combine`.
_SHAPES = (TILE_ROWS, MAX_GROUPS), (16 * TILE_ROWS, 512), (128 * TILE_ROWS, 128)
_AMX_SHAPES = (2 * AMX_ROWS, 2), (16 * AMX_ROWS, 256), (32 * LANES, 192)
PAD = 16  # items behind each row of the buffer: a power of two between rows would fill one set
BUFFER_ITEMS = max(
    rows * (items + PAD) for shapes in (_SHAPES, _AMX_SHAPES) for rows, items in shapes[1:]
)
MAX_SUMS = _SHAPES[2][0]  # rows of sums that a kernel wants


@by_types
def shapes_of(items):  # type: ignore[no-untyped-def]
    """Of a tile, a block of `linear` and one of `combine`; for compiled code, as all below."""
    shapes = _AMX_SHAPES if items.dtype == types.uint32 else _SHAPES
    return lambda items: shapes


@by_types
def ahead_of_turn(items, turn, turns):  # type: ignore[no-untyped-def]
    """Of a tile's rows those that its turn with some tokens prefetches: the first, how many."""

    def each(items, turn, turns):  # type: ignore[no-untyped-def]
        count = (2 * AMX_ROWS + turns - 1) // turns
        return turn * count, count

    def halves(items, turn, turns):  # type: ignore[no-untyped-def]
        return min(turn, 1) * ROWS_AHEAD, ROWS_AHEAD

    return each if items.dtype == types.uint32 else halves


@by_types
def start_tiles(items):  # type: ignore[no-untyped-def]
    """Before the first tile of a kernel, as `stop_tiles` after the last one."""
    if items.dtype == types.uint32:
        return lambda items: begin_tiles()
    return lambda items: None


@by_types
def stop_tiles(items):  # type: ignore[no-untyped-def]
    """See `start_tiles`."""
    if items.dtype == types.uint32:
        return lambda items: end_tiles()
    return lambda items: None


@inlined_by_types
def add_tiles(tokens, group, weights, row, first, last, sums, ahead):  # type: ignore[no-untyped-def]
    """`panel_ir.add_tile` of as many rows and groups as there are, at most those of a tile.

    sums[row + r, group + g] += sum over items i of weights[row + r, i] . tokens[group + g, i]
    ahead: an array, the first row and column of it that are prefetched, bytes of a row for each
    item, and the number of rows
    """
    return _add_amx_tiles if tokens.dtype == types.uint32 else _add_lane_tiles


def _add_amx_tiles(tokens, group, weights, row, first, last, sums, ahead):  # type: ignore[no-untyped-def]
    has_two = weights.shape[0] - row > AMX_ROWS
    if tokens.shape[0] - group > 1:
        if has_two:
            add_tiles_22(tokens, group, weights, row, first, last, sums, *ahead)
        else:
            add_tiles_12(tokens, group, weights, row, first, last, sums, *ahead)
    elif has_two:
        add_tiles_21(tokens, group, weights, row, first, last, sums, *ahead)
    else:
        add_tiles_11(tokens, group, weights, row, first, last, sums, *ahead)


def _add_lane_tiles(tokens, group, weights, row, first, last, sums, ahead):  # type: ignore[no-untyped-def]
    left = min(tokens.shape[0] - group, MAX_GROUPS)
    matrix, place, column, num_bytes, _ = ahead
    if left >= 4:
        add_tile(
            tokens, group, 4, weights, row, first, last, sums, matrix, place, column, num_bytes
        )
    elif left == 3:
        add_tile(
            tokens, group, 3, weights, row, first, last, sums, matrix, place, column, num_bytes
        )
    elif left == 2:
        add_tile(
            tokens, group, 2, weights, row, first, last, sums, matrix, place, column, num_bytes
        )
    else:
        add_tile(
            tokens, group, 1, weights, row, first, last, sums, matrix, place, column, num_bytes
        )
