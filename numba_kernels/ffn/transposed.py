"""Neurons in memory whose down projection is transposed: their steps of `layer_ffn`.

Without a predictor the down projection can stay as files have it, a row for each output, in their
format; a row per neuron would have to be quantized again. Each chosen block has such a matrix for
each of the service's stripes (`numba_kernels.decode.stripes`). Its rows are read whole, and
multiplied with zeros where neurons do not fire.

What such rows are multiplied with, a vector for each of the block's tokens, lies together, stripe
after stripe and block after block: of a block that starts at number n of the chosen ones' neurons,
from n * T on.
"""

import numpy as np

from hotcold.numba_kernels.block_rows import ROW_ITEMS
from hotcold.numba_kernels.compiler import inlined_by_types, njit
from hotcold.numba_kernels.decode.batch_ffn import count_tokens
from hotcold.numba_kernels.decode.block_vectors import block_vectors, quantize_block
from hotcold.numba_kernels.decode.by_format import with_matrix
from hotcold.numba_kernels.decode.candidates import BLOCK, END_ROW, ROW, TOKENS
from hotcold.numba_kernels.decode.rows import block_products, split_range
from hotcold.numba_kernels.decode.vectors import aligned_zeros
from hotcold.numba_kernels.ffn.in_memory import (
    DOWN,
    FfnScratch,
    merge_stripes,
    scratch_of,
    set_bias,
    with_matrices,
)
from hotcold.numba_kernels.ir.vector_ir import prefetch_row
from hotcold.numba_kernels.loops.work_stealing import block_span, next_block

_GROUP = 16  # neurons of a cache line
_BYTES_AT_ONCE = 1 << 18  # of all chosen blocks' rows that a thread takes at least,
_STREAM_BYTES = 1 << 16  # and of one block's, for each begins a new stream
_UNIT = 48  # rows; whole tiles of every format
_MOST_UNITS = 5  # `TokenLists.products` has place for 240 rows
_ROWS_AHEAD = 4  # of the next block, which begins a new stream


def new_transposed_scratch(
    num_threads: int, num_tokens: int, num_neurons: int, width: int, num_blocks: int = 1,
    num_stripes: int = 1,
) -> FfnScratch:  # fmt: skip
    """`new_scratch` for `TransposedArrays` with up to `num_neurons` a layer."""
    sums = aligned_zeros((1, num_tokens, num_neurons))
    num_sums = 2 * num_stripes.bit_length()
    scratch = scratch_of(sums, num_threads, num_neurons, num_blocks, width, max(num_neurons, width))
    return scratch._replace(
        first_stripes=np.zeros((num_threads, num_sums), np.int64),
        rows=aligned_zeros((num_threads, num_sums, num_tokens, _MOST_UNITS * _UNIT)),
    )


@njit(nogil=True, cache=True, inline="always")
def layer_rows(source, layer):
    """`FfnArrays` of one layer, but for matrices: all."""
    return with_matrices(source, layer, source.gate, source.up, source.down)


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
def _num_stripes(cuts):
    """Stripes of a layer, whose `cuts` are (B, n + 1), or (0, 0) where a block is one."""
    return cuts.shape[1] - 1 if cuts.shape[0] else np.int64(1)


@njit(nogil=True, cache=True)
def _stripe_part(span, cuts, stripe):
    """First and end of a stripe's neurons in a span's block, counted from its first."""
    if cuts.shape[0] == 0:
        return np.int64(0), span[END_ROW] - span[ROW]
    own = cuts[span[BLOCK]]
    return own[stripe] - own[0], own[stripe + 1] - own[0]


@njit(nogil=True, cache=True)
def _scatter(spans, cuts, fired_ids, gates, h):
    """Bring what fired into the order of its stripe's columns, a vector for each of its tokens."""
    num_tokens, i, begin = gates.shape[1], 0, np.int64(0)
    for span in spans:
        count = count_tokens(span[TOKENS], num_tokens)
        for stripe in range(_num_stripes(cuts)):
            first, end = _stripe_part(span, cuts, stripe)
            place, end_row = begin + first * (count - 1), span[ROW] + end
            for t in range(num_tokens):
                if not span[TOKENS] >> t & 1:
                    continue
                k = i
                while k < fired_ids.shape[0] and fired_ids[k] < end_row:
                    h[place + fired_ids[k] - span[ROW]] = gates[k, t]
                    k += 1
                place += end - first
            while i < fired_ids.shape[0] and fired_ids[i] < end_row:
                i += 1
        begin += (span[END_ROW] - span[ROW]) * num_tokens


@inlined_by_types
def _arrays_of(source):  # type: ignore[no-untyped-def]
    """`TransposedArrays` of a source: itself, or of offloaded experts; for compiled code."""
    if "arrays" in source.fields:
        return lambda source: source.arrays
    return lambda source: source


@njit(nogil=True, cache=True, inline="always")
def add(source, share, scratch):
    """Bring the products of what fired into the order of down's columns."""
    arrays = _arrays_of(source)
    count, h = scratch.counts[share.thread], scratch.sums.reshape(scratch.sums.size)
    cuts = arrays.cuts[min(share.layer, arrays.cuts.shape[0] - 1)]
    _scatter(share.spans, cuts, share.fired_ids[:count], share.gates[:count], h)


@njit(nogil=True, cache=True)
def _add_products(
    weights, h, begin, count, width, inputs, thread, first, last, products
):  # fmt: skip
    """products[k, n - first] = the block's row n . vector k, for n in first..last-1."""
    vectors = block_vectors(weights, h, begin, count, width, inputs, thread)
    block_products(weights, vectors, products, first, last, 0)


