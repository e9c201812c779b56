"""The feed-forward network, neuron by neuron: a neuron whose gate does not fire costs its gate row.

Three-matrix FFN (ReGLU, SwiGLU):  y = sum over n of fn(gate[n] . x) * (up[n] . x) * down[n]
Two-matrix FFN (OPT, Falcon):      y = sum over n of fn(gate[n] . x) * down[n]
In the two-matrix FFN the first matrix is called gate: it decides whether the neuron fires; `up`
then has no rows.
"""

import numpy as np
from numba import njit

from numba_kernels.checks import (
    activation_code,
    float_array,
    optional_floats,
    require,
    row_ids,
    weight_rows,
)
from numba_kernels.decode.activations import activate
from numba_kernels.decode.batch_ffn import empty_lists, gates_of_some, thread_lists, up_down_of_some
from numba_kernels.decode.rows import add_in_order, rows_ahead
from numba_kernels.decode.vectors import empty_vectors, prepared
from numba_kernels.formats import row_width
from numba_kernels.ir.vector_ir import add_scaled1, add_scaled4_ahead, dot_ahead, prefetch_row

NO_IDS = np.empty(0, np.int32)
NO_MASKS = np.empty(0, np.uint32)


@njit(nogil=True, cache=True)
def gate_values_kernel(gate, bias, ids, x, code, first, last, end, values):
    """values[i - first] = fn(gate[n] . x[0] + bias[n]) of candidates i in first..last-1, one token.

    n = ids[i], or i where `ids` is empty; those before `end` may be prefetched. Checks nothing.
    All in one loop without calls that take arrays: those cost as much as reading a short row.
    """
    listed, distance = ids.shape[0] > 0, rows_ahead(gate)
    for candidate in range(first, last):
        n, following = candidate, min(candidate + distance, end - 1)
        if listed:
            n, following = ids[candidate], ids[following]
            if candidate + distance + 2 < end:
                prefetch_row(gate, ids[candidate + distance + 2])
        value = dot_ahead(gate, n, following, x, 0)
        if bias.shape[0]:
            value += bias[n]
        values[candidate - first] = activate(code, value)


@njit(nogil=True, cache=True)
def keep_fired_kernel(ids, token_masks, keep_all, first, last, values, fired_ids, fired_masks, h):
    """Gather those of `gate_values_kernel`'s candidates that fired; returns their number.

    Silent are those whose value is zero, unless `keep_all`, and have it set to zero where
    `token_masks` says so. `h` may be `values`. Checks nothing.
    """
    num_fired, listed = 0, ids.shape[0] > 0
    for candidate in range(first, last):
        value = values[candidate - first]
        if token_masks.shape[0] and not token_masks[candidate] & np.uint32(1):
            value = np.float32(0)
        if value != 0 or keep_all:
            fired_ids[num_fired] = ids[candidate] if listed else candidate
            fired_masks[num_fired] = np.uint32(1)
            h[num_fired] = value
            num_fired += 1
    return num_fired


