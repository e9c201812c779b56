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
from hotcold.numba_kernels.decode.batch_ffn import contribution, up_down_of_some
from hotcold.numba_kernels.decode.rows import rows_ahead
from hotcold.numba_kernels.ir.vector_ir import (
    add_scaled1,
    axpy4_ahead,
    dot_ahead,
    dot_row,
    prefetch_row,
)


@njit(nogil=True, cache=True)
def gate_values_kernel(gate, bias, ids, x, function, first, last, end, values):
    """values[i - first] = fn(gate[n] . x[0] + bias[n]) of candidates i in first..last-1, one token.

    The candidates are rows ids[first:last], or rows first..last-1 where `ids` is empty; those
    before `end` may be prefetched. `x` is one token's `quantize_activations`. Checks nothing. One
    loop without calls that take arrays: such a call costs as much as reading a short row.
    """
    listed, distance = ids.shape[0] > 0, rows_ahead(gate)
    for candidate in range(first, last):
        n = candidate
        if listed:
            n, following = ids[candidate], ids[min(candidate + distance, end - 1)]
            if candidate + distance + 2 < end:
                prefetch_row(gate, ids[candidate + distance + 2])
            value = dot_ahead(gate, n, following, x, 0)
        else:
            value = dot_row(gate, n, x, 0)
        if bias.shape[0]:
            value += bias[n]
        values[candidate - first] = activate(function, value)


@njit(nogil=True, cache=True)
def keep_fired_kernel(ids, token_masks, threshold, first, last, values, fired_ids, fired_masks, h):
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
            fired_ids[num_fired] = ids[candidate] if listed else candidate
            fired_masks[num_fired] = np.uint32(1)
            h[num_fired] = value
            num_fired += 1
    return num_fired


@njit(nogil=True, cache=True)
def by_neuron(gates, num_tokens):
    """The flat `gates` as (N, T)."""
    height = gates.shape[0] // num_tokens
    return gates[: height * num_tokens].reshape(height, num_tokens)


@njit(nogil=True, cache=True)
def scale_by_up(up, bias, fired_ids, num_fired, x, function, h):
    """h[i] *= up[n] . x[0] + bias[n], n = fired_ids[i]; drelu: relu of that factor.

    Rows without gaps are read as one stream: see `dot_row`.
    """
    distance = rows_ahead(up)
    has_gaps = num_fired > 0 and fired_ids[num_fired - 1] - fired_ids[0] != num_fired - 1
    for i in range(num_fired):
        n = fired_ids[i]
        if has_gaps:
            if i + distance + 2 < num_fired:
                prefetch_row(up, fired_ids[i + distance + 2])
            factor = dot_ahead(up, n, fired_ids[min(i + distance, num_fired - 1)], x, 0)
        else:
            factor = dot_row(up, n, x, 0)
        if bias.shape[0]:
            factor += bias[n]
        h[i] *= activate_up(function, factor)


@njit(nogil=True, cache=True)
def drop_small(fired_ids, num_fired, h, down_norms, threshold):
    """Keep the neurons that contribute more than `threshold`, in order; returns their number."""
    kept = 0
    for i in range(num_fired):
        if passes(contribution(h[i], down_norms, np.int64(fired_ids[i])), threshold):
            fired_ids[kept], h[kept] = fired_ids[i], h[i]
            kept += 1
    return kept


@njit(nogil=True, cache=True)
def _add_one(down, ids, num_fired, h, out):
    """out += h[i] * down[ids[i]] for all i; `out` is read and written once for four rows.

    The next four rows are prefetched meanwhile, and the first lines of the four after them.
    """
    i, last = 0, num_fired - 1
    while i + 4 <= num_fired:
        for ahead in range(i + 8, min(i + 12, num_fired)):
            prefetch_row(down, ids[ahead])
        a0, a1, a2, a3 = min(i + 4, last), min(i + 5, last), min(i + 6, last), min(i + 7, last)
        axpy4_ahead(
            out, down, ids[i], ids[i + 1], ids[i + 2], ids[i + 3],
            h[i], h[i + 1], h[i + 2], h[i + 3], ids[a0], ids[a1], ids[a2], ids[a3],
        )  # fmt: skip
        i += 4
    while i < num_fired:
        add_scaled1(out, down, ids[i], h[i])
        i += 1


@njit(nogil=True, cache=True)
def up_down_kernel(
    up, bias, down, down_norms, fired_ids, fired_masks, num_fired, gates, x, function, threshold,
    out, lists,
):  # fmt: skip
    """out[t] += gate * (up[n] . x[t] + bias[n]) * down[n], n = fired_ids[i]; checks nothing.

    Returns how many fired. Without rows in `up` that factor is one. `gates` has fn(gate . x + bias)
    of T tokens a neuron, zero where it does not fire, and is overwritten. Unless `threshold` is
    below zero, neurons whose contribution does not pass it are removed from `fired_ids` and
    `fired_masks` and cost no down row. `out` (T, d) is in the order of `axpy4`; each token's
    neurons are added in order.
    """
    if out.shape[0] == 1:
        if up.shape[0]:
            scale_by_up(up, bias, fired_ids, num_fired, x, function, gates)
            if threshold >= 0:
                num_fired = drop_small(fired_ids, num_fired, gates, down_norms, threshold)
        _add_one(down, fired_ids, num_fired, gates, out[0])
        return num_fired
    return up_down_of_some(
        up, bias, down, down_norms, fired_ids, fired_masks, num_fired,
        by_neuron(gates, out.shape[0]), x, function, threshold, out, lists,
    )  # fmt: skip
