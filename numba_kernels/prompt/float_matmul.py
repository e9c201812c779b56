"""Matmul of many tokens (prefill) as floats: pairs of bfloat16 by AVX512-BF16, or float32.

A block of weights, of rows of any format, is converted into a buffer and then multiplied with all
tokens, a panel of them at a time: the buffer, the panel's part and the next block, which is
prefetched meanwhile, stay in the second-level cache. Sums wait in memory between parts. A token's
result does not depend on its batch-mates, nor on where it stands among them.

All numbers are items of 32 bits; what they are is the dtype of the arrays of tokens and of the
buffer: int32 are pairs of bfloat16, of two columns of `linear` or two rows of `combine`; float32
are numbers.

Source: "Anatomy of High-Performance Matrix Multiplication", K. Goto and R. van de Geijn, 2008.
"""

from typing import TypeVar

import numpy as np
from numba.core import types
from numba.extending import overload

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.formats import CHUNK, QUANT_GROUP
from hotcold.numba_kernels.ir.lane_tile import MAX_GROUPS, ROWS_AHEAD, TILE_ROWS
from hotcold.numba_kernels.ir.panel_ir import (
    add_tile,
    fill_groups,
    fill_pairs,
    fill_row,
    prefetch_columns,
    unpack_chunk,
    unpack_groups,
    unpack_pairs,
)
from hotcold.numba_kernels.ir.quantized_ir import format_of
from hotcold.numba_kernels.ir.target import LANES
from hotcold.numba_kernels.prompt.block_tokens import (
    adds_rows,
    begin_sums,
    block_matrix,
    block_rows,
    end_sums,
    num_outputs,
)

# Rows and items of columns in a block of `linear`, columns and items of rows in one of `combine`.
_LINEAR_ROWS, _LINEAR_ITEMS = 16 * TILE_ROWS, 512
_COMBINE_COLUMNS, _COMBINE_ITEMS = 128 * TILE_ROWS, 128
_PAD = 16  # items behind each row of the buffer: a power of two between rows would fill one set
_COMBINE_SPACE = _COMBINE_COLUMNS * (_COMBINE_ITEMS + 1)
BUFFER_ITEMS = max(_LINEAR_ROWS * (_LINEAR_ITEMS + _PAD), _COMBINE_SPACE)
MAX_SUMS = _COMBINE_COLUMNS  # rows of sums that a kernel wants
Count = TypeVar("Count", int, np.ndarray)  # one, or of several blocks
_ROWS_AHEAD = 8  # of a block of `combine` while it is filled


