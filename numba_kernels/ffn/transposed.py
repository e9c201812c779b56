"""Neurons in memory whose down projection is transposed: their steps of `layer_ffn`.

Without a predictor the down projection can stay as files have it, a row for each output, in their
format; a row per neuron would have to be quantized again. Each chosen block has such a matrix. Its
rows are read whole, and multiplied with zeros where neurons do not fire.

What a block's rows are multiplied with, a vector for each of its tokens, lies together, block after
block: of a block that starts at number n of the chosen ones' neurons, from n * T on.
"""

import numpy as np

from hotcold.numba_kernels.block_rows import IS_SECOND, ROW_ITEMS
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.batch_ffn import count_tokens
from hotcold.numba_kernels.decode.block_vectors import block_vectors, matrix_at, quantize_block
from hotcold.numba_kernels.decode.candidates import BLOCK, END_ROW, ROW, TOKENS
from hotcold.numba_kernels.decode.rows import block_products, split_range
from hotcold.numba_kernels.ffn.in_memory import (
    DOWN,
    FfnScratch,
    layer_span,
    part_of,
    scratch_of,
    set_bias,
    with_matrices,
)
from hotcold.numba_kernels.ir.vector_ir import prefetch_row
from hotcold.numba_kernels.serve.work_stealing import block_span, next_block

_GROUP = 16  # neurons of a cache line
_BYTES_AT_ONCE = 1 << 18  # of all chosen blocks' rows that a thread takes at least,
_STREAM_BYTES = 1 << 16  # and of one block's, for each begins a new stream
_UNIT = 48  # rows; whole tiles of every format
_MOST_UNITS = 5  # `TokenLists.products` has place for 240 rows
_ROWS_AHEAD = 4  # of the next block, which begins a new stream


def new_transposed_scratch(
    num_threads: int, num_tokens: int, num_neurons: int, width: int, num_blocks: int = 1
) -> FfnScratch:
    """`new_scratch` for `TransposedArrays` with up to `num_neurons` a layer."""
    sums = np.zeros((1, num_tokens, num_neurons), np.float32)
    return scratch_of(sums, num_threads, num_neurons, num_blocks, width, max(num_neurons, width))


@njit(nogil=True, cache=True, inline="always")
def layer_rows(source, layer):
    """`FfnArrays` of one layer, but for down rows: all."""
    first, last = layer_span(source, layer)
    up = part_of(source.up, first, last)
    return with_matrices(source, layer, source.gate[first:last], up, source.down)


@njit(nogil=True, cache=True)
def _num_values(spans, num_tokens):
    """How many numbers down rows are multiplied with."""
    count = np.int64(0)
    for span in spans:
        count += (span[END_ROW] - span[ROW]) * num_tokens
    return count


@njit(nogil=True, cache=True, inline="always")
def clear(source, share, scratch):
    """The thread's part of what down rows are multiplied with is zero."""
    count = _num_values(share.spans, share.x.shape[0])
    begin, end = split_range(count, share.thread, share.num_threads, _GROUP)
    scratch.sums.reshape(scratch.sums.size)[begin:end] = 0


@njit(nogil=True, cache=True)
def _scatter(spans, fired_ids, gates, h):
    """Bring what fired into the order of its block's columns, a vector for each of its tokens."""
    num_tokens, i, begin = gates.shape[1], 0, np.int64(0)
    for span in spans:
        width, place = span[END_ROW] - span[ROW], begin
        for t in range(num_tokens):
            if not span[TOKENS] >> t & 1:
                continue
            k = i
            while k < fired_ids.shape[0] and fired_ids[k] < span[END_ROW]:
                h[place + fired_ids[k] - span[ROW]] = gates[k, t]
                k += 1
            place += width
        while i < fired_ids.shape[0] and fired_ids[i] < span[END_ROW]:
            i += 1
        begin += width * num_tokens


@njit(nogil=True, cache=True, inline="always")
def add(source, share, scratch):
    """Bring the products of what fired into the order of down's columns."""
    count, h = scratch.counts[share.thread], scratch.sums.reshape(scratch.sums.size)
    _scatter(share.spans, share.fired_ids[:count], share.gates[:count], h)


