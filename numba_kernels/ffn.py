"""The feed-forward network, neuron by neuron: a neuron whose gate does not fire costs its gate row.

Three-matrix FFN (ReGLU, SwiGLU):  y = sum over n of fn(gate[n] . x) * (up[n] . x) * down[n]
Two-matrix FFN (OPT, Falcon):      y = sum over n of fn(gate[n] . x) * down[n]
In the two-matrix FFN the first matrix is called gate, for it decides whether the neuron fires; `up`
then has no rows.
"""

import math

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
from numba_kernels.rows import four_rows_kernel, row_kernel
from numba_kernels.vector_ir import add_scaled1, add_scaled4, prefetch_row

NO_IDS = np.empty(0, np.int32)
NO_TOKENS = np.empty(0, np.uint32)
ALL_TOKENS = np.uint32(0xFFFFFFFF)


@njit(nogil=True, cache=True)
def activate(code, value):
    """relu, silu or gelu (exact, by erf) of one number; a NaN stays NaN."""
    if code == 0:
        return np.float32(0) if value <= 0 else value
    if code == 1:
        return np.float32(value / (1.0 + math.exp(-value)))
    return np.float32(0.5 * value * (1.0 + math.erf(value * 0.7071067811865476)))


@njit(nogil=True, cache=True)
def _keep(neuron, code, keep_all, wanted, fired_ids, gates, num_fired, num_tokens):
    """Activate the products in column num_fired; keep the neuron if one of them is not zero.

    For tokens whose bit in `wanted` is not set it is silent.
    """
    fires = keep_all
    for t in range(num_tokens):
        value = activate(code, gates[t, num_fired])
        gates[t, num_fired] = value if (wanted >> np.uint32(t)) & np.uint32(1) else np.float32(0)
        if gates[t, num_fired] != 0:
            fires = True
    if fires:
        fired_ids[num_fired] = neuron
        return num_fired + 1
    return num_fired


@njit(nogil=True, cache=True)
def _four_listed(weights, ids, at, last, x, out, column):
    """out[t, column + k] = weights[ids[at + k]] . x[t], k = 0..3; rows before `last` prefetched."""
    for ahead in range(at + 4, min(at + 8, last)):
        prefetch_row(weights, ids[ahead])
    n0, n1, n2, n3 = ids[at], ids[at + 1], ids[at + 2], ids[at + 3]
    four_rows_kernel(weights, n0, n1, n2, n3, x, out, column)


@njit(nogil=True, cache=True)
def gate_kernel(gate, bias, ids, tokens, x, code, keep_all, first, last, fired_ids, gates):
    """Gate products of candidates first..last-1, and which of them fired; checks nothing.

    The candidates are rows ids[first:last], or rows first..last-1 where `ids` is empty; bit t of
    tokens[i] says whether ids[i] is wanted for token t (all are where `tokens` is empty). For one
    token rows in order are read one by one; listed ones four side by side, for a jump in memory
    then costs less; so are all for several tokens.
    fired_ids (>= last - first,) int32 and gates (T, >= last - first + 4) float32 receive, for each
    neuron that fired for at least one token, its row and fn(gate . x + bias). Returns their number.
    """
    num_tokens, num_fired = x.shape[0], 0
    listed = ids.shape[0] > 0
    candidate = first
    while candidate < last:
        column, group = num_fired, 4
        n = ids[candidate] if listed else candidate
        if candidate + 4 > last or (num_tokens == 1 and not listed):
            group = 1
            following = n if listed else min(n + 1, last - 1)
            row_kernel(gate, n, following, x, gates, column)
        elif listed:
            _four_listed(gate, ids, candidate, last, x, gates, column)
        else:
            for ahead in range(n + 4, min(n + 8, last)):
                prefetch_row(gate, ahead)
            four_rows_kernel(gate, n, n + 1, n + 2, n + 3, x, gates, column)
        for k in range(group):
            n = ids[candidate + k] if listed else candidate + k
            for t in range(num_tokens):
                gates[t, num_fired] = gates[t, column + k]
                if bias.shape[0]:
                    gates[t, num_fired] += bias[n]
            wanted = tokens[candidate + k] if tokens.shape[0] else ALL_TOKENS
            num_fired = _keep(n, code, keep_all, wanted, fired_ids, gates, num_fired, num_tokens)
        candidate += group
    return num_fired


@njit(nogil=True, cache=True)
def _scale_by_up(up, bias, fired_ids, first, count, num_fired, x, products, gates):
    """gates[t, i] *= up[n] . x[t] + bias[n] for i in first..first+count-1, n = fired_ids[i]."""
    if count == 4:
        _four_listed(up, fired_ids, first, num_fired, x, products, 0)
    else:
        row_kernel(up, fired_ids[first], fired_ids[first], x, products, 0)
    for k in range(count):
        for t in range(x.shape[0]):
            factor = products[t, k]
            if bias.shape[0]:
                factor += bias[fired_ids[first + k]]
            gates[t, first + k] *= factor


