"""Rows times vectors, the GEMV of decoding, limited by memory bandwidth."""

from collections.abc import Callable

from numba import types

from hotcold.numba_kernels.compiler import by_types, njit
from hotcold.numba_kernels.formats import (
    CHUNK,
    CHUNK_GROUPS,
    QUANT_GROUP,
    steps_side_by_side,
)
from hotcold.numba_kernels.ir.amx_bytes_ir import byte_tile_products, takes_bytes
from hotcold.numba_kernels.ir.quantized_ir import format_of
from hotcold.numba_kernels.ir.tile_ir import (
    ASKS_AHEAD,
    HAS_STREAMS,
    NEVER,
    UNPACKS,
    fewest_tokens,
    fit_first_level,
    tile_narrow,
    tile_panel,
    tile_panel3,
    tile_shape,
    tile_stream2,
    tile_stream3,
    tile_stream4,
    tile_tokens,
    tile_wide,
)
from hotcold.numba_kernels.ir.unpacked_ir import TOKENS
from hotcold.numba_kernels.ir.vector_ir import (
    any_layout,
    dot_row,
    dot_tokens,
    read_rows,
)

_PANEL_BYTES = 1 << 17  # of rows that stay in the cache for several tokens
_MAX_ROWS = 192
# More tokens than a step has, and so many rows, are worth packing them for the tiles of AMX.
_STEP_TOKENS, _FEWEST_ROWS = 32, 48
# So many tokens take long enough for a block of float rows to read the next one meanwhile.
_TOKENS_AHEAD = 12 if ASKS_AHEAD else NEVER
_BYTES_AHEAD = 4096  # of listed rows: what a core reads during one memory latency

side_by_side = njit(nogil=True, cache=True)(steps_side_by_side)


