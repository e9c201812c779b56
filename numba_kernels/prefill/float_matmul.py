"""Matmul of many tokens (prefill) as floats: pairs of bfloat16 by AMX or AVX512-BF16, or float32.

A block of weights, of rows of any format, is converted into a buffer and then multiplied with all
tokens, a panel of them at a time: the buffer, the panel's part and the next block, which is
prefetched meanwhile, stay in the second-level cache. Sums wait in memory between parts. A token's
result does not depend on its batch-mates, nor on where it stands among them.

All numbers are items of 32 bits; what they are is the dtype of the arrays of tokens and of the
buffer: uint32 (for AMX) and int32 are pairs of bfloat16, of two columns of `linear` or two rows of
`combine`; float32 are numbers. AMX takes items by 16, so its rows are filled up with zeros.

Source: "Anatomy of High-Performance Matrix Multiplication", K. Goto and R. van de Geijn, 2008.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.by_format import matrix_at
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.formats import CHUNK
from hotcold.numba_kernels.ir.panel_ir import transpose
from hotcold.numba_kernels.ir.target import LANES
from hotcold.numba_kernels.prefill.block_tokens import (
    adds_rows,
    begin_sums,
    block_rows,
    end_sums,
)
from hotcold.numba_kernels.prefill.float_items import (
    end_of_block,
    fill_block,
    fill_items,
    is_in_lanes,
    items_in,
    numbers_an_item,
    part_of_row,
    unit_of,
)
from hotcold.numba_kernels.prefill.float_tiles import (
    PAD,
    add_tiles,
    ahead_of_turn,
    shapes_of,
    start_tiles,
    stop_tiles,
)

_PACKED_ITEMS = 512  # of a token, at a time


@njit(nogil=True, cache=True)
def num_groups_of(num_tokens):
    """Groups of LANES tokens."""
    return (num_tokens + LANES - 1) // LANES


@njit(nogil=True, cache=True)
def pack_groups(x, ids, tokens, buffer, first, last):
    """Groups first..last-1 of `tokens` = items of x[ids], zeros where they end."""
    for group in range(first, last):
        if (group + 1) * LANES > ids.shape[0]:
            tokens[group] = 0
        for lane in range(LANES):
            t = group * LANES + lane
            if t >= ids.shape[0]:
                continue
            for begin in range(0, tokens.shape[1], _PACKED_ITEMS):
                end = min(begin + _PACKED_ITEMS, tokens.shape[1])
                fill_items(x, ids[t], begin, end, buffer)
                whole = begin + (end - begin) // LANES * LANES
                for item in range(begin, whole, LANES):
                    for i in range(LANES):
                        tokens[group, item + lane, i] = buffer[item - begin + i]
                for item in range(whole, end):
                    tokens[group, item, lane] = buffer[item - begin]
        for item in range(0, tokens.shape[1] // LANES * LANES, LANES):
            transpose(tokens[group], item)


@njit(nogil=True, cache=True)
def multiply_rows(weights, tokens, buffer, sums, out, ids, adds, first, last):
    """out[ids[t], n] = weights[n] . x[t], or adds it, for rows first..last-1."""
    (tile_rows, tile_groups), (most_rows, items), _ = shapes_of(buffer)
    count, stride = tokens.shape[1], items + PAD
    columns_an_item = numbers_an_item(buffer)
    block = buffer[: most_rows * stride].reshape(most_rows, stride)
    ahead_bytes = weights.itemsize * columns_an_item
    turns = -(-tokens.shape[0] // tile_groups)
    for row in range(first, last, most_rows):
        num_rows = min(most_rows, last - row)
        sums[:num_rows] = 0
        for begin in range(0, count, items):
            end = min(begin + items, count)
            for r in range(num_rows):
                fill_items(weights, row + r, begin, end, block[r])
            next_row, column = row, columns_an_item * end
            if end == count:
                next_row, column = row + most_rows, 0
            for group in range(0, tokens.shape[0], tile_groups):
                first_ahead, rows_ahead = ahead_of_turn(buffer, group // tile_groups, turns)
                for r in range(0, num_rows, tile_rows):
                    place = next_row + r + first_ahead, column, ahead_bytes, rows_ahead
                    add_tiles(tokens, group, block, r, begin, end, sums, (weights, *place))
        store_sums(sums, num_rows, out, ids, adds, row)


@njit(nogil=True, cache=True)
def pack_rows_kernel(h, tokens, packed, starts, thread, num_threads):
    """A thread's share of `packed` = items of each block's rows of h; checks nothing.

    h `CutRows`; tokens `BlockTokens`; packed (items,), of block b packed[starts[b] : starts[b + 1]]
    as rows of choices, zeros where a row ends
    """
    for b in range(starts.shape[0] - 1):
        own, ids = block_rows(h, tokens, b)
        first, last = split_range(ids.shape[0], (thread + b) % num_threads, num_threads, 1)
        if first < last:
            items = (starts[b + 1] - starts[b]) // ids.shape[0]
            for t in range(first, last):
                begin = starts[b] + t * items
                fill_items(own, ids[t], 0, items, packed[begin : begin + items])


@njit(nogil=True, cache=True)
def combine_kernel(rows, places, tokens, packed, starts, buffer, sums, out, thread, num_threads):
    """A thread's share of the columns of each block's rows, weighted and summed; checks nothing.

    out[t] = sum over rows n of h[t, n] rows[n] of choice t of a block, added up as `StripeSums` say
    rows (items,), places (B, 4): each block's matrix; packed, starts: see `pack_rows_kernel`, with
    `unit_of` rows behind the last one; buffer (BUFFER_ITEMS,) like packed; sums (MAX_SUMS *
    choices,) float32 of the block with the most choices, rounded up to `unit_of`
    """
    start_tiles(buffer)
    unit = unit_of(buffer)
    for b in range(starts.shape[0] - 1):
        own, ids = block_rows(out, tokens, b)
        first, last = split_range(own.shape[1], thread, num_threads, LANES)
        matrix, count = matrix_at(rows, places[b]), ids.shape[0]
        begin_sums(out, b, first, last)
        if first < last and count and matrix.shape[0]:
            stride = (starts[b + 1] - starts[b]) // count
            whole = (count + unit - 1) // unit * unit
            h = packed[starts[b] : starts[b] + whole * stride].reshape(whole, stride)
            items = items_in(matrix.shape[0], buffer)
            _sum_rows(matrix, h[:, :items], buffer, sums, out, b, own, ids, first, last)
        if adds_rows(out, b):
            end_sums(out, b, 0, own.shape[0], first, last)
    stop_tiles(buffer)


@njit(nogil=True, cache=True, _nrt=True)
def _sum_rows(rows, h, buffer, sums, of_stripes, b, out, ids, first, last):
    """out[ids[t]] = sum over n of h[t, n] rows[n], or adds it, in columns first..last-1.

    `out` are rows of `of_stripes`, `StripeSums`, for part b; where these are written they are
    merged at once.

    Columns are the lanes of tiles, and so the tokens are what is broadcast to them.
    """
    count, rows_an_item, adds = h.shape[1], numbers_an_item(buffer), adds_rows(of_stripes, b)
    (tile_rows, tile_groups), _, (most_columns, items) = shapes_of(buffer)
    block = buffer[: most_columns * (items + 1)].reshape(most_columns // LANES, items + 1, LANES)
    space = np.empty((2, CHUNK), np.float32)
    column = first
    while column < last:
        end_column = end_of_block(rows, column, last, most_columns)
        num_columns = end_column - column
        place, row_bytes = part_of_row(rows, column, num_columns)
        ahead_bytes = row_bytes // items
        groups = (num_columns + LANES - 1) // LANES
        own = sums[: h.shape[0] * groups * LANES].reshape(h.shape[0], groups, LANES)
        own[:] = 0
        columns = block[:groups]
        num_tiles = -(-groups // tile_groups) * -(-h.shape[0] // tile_rows)
        rows_ahead = -(-rows_an_item * items // num_tiles)
        for begin in range(0, count, items):
            end = min(begin + items, count)
            fill_block(rows, begin, end, column, num_columns, block, space)
            next_row, next_place, tile = rows_an_item * end, place, 0
            if end == count:
                next_row, next_place = 0, place + row_bytes // rows.itemsize
            for group in range(0, groups, tile_groups):
                for t in range(0, h.shape[0], tile_rows):
                    row = next_row + tile * rows_an_item * items // num_tiles
                    tile += 1
                    ahead = rows, row, next_place, ahead_bytes, rows_ahead
                    add_tiles(columns, group, h[:, begin:end], t, 0, end - begin, own, ahead)
        in_lanes = is_in_lanes(rows, column, num_columns)
        for t in range(ids.shape[0]):
            _store_columns(own[t], in_lanes, out[ids[t], column:end_column], adds)
            if not adds:
                end_sums(of_stripes, b, t, t + 1, column, end_column)
        column = end_column


@njit(nogil=True, cache=True)
def _store_columns(sums, in_lanes, out, adds):
    """out = sums, or adds them; `in_lanes` they are 16 groups of 32 columns, a group a lane.

    Changes sums.
    """
    whole = out.shape[0] // LANES
    if in_lanes:
        transpose(sums, 0)
        transpose(sums, LANES)
    for i in range(whole):
        row = i // 2 + i % 2 * LANES if in_lanes else i
        _put(sums[row], out, i * LANES, adds)
    for n in range(whole * LANES, out.shape[0]):
        total = sums[whole, n - whole * LANES]
        out[n] = out[n] + total if adds else total


@njit(nogil=True, cache=True)
def store_sums(sums, count, out, ids, adds, first):
    """out[ids[t], first + i] = sums[i] of token t, or adds it, for i < count; changes sums."""
    whole = count // LANES * LANES
    for group in range(num_groups_of(ids.shape[0])):
        of_group = sums[:, group]
        for i in range(0, whole, LANES):
            transpose(of_group, i)
        for lane in range(min(LANES, ids.shape[0] - group * LANES)):
            target = out[ids[group * LANES + lane]]
            for i in range(0, whole, LANES):
                _put(of_group[i + lane], target, first + i, adds)
            for i in range(whole, count):
                total = of_group[i, lane]
                target[first + i] = target[first + i] + total if adds else total


@njit(nogil=True, cache=True)
def _put(numbers, out, first, adds):
    """out[first : first + LANES] = numbers, or adds them."""
    if adds:
        for i in range(LANES):
            out[first + i] += numbers[i]
    else:
        for i in range(LANES):
            out[first + i] = numbers[i]
