"""The feed-forward network of several tokens at once, each with its own active neurons.

Neurons are taken in pieces of a block's rows. Rows without gaps are multiplied with all tokens that
want them at once, in tiles; of a block that only some tokens chose, with vectors of these, gathered
side by side. Where each token has its own list of neurons, the first one that needs a row reads it
from memory, the others find it in the L2 cache. A list is in ascending order, so a token's sums do
not depend on its batch-mates (batch invariance).
"""

from typing import NamedTuple

import numpy as np
from numba import types

from hotcold.numba_kernels.compiler import by_types, inlined_by_types, njit
from hotcold.numba_kernels.decode.activations import activate, activate_up, passes
from hotcold.numba_kernels.decode.rows import block_products, rows_ahead, rows_at_once
from hotcold.numba_kernels.decode.vectors import (
    QuantizedVectors,
    aligned_zeros,
    copy_numbers,
    empty_vectors,
)
from hotcold.numba_kernels.formats import QUANT_GROUP
from hotcold.numba_kernels.ir.bit_ir import lowest_bit
from hotcold.numba_kernels.ir.vector_ir import (
    axpy_ahead,
    dot_ahead,
    prefetch_row,
)

_BLOCK_BYTES = 1 << 19  # of one matrix's rows
_MAX_NEURONS = 240  # of a block
_CARRIED = 3  # neurons left over from one block for the next: four are added at once
_ALL_TOKENS = np.uint32(0xFFFFFFFF)


class TokenLists(NamedTuple):
    """Each token's active neurons of a piece, as indices into the list that it is cut from.

    places (T, 243) int32: counts[t] of them; counts (T,) int64
    products (T, 240) float32: of a piece's rows with all tokens, or with some
    floats (T * d,) float32, vectors: activations of some tokens side by side
    """

    places: np.ndarray
    counts: np.ndarray
    products: np.ndarray
    floats: np.ndarray
    vectors: QuantizedVectors


def empty_lists(num_threads: int, num_tokens: int, width: int) -> TokenLists:
    """Work space for `num_tokens` of `width` numbers; arrays have a leading axis of threads."""
    return TokenLists(
        np.empty((num_threads, num_tokens, _MAX_NEURONS + _CARRIED), np.int32),
        np.zeros((num_threads, num_tokens), np.int64),
        np.empty((num_threads, num_tokens, _MAX_NEURONS), np.float32),
        aligned_zeros((num_threads, num_tokens * width)),
        empty_vectors(num_threads, num_tokens, width),
    )


@njit(nogil=True, cache=True)
def thread_lists(lists, thread, num_tokens):
    """One thread's work space for `num_tokens`."""
    vectors = lists.vectors
    return TokenLists(
        lists.places[thread, :num_tokens],
        lists.counts[thread, :num_tokens],
        lists.products[thread, :num_tokens],
        lists.floats[thread],
        QuantizedVectors(vectors.values[thread], vectors.scales[thread], vectors.sums[thread]),
    )


@inlined_by_types
def gathered(x, width, lists):  # type: ignore[no-untyped-def]
    """What `gather` wrote for x, as kernels take it; for compiled code."""
    if not isinstance(x, types.Array):
        return lambda x, width, lists: lists.vectors

    def floats(x, width, lists):  # type: ignore[no-untyped-def]
        return lists.floats[: x.shape[0] * width].reshape(x.shape[0], width)

    return floats


@by_types
def gather(x, tokens, width, lists):  # type: ignore[no-untyped-def]
    """Copy `tokens` of x, `quantize_activations` of vectors (T, width), side by side.

    For compiled code.
    """
    return _gather_floats if isinstance(x, types.Array) else _gather_vectors


def _gather_floats(x, tokens, width, lists):  # type: ignore[no-untyped-def]
    row, some = 0, gathered(x, width, lists)
    for t in range(x.shape[0]):
        if np.int64(tokens) >> t & 1:
            copy_numbers(x[t], some[row])
            row += 1


