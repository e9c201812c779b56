"""The feed-forward network, neuron by neuron: a neuron whose gate does not fire costs its gate row.

With `down_norms` a neuron whose contribution is too small costs its up row too, but no down row:
`numba_kernels.decode.activations.Thresholds`.

Three-matrix FFN (ReGLU, SwiGLU):  y = sum over n of fn(gate[n] . x) * (up[n] . x) * down[n]
dReLU:                             y = sum over n of relu(gate[n] . x) * relu(up[n] . x) * down[n]
Two-matrix FFN (OPT, Falcon):      y = sum over n of fn(gate[n] . x) * down[n]
In the two-matrix FFN the first matrix is called gate: it decides whether the neuron fires; `up`
then has no rows.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import activate, activate_up, passes
from hotcold.numba_kernels.decode.candidates import BLOCK, FIRED_END
from hotcold.numba_kernels.decode.rows import rows_ahead
from hotcold.numba_kernels.ir.vector_ir import (
    axpy_ahead,
    dot_ahead,
    dot_row,
    prefetch_row,
)


@njit(nogil=True, cache=True)
def gate_values_kernel(gate, bias, ids, shift, offset, x, function, first, last, end, values):
    """values[i - first] = fn(gate[n + offset] . x[0] + bias[n]) of candidates i in first..last-1.

    The candidates are rows ids[first:last], or rows first + shift..last + shift - 1 where `ids` is
    empty, of one token; those before `end` may be prefetched. `x` is that token's
    `quantize_activations`. Checks nothing. One loop without calls that take arrays: such a call
    costs as much as reading a short row.
    """
    listed, distance = ids.shape[0] > 0, rows_ahead(gate)
    for candidate in range(first, last):
        n = candidate + shift
        if listed:
            n, following = ids[candidate], ids[min(candidate + distance, end - 1)]
            if candidate + distance + 2 < end:
                prefetch_row(gate, ids[candidate + distance + 2] + offset)
            value = dot_ahead(gate, n + offset, following + offset, x, 0)
        else:
            value = dot_row(gate, n + offset, x, 0)
        if bias.shape[0]:
            value += bias[n]
        values[candidate - first] = activate(function, value)


@njit(nogil=True, cache=True)
def keep_fired_kernel(
    ids, token_masks, shift, threshold, first, last, values, fired_ids, fired_masks, h
):  # fmt: skip
    """Gather those of `gate_values_kernel`'s candidates that fired; returns their number.

    A candidate fires where its value passes `threshold`; the value is zero where token_masks lacks
    bit 0. h (N,) receives the values of those that fired. Checks nothing.
    """
    num_fired, listed = 0, ids.shape[0] > 0
    for candidate in range(first, last):
        value = values[candidate - first]
        if token_masks.shape[0] and not token_masks[candidate] & np.uint32(1):
            value = np.float32(0)
        if passes(value, threshold):
            fired_ids[num_fired] = ids[candidate] if listed else candidate + shift
            fired_masks[num_fired] = np.uint32(1)
            h[num_fired] = value
            num_fired += 1
    return num_fired


@njit(nogil=True, cache=True, inline="always")
def by_neuron(gates, num_tokens):
    """The flat `gates` as (N, T)."""
    height = gates.shape[0] // num_tokens
    return gates[: height * num_tokens].reshape(height, num_tokens)


@njit(nogil=True, cache=True)
def scale_by_up(up, bias, ids, places, offset, begin, end, x, function, h):
    """h[i] *= up[places[i] + offset] . x[0] + bias[ids[i]]; drelu: relu of that factor.

    For begin <= i < end. Rows without gaps are read as one stream: see `dot_row`.
    """
    distance = rows_ahead(up)
    has_gaps = begin < end and places[end - 1] - places[begin] != end - 1 - begin
    for i in range(begin, end):
        n = places[i] + offset
        if has_gaps:
            if i + distance + 2 < end:
                prefetch_row(up, places[i + distance + 2] + offset)
            factor = dot_ahead(up, n, places[min(i + distance, end - 1)] + offset, x, 0)
        else:
            factor = dot_row(up, n, x, 0)
        if bias.shape[0]:
            factor += bias[ids[i]]
        h[i] *= activate_up(function, factor)


@njit(nogil=True, cache=True)
def weigh(block_weights, spans, gates):
    """gates[i, t] *= block_weights[t, b], of the neurons i that fired in each chosen block b.

    gates (N, T): the product of gate and up, of tokens t that chose b. Without weights nothing is
    multiplied.
    """
    if block_weights.shape[0] == 0:
        return
    first = np.int64(0)
    for span in spans:
        for t in range(gates.shape[1]):
            weight = block_weights[t, span[BLOCK]]
            if weight != 0:
                for i in range(first, span[FIRED_END]):
                    gates[i, t] *= weight
        first = span[FIRED_END]


@njit(nogil=True, cache=True)
def drop_small(ids, places, masks, num_fired, gates, down_norms, threshold):
    """Keep what contributes more than `threshold` to some token; returns how many neurons.

    What a neuron contributes to a token is |gates[i, t]| times the norm of its down row, without
    norms |gates[i, t]|. Smaller gates become zero, and lose their bits in `masks`. Arrays are
    compacted in order.
    """
    kept = 0
    for i in range(num_fired):
        norm = down_norms[ids[i]] if down_norms.shape[0] else np.float32(1)
        fires = np.uint32(0)
        for t in range(gates.shape[1]):
            bit, value = np.uint32(1) << np.uint32(t), gates[i, t]
            if masks[i] & bit and passes(value * norm, threshold):
                fires |= bit
            else:
                value = np.float32(0)
            gates[kept, t] = value
        if fires:
            ids[kept], places[kept], masks[kept] = ids[i], places[i], fires
            kept += 1
    return kept


@njit(nogil=True, cache=True)
def add_one(down, places, order, first, last, h, out):
    """out += h[i] * down[places[i]] for i in order[first:last], four rows at a time.

    `out` (d,) is in the order of `axpy`; fewer than four are added with rows times zero. The next
    four rows are prefetched meanwhile, also those behind `last`, and the first lines of the four
    after them.
    """
    k, most = first, order.shape[0] - 1
    while k < last:
        following, end = min(k + 4, last), last - 1
        for ahead in range(following + 4, min(following + 8, most + 1)):
            prefetch_row(down, places[order[ahead]])
        i0, i1 = order[k], order[min(k + 1, end)]
        i2, i3 = order[min(k + 2, end)], order[min(k + 3, end)]
        a0, a1 = order[min(following, most)], order[min(following + 1, most)]
        a2, a3 = order[min(following + 2, most)], order[min(following + 3, most)]
        rows = places[i0], places[i1], places[i2], places[i3]
        factors = (
            h[i0], h[i1] if k + 1 < last else np.float32(0),
            h[i2] if k + 2 < last else np.float32(0), h[i3] if k + 3 < last else np.float32(0),
        )  # fmt: skip
        axpy_ahead(
            out, down, rows, factors, (places[a0], places[a1], places[a2], places[a3])
        )  # fmt: skip
        k = following
