"""Rows of any format times a prompt's tokens, shared by threads that are in a compiled loop.

The products are those of `quantized_matmul`, `float_matmul` and `int16_matmul`, to the bit. What
tokens are multiplied as is the type of their work space, which `actors.cpu.matmul` chooses.
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import by_types, njit
from hotcold.numba_kernels.decode.rows import block_products, rows_a_panel, split_range
from hotcold.numba_kernels.decode.vectors import QuantizedVectors, aligned_zeros, empty_vectors
from hotcold.numba_kernels.ir.int16_ir import GROUP_PAIRS
from hotcold.numba_kernels.ir.target import LANES
from hotcold.numba_kernels.ir.vector_ir import quantize_vector
from hotcold.numba_kernels.loops.work_stealing import next_block
from hotcold.numba_kernels.prefill import float_matmul, int16_matmul
from hotcold.numba_kernels.prefill.block_tokens import is_of
from hotcold.numba_kernels.prefill.float_items import items_in, num_items
from hotcold.numba_kernels.prefill.float_tiles import (
    BUFFER_ITEMS,
    MAX_SUMS,
    shapes_of,
    start_tiles,
    stop_tiles,
)
from hotcold.numba_kernels.prefill.quantized_matmul import ROWS, TOKENS_AT_ONCE, vectors_part

_pack_items, _multiply_items = float_matmul.pack_groups, float_matmul.multiply_rows
_pack_pairs, _multiply_pairs = int16_matmul.pack_groups, int16_matmul.multiply_rows


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


Tokens = QuantizedVectors | FloatTokens | Int16Tokens


def quantized_tokens(num_threads: int, num_tokens: int, width: int) -> QuantizedVectors:
    """Work space for tokens of up to `width` numbers; what is not used of it takes no memory."""
    return QuantizedVectors(*(array[0] for array in empty_vectors(1, num_tokens, width)))


def float_tokens(num_threads: int, num_tokens: int, width: int, items: type) -> FloatTokens:
    """As `quantized_tokens`; `items`: see `float_matmul`."""
    whole = -(-num_tokens // LANES) * LANES
    return FloatTokens(
        aligned_zeros((whole * num_items(width, items),), items),
        aligned_zeros((num_threads, BUFFER_ITEMS), items),
        aligned_zeros((num_threads, MAX_SUMS * whole)),
        np.arange(num_tokens, dtype=np.int64),
    )


def int16_tokens(num_threads: int, num_tokens: int, width: int) -> Int16Tokens:
    """As `quantized_tokens`."""
    whole, groups = -(-num_tokens // LANES) * LANES, int16_matmul.num_column_groups(width)
    return Int16Tokens(
        aligned_zeros((whole * groups * GROUP_PAIRS,), np.int32),
        aligned_zeros((whole * groups,)),
        aligned_zeros((num_threads, int16_matmul.BUFFER_PAIRS), np.int32),
        aligned_zeros((num_threads, int16_matmul.MAX_SUMS * whole)),
        np.arange(num_tokens, dtype=np.int64),
    )


@by_types
def share_unit(tokens):  # type: ignore[no-untyped-def]
    """Tokens that one thread prepares are whole ones of so many; for compiled code, as below."""
    unit = 1 if is_of(tokens, QuantizedVectors) else LANES
    return lambda tokens: unit


@by_types
def prepare_tokens(weights, x, first, last, tokens, thread):  # type: ignore[no-untyped-def]
    """tokens = x[t] as rows like `weights` take them, for first <= t < last; no checks."""

    def quantized(weights, x, first, last, tokens, thread):  # type: ignore[no-untyped-def]
        for t in range(first, last):
            quantize_vector(weights, x, t, tokens, t)

    def floats(weights, x, first, last, tokens, thread):  # type: ignore[no-untyped-def]
        if first < last:
            packed = _packed(tokens, x.shape[0], x.shape[1])
            order, end = tokens.order[: x.shape[0]], (last + LANES - 1) // LANES
            _pack_items(x, order, packed, tokens.buffers[thread], first // LANES, end)

    def pairs(weights, x, first, last, tokens, thread):  # type: ignore[no-untyped-def]
        if first < last:
            packed, scales = _packed_pairs(tokens, x.shape[0], x.shape[1])
            order, end = tokens.order[: x.shape[0]], (last + LANES - 1) // LANES
            _pack_pairs(x, order, packed, scales, tokens.buffers[thread], first // LANES, end)

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

    def floats(weights, tokens, thread, out, column, first, last):  # type: ignore[no-untyped-def]
        packed, order = _packed(tokens, out.shape[0], weights.shape[1]), tokens.order
        groups = packed.shape[0]
        sums = tokens.sums[thread, : MAX_SUMS * groups * LANES].reshape(MAX_SUMS, groups, LANES)
        _multiply_items(
            weights, packed, tokens.buffers[thread], sums, out[:, column:],
            order[: out.shape[0]], False, first, last,
        )  # fmt: skip

    def pairs(weights, tokens, thread, out, column, first, last):  # type: ignore[no-untyped-def]
        packed, scales = _packed_pairs(tokens, out.shape[0], weights.shape[1])
        groups, most, order = packed.shape[0], int16_matmul.MAX_SUMS, tokens.order
        sums = tokens.sums[thread, : most * groups * LANES].reshape(most, groups, LANES)
        _multiply_pairs(
            weights, packed, scales, tokens.buffers[thread], sums, out[:, column:],
            order[: out.shape[0]], False, first, last,
        )  # fmt: skip

    if is_of(tokens, QuantizedVectors):
        return quantized
    return floats if is_of(tokens, FloatTokens) else pairs


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
def prepare_for_layer(rows, layer, x, first, last, tokens, second_tokens, thread):
    """`prepare_tokens` for a layer's `LayerRows`: what rows of each format take."""
    if rows.first_rows[layer, 0] < rows.first_rows[layer, 1]:
        prepare_tokens(rows.first, x, first, last, tokens, thread)
    if rows.second_rows[layer, 0] < rows.second_rows[layer, 1]:
        prepare_tokens(rows.second, x, first, last, second_tokens, thread)


@njit(nogil=True, cache=True)
def share_layer(
    counters, thread, num_threads, rows, layer, bias, tokens, second_tokens, addend, out
):  # fmt: skip
    """`share_rows` of a layer's `LayerRows`; `counters` has a kind for each format."""
    begin, end = rows.first_rows[layer]
    second_begin, second_end = rows.second_rows[layer]
    if begin < end:
        share_rows(
            counters[0], thread, num_threads, rows.first[begin:end], bias, tokens, addend, out, 0
        )
    if second_begin < second_end:
        share_rows(
            counters[1], thread, num_threads, rows.second[second_begin:second_end], bias,
            second_tokens, addend, out, end - begin,
        )  # fmt: skip