@njit(nogil=True, cache=True)
def gate_kernel(
    gate, bias, ids, token_masks, x, code, keep_all, first, last, fired_ids, fired_masks, gates,
    num_tokens, lists,
):  # fmt: skip
    """Gate products of candidates first..last-1, and which of them fired; checks nothing.

    The candidates are rows ids[first:last], or rows first..last-1 where `ids` is empty; bit t of
    token_masks[i] says whether ids[i] is wanted for token t (all are where it is empty). `x` is
    what `prepared` gave for `num_tokens` tokens, `lists` work space for as many.
    fired_ids (>= last - first,) int32, fired_masks (same) uint32 and gates (T times as many,)
    float32 receive, for each neuron that fired, its row, a bit for each token that it fired for,
    and T times fn(gate . x + bias), zero for others. Returns their number.
    """
    if num_tokens == 1:
        gate_values_kernel(gate, bias, ids, x, code, first, last, last, gates)
        return keep_fired_kernel(
            ids, token_masks, keep_all, first, last, gates, fired_ids, fired_masks, gates
        )
    return gates_of_some(
        gate, bias, ids, token_masks, x, code, keep_all, first, last, fired_ids, fired_masks,
        by_neuron(gates, num_tokens), lists,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def by_neuron(gates, num_tokens):
    """The flat `gates` as (N, T)."""
    height = gates.shape[0] // num_tokens
    return gates[: height * num_tokens].reshape(height, num_tokens)


@njit(nogil=True, cache=True)
def _scale_one(up, bias, fired_ids, num_fired, x, h):
    """h[i] *= up[n] . x[0] + bias[n], n = fired_ids[i]."""
    distance = rows_ahead(up)
    for i in range(num_fired):
        if i + distance + 2 < num_fired:
            prefetch_row(up, fired_ids[i + distance + 2])
        n, following = fired_ids[i], fired_ids[min(i + distance, num_fired - 1)]
        factor = dot_ahead(up, n, following, x, 0)
        if bias.shape[0]:
            factor += bias[n]
        h[i] *= factor


@njit(nogil=True, cache=True)
def _add_one(down, ids, num_fired, h, out):
    """out += h[i] * down[ids[i]] for all i; `out` is read and written once for four rows.

    The four rows that come next are prefetched in step, those after them by their first lines.
    """
    i, last = 0, num_fired - 1
    while i + 4 <= num_fired:
        for ahead in range(i + 8, min(i + 12, num_fired)):
            prefetch_row(down, ids[ahead])
        a0, a1, a2, a3 = min(i + 4, last), min(i + 5, last), min(i + 6, last), min(i + 7, last)
        add_scaled4_ahead(
            out, down, ids[i], ids[i + 1], ids[i + 2], ids[i + 3],
            h[i], h[i + 1], h[i + 2], h[i + 3], ids[a0], ids[a1], ids[a2], ids[a3],
        )  # fmt: skip
        i += 4
    while i < num_fired:
        add_scaled1(out, down, ids[i], h[i])
        i += 1


@njit(nogil=True, cache=True)
def up_down_kernel(up, bias, down, fired_ids, fired_masks, num_fired, gates, x, out, lists):
    """out[t] += gate * (up[n] . x[t] + bias[n]) * down[n], n = fired_ids[i]; checks nothing.

    Where `up` has no rows, that factor is one. `gates` is as `gate_kernel` left it, and is
    overwritten. `out` (T, d) is in the order of `add_scaled4`, each token's neurons are added one
    after the other.
    """
    if out.shape[0] == 1:
        if up.shape[0]:
            _scale_one(up, bias, fired_ids, num_fired, x, gates)
        _add_one(down, fired_ids, num_fired, gates, out[0])
        return
    up_down_of_some(
        up, bias, down, fired_ids, fired_masks, num_fired, by_neuron(gates, out.shape[0]), x, out,
        lists,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def _sparse_ffn(
    gate, biases, up, down, ids, token_masks, x, code, keep_all, room, room_for_lists, length, out
):
    """`sparse_ffn` with checked arguments; out (T, d) is zero. Returns the fired ids."""
    num_tokens = x.shape[0]
    fired_ids = np.empty(length, np.int32)
    fired_masks = np.empty(length, np.uint32)
    gates = np.empty(num_tokens * length, np.float32)
    ready, lists = prepared(gate, x, room, 0), thread_lists(room_for_lists, 0, num_tokens)
    num_fired = gate_kernel(
        gate, biases[0], ids, token_masks, ready, code, keep_all, 0, length, fired_ids, fired_masks,
        gates, num_tokens, lists,
    )  # fmt: skip
    sums = np.zeros_like(out)
    up_down_kernel(
        up, biases[1], down, fired_ids, fired_masks, num_fired, gates, ready, sums, lists
    )
    for t in range(num_tokens):
        add_in_order(down, sums[t], out[t], 0, out.shape[1])
    return fired_ids[:num_fired]


def sparse_ffn(
    gate: np.ndarray,
    up: np.ndarray | None,
    down: np.ndarray,
    x: np.ndarray,
    ids: np.ndarray | None = None,
    token_masks: np.ndarray | None = None,
    *,
    gate_bias: np.ndarray | None = None,
    up_bias: np.ndarray | None = None,
    activation_fn: str = "relu",
    skip_silent: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """The FFN's output over all neurons, or over those in `ids`, and the ids that fired.

    With `token_masks`, neuron ids[i] is silent for each token t whose bit token_masks[i] lacks.

    out[t] = sum over n of fn(gate[n] . x[t] + gate_bias[n]) * (up[n] . x[t] + up_bias[n]) * down[n]
    Shapes:  gate, up, down (N, d) or (N, row bytes), down neuron-major; x (T, d), T <= 32;
             ids (A,); out (T, d)
    Dtypes:  weights float32, uint16 (float16 bits), int16 (bfloat16 bits), Q8 or Q4, all three
             alike; ids int32, unique; token_masks (A,) uint32; biases, x, out float32
    Units:   reads d weights for each candidate, 2 d more (one matrix up, one down) if it fired
    Errors:  ValueError on any mismatch
    Source:  PowerInfer section 5.4; the early stop at a silent gate: PowerInfer-2 section 4.4
    """
    gate = weight_rows("gate", gate)
    num_neurons, width = gate.shape[0], row_width(gate.dtype, gate.shape[1])
    up = gate[:0] if up is None else weight_rows("up", up, width)
    down = weight_rows("down", down, width)
    require(up.shape[0] in (0, num_neurons), f"up must have {num_neurons} rows")
    require(down.shape[0] == num_neurons, f"down must have {num_neurons} rows")
    require(gate.dtype == up.dtype == down.dtype, "gate, up and down must have one dtype")
    x = float_array("x", x, (x.shape[0] if x.ndim else 0, width))
    require(x.shape[0] <= 32, f"x has {x.shape[0]} rows; at most 32 tokens are computed at once")
    biases = (
        optional_floats("gate_bias", gate_bias, num_neurons),
        optional_floats("up_bias", up_bias, num_neurons if up.shape[0] else 0),
    )
    code = activation_code(activation_fn)
    out = np.zeros((x.shape[0], width), np.float32)
    candidates = NO_IDS if ids is None else row_ids("ids", ids, num_neurons)
    if x.shape[0] == 0 or (ids is not None and not ids.size):
        return out, NO_IDS
    wanted = NO_MASKS if token_masks is None else np.ascontiguousarray(token_masks)
    require(wanted.dtype == np.uint32, f"token_masks must be uint32, not {wanted.dtype}")
    if token_masks is not None:
        require(ids is not None and wanted.shape == candidates.shape, "token_masks go with ids")
    length = num_neurons if ids is None else candidates.size
    fired_ids = _sparse_ffn(
        gate, biases, up, down, candidates, wanted, x, code, not skip_silent,
        empty_vectors(1, *x.shape), empty_lists(1, x.shape[0]), length, out,
    )  # fmt: skip
    return out, fired_ids
