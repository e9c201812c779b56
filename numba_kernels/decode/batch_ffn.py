"""The feed-forward network of several tokens at once, each with its own active neurons.

Neurons are taken in blocks. Within a block each token goes through its own list of neurons: the
first token that needs a row reads it from memory, the others find it in the L2 cache. A list is in
ascending order, so a token's sums do not depend on its batch-mates (batch invariance).
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import activate, activate_up, passes
from hotcold.numba_kernels.decode.rows import block_products, rows_ahead, rows_at_once
from hotcold.numba_kernels.ir.bit_ir import lowest_bit
from hotcold.numba_kernels.ir.vector_ir import (
    add_scaled1,
    axpy4_ahead,
    dot_ahead,
    prefetch_row,
)

_BLOCK_BYTES = 1 << 19  # of one matrix's rows
_MAX_NEURONS = 240  # of a block
_CARRIED = 3  # neurons left over from one block for the next: four are added at once
_ALL_TOKENS = np.uint32(0xFFFFFFFF)


class TokenLists(NamedTuple):
    """Each token's active neurons of a block, as indices into the list that the block is cut from.

    places (T, 243) int32: counts[t] of them, of which the first carried[t] are of the block before;
    counts, carried (T,) int64; products (T, 240) float32: of a block's rows with all tokens
    """

    places: np.ndarray
    counts: np.ndarray
    carried: np.ndarray
    products: np.ndarray


@njit(nogil=True, cache=True)
def empty_lists(num_threads, num_tokens):
    """Work space for `num_tokens`; arrays have a leading axis of threads."""
    return TokenLists(
        np.empty((num_threads, num_tokens, _MAX_NEURONS + _CARRIED), np.int32),
        np.zeros((num_threads, num_tokens), np.int64),
        np.zeros((num_threads, num_tokens), np.int64),
        np.empty((num_threads, num_tokens, _MAX_NEURONS), np.float32),
    )


@njit(nogil=True, cache=True)
def thread_lists(lists, thread, num_tokens):
    """One thread's work space for `num_tokens`."""
    return TokenLists(
        lists.places[thread, :num_tokens],
        lists.counts[thread, :num_tokens],
        lists.carried[thread, :num_tokens],
        lists.products[thread, :num_tokens],
    )