@njit(nogil=True, cache=True)
def up_down_kernel(up, bias, down, fired_ids, num_fired, gates, x, out):
    """out[t] += gates[t, i] * (up[n] . x[t] + bias[n]) * down[n], n = fired_ids[i]; no checks.

    Where `up` has no rows, that factor is one. Four neurons a pass: `out` is then read and written
    once for four down rows. `gates` is overwritten.
    """
    products = np.empty((x.shape[0], 4), np.float32)
    i = 0
    while i < num_fired:
        count = 4 if i + 4 <= num_fired else 1
        if up.shape[0]:
            for ahead in range(i, i + count):
                prefetch_row(down, fired_ids[ahead])
            _scale_by_up(up, bias, fired_ids, i, count, num_fired, x, products, gates)
        else:
            for ahead in range(i + 4, min(i + 8, num_fired)):
                prefetch_row(down, fired_ids[ahead])
        for t in range(x.shape[0]):
            h = gates[t]
            if count == 4:
                n0, n1, n2, n3 = fired_ids[i], fired_ids[i + 1], fired_ids[i + 2], fired_ids[i + 3]
                add_scaled4(out[t], down, n0, n1, n2, n3, h[i], h[i + 1], h[i + 2], h[i + 3])
            else:
                add_scaled1(out[t], down, fired_ids[i], h[i])
        i += count


def sparse_ffn(
    gate: np.ndarray,
    up: np.ndarray | None,
    down: np.ndarray,
    x: np.ndarray,
    ids: np.ndarray | None = None,
    tokens: np.ndarray | None = None,
    *,
    gate_bias: np.ndarray | None = None,
    up_bias: np.ndarray | None = None,
    activation_fn: str = "relu",
    skip_silent: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """The FFN's output over all neurons, or over those in `ids`, and the ids that fired.

    With `tokens`, neuron ids[i] is silent for each token t whose bit is not set in tokens[i].

    out[t] = sum over n of fn(gate[n] . x[t] + gate_bias[n]) * (up[n] . x[t] + up_bias[n]) * down[n]
    Shapes:  gate, up, down (N, d), down neuron-major; x (T, d); ids (A,); out (T, d)
    Dtypes:  weights float32, uint16 (float16 bits) or int16 (bfloat16 bits), all three alike;
             ids int32, unique; tokens (A,) uint32, then T <= 32; biases, x, out float32
    Units:   reads d weights for each candidate, 2 d more (one matrix up, one down) if it fired
    Errors:  ValueError on any mismatch
    Source:  PowerInfer section 5.4; the early stop at a silent gate: PowerInfer-2 section 4.4
    """
    gate = weight_rows("gate", gate)
    num_neurons, width = gate.shape
    up = np.empty((0, width), gate.dtype) if up is None else weight_rows("up", up, width)
    down = weight_rows("down", down, width)
    require(up.shape[0] in (0, num_neurons), f"up must have {num_neurons} rows")
    require(down.shape[0] == num_neurons, f"down must have {num_neurons} rows")
    require(gate.dtype == up.dtype == down.dtype, "gate, up and down must have one dtype")
    x = float_array("x", x, (x.shape[0] if x.ndim else 0, width))
    gate_biases = optional_floats("gate_bias", gate_bias, num_neurons)
    up_biases = optional_floats("up_bias", up_bias, num_neurons if up.shape[0] else 0)
    code = activation_code(activation_fn)
    out = np.zeros((x.shape[0], width), np.float32)
    candidates = NO_IDS if ids is None else row_ids("ids", ids, num_neurons)
    if x.shape[0] == 0 or (ids is not None and not ids.size):
        return out, NO_IDS
    wanted = NO_TOKENS if tokens is None else np.ascontiguousarray(tokens)
    require(wanted.dtype == np.uint32, f"tokens must be uint32, not {wanted.dtype}")
    if tokens is not None:
        require(ids is not None and wanted.shape == candidates.shape, "tokens go with ids")
        require(x.shape[0] <= 32, f"tokens are bits of 32 tokens, not of {x.shape[0]}")
    length = num_neurons if ids is None else candidates.size
    fired_ids = np.empty(length, np.int32)
    gates = np.empty((x.shape[0], length + 4), np.float32)
    num_fired = gate_kernel(
        gate, gate_biases, candidates, wanted, x, code, not skip_silent, 0, length, fired_ids, gates
    )
    up_down_kernel(up, up_biases, down, fired_ids, num_fired, gates, x, out)
    return out, fired_ids[:num_fired]
