"""Rows of any format times a prompt's tokens, shared by threads.

Of one matrix, or of the blocks that tokens chose. Products are those of `decode.rows`,
`float_matmul` and `int16_matmul`. What tokens are multiplied as is the type of their work space,
which `actors.cpu.matmul` chooses.
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.block_rows import FORMAT
from hotcold.numba_kernels.compiler import by_types, njit
from hotcold.numba_kernels.decode.by_format import with_matrix
from hotcold.numba_kernels.decode.rows import block_products, rows_a_panel, split_range
from hotcold.numba_kernels.decode.vectors import (
    BothOrders,
    QuantizedVectors,
    aligned_zeros,
    empty_vectors,
    in_order_of,
)
from hotcold.numba_kernels.ir.amx_ir import AMX_ITEMS
from hotcold.numba_kernels.ir.int16_ir import GROUP_PAIRS
from hotcold.numba_kernels.ir.target import LANES
from hotcold.numba_kernels.ir.vector_ir import quantize_vector
from hotcold.numba_kernels.loops.work_stealing import next_block, take_piece
from hotcold.numba_kernels.prefill import float_matmul, int16_matmul
from hotcold.numba_kernels.prefill.block_tokens import (
    adds_rows,
    begin_sums,
    block_height,
    block_rows,
    end_sums,
    is_of,
    num_outputs,
)
from hotcold.numba_kernels.prefill.float_items import items_in, num_items
from hotcold.numba_kernels.prefill.float_tiles import (
    BUFFER_ITEMS,
    MAX_SUMS,
    shapes_of,
    start_tiles,
    stop_tiles,
)

_pack_items, _multiply_items = float_matmul.pack_groups, float_matmul.multiply_rows
_pack_pairs, _multiply_pairs = int16_matmul.pack_groups, int16_matmul.multiply_rows

# What numbers are multiplied as: pairs of bfloat16 in tiles of AMX or in vectors, float32, pairs of
# int16 with scales, vectors quantized as rows are, or `BothOrders`. The first three are dtypes of
# items.
AMX, BFLOAT16, FLOAT32, INT16, QUANTIZED = np.uint32, np.int32, np.float32, np.int16, np.int8
BOTH_ORDERS = np.uint8
TOKENS_AT_ONCE = 128  # whose vectors stay in a core's second-level cache while rows pass by
ROWS = 8  # a thread has whole ones: as many as some tile takes side by side
_MOST_PIECES, _LEAST_ROWS = 4, 96  # of a thread's part of blocks' rows, and rows of a piece
SUM_ROWS = 192  # of products that are added to rows of tokens, panel by panel


class FloatTokens(NamedTuple):
    """Tokens as items of `float_matmul`, with each thread's work space.

    packed (items of all groups of LANES tokens,); buffers (threads, BUFFER_ITEMS) like packed
    sums (threads, MAX_SUMS * tokens) float32; order (tokens,) int64: 0, 1, 2 ...
    """

    packed: np.ndarray
    buffers: np.ndarray
    sums: np.ndarray
    order: np.ndarray


class Int16Tokens(NamedTuple):
    """The same as pairs of `int16_matmul`, with their groups' scales."""

    pairs: np.ndarray
    scales: np.ndarray
    buffers: np.ndarray
    sums: np.ndarray
    order: np.ndarray


Tokens = QuantizedVectors | BothOrders | FloatTokens | Int16Tokens