def _gather_vectors(x, tokens, width, lists):  # type: ignore[no-untyped-def]
    groups, row, some = width // QUANT_GROUP, 0, lists.vectors
    for t in range(lists.counts.shape[0]):
        if np.int64(tokens) >> t & 1:
            copy_numbers(x.values[t, :width], some.values[row, :width])
            copy_numbers(x.scales[t, :groups], some.scales[row, :groups])
            copy_numbers(x.sums[t, :groups], some.sums[row, :groups])
            row += 1


@njit(nogil=True, cache=True, inline="always")
def are_all(tokens, num_tokens):
    """Whether the bits of all of the first `num_tokens` tokens are set."""
    some = _ALL_TOKENS >> np.uint32(32 - num_tokens)
    return np.uint32(tokens) & some == some


@njit(nogil=True, cache=True, inline="always")
def count_tokens(tokens, num_tokens):
    """How many of the first `num_tokens` tokens have their bit set."""
    count = np.int64(0)
    for t in range(num_tokens):
        count += np.int64(tokens) >> t & 1
    return count


@njit(nogil=True, cache=True)
def block_size(weights, num_tokens):
    """Neurons of a block: whole `rows_at_once` for several tokens."""
    tile = rows_at_once(weights) if num_tokens > 1 else 1
    fitting = min(_MAX_NEURONS, _BLOCK_BYTES // max(1, weights.shape[1] * weights.itemsize))
    return max(1, fitting // tile) * tile


@njit(nogil=True, cache=True)
def _list_active(masks, tokens, order, lists):
    """Append each i of `order` to the list of each of `tokens` whose bit is set in masks[i].

    `order`: a range or an array; no masks: every bit is set.
    """
    some = tokens & (_ALL_TOKENS >> np.uint32(32 - lists.counts.shape[0]))
    for i in order:
        bits = (masks[i] if masks.shape[0] else _ALL_TOKENS) & some
        while bits:
            t = lowest_bit(bits)
            lists.places[t, lists.counts[t]] = i
            lists.counts[t] += 1
            bits &= bits - np.uint32(1)


@njit(nogil=True, cache=True)
def _listed_products(weights, ids, offset, token_masks, tokens, x, first, last, products, lists):
    """products[i - first, t] = weights[ids[i] + offset] . x[t] for the tokens that want ids[i]."""
    distance = rows_ahead(weights)
    lists.counts[:] = 0
    _list_active(token_masks, tokens, range(first, last), lists)
    for t in range(products.shape[1]):
        count, places = lists.counts[t], lists.places[t]
        for k in range(count):
            i, following = places[k], places[min(k + distance, count - 1)]
            if k + distance + 2 < count:
                prefetch_row(weights, ids[places[k + distance + 2]] + offset)
            products[i - first, t] = dot_ahead(
                weights, ids[i] + offset, ids[following] + offset, x, t
            )  # fmt: skip


@njit(nogil=True, cache=True)
def _own_products(lists, count):
    """Work space for products of `count` tokens, in the order of `gates`: (count, neurons)."""
    flat = lists.products.reshape(lists.products.size)
    height = flat.shape[0] // max(1, count)
    return flat[: height * count].reshape(height, count).T


@njit(nogil=True, cache=True)
def first_of_rows(ids, token_masks, shift, first, last):
    """Row of candidate `first` where the rows of candidates first..last-1 have no gaps, else -1.

    Nor have they where single neurons are for some tokens only.
    """
    if ids.shape[0] == 0:
        return np.int64(first + shift)
    if token_masks.shape[0] or not _is_range(ids[first:last]):
        return np.int64(-1)
    return np.int64(ids[first])


@njit(nogil=True, cache=True)
def products_kernel(
    weights, ids, offset, token_masks, tokens, first_row, x, width, first, last, products, lists
):  # fmt: skip
    """products[i - first, t] = weights[n + offset] . x[t] of candidates i in first..last-1.

    Candidates are as for `numba_kernels.decode.ffn.gate_values_kernel`, first_row as of
    `first_of_rows`. They are multiplied with `tokens`, listed ones only with those of their masks;
    other products stay as they are. Of vectors (T, width) x, `gather` has copied these tokens',
    unless they are all, or first_row is -1. Checks nothing.
    """
    num_tokens, begin = products.shape[1], first_row + offset
    end = begin + last - first
    if first_row < 0:
        _listed_products(weights, ids, offset, token_masks, tokens, x, first, last, products, lists)
    elif are_all(tokens, num_tokens):
        block_products(weights, x, products.T, begin, end, 0)
    else:
        count, row = count_tokens(tokens, num_tokens), 0
        some_x = gathered(x, width, lists)
        some = _own_products(lists, count)
        block_products(weights, some_x, some, begin, end, 0)
        for t in range(num_tokens):
            if tokens & (np.uint32(1) << np.uint32(t)):
                for i in range(last - first):
                    products[i, t] = some[row, i]
                row += 1


@njit(nogil=True, cache=True)
def keep_some_kernel(
    bias, ids, token_masks, tokens, shift, function, threshold, first, last, products, fired_ids,
    fired_masks, gates,
):  # fmt: skip
    """Gather those of candidates first..last-1 that fire for some token; returns their number.

    A neuron fires for one of `tokens` where fn(product + bias) passes `threshold`; below zero all
    neurons are kept. `products` (N, T) is as in `products_kernel`. fired_ids (N,) int32,
    fired_masks (N,) uint32 and gates (N, T) receive each fired neuron's row, the bits of its
    tokens, and fn(product + bias), zero for others of `tokens`. Checks nothing.
    """
    num_fired, some = 0, tokens & (_ALL_TOKENS >> np.uint32(32 - gates.shape[1]))
    for candidate in range(first, last):
        n = ids[candidate] if ids.shape[0] else candidate + shift
        active = token_masks[candidate] if token_masks.shape[0] else _ALL_TOKENS
        bias_of_n = bias[n] if bias.shape[0] else np.float32(0)
        fires, bits = np.uint32(0), some
        while bits:
            t, bit = lowest_bit(bits), bits & (~bits + np.uint32(1))
            value = np.float32(0)
            if active & bit:
                value = activate(function, products[candidate - first, t] + bias_of_n)
                if passes(value, threshold):
                    fires |= bit
                else:
                    value = np.float32(0)
            gates[num_fired, t] = value
            bits ^= bit
        if fires or threshold < 0:
            fired_ids[num_fired] = n
            fired_masks[num_fired] = fires
            num_fired += 1
    return num_fired


@njit(nogil=True, cache=True)
def scale_by_products(bias, ids, masks, products, function, gates):
    """gates[i, t] *= products[i, t] + bias[ids[i]] for the tokens t of masks[i]."""
    for i in range(gates.shape[0]):
        shift, bits = bias[ids[i]] if bias.shape[0] else np.float32(0), masks[i]
        while bits:
            t = lowest_bit(bits)
            gates[i, t] *= activate_up(function, products[i, t] + shift)
            bits &= bits - np.uint32(1)


@njit(nogil=True, cache=True)
def _scale(up, bias, ids, rows, offset, x, t, places, count, function, gates):
    """gates[i, t] *= up[rows[i] + offset] . x[t] + bias[ids[i]] for i in places[:count]."""
    distance = rows_ahead(up)
    for k in range(count):
        i, following = places[k], places[min(k + distance, count - 1)]
        if k + distance + 2 < count:
            prefetch_row(up, rows[places[k + distance + 2]] + offset)
        factor = dot_ahead(up, rows[i] + offset, rows[following] + offset, x, t)
        if bias.shape[0]:
            factor += bias[ids[i]]
        gates[i, t] *= activate_up(function, factor)


@njit(nogil=True, cache=True)
def _is_range(rows):
    place = 1
    while place < rows.shape[0] and rows[place] == rows[place - 1] + 1:
        place += 1
    return place >= rows.shape[0]


@njit(nogil=True, cache=True)
def _scale_piece(
    up, bias, ids, rows, offset, masks, first, last, x, width, function, gates, lists
):  # fmt: skip
    """`scale_some_kernel` of a piece.

    Where most neurons are active for most tokens that have any, as in dense mode, rows without gaps
    are multiplied with all of these at once.
    """
    lists.counts[:] = 0
    _list_active(masks, _ALL_TOKENS, range(first, last), lists)
    num_active, tokens, count = np.int64(0), np.int64(0), 0
    for t in range(gates.shape[1]):
        if lists.counts[t]:
            tokens |= np.int64(1) << t
            num_active += lists.counts[t]
            count += 1
    if 2 * num_active < (last - first) * count or not _is_range(rows[first:last]):
        for t in range(gates.shape[1]):
            _scale(
                up, bias, ids, rows, offset, x, t, lists.places[t], lists.counts[t], function, gates
            )  # fmt: skip
        return
    begin, end = np.int64(rows[first]) + offset, np.int64(rows[last - 1]) + 1 + offset
    products = _own_products(lists, count)
    if count == gates.shape[1]:
        block_products(up, x, products, begin, end, 0)
    else:
        gather(x, tokens, width, lists)
        block_products(up, gathered(x, width, lists), products, begin, end, 0)
    row = 0
    for t in range(gates.shape[1]):
        if tokens >> t & 1:
            for i in range(first, last):
                shift = bias[ids[i]] if bias.shape[0] else np.float32(0)
                gates[i, t] *= activate_up(function, products[row, i - first] + shift)
            row += 1


@njit(nogil=True, cache=True)
def scale_some_kernel(
    up, bias, ids, rows, offset, masks, begin, end, gates, x, width, function, lists
):  # fmt: skip
    """gates[i, t] *= up[rows[i] + offset] . x[t] + bias[ids[i]] for the tokens t of masks[i].

    The neurons begin <= i < end that fired are of one block. x: `quantize_activations` of vectors
    (T, width).
    """
    size = block_size(up, gates.shape[1])
    for first in range(begin, end, size):
        last = min(first + size, end)
        _scale_piece(
            up, bias, ids, rows, offset, masks, first, last, x, width, function, gates, lists
        )  # fmt: skip


@njit(nogil=True, cache=True)
def _add_fours(down, rows, t, places, count, gates, out, is_last):
    """out += gates[i, t] * down[rows[i]] for i in places[:count], in whole groups of four.

    `out` is read and written once for four rows while the next four are prefetched. Places that are
    left over move to the front, and their number is returned; with `is_last` they are added too, in
    a group with rows times zero.
    """
    k, last, zero = 0, count - 1, np.float32(0)
    while k + 4 <= count or (is_last and k < count):
        i0, i1 = places[k], places[min(k + 1, last)]
        i2, i3 = places[min(k + 2, last)], places[min(k + 3, last)]
        a0, a1 = places[min(k + 4, last)], places[min(k + 5, last)]
        a2, a3 = places[min(k + 6, last)], places[min(k + 7, last)]
        own = rows[i0], rows[i1], rows[i2], rows[i3]
        factors = (
            gates[i0, t], gates[i1, t] if k + 1 < count else zero,
            gates[i2, t] if k + 2 < count else zero, gates[i3, t] if k + 3 < count else zero,
        )  # fmt: skip
        axpy_ahead(out, down, own, factors, (rows[a0], rows[a1], rows[a2], rows[a3]))
        k += 4
    for i in range(count - k):
        places[i] = places[k + i]
    return max(count - k, 0)


@njit(nogil=True, cache=True)
def add_some_kernel(down, rows, masks, order, gates, out, lists):
    """out[t] += gates[i, t] * down[rows[i]] for i in `order`, tokens t of masks[i]; checks nothing.

    `out` (T, d) is in the order of `axpy`; each token's neurons are added in order, in fours
    whatever the pieces.
    """
    size = block_size(down, 1)
    lists.counts[:] = 0
    for first in range(0, order.shape[0], size):
        last = min(first + size, order.shape[0])
        _list_active(masks, _ALL_TOKENS, order[first:last], lists)
        for t in range(out.shape[0]):
            lists.counts[t] = _add_fours(
                down, rows, t, lists.places[t], lists.counts[t], gates, out[t],
                last == order.shape[0],
            )  # fmt: skip