def num_groups(num_tokens: Count) -> Count:
    """Groups of LANES tokens."""
    return -(-num_tokens // LANES)


def num_items(width: Count, dtype: type) -> Count:
    """Items of `dtype` that hold `width` numbers."""
    return width if dtype == np.float32 else -(-width // 2)


@njit(nogil=True, cache=True)
def pack_tokens_kernel(x, tokens, packed, starts, buffer, thread, num_threads):
    """A thread's share of `packed` = items of each block's rows of x; checks nothing.

    x (T, d) float32, `ChoiceRows` or `CutRows`; tokens `BlockTokens`
    buffer (BUFFER_ITEMS,) like packed
    packed (items,), of block b packed[starts[b] : starts[b + 1]]: (groups, items of a row, LANES),
    zeros where its choices end
    """
    for b in range(starts.shape[0] - 1):
        own, ids = block_rows(x, tokens, b)
        groups = num_groups_of(ids.shape[0])
        first, last = split_range(groups, (thread + b) % num_threads, num_threads, 1)
        if first < last:
            of_block = _packed_block(packed, starts, groups, b)
            _pack_groups(own, ids, of_block, buffer, first, last)


@njit(nogil=True, cache=True)
def num_groups_of(num_tokens):
    """`num_groups` in compiled code."""
    return (num_tokens + LANES - 1) // LANES


@njit(nogil=True, cache=True)
def _packed_block(packed, starts, groups, block):
    own = packed[starts[block] : starts[block + 1]]
    return own.reshape(groups, own.shape[0] // (groups * LANES), LANES)


@njit(nogil=True, cache=True)
def _pack_groups(x, ids, tokens, buffer, first, last):
    """Groups first..last-1 of `tokens` = items of x[ids], zeros where they end."""
    for group in range(first, last):
        for lane in range(LANES):
            t = group * LANES + lane
            if t >= ids.shape[0]:
                for item in range(tokens.shape[1]):
                    tokens[group, item, lane] = 0
                continue
            for begin in range(0, tokens.shape[1], _LINEAR_ITEMS):
                end = min(begin + _LINEAR_ITEMS, tokens.shape[1])
                _fill_items(x, ids[t], begin, end, buffer)
                for item in range(begin, end):
                    tokens[group, item, lane] = buffer[item - begin]


@njit(nogil=True, cache=True)
def linear_kernel(weights, places, tokens, packed, starts, buffer, sums, out, thread, num_threads):
    """A thread's share of each block's rows times its choices; checks nothing.

    out[t, n] = weights[n] . x[t] of row n and choice t of a block; of `LaneSums` they are added up.
    weights, places: `WeightBlocks` of float32, uint16 (float16) or int16 (bfloat16)
    out: see `block_rows`
    packed, starts: see `pack_tokens_kernel`; buffer (BUFFER_ITEMS,) like packed
    sums (MAX_SUMS * groups * LANES,) float32, of the block with the most groups
    """
    for b in range(starts.shape[0] - 1):
        matrix = block_matrix(weights, places[b])
        first, last = split_range(num_outputs(out, matrix.shape[0]), thread, num_threads, LANES)
        own, ids = block_rows(out, tokens, b)
        groups = num_groups_of(ids.shape[0])
        begin_sums(out, b, first, last)
        if first < last and groups and matrix.shape[0]:
            _multiply_rows(
                matrix, _packed_block(packed, starts, groups, b),
                buffer, _block_sums(sums, groups), own, ids, adds_rows(out, b), first, last,
            )  # fmt: skip
        end_sums(out, b, 0, own.shape[0], first, last)


@njit(nogil=True, cache=True)
def _block_sums(sums, groups):
    return sums[: MAX_SUMS * groups * LANES].reshape(MAX_SUMS, groups, LANES)


@njit(nogil=True, cache=True)
def _multiply_rows(weights, tokens, buffer, sums, out, ids, adds, first, last):
    """out[ids[t], n] = weights[n] . x[t], or adds it, for rows first..last-1."""
    count, stride = tokens.shape[1], _LINEAR_ITEMS + _PAD
    columns_an_item = _numbers_an_item(buffer)
    block = buffer[: _LINEAR_ROWS * stride].reshape(_LINEAR_ROWS, stride)
    ahead_bytes = weights.itemsize * columns_an_item
    for row in range(first, last, _LINEAR_ROWS):
        num_rows = min(_LINEAR_ROWS, last - row)
        sums[:num_rows] = 0
        for begin in range(0, count, _LINEAR_ITEMS):
            end = min(begin + _LINEAR_ITEMS, count)
            for r in range(num_rows):
                _fill_items(weights, row + r, begin, end, block[r])
            next_row, column = row, columns_an_item * end
            if end == count:
                next_row, column = row + _LINEAR_ROWS, 0
            for group in range(0, tokens.shape[0], MAX_GROUPS):
                ahead = next_row + min(group // MAX_GROUPS, 1) * ROWS_AHEAD
                for r in range(0, num_rows, TILE_ROWS):
                    _add_tiles(
                        tokens, group, block, r, begin, end, sums,
                        weights, ahead + r, column, ahead_bytes,
                    )  # fmt: skip
        store_sums(sums, num_rows, out, ids, adds, row)


@njit(nogil=True, cache=True)
def pack_rows_kernel(h, tokens, packed, starts, thread, num_threads):
    """A thread's share of `packed` = items of each block's rows of h; checks nothing.

    h, tokens as in `pack_tokens_kernel`; of block b packed[starts[b] : starts[b + 1]] is
    (choices, items of a row)
    """
    for b in range(starts.shape[0] - 1):
        own, ids = block_rows(h, tokens, b)
        first, last = split_range(ids.shape[0], (thread + b) % num_threads, num_threads, 1)
        if first < last:
            items = (starts[b + 1] - starts[b]) // ids.shape[0]
            for t in range(first, last):
                begin = starts[b] + t * items
                _fill_items(own, ids[t], 0, items, packed[begin : begin + items])


@njit(nogil=True, cache=True)
def combine_kernel(rows, places, tokens, packed, starts, buffer, sums, out, thread, num_threads):
    """A thread's share of the columns of each block's rows, weighted and summed; checks nothing.

    out[t] = sum over rows n of h[t, n] rows[n] of choice t of a block, added up as `LaneSums` say
    rows as `weights` in `linear_kernel`, or of ROW_FORMATS; packed, starts: see `pack_rows_kernel`,
    with TILE_ROWS rows behind the last one; sums (MAX_SUMS * choices,) float32 of the block with
    the most choices, rounded up to TILE_ROWS; the rest as in `linear_kernel`
    """
    for b in range(starts.shape[0] - 1):
        own, ids = block_rows(out, tokens, b)
        first, last = split_range(own.shape[1], thread, num_threads, LANES)
        matrix, count = block_matrix(rows, places[b]), ids.shape[0]
        begin_sums(out, b, first, last)
        if first < last and count and matrix.shape[0]:
            items = (starts[b + 1] - starts[b]) // count
            whole = (count + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
            h = packed[starts[b] : starts[b] + whole * items].reshape(whole, items)
            _sum_rows(matrix, h, buffer, sums, out, b, own, ids, first, last)
        if adds_rows(out, b):
            end_sums(out, b, 0, own.shape[0], first, last)


@njit(nogil=True, cache=True, _nrt=True)
def _sum_rows(rows, h, buffer, sums, of_lanes, b, out, ids, first, last):
    """out[ids[t]] = sum over n of h[t, n] rows[n], or adds it, in columns first..last-1.

    `out` are rows of `of_lanes`, `LaneSums`, for part b; where these are written they are merged at
    once.

    Columns are the lanes of tiles, and so the tokens are what is broadcast to them.
    """
    count, rows_an_item, adds = h.shape[1], _numbers_an_item(buffer), adds_rows(of_lanes, b)
    block = buffer[:_COMBINE_SPACE].reshape(_COMBINE_COLUMNS // LANES, _COMBINE_ITEMS + 1, LANES)
    space = np.empty((2, CHUNK), np.float32)
    column = first
    while column < last:
        end_column = _end_of_block(rows, column, last)
        num_columns = end_column - column
        place, row_bytes = _part_of_row(rows, column, num_columns)
        ahead_bytes = row_bytes // _COMBINE_ITEMS
        groups = (num_columns + LANES - 1) // LANES
        own = sums[: h.shape[0] * groups * LANES].reshape(h.shape[0], groups, LANES)
        own[:] = 0
        columns = block[:groups]
        num_tiles = (groups + MAX_GROUPS - 1) // MAX_GROUPS * (h.shape[0] // TILE_ROWS)
        for begin in range(0, count, _COMBINE_ITEMS):
            end = min(begin + _COMBINE_ITEMS, count)
            _fill_block(rows, begin, end, column, num_columns, block, space)
            next_row, next_place, tile = rows_an_item * end, place, 0
            if end == count:
                next_row, next_place = 0, place + row_bytes // rows.itemsize
            for group in range(0, groups, MAX_GROUPS):
                for t in range(0, h.shape[0], TILE_ROWS):
                    ahead = next_row + tile * rows_an_item * _COMBINE_ITEMS // num_tiles
                    tile += 1
                    _add_columns(
                        columns, group, h, t, begin, end, own, rows, ahead, next_place, ahead_bytes
                    )
        in_lanes = _is_in_lanes(rows, column, num_columns)
        for t in range(ids.shape[0]):
            _store_columns(own[t].reshape(-1), in_lanes, out[ids[t], column:end_column], adds)
            if not adds:
                end_sums(of_lanes, b, t, t + 1, column, end_column)
        column = end_column


@njit(nogil=True, cache=True)
def _store_columns(sums, in_lanes, out, adds):
    """out = sums, or adds them; `in_lanes` they are 16 groups of 32 columns, a group a lane."""
    if in_lanes:
        for group in range(LANES):
            for i in range(QUANT_GROUP):
                total = sums[i * LANES + group]
                n = group * QUANT_GROUP + i
                out[n] = out[n] + total if adds else total
    elif adds:
        for n in range(out.shape[0]):
            out[n] += sums[n]
    else:
        for n in range(out.shape[0]):
            out[n] = sums[n]


def _numbers_an_item(items):  # type: ignore[no-untyped-def]
    """2 of pairs, else 1; for compiled code, as the functions below."""
    raise NotImplementedError


@overload(_numbers_an_item)
def _numbers_an_item_of(items):  # type: ignore[no-untyped-def]
    number = 2 if items.dtype == types.int32 else 1
    return lambda items: number


def _fill_items(matrix, row, first, last, out):  # type: ignore[no-untyped-def]
    """out = items first..last-1 of matrix[row]; the last pair's second half may be 0."""
    raise NotImplementedError


@overload(_fill_items)
def _fill_items_of(matrix, row, first, last, out):  # type: ignore[no-untyped-def]
    def floats(matrix, row, first, last, out):  # type: ignore[no-untyped-def]
        fill_row(matrix, row, first, last - first, out)

    def pairs(matrix, row, first, last, out):  # type: ignore[no-untyped-def]
        length = min(2 * last, matrix.shape[1]) - 2 * first
        bits = out.view(np.int16)
        fill_row(matrix, row, 2 * first, length, bits)
        if length % 2:
            bits[length] = 0

    return pairs if out.dtype == types.int32 else floats


def _end_of_block(rows, column, last):  # type: ignore[no-untyped-def]
    """Where a block of `combine` ends that begins at `column`; a quantized one has one chunk."""
    raise NotImplementedError


@overload(_end_of_block)
def _end_of_block_of(rows, column, last):  # type: ignore[no-untyped-def]
    if format_of(rows.dtype):
        return lambda rows, column, last: min((column // CHUNK + 1) * CHUNK, last)
    return lambda rows, column, last: min(column + _COMBINE_COLUMNS, last)


def _part_of_row(rows, column, count):  # type: ignore[no-untyped-def]
    """Of `count` columns from `column` on: the index of their first item in a row, and bytes."""
    raise NotImplementedError


@overload(_part_of_row)
def _part_of_row_of(rows, column, count):  # type: ignore[no-untyped-def]
    row_format = format_of(rows.dtype)
    if not row_format:
        return lambda rows, column, count: (column, count * rows.itemsize)
    chunk_bytes = row_format.chunk_bytes
    return lambda rows, column, count: (column // CHUNK * chunk_bytes, chunk_bytes)


def _is_in_lanes(rows, column, count):  # type: ignore[no-untyped-def]
    """Whether these columns are a whole chunk of quantized rows, unpacked with a group a lane."""
    raise NotImplementedError


@overload(_is_in_lanes)
def _is_in_lanes_of(rows, column, count):  # type: ignore[no-untyped-def]
    if format_of(rows.dtype):
        return lambda rows, column, count: count == CHUNK
    return lambda rows, column, count: False


def _fill_block(rows, first, last, column, count, out, space):  # type: ignore[no-untyped-def]
    """out[k // LANES, i - first, k % LANES] = column k of item i, for k < count, first <= i < last.

    Items are of `rows` from `column` on. Quantized columns are of one chunk; a whole one's are in
    the order of `_is_in_lanes`. space (2, CHUNK) float32
    """
    raise NotImplementedError


@overload(_fill_block)
def _fill_block_of(rows, first, last, column, count, out, space):  # type: ignore[no-untyped-def]
    is_quantized, has_pairs = format_of(rows.dtype) is not None, out.dtype == types.int32

    def floats(rows, first, last, column, count, out, space):  # type: ignore[no-untyped-def]
        for i in range(first, last):
            prefetch_columns(rows, i + _ROWS_AHEAD, column, count)
            fill_groups(rows, i, column, count, out, i - first)

    def pairs(rows, first, last, column, count, out, space):  # type: ignore[no-untyped-def]
        for i in range(first, last):
            prefetch_columns(rows, 2 * i + _ROWS_AHEAD, column, count)
            prefetch_columns(rows, 2 * i + 1 + _ROWS_AHEAD, column, count)
            if 2 * i + 1 < rows.shape[0]:
                fill_pairs(rows, 2 * i, column, count, out, i - first)
            else:  # a row without a second one
                fill_groups(rows, 2 * i, column, count, out, i - first)

    def unpacked_floats(rows, first, last, column, count, out, space):  # type: ignore[no-untyped-def]
        chunk, begin = column // CHUNK, column % CHUNK
        for i in range(first, last):
            prefetch_columns(rows, i + _ROWS_AHEAD, column, count)
            if count == CHUNK:
                unpack_groups(rows, i, chunk, out, i - first)
            else:
                unpack_chunk(rows, i, chunk, space[0])
                fill_groups(space, 0, begin, count, out, i - first)

    def unpacked_pairs(rows, first, last, column, count, out, space):  # type: ignore[no-untyped-def]
        chunk, begin = column // CHUNK, column % CHUNK
        bits = space.view(np.int16)
        for i in range(first, last):
            has_second = 2 * i + 1 < rows.shape[0]
            prefetch_columns(rows, 2 * i + _ROWS_AHEAD, column, count)
            prefetch_columns(rows, 2 * i + 1 + _ROWS_AHEAD, column, count)
            if count == CHUNK:
                if has_second:
                    unpack_pairs(rows, 2 * i, chunk, out, i - first)
                else:
                    unpack_groups(rows, 2 * i, chunk, out, i - first)
                continue
            unpack_chunk(rows, 2 * i, chunk, bits[0])
            if has_second:
                unpack_chunk(rows, 2 * i + 1, chunk, bits[1])
                fill_pairs(bits, 0, begin, count, out, i - first)
            else:
                fill_groups(bits, 0, begin, count, out, i - first)

    if is_quantized:
        return unpacked_pairs if has_pairs else unpacked_floats
    return pairs if has_pairs else floats


@njit(nogil=True, cache=True, inline="always")
def _add_columns(columns, group, h, row, first, last, sums, ahead, ahead_row, column, ahead_bytes):
    """`_add_tiles` whose lanes are columns: sums[row + r, group] += h[row + r] . columns[group].

    Items first..last-1 of h are 0.. of columns.
    """
    own = h[:, first:last]
    _add_tiles(
        columns, group, own, row, 0, last - first, sums, ahead, ahead_row, column, ahead_bytes
    )


@njit(nogil=True, cache=True, inline="always")
def _add_tiles(
    tokens, group, weights, row, first, last, sums, ahead, ahead_row, column, ahead_bytes
):
    """`add_tile` with as many groups as there are from `group` on, at most MAX_GROUPS."""
    left = min(tokens.shape[0] - group, MAX_GROUPS)
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
def store_sums(sums, count, out, ids, adds, first):
    """out[ids[t], first + i] = sums[i] of token t, or adds it, for i < count."""
    for t in range(ids.shape[0]):
        group, lane, row = t // LANES, t % LANES, ids[t]
        if adds:
            for i in range(count):
                out[row, first + i] += sums[i, group, lane]
        else:
            for i in range(count):
                out[row, first + i] = sums[i, group, lane]