@njit(nogil=True, cache=True)
def _add_products(
    array, place, following, h, begin, count, width, inputs, thread, first, last, products
):  # fmt: skip
    """products[k, n - first] = the block's row n . vector k, for n in first..last-1."""
    weights = matrix_at(array, place)
    vectors = block_vectors(weights, h, begin, count, width, inputs, thread)
    if following[IS_SECOND] == place[IS_SECOND]:
        ahead = matrix_at(array, following)
        for row in range(first, min(first + _ROWS_AHEAD, last, ahead.shape[0])):
            prefetch_row(ahead, row)
    block_products(weights, vectors, products, first, last, 0)


@njit(nogil=True, cache=True)
def _rows_at_once(places, spans, itemsize):
    """Rows of all chosen blocks that a thread takes together."""
    unit_bytes, longest = np.int64(1), np.int64(1)  # of all blocks, and of the one with most
    for span in spans:
        own_bytes = places[span[BLOCK], ROW_ITEMS] * itemsize * _UNIT
        unit_bytes += own_bytes
        longest = max(longest, own_bytes)
    units = max(_BYTES_AT_ONCE // unit_bytes, (_STREAM_BYTES + longest - 1) // longest)
    return max(np.int64(1), min(units, np.int64(_MOST_UNITS))) * _UNIT


@njit(nogil=True, cache=True)
def _add_blocks(
    counters, thread, num_threads, down, places, spans, block_weights, biases, h, inputs, products,
    out,
):  # fmt: skip
    """out = the sum over chosen blocks of down . h and their biases, in the rows that it takes."""
    num_tokens, begin = out.shape[0], np.int64(0)
    for span in spans:
        width, count = span[END_ROW] - span[ROW], count_tokens(span[TOKENS], num_tokens)
        if places[span[BLOCK], IS_SECOND]:
            quantize_block(down.second, h, begin, count, width, inputs, thread)
        else:
            quantize_block(down.first, h, begin, count, width, inputs, thread)
        begin += width * num_tokens
    size, last_span = _rows_at_once(places, spans, down.first.itemsize), spans.shape[0] - 1
    for turn in range(num_threads):
        part = (thread + turn) % num_threads
        part_first, part_last = split_range(out.shape[1], part, num_threads, 4)
        count = part_last - part_first
        first, last = block_span(count, size, _UNIT, next_block(counters, part))
        while first < last:
            first, last = part_first + first, part_first + last
            set_bias(block_weights, biases, out, first, last)
            begin = np.int64(0)
            for k in range(spans.shape[0]):
                span, following = spans[k], places[spans[min(k + 1, last_span), BLOCK]]
                width, count = span[END_ROW] - span[ROW], count_tokens(span[TOKENS], num_tokens)
                place = places[span[BLOCK]]
                if place[IS_SECOND]:
                    _add_products(
                        down.second, place, following, h, begin, count, width, inputs, thread,
                        first, last, products[:count],
                    )  # fmt: skip
                else:
                    _add_products(
                        down.first, place, following, h, begin, count, width, inputs, thread,
                        first, last, products[:count],
                    )  # fmt: skip
                row = 0
                for t in range(num_tokens):
                    if span[TOKENS] >> t & 1:
                        for n in range(first, last):
                            out[t, n] += products[row, n - first]
                        row += 1
                begin += width * num_tokens
            first, last = block_span(
                part_last - part_first, size, _UNIT, next_block(counters, part)
            )


@njit(nogil=True, cache=True, inline="always")
def add_up(source, share, scratch):
    """out = down . h and the biases, in rows that threads share by work stealing."""
    down, layer = share.rows.down, share.layer
    _add_blocks(
        scratch.counters[DOWN], share.thread, share.num_threads, down, down.places[layer],
        share.spans, share.selection.block_weights, share.rows.down_bias[layer],
        scratch.sums.reshape(scratch.sums.size), scratch.inputs, share.lists.products, share.out,
    )  # fmt: skip