@njit(nogil=True, cache=True)
def rows_ahead(weights):
    """Prefetch distance in rows."""
    return max(1, _BYTES_AHEAD // max(1, weights.shape[1] * weights.itemsize))


@njit(nogil=True, cache=True)
def _token_by_token(weights, x, out, first, last, column):
    """out[t, column + n] = weights[n] . x[t] for n in first..last-1, token by token.

    Two tokens at a time without AVX-512: a row is unpacked once for both. The
    first tokens stream the rows from memory, the others find them in the cache.
    """
    t = 0
    while UNPACKS and t + 2 <= out.shape[0]:
        for row in range(first, last):
            two = dot_tokens(weights, row, x, (t, t + 1))
            out[t, column + row], out[t + 1, column + row] = two[0], two[1]
        t += 2
    while t < out.shape[0]:
        for row in range(first, last):
            out[t, column + row] = dot_row(weights, row, x, t)
        t += 1


@by_types
def _row_by_row(weights, x, out, first, last, column):  # type: ignore[no-untyped-def]
    """`_token_by_token` for float rows, each read once for all tokens; for compiled code."""
    return _never if format_of(weights.dtype) else _float_rows


def _never(weights, x, out, first, last, column):  # type: ignore[no-untyped-def]
    pass


def _float_rows(weights, x, out, first, last, column):  # type: ignore[no-untyped-def]
    num_tokens = out.shape[0]
    for row in range(first, last):
        t = 0
        while t + 4 <= num_tokens:
            four = dot_tokens(weights, row, x, (t, t + 1, t + 2, t + 3))
            for k in range(4):
                out[t + k, column + row] = four[k]
            t += 4
        if t + 2 <= num_tokens:
            two = dot_tokens(weights, row, x, (t, t + 1))
            out[t, column + row], out[t + 1, column + row] = two[0], two[1]
            t += 2
        if t < num_tokens:
            out[t, column + row] = dot_row(weights, row, x, t)


@by_types
def _tiles(weights, row, count, is_first, x, out, column):  # type: ignore[no-untyped-def]
    """out[t, column + r] = weights[row + r] . x[t] for r < count, all tokens; for compiled code.

    `count` rows are whole blocks of tiles, tokens at least `fewest_tokens`. The first tokens bring
    the rows into the cache, or a read without products does, or the block before, which there is
    unless `is_first`. No checks.
    """
    row_format = format_of(weights.dtype)
    if row_format and UNPACKS:
        return _unpacked_tiles
    if row_format:
        return _quantized_tiles(row_format.bits == 8 or not row_format.is_plain)
    return _float_panels


def _unpacked_tiles(weights, row, count, is_first, x, out, column):  # type: ignore[no-untyped-def]
    rows, _, tiles = tile_shape(weights)
    for t in range(0, out.shape[0], TOKENS):
        for first in range(0, count, rows * tiles):
            tile_tokens(weights, row + first, x, t, out, column + first)


def _quantized_tiles(reads_first: bool) -> Callable[..., None]:
    """`_tiles` of a format; with `reads_first` rows are read first if tiles then come out even.

    Rows of bytes, and those slow to unpack, are read slightly faster without products.
    """

    def tiles(weights, row, count, is_first, x, out, column):  # type: ignore[no-untyped-def]
        num_tokens = out.shape[0]
        rows, tokens, _ = tile_shape(weights)
        begin = 0 if reads_first and num_tokens % tokens == 0 else 1
        if begin == 0:
            read_rows(weights, row, count)
        else:
            for r in range(count):
                out[0, column + r] = dot_row(weights, row + r, x, 0)
        for first in range(0, count, rows):
            t = begin
            while t + tokens <= num_tokens:
                tile_wide(weights, row + first, x, t, out, column + first)
                t += tokens
            while t < num_tokens:
                tile_narrow(weights, row + first, x, t, out, column + first)
                t += 1

    return tiles


@by_types
def _first_tokens(weights, row, x, out, column):  # type: ignore[no-untyped-def]
    """`_tiles` of a block for the first tokens, which read it from memory; returns their number.

    For compiled code.
    """
    # Four bytes are read faster by one token.
    return _first_four if HAS_STREAMS and weights.dtype != types.float32 else _first_alone


def _first_four(weights, row, x, out, column):  # type: ignore[no-untyped-def]
    num_tokens = min(out.shape[0], 4)
    if num_tokens == 2:
        tile_stream2(weights, row, x, 0, out, column)
    elif num_tokens == 3:
        tile_stream3(weights, row, x, 0, out, column)
    else:
        tile_stream4(weights, row, x, 0, out, column)
    return num_tokens


def _first_alone(weights, row, x, out, column):  # type: ignore[no-untyped-def]
    rows, _, tiles = tile_shape(weights)
    for r in range(rows * tiles):
        out[0, column + r] = dot_row(weights, row + r, x, 0)
    return 1


def _float_panels(weights, row, count, is_first, x, out, column):  # type: ignore[no-untyped-def]
    num_tokens = out.shape[0]
    rows, tokens, tiles = tile_shape(weights)
    for first in range(0, count, rows * tiles):
        at, to, t = row + first, column + first, 0
        asks = num_tokens >= _TOKENS_AHEAD
        if not asks or (is_first and first == 0):
            t = _first_tokens(weights, at, x, out, to)
        turns = (num_tokens - t + tokens - 1) // tokens if asks else NEVER
        turn = 0 if asks else NEVER - 1
        while t < num_tokens:
            if t + 1 == num_tokens:
                for r in range(rows * tiles):
                    out[t, to + r] = dot_row(weights, at + r, x, t)
                t += 1
            elif (num_tokens - t) % tokens:
                t = min(t, num_tokens - 3)  # the last tokens with some of those before them
                tile_panel3(weights, at, x, t, out, to, turn, turns)
                t += 3
            else:
                tile_panel(weights, at, x, t, out, to, turn, turns)
                t += tokens
            turn = min(turn + 1, turns - 1)


@njit(nogil=True, cache=True)
def rows_at_once(weights):
    """Rows of a panel, which all tokens use before the next is read: whole blocks of tiles.

    More where rows are short, since each panel starts a new stream.
    """
    rows, _, tiles = tile_shape(weights)
    most = min(_MAX_ROWS, _PANEL_BYTES // max(1, weights.shape[1] * weights.itemsize))
    return max(1, most // (rows * tiles)) * rows * tiles


@by_types
def rows_a_panel(weights, num_tokens):  # type: ignore[no-untyped-def]
    """`rows_at_once` for so many tokens: AMX packs them once for all rows; for compiled code."""

    def most(weights, num_tokens):  # type: ignore[no-untyped-def]
        return _MAX_ROWS if num_tokens > _STEP_TOKENS else rows_at_once(weights)

    return most if takes_bytes(weights.dtype) else lambda weights, num_tokens: rows_at_once(weights)


@by_types
def _by_byte_tiles(weights, x, out, first, last, column):  # type: ignore[no-untyped-def]
    """Whether the tiles of AMX have made all products; for compiled code."""

    def many(weights, x, out, first, last, column):  # type: ignore[no-untyped-def]
        is_dense = out.strides[1] == out.itemsize
        if out.shape[0] <= _STEP_TOKENS or last - first < _FEWEST_ROWS or not is_dense:
            return False
        return byte_tile_products(weights, x, out, first, last, first + column)

    if takes_bytes(weights.dtype):
        return many
    return lambda weights, x, out, first, last, column: False


@njit(nogil=True, cache=True)
def _block_products(weights, x, out, first, last, column):
    """`block_products`; `out` is of any layout."""
    row, column, num_tokens = first, column - first, out.shape[0]
    size, fewest = rows_at_once(weights), fewest_tokens(weights)
    if _by_byte_tiles(weights, x, out, first, last, column):
        return
    if num_tokens == 1:
        size = last - first
    elif fit_first_level(weights, num_tokens):
        _row_by_row(weights, x, out, first, last, column)
        return
    elif num_tokens >= fewest:
        rows, _, tiles = tile_shape(weights)
        unit = rows * tiles
        while row + unit <= last:
            count = min(size, (last - row) // unit * unit)
            _tiles(weights, row, count, row == first, x, out, column + row)
            row += count
    while row < last:
        end = min(row + size, last)
        _token_by_token(weights, x, out, row, end, column)
        row = end


@njit(nogil=True, cache=True)
def block_products(weights, x, out, first, last, column):
    """out[t, column + n - first] = weights[n] . x[t] for n in first..last-1; checks nothing.

    `x` is `quantize_activations` of the T tokens of `out`. One token streams the rows at memory
    bandwidth. Several tokens share panels of rows, in tiles where those are faster, else token by
    token; float rows are read once for all tokens whose vectors fit the L1 cache. docs/decisions.md
    has the figures.
    """
    _block_products(weights, x, any_layout(out), first, last, column)


@njit(nogil=True, cache=True)
def rows_kernel(weights, bias, x, out, first, last):
    """out[t, n] = weights[n] . x[t] + bias[n] for n in first..last-1; checks nothing.

    `x` is `quantize_activations` of the T tokens of `out` (T, N).
    """
    block_products(weights, x, out, first, last, first)
    if bias.shape[0]:
        for t in range(out.shape[0]):
            for n in range(first, last):
                out[t, n] += bias[n]


@njit(nogil=True, cache=True)
def split_range(length, part, num_parts, unit):
    """First and last of part `part` when `length` is cut into parts of whole `unit`s; no checks."""
    units = (length + unit - 1) // unit
    first = units * part // num_parts * unit
    last = units * (part + 1) // num_parts * unit
    return min(first, length), min(last, length)


@by_types
def add_in_order(weights, source, target, first, last):  # type: ignore[no-untyped-def]
    """target[first:last] += what `axpy` summed of `weights` into `source`; for compiled code.

    `source` has the weights' order for float formats. For quantized ones it has lane order: item i
    of group g of a chunk at 16 * i + g, and in the last chunk, where vectors hold several steps, by
    those. `first` and `last` are then multiples of 512 or the end.
    """
    row_format = format_of(weights.dtype)
    if not row_format:

        def plain(weights, source, target, first, last):  # type: ignore[no-untyped-def]
            values, sums = source[first:last], target[first:last]
            for i in range(sums.shape[0]):
                sums[i] += values[i]

        return plain

    steps = row_format.bits  # of a chunk
    items = QUANT_GROUP // steps  # of a group in a step

    def from_lanes(weights, source, target, first, last):  # type: ignore[no-untyped-def]
        for begin in range(first, last, CHUNK):
            groups = min(CHUNK_GROUPS, (last - begin) // QUANT_GROUP)
            side = side_by_side(groups, steps)
            for g in range(groups):
                for i in range(QUANT_GROUP):
                    step, item = i // items, i % items
                    vector, lane = step // side * items + item, step % side * groups + g
                    cell = source[begin + vector * CHUNK_GROUPS + lane]
                    target[begin + g * QUANT_GROUP + i] += cell

    return from_lanes