@njit(nogil=True, cache=True)
def _ask_for(weights, first, last):
    """Prefetch the first of a matrix's rows first..last-1."""
    for row in range(first, min(first + _ROWS_AHEAD, last, weights.shape[0])):
        prefetch_row(weights, row)


@njit(nogil=True, cache=True)
def _rows_at_once(places, num_stripes, spans, itemsize):
    """Rows of all chosen blocks that a thread takes together."""
    unit_bytes, longest = np.int64(1), np.int64(1)  # of all matrices, and of the one with most
    for span in spans:
        for stripe in range(num_stripes):
            own_bytes = places[span[BLOCK] * num_stripes + stripe, ROW_ITEMS] * itemsize * _UNIT
            unit_bytes += own_bytes
            longest = max(longest, own_bytes)
    units = max(_BYTES_AT_ONCE // unit_bytes, (_STREAM_BYTES + longest - 1) // longest)
    return max(np.int64(1), min(units, np.int64(_MOST_UNITS))) * _UNIT


@njit(nogil=True, cache=True)
def _add_stripe(
    thread, down, places, spans, cuts, stripe, h, inputs, first, last, products, sums
):  # fmt: skip
    """sums[t, n - first] = the sum over chosen blocks of the stripe's row n . h[t]."""
    num_tokens, begin, num_stripes = sums.shape[0], np.int64(0), _num_stripes(cuts)
    sums[:, : last - first] = 0
    following_stripe = min(stripe + 1, num_stripes - 1)
    for k in range(spans.shape[0]):
        span = spans[k]
        place = places[span[BLOCK] * num_stripes + stripe]
        following = places[spans[0, BLOCK] * num_stripes + following_stripe]
        if k + 1 < spans.shape[0]:
            following = places[spans[k + 1, BLOCK] * num_stripes + stripe]
        count = count_tokens(span[TOKENS], num_tokens)
        own_first, own_end = _stripe_part(span, cuts, stripe)
        width, at = own_end - own_first, begin + own_first * count
        if width:
            with_matrix(down.arrays, following, _ask_for, first, last)
            with_matrix(
                down.arrays, place, _add_products, h, at, count, width, inputs, thread, first, last,
                products[:count],
            )  # fmt: skip
        row = 0
        for t in range(num_tokens if width else 0):
            if span[TOKENS] >> t & 1:
                for n in range(last - first):
                    sums[t, n] += products[row, n]
                row += 1
        begin += (span[END_ROW] - span[ROW]) * num_tokens


@njit(nogil=True, cache=True)
def _quantize_all(down, places, spans, cuts, num_tokens, h, inputs, thread):
    """The vectors of all chosen blocks' stripes, for rows in their formats."""
    begin, num_stripes = np.int64(0), _num_stripes(cuts)
    for span in spans:
        count = count_tokens(span[TOKENS], num_tokens)
        for stripe in range(num_stripes):
            first, end = _stripe_part(span, cuts, stripe)
            if first == end:
                continue
            width, at = end - first, begin + first * count
            place = places[span[BLOCK] * num_stripes + stripe]
            with_matrix(
                down.arrays, place, quantize_block, h, at, count, width, inputs, thread
            )  # fmt: skip
        begin += (span[END_ROW] - span[ROW]) * num_tokens


@njit(nogil=True, cache=True)
def _add_all(
    counters, thread, num_threads, down, places, spans, cuts, first_stripe, block_weights, biases,
    h, inputs, products, sums, first_stripes, out, more,
):  # fmt: skip
    """What is left over of the sums of stripes, and the biases, in the rows that it takes."""
    num_tokens, num_stripes = out.shape[0], _num_stripes(cuts)
    _quantize_all(down, places, spans, cuts, num_tokens, h, inputs, thread)
    size = _rows_at_once(places, num_stripes, spans, down.arrays[0].itemsize)
    for turn in range(num_threads):
        part = (thread + turn) % num_threads
        part_first, part_last = split_range(out.shape[1], part, num_threads, 4)
        size_of_part = part_last - part_first
        first, last = block_span(size_of_part, size, _UNIT, next_block(counters, part))
        while first < last:
            first, last, count = part_first + first, part_first + last, 0
            for stripe in range(num_stripes):
                _add_stripe(
                    thread, down, places, spans, cuts, stripe, h, inputs, first, last, products,
                    sums[count, :num_tokens],
                )  # fmt: skip
                first_stripes[count] = first_stripe + stripe
                count = merge_stripes(
                    sums, first_stripes, count + 1, first_stripe, first_stripe + stripe + 1,
                    num_tokens, last - first,
                )  # fmt: skip
            out[:, first:last] = 0
            of_biases = out
            if more.shape[0] and biases.shape[1]:
                of_biases = more[max(count - 1, 0), :num_tokens]
            set_bias(block_weights, biases, of_biases, first, last)
            for i in range(count):
                for t in range(num_tokens):
                    target = more[i - 1, t] if i else out[t]
                    if i:
                        target[first:last] = 0
                    for n in range(first, last):
                        target[n] += sums[i, t, n - first]
            first, last = block_span(size_of_part, size, _UNIT, next_block(counters, part))


@njit(nogil=True, cache=True, inline="always")
def add_up(source, share, scratch):
    """What is left over of down . h of each stripe, and biases, in rows shared by work stealing."""
    arrays = _arrays_of(source)
    down, layer, thread = share.rows.down, share.layer, share.thread
    _add_all(
        scratch.counters[DOWN], thread, share.num_threads, down, down.places[layer], share.spans,
        arrays.cuts[min(layer, arrays.cuts.shape[0] - 1)], arrays.first_stripe,
        share.selection.block_weights, share.rows.down_bias[layer],
        scratch.sums.reshape(scratch.sums.size), scratch.inputs, share.lists.products,
        scratch.rows[thread], scratch.first_stripes[thread], share.out, share.more,
    )  # fmt: skip