def new_tokens(
    kind: type, num_threads: int, num_tokens: int, width: int, num_blocks: int = 1
) -> Tokens:
    """Work space for tokens of up to `width` numbers, of `num_blocks` blocks that all may choose.

    What is not used of it takes no memory.
    """
    if kind is BOTH_ORDERS:
        sizes = num_threads, num_tokens, width, num_blocks
        fours, eights = (new_tokens(QUANTIZED, *sizes) for _ in range(2))
        assert isinstance(fours, QuantizedVectors) and isinstance(eights, QuantizedVectors)
        return BothOrders(fours, eights)
    if kind is QUANTIZED:
        vectors = empty_vectors(1, num_blocks * num_tokens, width)
        return QuantizedVectors(*(array[0] for array in vectors))
    whole = -(-num_tokens // LANES) * LANES
    order = np.arange(whole, dtype=np.int64)
    if kind is INT16:
        groups = num_blocks * whole * int16_matmul.num_column_groups(width)
        return Int16Tokens(
            aligned_zeros((groups * GROUP_PAIRS,), np.int32),
            aligned_zeros((groups,), np.float32),
            aligned_zeros((num_threads, int16_matmul.BUFFER_PAIRS), np.int32),
            aligned_zeros((num_threads, int16_matmul.MAX_SUMS * whole), np.float32),
            order,
        )
    return FloatTokens(
        aligned_zeros((num_blocks * whole * num_items(width, kind),), kind),
        aligned_zeros((num_threads, BUFFER_ITEMS), kind),
        aligned_zeros((num_threads, MAX_SUMS * whole), np.float32),
        order,
    )


# Numbers of a layout: so many tokens are whole, a token has so many items for so many numbers.
UNIT, ITEMS, NUMBERS, SET_BITS = range(4)


def token_layout(kind: type, of_rows: bool = False) -> np.ndarray:
    """How many items tokens take: UNIT, ITEMS, NUMBERS, and bits that a token's count has set.

    A vector of QUANTIZED counts as one item. of_rows: as `float_matmul.combine_kernel` takes them;
    a tile of AMX reads 16 rows at once, which would fill one set with a power of two between them.
    """
    if kind in (QUANTIZED, BOTH_ORDERS):
        return np.array([1, 1, 1 << 62, 0])
    items = GROUP_PAIRS if kind is INT16 else AMX_ITEMS if kind is AMX else 1
    numbers = items if kind is FLOAT32 else 2 * items
    return np.array(
        [1 if of_rows else LANES, items, numbers, AMX_ITEMS * (of_rows and kind is AMX)]
    )


@njit(nogil=True, cache=True)
def space_of(layout, count, width):
    """Items that `count` tokens of `width` numbers take."""
    whole = (count + layout[UNIT] - 1) // layout[UNIT] * layout[UNIT]
    items = (max(width, 1) + layout[NUMBERS] - 1) // layout[NUMBERS] * layout[ITEMS]
    return whole * (items | layout[SET_BITS])


@njit(nogil=True, cache=True)
def vectors_part(vectors, first, count):
    """`count` of the vectors from number `first` on."""
    end = first + count
    return QuantizedVectors(
        vectors.values[first:end], vectors.scales[first:end], vectors.sums[first:end]
    )


@by_types
def share_unit(tokens):  # type: ignore[no-untyped-def]
    """Tokens that one thread prepares are whole ones of so many; for compiled code, as below."""
    unit = 1 if is_of(tokens, QuantizedVectors) or is_of(tokens, BothOrders) else LANES
    return lambda tokens: unit


@by_types
def prepare_tokens(weights, x, first, last, tokens, thread):  # type: ignore[no-untyped-def]
    """tokens = x[t] as rows like `weights` take them, for first <= t < last; no checks."""

    def quantized(weights, x, first, last, tokens, thread):  # type: ignore[no-untyped-def]
        for t in range(first, last):
            quantize_vector(weights, x, t, tokens, t)

    def others(weights, x, first, last, tokens, thread):  # type: ignore[no-untyped-def]
        _prepare_some(weights, x, tokens.order[: x.shape[0]], first, last, tokens, thread)

    return quantized if is_of(tokens, QuantizedVectors) else others


@by_types
def _prepare_some(weights, x, ids, first, last, tokens, thread):  # type: ignore[no-untyped-def]
    """`prepare_tokens` of x[ids]."""

    def quantized(weights, x, ids, first, last, tokens, thread):  # type: ignore[no-untyped-def]
        for t in range(first, last):
            quantize_vector(weights, x, ids[t], tokens, t)

    def floats(weights, x, ids, first, last, tokens, thread):  # type: ignore[no-untyped-def]
        if first < last:
            packed = _packed(tokens, ids.shape[0], x.shape[1])
            end = (last + LANES - 1) // LANES
            _pack_items(x, ids, packed, tokens.buffers[thread], first // LANES, end)

    def pairs(weights, x, ids, first, last, tokens, thread):  # type: ignore[no-untyped-def]
        if first < last:
            packed, scales = _packed_pairs(tokens, ids.shape[0], x.shape[1])
            end = (last + LANES - 1) // LANES
            _pack_pairs(x, ids, packed, scales, tokens.buffers[thread], first // LANES, end)

    if is_of(tokens, QuantizedVectors):
        return quantized
    return floats if is_of(tokens, FloatTokens) else pairs


@njit(nogil=True, cache=True)
def _packed(tokens, count, width):
    groups, items = (count + LANES - 1) // LANES, items_in(width, tokens.packed)
    return tokens.packed[: groups * items * LANES].reshape(groups, items, LANES)


@njit(nogil=True, cache=True)
def _packed_pairs(tokens, count, width):
    groups = (count + LANES - 1) // LANES
    parts = (width + 2 * GROUP_PAIRS - 1) // (2 * GROUP_PAIRS)
    pairs = tokens.pairs[: groups * parts * GROUP_PAIRS * LANES]
    scales = tokens.scales[: groups * parts * LANES]
    return (
        pairs.reshape(groups, parts * GROUP_PAIRS, LANES),
        scales.reshape(groups, parts, LANES),
    )


@by_types
def _rows_at_once(weights, tokens, count):  # type: ignore[no-untyped-def]
    """Rows that a thread takes together, and the unit of which it has whole ones."""
    if is_of(tokens, QuantizedVectors):
        return lambda weights, tokens, count: (rows_a_panel(weights, count), ROWS)
    if is_of(tokens, Int16Tokens):
        return lambda weights, tokens, count: (int16_matmul.MAX_SUMS, LANES)
    return lambda weights, tokens, count: (shapes_of(tokens.packed)[1][0], LANES)


@by_types
def _put_products(weights, tokens, thread, out, column, first, last):  # type: ignore[no-untyped-def]
    """out[t, column + n] = weights[n] . token t, for first <= n < last."""

    def quantized(weights, tokens, thread, out, column, first, last):  # type: ignore[no-untyped-def]
        for t in range(0, out.shape[0], TOKENS_AT_ONCE):
            count = min(TOKENS_AT_ONCE, out.shape[0] - t)
            some = vectors_part(tokens, t, count)
            block_products(weights, some, out[t : t + count], first, last, column + first)

    def others(weights, tokens, thread, out, column, first, last):  # type: ignore[no-untyped-def]
        ids, target = tokens.order[: out.shape[0]], out[:, column:]
        _put_some(weights, tokens, thread, target, ids, False, first, last)

    return quantized if is_of(tokens, QuantizedVectors) else others


@by_types
def _put_some(weights, tokens, thread, out, ids, adds, first, last):  # type: ignore[no-untyped-def]
    """out[ids[t], n] = weights[n] . token t, or adds it, for first <= n < last.

    Where it adds nothing, quantized ones take `ids` to be 0, 1, 2 ...
    """

    def quantized(weights, tokens, thread, out, ids, adds, first, last):  # type: ignore[no-untyped-def]
        if not adds:
            _put_products(weights, tokens, thread, out[: ids.shape[0]], 0, first, last)
            return
        for t in range(0, ids.shape[0], TOKENS_AT_ONCE):
            count = min(TOKENS_AT_ONCE, ids.shape[0] - t)
            _add_products(
                weights, vectors_part(tokens, t, count), out, ids[t : t + count], first, last
            )

    def floats(weights, tokens, thread, out, ids, adds, first, last):  # type: ignore[no-untyped-def]
        packed = _packed(tokens, ids.shape[0], weights.shape[1])
        groups = packed.shape[0]
        sums = tokens.sums[thread, : MAX_SUMS * groups * LANES].reshape(MAX_SUMS, groups, LANES)
        _multiply_items(weights, packed, tokens.buffers[thread], sums, out, ids, adds, first, last)

    def pairs(weights, tokens, thread, out, ids, adds, first, last):  # type: ignore[no-untyped-def]
        packed, scales = _packed_pairs(tokens, ids.shape[0], weights.shape[1])
        groups, most = packed.shape[0], int16_matmul.MAX_SUMS
        sums = tokens.sums[thread, : most * groups * LANES].reshape(most, groups, LANES)
        _multiply_pairs(
            weights, packed, scales, tokens.buffers[thread], sums, out, ids, adds, first, last
        )

    if is_of(tokens, QuantizedVectors):
        return quantized
    return floats if is_of(tokens, FloatTokens) else pairs


@njit(nogil=True, cache=True, _nrt=True)
def _add_products(weights, vectors, out, ids, first, last):
    """out[ids[t], n] += weights[n] . vectors[t] for first <= n < last.

    Panel by panel: neighbours of a row of `out` lie together, others a power of two apart.
    """
    size = min(SUM_ROWS, rows_a_panel(weights, ids.shape[0]))
    sums = np.empty((ids.shape[0], SUM_ROWS), np.float32)
    for row in range(first, last, size):
        end = min(row + size, last)
        block_products(weights, vectors, sums, row, end, 0)
        _add_panel(sums, out, ids, row, end)


@njit(nogil=True, cache=True)
def _add_panel(sums, out, ids, first, last):
    for t in range(ids.shape[0]):
        target, products = out[ids[t]], sums[t]
        for n in range(first, last):
            target[n] += products[n - first]


@by_types
def vectors_of(weights, x, tokens):  # type: ignore[no-untyped-def]
    """What kernels multiply single rows of `weights` with: x, or its vectors in `tokens`."""
    if is_of(tokens, QuantizedVectors):
        return lambda weights, x, tokens: tokens
    return lambda weights, x, tokens: x


@by_types
def prepare_vectors(weights, x, thread, num_threads, tokens):  # type: ignore[no-untyped-def]
    """A thread's share of `vectors_of` all tokens."""

    def quantized(weights, x, thread, num_threads, tokens):  # type: ignore[no-untyped-def]
        first, last = split_range(x.shape[0], thread, num_threads, 1)
        prepare_tokens(weights, x, first, last, tokens, thread)

    if is_of(tokens, QuantizedVectors):
        return quantized
    return lambda weights, x, thread, num_threads, tokens: None


@by_types
def _begin_tiles(tokens):  # type: ignore[no-untyped-def]
    if is_of(tokens, FloatTokens):
        return lambda tokens: start_tiles(tokens.packed)
    return lambda tokens: None


@by_types
def _end_tiles(tokens):  # type: ignore[no-untyped-def]
    if is_of(tokens, FloatTokens):
        return lambda tokens: stop_tiles(tokens.packed)
    return lambda tokens: None


@njit(nogil=True, cache=True)
def share_rows(counters, thread, num_threads, weights, bias, tokens, addend, out, column):
    """out[t, n] = weights[n - column] . token t + bias[n] + addend[t, n], of rows it takes.

    Row r is column `column` + r of `out` (T, N); `bias` (N,) and `addend` (T, N) may be empty.
    counters: a kind of `new_block_counters`. Checks nothing.
    """
    num_tokens = out.shape[0]
    size, unit = _rows_at_once(weights, tokens, num_tokens)
    _begin_tiles(tokens)
    for turn in range(num_threads):
        part = (thread + turn) % num_threads
        first, last = split_range(weights.shape[0], part, num_threads, unit)
        begin = first + next_block(counters, part) * size
        while begin < last:
            end = min(begin + size, last)
            _put_products(weights, tokens, thread, out, column, begin, end)
            for t in range(num_tokens):
                if bias.shape[0]:
                    for n in range(column + begin, column + end):
                        out[t, n] += bias[n]
                if addend.shape[0]:
                    for n in range(column + begin, column + end):
                        out[t, n] += addend[t, n]
            begin = first + next_block(counters, part) * size
    _end_tiles(tokens)


@njit(nogil=True, cache=True)
def _prepare_order(weights, x, first, last, tokens, thread):
    """`prepare_tokens` of the order that the rows take."""
    prepare_tokens(weights, x, first, last, in_order_of(weights, tokens), thread)


@njit(nogil=True, cache=True)
def prepare_for_layer(rows, layer, x, first, last, tokens, thread):
    """`prepare_tokens` for a layer's `BlockRows`: what its matrices take."""
    places = rows.places[layer]
    for block in range(places.shape[0]):
        is_prepared = block_height(places[block]) == 0
        for before in range(block):
            is_prepared = is_prepared or places[before, FORMAT] == places[block, FORMAT]
        if not is_prepared:
            with_matrix(
                rows.arrays, places[block], _prepare_order, x, first, last, tokens, thread
            )  # fmt: skip


@njit(nogil=True, cache=True)
def _share_matrix(weights, counters, thread, num_threads, bias, tokens, addend, out, column):
    """`share_rows` of tokens of the order that the rows take."""
    own = in_order_of(weights, tokens)
    share_rows(counters, thread, num_threads, weights, bias, own, addend, out, column)


@njit(nogil=True, cache=True)
def share_layer(counters, thread, num_threads, rows, layer, bias, tokens, addend, out):
    """`share_rows` of a layer's `BlockRows`, one under the other; `counters`: a kind for each."""
    column = np.int64(0)
    for block in range(rows.places.shape[1]):
        place = rows.places[layer, block]
        height = block_height(place)
        if height:
            with_matrix(
                rows.arrays, place, _share_matrix, counters[block], thread, num_threads, bias,
                tokens, addend, out, column,
            )  # fmt: skip
        column += height


@by_types
def _block_part(tokens, starts, block):  # type: ignore[no-untyped-def]
    """Work space for a block's choices, which begin at starts[block]; for compiled code."""

    def quantized(tokens, starts, block):  # type: ignore[no-untyped-def]
        return vectors_part(tokens, starts[block], starts[block + 1] - starts[block])

    def floats(tokens, starts, block):  # type: ignore[no-untyped-def]
        return FloatTokens(
            tokens.packed[starts[block] :], tokens.buffers, tokens.sums, tokens.order
        )

    def pairs(tokens, starts, block):  # type: ignore[no-untyped-def]
        first = starts[block]
        return Int16Tokens(
            tokens.pairs[first:], tokens.scales[first // GROUP_PAIRS :], tokens.buffers,
            tokens.sums, tokens.order,
        )  # fmt: skip

    if is_of(tokens, QuantizedVectors):
        return quantized
    return floats if is_of(tokens, FloatTokens) else pairs


@njit(nogil=True, cache=True)
def prepare_blocks(arrays, places, x, choices, tokens, starts, buffer, thread, num_threads):
    """A thread's share of `tokens` = each block's rows of x as rows of its matrix take them.

    x (T, d) float32, `ChoiceRows` or `CutRows`; choices `BlockTokens`
    arrays, places (B, 4): of `BlockRows`
    starts (B + 1,) int64: where each block's begin in items of `tokens`, of QUANTIZED in vectors
    buffer: the number of the thread's buffer; checks nothing
    """
    for b in range(starts.shape[0] - 1):
        own, ids = block_rows(x, choices, b)
        first, last = split_range(
            ids.shape[0], (thread + b) % num_threads, num_threads, share_unit(tokens)
        )
        if first < last:
            with_matrix(
                arrays, places[b], _prepare_block, own, ids, first, last, tokens, starts, b, buffer
            )  # fmt: skip


@njit(nogil=True, cache=True)
def _prepare_block(weights, own, ids, first, last, tokens, starts, block, buffer):
    of_block = _block_part(in_order_of(weights, tokens), starts, block)
    _prepare_some(weights, own, ids, first, last, of_block, buffer)


@njit(nogil=True, cache=True)
def multiply_blocks(arrays, places, choices, tokens, starts, out, buffer, part, num_parts):
    """Part `part` of each block's rows times its choices; checks nothing.

    out[t, n] = weights[n] . x[t] of row n and choice t of a block; of `StripeSums` they are added
    up.
    out: see `block_rows`; the rest as in `prepare_blocks`
    """
    _begin_tiles(tokens)
    for b in range(starts.shape[0] - 1):
        with_matrix(
            arrays, places[b], _multiply_block, b, choices, tokens, starts, out, buffer, part,
            num_parts,
        )  # fmt: skip
    _end_tiles(tokens)


@njit(nogil=True, cache=True)
def _multiply_block(matrix, block, choices, tokens, starts, out, buffer, part, num_parts):
    own, ids = block_rows(out, choices, block)
    of_rows = in_order_of(matrix, tokens)
    _, unit = _rows_at_once(matrix, of_rows, ids.shape[0])
    first, last = split_range(num_outputs(out, matrix.shape[0]), part, num_parts, unit)
    begin_sums(out, block, first, last)
    if first < last and ids.shape[0] and matrix.shape[0]:
        of_block = _block_part(of_rows, starts, block)
        _put_some(matrix, of_block, buffer, own, ids, adds_rows(out, block), first, last)
    end_sums(out, block, 0, own.shape[0], first, last)


@njit(nogil=True, cache=True)
def num_pieces(places, out, num_threads):
    """Into how many pieces of blocks' rows a thread's part is cut."""
    height = np.int64(0)
    for b in range(places.shape[0]):
        height = max(height, block_height(places[b]))
    return max(1, min(_MOST_PIECES, num_outputs(out, height) // (num_threads * _LEAST_ROWS)))


@njit(nogil=True, cache=True)
def share_blocks(
    counters, thread, num_threads, arrays, places, choices, tokens, starts, out
):  # fmt: skip
    """`multiply_blocks` of the pieces that this thread takes."""
    pieces = num_pieces(places, out, num_threads)
    piece = take_piece(counters, thread, num_threads, pieces)
    while piece >= 0:
        multiply_blocks(
            arrays, places, choices, tokens, starts, out, thread, piece, num_threads * pieces
        )
        piece = take_piece(counters, thread, num_threads, pieces)
