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
from numba_kernels.vector_ir import add_scaled1, add_scaled4, dot1, dot1_ahead, dot4, prefetch_row

NO_IDS = np.empty(0, np.int32)


@njit(nogil=True, cache=True)
def activate(code, value):
    """relu, silu or gelu (exact, by erf) of one number; a NaN stays NaN."""
    if code == 0:
        return np.float32(0) if value <= 0 else value
    if code == 1:
        return np.float32(value / (1.0 + math.exp(-value)))
    return np.float32(0.5 * value * (1.0 + math.erf(value * 0.7071067811865476)))


@njit(nogil=True, cache=True)
def _keep(neuron, code, keep_all, fired_ids, gates, num_fired, num_tokens):
    """Activate the products in column num_fired; keep the neuron if one of them is not zero."""
    fires = keep_all
    for t in range(num_tokens):
        gates[t, num_fired] = activate(code, gates[t, num_fired])
        if gates[t, num_fired] != 0:
            fires = True
    if fires:
        fired_ids[num_fired] = neuron
        return num_fired + 1
    return num_fired


@njit(nogil=True, cache=True)
def _listed_gates(gate, ids, x, candidate, last, gates, column):
    """Products of four listed rows into columns of gates; the next four are prefetched."""
    n0, n1, n2, n3 = ids[candidate], ids[candidate + 1], ids[candidate + 2], ids[candidate + 3]
    for ahead in range(candidate + 4, min(candidate + 8, last)):
        prefetch_row(gate, ids[ahead])
    for t in range(x.shape[0]):
        sums = dot4(gate, n0, n1, n2, n3, x[t])
        for k in range(4):
            gates[t, column + k] = sums[k]


@njit(nogil=True, cache=True)
def _next_gate(gate, row, following, x, gates, column):
    """Products of one row into a column of gates; row `following` is prefetched."""
    gates[0, column] = dot1_ahead(gate, row, following, x[0])
    for t in range(1, x.shape[0]):
        gates[t, column] = dot1(gate, row, x[t])


@njit(nogil=True, cache=True)
def gate_kernel(gate, bias, ids, x, code, keep_all, first, last, fired_ids, gates):
    """Gate products of candidates first..last-1, and which of them fired; checks nothing.

    The candidates are rows ids[first:last], or rows first..last-1 where `ids` is empty. Rows in
    order are read one by one; listed ones four side by side, for a jump costs less when shared.
    fired_ids (>= last - first,) int32 and gates (T, >= last - first + 4) float32 receive, for each
    neuron that fired for at least one token, its row and fn(gate . x + bias). Returns their number.
    """
    num_tokens, num_fired = x.shape[0], 0
    listed = ids.shape[0] > 0
    candidate = first
    while candidate < last:
        column, group = num_fired, 1
        if listed and candidate + 4 <= last:
            group = 4
            _listed_gates(gate, ids, x, candidate, last, gates, column)
        else:
            row = ids[candidate] if listed else candidate
            following = row if listed else min(candidate + 1, last - 1)
            _next_gate(gate, row, following, x, gates, column)
        for k in range(group):
            n = ids[candidate + k] if listed else candidate
            for t in range(num_tokens):
                gates[t, num_fired] = gates[t, column + k]
                if bias.shape[0]:
                    gates[t, num_fired] += bias[n]
            num_fired = _keep(n, code, keep_all, fired_ids, gates, num_fired, num_tokens)
        candidate += group
    return num_fired


@njit(nogil=True, cache=True)
def up_down_kernel(up, bias, down, fired_ids, num_fired, gates, x, out):
    """out[t] += gates[t, i] * (up[n] . x[t] + bias[n]) * down[n], n = fired_ids[i]; no checks.

    Where `up` has no rows, that factor is one. Four neurons a pass: `out` is then read and written
    once for four down rows.
    """
    num_tokens = x.shape[0]
    has_up = up.shape[0] > 0
    i = 0
    while i + 4 <= num_fired:
        n0, n1, n2, n3 = fired_ids[i], fired_ids[i + 1], fired_ids[i + 2], fired_ids[i + 3]
        following = min(i + 8, num_fired)
        if has_up:
            for k in range(4):
                prefetch_row(down, fired_ids[i + k])
            for t in range(num_tokens):
                sums = dot4(up, n0, n1, n2, n3, x[t])
                for k in range(4):
                    n = fired_ids[i + k]
                    factor = sums[k] + bias[n] if bias.shape[0] else sums[k]
                    gates[t, i + k] *= factor
            for ahead in range(i + 4, following):
                prefetch_row(up, fired_ids[ahead])
        else:
            for ahead in range(i + 4, following):
                prefetch_row(down, fired_ids[ahead])
        for t in range(num_tokens):
            h = gates[t]
            add_scaled4(out[t], down, n0, n1, n2, n3, h[i], h[i + 1], h[i + 2], h[i + 3])
        i += 4
    while i < num_fired:
        n = fired_ids[i]
        for t in range(num_tokens):
            if has_up:
                factor = dot1(up, n, x[t])
                gates[t, i] *= factor + bias[n] if bias.shape[0] else factor
            add_scaled1(out[t], down, n, gates[t, i])
        i += 1


def sparse_ffn(
    gate: np.ndarray,
    up: np.ndarray | None,
    down: np.ndarray,
    x: np.ndarray,
    ids: np.ndarray | None = None,
    *,
    gate_bias: np.ndarray | None = None,
    up_bias: np.ndarray | None = None,
    activation_fn: str = "relu",
    skip_silent: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """The FFN's output over all neurons, or over those in `ids`, and the ids that fired.

    out[t] = sum over n of fn(gate[n] . x[t] + gate_bias[n]) * (up[n] . x[t] + up_bias[n]) * down[n]
    Shapes:  gate, up, down (N, d), down neuron-major; x (T, d); ids (A,); out (T, d)
    Dtypes:  weights float32, uint16 (float16 bits) or int16 (bfloat16 bits), all three alike;
             ids int32, unique; biases, x, out float32
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
    length = num_neurons if ids is None else candidates.size
    fired_ids = np.empty(length, np.int32)
    gates = np.empty((x.shape[0], length + 4), np.float32)
    num_fired = gate_kernel(
        gate, gate_biases, candidates, x, code, not skip_silent, 0, length, fired_ids, gates
    )
    up_down_kernel(up, up_biases, down, fired_ids, num_fired, gates, x, out)
    return out, fired_ids[:num_fired]