@njit(nogil=True, cache=True)
def block_size(weights, num_tokens):
    """Neurons of a block: whole `rows_at_once` for several tokens."""
    tile = rows_at_once(weights) if num_tokens > 1 else 1
    fitting = min(_MAX_NEURONS, _BLOCK_BYTES // max(1, weights.shape[1] * weights.itemsize))
    return max(1, fitting // tile) * tile


@njit(nogil=True, cache=True)
def _list_active(masks, first, last, lists):
    """Append i to the list of each token whose bit is set in masks[i], for i in first..last-1."""
    some = _ALL_TOKENS >> np.uint32(32 - lists.counts.shape[0])
    for i in range(first, last):
        bits = (masks[i] if masks.shape[0] else _ALL_TOKENS) & some
        while bits:
            t = lowest_bit(bits)
            lists.places[t, lists.counts[t]] = i
            lists.counts[t] += 1
            bits &= bits - np.uint32(1)


@njit(nogil=True, cache=True)
def _listed_products(gate, ids, token_masks, x, first, last, gates, lists):
    """gates[i - first, t] = gate[ids[i]] . x[t] for the tokens that ids[i] is active for."""
    distance = rows_ahead(gate)
    lists.counts[:] = 0
    _list_active(token_masks, first, last, lists)
    for t in range(gates.shape[1]):
        count, places = lists.counts[t], lists.places[t]
        for k in range(count):
            i, following = places[k], places[min(k + distance, count - 1)]
            if k + distance + 2 < count:
                prefetch_row(gate, ids[places[k + distance + 2]])
            gates[i - first, t] = dot_ahead(gate, ids[i], ids[following], x, t)


@njit(nogil=True, cache=True)
def gate_up_products_kernel(gate, ids, token_masks, x, first, last, products, lists):
    """products[i - first, t] = gate[n] . x[t] of candidates i in first..last-1; checks nothing.

    Candidates are as for `numba_kernels.decode.ffn.gate_values_kernel`; listed ones are multiplied
    only with the tokens of their masks.
    """
    if ids.shape[0]:
        _listed_products(gate, ids, token_masks, x, first, last, products, lists)
    else:
        block_products(gate, x, products.T, first, last, 0)


@njit(nogil=True, cache=True)
def keep_some_kernel(
    bias, ids, token_masks, function, threshold, first, last, products, fired_ids, fired_masks,
    gates,
):  # fmt: skip
    """Gather those of candidates first..last-1 that fire for some token; returns their number.

    A neuron fires for a token where fn(product + bias) passes `threshold`; below zero all neurons
    are kept. `products` (N, T) is as in `gate_up_products_kernel`. fired_ids (N,) int32,
    fired_masks (N,) uint32 and gates (N, T) receive each fired neuron's row, the bits of its
    tokens, and fn(product + bias), zero for other tokens. Checks nothing.
    """
    num_fired = 0
    for candidate in range(first, last):
        n = ids[candidate] if ids.shape[0] else candidate
        active = token_masks[candidate] if token_masks.shape[0] else _ALL_TOKENS
        shift = bias[n] if bias.shape[0] else np.float32(0)
        fires = np.uint32(0)
        for t in range(gates.shape[1]):
            bit = np.uint32(1) << np.uint32(t)
            value = np.float32(0)
            if active & bit:
                value = activate(function, products[candidate - first, t] + shift)
                if passes(value, threshold):
                    fires |= bit
                else:
                    value = np.float32(0)
            gates[num_fired, t] = value
        if fires or threshold < 0:
            fired_ids[num_fired] = n
            fired_masks[num_fired] = fires
            num_fired += 1
    return num_fired


@njit(nogil=True, cache=True)
def _scale(up, bias, fired_ids, x, t, places, first, last, function, gates):
    """gates[i, t] *= up[n] . x[t] + bias[n], n = fired_ids[i], for i in places[first:last]."""
    distance = rows_ahead(up)
    for k in range(first, last):
        i, following = places[k], places[min(k + distance, last - 1)]
        if k + distance + 2 < last:
            prefetch_row(up, fired_ids[places[k + distance + 2]])
        n = fired_ids[i]
        factor = dot_ahead(up, n, fired_ids[following], x, t)
        if bias.shape[0]:
            factor += bias[n]
        gates[i, t] *= activate_up(function, factor)


@njit(nogil=True, cache=True)
def _is_range(ids):
    place = 1
    while place < ids.shape[0] and ids[place] == ids[place - 1] + 1:
        place += 1
    return place >= ids.shape[0]


@njit(nogil=True, cache=True)
def _scale_block(up, bias, fired_ids, first, last, x, function, gates, lists):
    """`_scale` of all tokens' new places.

    Where most neurons are active for most tokens, as in dense mode, rows without gaps are
    multiplied with all tokens at once.
    """
    num_active = lists.counts.sum() - lists.carried.sum()
    if 2 * num_active < (last - first) * gates.shape[1] or not _is_range(fired_ids[first:last]):
        for t in range(gates.shape[1]):
            _scale(
                up, bias, fired_ids, x, t, lists.places[t], lists.carried[t], lists.counts[t],
                function, gates,
            )  # fmt: skip
        return
    begin, end = np.int64(fired_ids[first]), np.int64(fired_ids[last - 1]) + 1
    block_products(up, x, lists.products, begin, end, 0)
    for i in range(first, last):
        shift = bias[fired_ids[i]] if bias.shape[0] else np.float32(0)
        for t in range(gates.shape[1]):
            gates[i, t] *= activate_up(function, lists.products[t, i - first] + shift)


@njit(nogil=True, cache=True)
def _add_fours(down, fired_ids, t, places, count, gates, out):
    """out += gates[i, t] * down[fired_ids[i]] for i in places[:count], in whole groups of four.

    `out` is read and written once for four rows while the next four are prefetched. Places that are
    left over move to the front; returns their number.
    """
    k, last = 0, count - 1
    while k + 4 <= count:
        i0, i1, i2, i3 = places[k], places[k + 1], places[k + 2], places[k + 3]
        a0, a1 = places[min(k + 4, last)], places[min(k + 5, last)]
        a2, a3 = places[min(k + 6, last)], places[min(k + 7, last)]
        axpy4_ahead(
            out, down, fired_ids[i0], fired_ids[i1], fired_ids[i2], fired_ids[i3],
            gates[i0, t], gates[i1, t], gates[i2, t], gates[i3, t],
            fired_ids[a0], fired_ids[a1], fired_ids[a2], fired_ids[a3],
        )  # fmt: skip
        k += 4
    for i in range(count - k):
        places[i] = places[k + i]
    return count - k


@njit(nogil=True, cache=True)
def contribution(h, down_norms, n):
    """What neuron n adds to a token's output: h times the norm of its down row, or h without."""
    return h * down_norms[n] if down_norms.shape[0] else h


@njit(nogil=True, cache=True)
def _drop_small(fired_ids, gates, down_norms, threshold, lists):
    """Drop new places that contribute no more than `threshold`, and zero their gates."""
    for t in range(gates.shape[1]):
        places, kept = lists.places[t], lists.carried[t]
        for k in range(lists.carried[t], lists.counts[t]):
            i = places[k]
            if passes(contribution(gates[i, t], down_norms, np.int64(fired_ids[i])), threshold):
                places[kept] = i
                kept += 1
            else:
                gates[i, t] = 0
        lists.counts[t] = kept


@njit(nogil=True, cache=True)
def _keep_firing(fired_ids, fired_masks, num_fired, gates):
    """Keep the neurons with a nonzero gate, in order; returns their number."""
    kept = 0
    for i in range(num_fired):
        fires = np.uint32(0)
        for t in range(gates.shape[1]):
            if gates[i, t] != 0:
                fires |= np.uint32(1) << np.uint32(t)
        if fires:
            fired_ids[kept], fired_masks[kept] = fired_ids[i], fires
            kept += 1
    return kept


@njit(nogil=True, cache=True)
def up_down_of_some(
    up, bias, down, down_norms, fired_ids, fired_masks, num_fired, gates, x, function, threshold,
    out, lists,
):  # fmt: skip
    """`numba_kernels.decode.ffn.up_down_kernel` for several tokens; gates (N, T)."""
    drops = threshold >= 0 and up.shape[0] > 0
    size = block_size(down, 1)
    lists.counts[:] = 0
    for first in range(0, num_fired, size):
        last = min(first + size, num_fired)
        lists.carried[:] = lists.counts
        _list_active(fired_masks, first, last, lists)
        if up.shape[0]:
            _scale_block(up, bias, fired_ids, first, last, x, function, gates, lists)
            if drops:
                _drop_small(fired_ids, gates, down_norms, threshold, lists)
        for t in range(out.shape[0]):
            lists.counts[t] = _add_fours(
                down, fired_ids, t, lists.places[t], lists.counts[t], gates, out[t]
            )
    for t in range(out.shape[0]):
        for i in lists.places[t, : lists.counts[t]]:
            add_scaled1(out[t], down, fired_ids[i], gates[i, t])
    return _keep_firing(fired_ids, fired_masks, num_fired, gates) if drops else num_fired
